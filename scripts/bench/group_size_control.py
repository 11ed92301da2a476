"""How close the controller comes to the optimum in hindsight, and what it costs in budget, in simulated runs.

    python scripts/bench/group_size_control.py --json docs/measurements/group_size_control.json --plots docs

Parts of the result: scaling with the horizon, the constant of the V rule against budgets, drift, a coarse grid, and
rivals: every fixed size, and the same law with the risk of a size learnt only from batches played at that size.

Utilities are log G; the truth is `sagc.simulation.true_risk`. `efficiency` compares the run's utility with the optimum
at the budget that its sizes truly spent. It is free of the luck of the draws and of what overspending buys.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sagc import ControllerConfig, GroupSizeController, StragglerEvent, choose_group_size, straggler_events
from sagc.controller import V_PER_SQRT_HORIZON
from sagc.events import FloatArray
from sagc.oracle import hindsight_optimum
from sagc.simulation import FixedSize, LengthModel, Policy, Run, score, simulate, true_risk
from sagc.utility import static_utility

SIZES = tuple(range(2, 17))
EVENT = StragglerEvent(tau=2.0)
UTILITY = static_utility("log", SIZES)
RANGE = float(UTILITY[-1] - UTILITY[0])
GROUPS = 8
MODELS = {
    "stationary": LengthModel(),
    "longer": LengthModel(growth=3.0, max_length=800),
    "wider": LengthModel(sigma=0.3, sigma_growth=2.0),
}
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6)

PolicyMaker = Callable[[float, int], Policy]  # of budget and horizon


@dataclass
class PlayedOnly:
    """The same control law, but a batch teaches only the risk of its own size; untried sizes count as free of risk."""

    rho: float
    v: float
    group_size: int = SIZES[-1]
    queue: float = 0.0
    forgetting_factor: float = 0.95
    events: FloatArray = field(default_factory=lambda: np.zeros(len(SIZES)))
    groups: FloatArray = field(default_factory=lambda: np.zeros(len(SIZES)))

    def observe(self, lengths: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> None:
        event = straggler_events(lengths, EVENT, truncated)
        self.queue = max(0.0, self.queue + float(event.mean()) - self.rho)
        index = SIZES.index(self.group_size)
        self.events *= self.forgetting_factor
        self.groups *= self.forgetting_factor
        self.events[index] += event.sum()
        self.groups[index] += event.size
        risk = np.divide(self.events, self.groups, out=np.zeros(len(SIZES)), where=self.groups > 0)
        self.group_size = SIZES[choose_group_size(UTILITY, risk, self.v, self.queue)]


@cache
def risk_of(model: LengthModel, steps: int) -> FloatArray:
    return true_risk(model, EVENT, SIZES, steps, samples=40_000 if model.drifts else 400_000)


@cache
def stepwise_optimum(model: LengthModel, steps: int, rho: float) -> float:
    """Average utility of the best mixture of each step that meets the budget at that step (or comes closest)."""
    rows = risk_of(model, steps)[:: max(steps // 30, 1)]
    return float(np.mean([hindsight_optimum(UTILITY, row, max(rho, float(row.min())))[0] for row in rows]))


def sagc_policy(
    rho: float, steps: int, constant: float = V_PER_SQRT_HORIZON, forgetting_factor: float = 0.95
) -> Policy:
    v = constant * steps**0.5 / RANGE
    config = ControllerConfig(sizes=SIZES, rho=rho, event=EVENT, v=v, forgetting_factor=forgetting_factor)
    return GroupSizeController(config)


def played_only_policy(rho: float, steps: int) -> Policy:
    return PlayedOnly(rho, V_PER_SQRT_HORIZON * steps**0.5 / RANGE)


def judge(run: Run, model: LengthModel, rho: float) -> dict[str, float]:
    steps = len(run.sizes)
    risk = risk_of(model, steps)
    result = score(run, SIZES, UTILITY, risk, rho)
    spent = float(risk[np.arange(steps), np.searchsorted(SIZES, run.sizes)].mean())
    affordable, _ = hindsight_optimum(UTILITY, risk, spent)
    return {
        "rate_over_budget": result.rate / rho - 1,
        "utility_over_optimum": result.utility / result.optimum - 1,
        "efficiency": result.utility / affordable - 1,
        "regret": result.regret,
        "regret_at_spent_budget": steps * (affordable - result.utility),
        "violation": result.violation,
    }


def summary(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and range over seeds of each figure."""
    columns = {name: np.array([run[name] for run in runs]) for name in runs[0]}
    return {
        name: {"mean": float(c.mean()), "min": float(c.min()), "max": float(c.max())} for name, c in columns.items()
    }


def slope(horizons: Sequence[int], values: FloatArray) -> dict[str, float]:
    """Log-log slope of the mean over seeds, with the 10% and 90% quantile over resampled seeds."""
    rng = np.random.default_rng(0)

    def fit(table: FloatArray) -> float:
        return float(np.polyfit(np.log(horizons), np.log(np.maximum(table.mean(axis=1), 1e-9)), 1)[0])

    resampled = [fit(values[:, rng.integers(values.shape[1], size=values.shape[1])]) for _ in range(500)]
    low, high = np.quantile(resampled, [0.1, 0.9])
    return {"slope": fit(values), "p10": float(low), "p90": float(high)}


def repeated(policy: PolicyMaker, model: LengthModel, rho: float, steps: int, seeds: int) -> list[dict[str, float]]:
    """One judged run for each seed."""
    runs = (simulate(policy(rho, steps), model, EVENT, steps, GROUPS, seed) for seed in range(seeds))
    return [judge(run, model, rho) for run in runs]


def scaling(horizons: Sequence[int], seeds: int, forgetting_factor: float = 0.95) -> list[dict[str, Any]]:
    model, policy = MODELS["stationary"], partial(sagc_policy, forgetting_factor=forgetting_factor)
    rows: list[dict[str, Any]] = []
    for rho in (0.2, 0.3, 0.4, 0.5):
        runs = [repeated(policy, model, rho, steps, seeds) for steps in horizons]
        names = ("violation", "regret_at_spent_budget")
        tables = {name: np.array([[run[name] for run in at] for at in runs]) for name in names}
        slopes = {name: slope(horizons, table) for name, table in tables.items()}
        by_horizon = [summary(at) for at in runs]
        rows.append({"rho": rho, "horizons": list(horizons), "by_horizon": by_horizon, "slopes": slopes})
        print(
            f"scaling, forgetting {forgetting_factor}, rho {rho}",
            {k: {n: round(x, 2) for n, x in v.items()} for k, v in slopes.items()},
            flush=True,
        )
    return rows


def constants(steps: int, seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for constant in (0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5):
        policy = partial(sagc_policy, constant=constant)
        for rho in BUDGETS:
            runs = repeated(policy, MODELS["stationary"], rho, steps, seeds)
            rows.append({"constant": constant, "rho": rho, **summary(runs)})
        over = [round(100 * row["rate_over_budget"]["mean"], 1) for row in rows[-len(BUDGETS) :]]
        print(f"constant {constant}: over budget in % {over}", flush=True)
    return rows


def coarse_grid(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Sizes 2, 4, 8 and 16 only: the smallest is riskier than its odd neighbour, so budgets near it are tight."""
    sizes, model = (2, 4, 8, 16), MODELS["stationary"]
    rows: list[dict[str, Any]] = []
    utility, risk = static_utility("log", sizes), risk_of(model, steps)[:, [SIZES.index(g) for g in sizes]]
    v = V_PER_SQRT_HORIZON * steps**0.5 / float(utility[-1] - utility[0])
    for rho in (0.3, 0.4, 0.5):
        config = ControllerConfig(sizes=sizes, rho=rho, event=EVENT, v=v)
        runs = [simulate(GroupSizeController(config), model, EVENT, steps, GROUPS, s) for s in range(seeds)]
        results = [score(run, sizes, utility, risk, rho) for run in runs]
        figures = [
            {"rate_over_budget": r.rate / rho - 1, "utility_over_optimum": r.utility / r.optimum - 1} for r in results
        ]
        rows.append({"rho": rho, **summary(figures)})
        print("coarse grid", rho, {k: round(100 * v["mean"], 1) for k, v in summary(figures).items()}, flush=True)
    return rows


def rivals(steps: int, seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        for rho in BUDGETS:
            if risk_of(model, steps).mean(axis=0).min() > rho:
                continue
            row: dict[str, Any] = {"model": name, "rho": rho, "steps": steps}
            row["optimum"] = hindsight_optimum(UTILITY, risk_of(model, steps), rho)[0]
            row["stepwise_optimum"] = stepwise_optimum(model, steps, rho)
            for label, policy in (("sagc", sagc_policy), ("played_only", played_only_policy)):
                runs = [simulate(policy(rho, steps), model, EVENT, steps, GROUPS, s) for s in range(seeds)]
                row[label] = summary([judge(run, model, rho) for run in runs])
                row[label]["mean_utility"] = float(
                    np.mean([UTILITY[np.searchsorted(SIZES, run.sizes)].mean() for run in runs])
                )
                row[label]["mean_rate"] = float(np.mean([run.rates.mean() for run in runs]))
            rows.append(row)
            print(
                f"{name} {steps} rho {rho}: over budget, utility to optimum, efficiency in %: "
                + ", ".join(f"{label} {_percent(row[label])}" for label in ("sagc", "played_only"))
            )
    return rows


def _percent(result: dict[str, dict[str, float]]) -> list[float]:
    return [round(100 * result[key]["mean"], 1) for key in ("rate_over_budget", "utility_over_optimum", "efficiency")]


def fixed_sizes(steps: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name, model in MODELS.items():
        for index, size in enumerate(SIZES):
            runs = [simulate(FixedSize(size), model, EVENT, steps, GROUPS, s) for s in range(seeds)]
            rate = float(np.mean([run.rates.mean() for run in runs]))
            truth = float(risk_of(model, steps).mean(axis=0)[index])
            rows.append({"model": name, "size": size, "rate": rate, "risk": truth, "utility": float(UTILITY[index])})
    return rows


def plot_scaling(report: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    panels = (
        ("violation", "straggler rate over budget,\nsummed over batches"),
        ("regret_at_spent_budget", "utility short of the optimum at the\nspent budget, summed (nats of log G)"),
    )
    for axis, (name, label) in zip(axes[:2], panels, strict=True):
        for row in report["scaling"]:
            values = [at[name]["mean"] for at in row["by_horizon"]]
            fitted = row["slopes"][name]["slope"]
            axis.loglog(row["horizons"], values, "o-", label=f"budget {row['rho']}: slope {fitted:.2f}")
        horizons = np.array(row["horizons"])
        axis.loglog(horizons, 0.6 * values[0] * (horizons / horizons[0]) ** 0.5, "k:", label="slope 0.5")
        axis.set(xlabel="horizon (batches)", ylabel=label)
        axis.set_xticks(horizons, [str(h) for h in horizons])
        ticks = [0.2, 0.5, 1, 2, 5, 10, 20]
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
    for rho in BUDGETS:
        rows = [row for row in report["constants"] if row["rho"] == rho]
        over = [100 * row["rate_over_budget"]["mean"] for row in rows]
        axes[2].semilogx([row["constant"] for row in rows], over, "o-", label=f"budget {rho}")
    axes[2].axvline(V_PER_SQRT_HORIZON, color="grey", linestyle="--", label="default")
    axes[2].axhspan(-5, 5, color="green", alpha=0.1, label="within 5%")
    ticks = sorted({row["constant"] for row in report["constants"]})
    axes[2].set_xticks(ticks, [str(tick) for tick in ticks])
    axes[2].minorticks_off()
    axes[2].set(
        xlabel="constant of the V rule", ylabel=f"straggler rate over budget (%)\nafter {report['steps']} batches"
    )
    for axis in axes:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_frontier(report: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    steps, model = report["steps"], MODELS["stationary"]
    risk = risk_of(model, steps)
    budgets = np.linspace(float(risk[0].min()), float(risk[0].max()), 40)
    optimum = [hindsight_optimum(UTILITY, risk[0], budget + 1e-9)[0] for budget in budgets]
    axes[0].plot(budgets, optimum, "k-", label="optimum in hindsight")
    fixed = [row for row in report["fixed_sizes"] if row["model"] == "stationary"]
    rates, utilities = [row["rate"] for row in fixed], [row["utility"] for row in fixed]
    axes[0].plot(rates, utilities, "s", c="tab:grey", label="fixed size")
    for row in fixed:
        place = (row["rate"], row["utility"])
        axes[0].annotate(str(row["size"]), place, (5, -9), textcoords="offset points", fontsize=8)
    for label, marker, text in (("sagc", "o", "SAGC"), ("played_only", "x", "risk learnt at played sizes only")):
        rows = [row[label] for row in report["rivals"] if row["model"] == "stationary" and row["steps"] == steps]
        axes[0].plot([r["mean_rate"] for r in rows], [r["mean_utility"] for r in rows], marker, label=text, ms=8)
    for rho in BUDGETS:
        axes[0].axvline(rho, color="tab:red", alpha=0.25, lw=1, label="budgets" if rho == BUDGETS[0] else None)
    axes[0].set(xlabel="straggler rate (fraction of groups)", ylabel="average utility (log G)")
    axes[0].set_title(f"stationary, {steps} batches of {GROUPS} groups", fontsize=10)
    _plot_drifting_run(axes[1], steps)
    for axis in axes:
        axis.legend(fontsize=8, loc="lower right" if axis is axes[0] else "upper left")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _plot_drifting_run(axis: Any, steps: int) -> None:
    rho, model = 0.3, MODELS["wider"]
    run = simulate(sagc_policy(rho, steps), model, EVENT, steps, GROUPS, 0)
    risk = risk_of(model, steps)
    for size in (3, 16):
        axis.plot(risk[:, SIZES.index(size)], lw=1, label=f"true risk of size {size}")
    axis.plot(np.cumsum(run.rates) / np.arange(1, steps + 1), "k-", label="straggler rate so far")
    axis.axhline(rho, color="tab:red", lw=1, label="budget")
    axis.set(xlabel="batch", ylabel="fraction of groups", ylim=(0, 1))
    twin = axis.twinx()
    twin.plot(run.sizes, ".", c="tab:purple", ms=4, alpha=0.6)
    twin.set_ylabel("group size (purple dots)")
    twin.set_ylim(0, 30)
    axis.set_title("one run, spread of lengths doubling", fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter horizons and fewer seeds")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--plots", type=Path, help="folder for the pictures; needs matplotlib")
    arguments = parser.parse_args()
    horizons = (50, 100, 200) if arguments.quick else (100, 200, 400, 800, 1600)
    seeds, steps = (2, 100) if arguments.quick else (10, 300)
    report: dict[str, Any] = {
        "command": "python scripts/bench/group_size_control.py" + (" --quick" if arguments.quick else ""),
        "seeds": seeds,
        "steps": steps,
        "groups": GROUPS,
        "sizes": list(SIZES),
        "stationary_risk": risk_of(MODELS["stationary"], steps)[0].tolist(),
        "scaling": scaling(horizons, seeds),
        "scaling_without_forgetting": scaling(horizons, seeds, forgetting_factor=1.0),
        "constants": constants(steps, seeds),
        "rivals": rivals(steps // 3, seeds) + rivals(steps, seeds),
        "coarse_grid": coarse_grid(steps, seeds),
        "fixed_sizes": fixed_sizes(steps, seeds),
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plots:
        plot_scaling(report, arguments.plots / "group_size_control_scaling.png")
        plot_frontier(report, arguments.plots / "group_size_control_frontier.png")


if __name__ == "__main__":
    main()
