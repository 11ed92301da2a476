"""How close the controller comes to the optimum in hindsight, and what it costs in budget, in simulated runs.

    python scripts/bench/group_size_control.py --json docs/measurements/group_size_control.json --plots docs

Groups are drawn from a recorded trace of a real model (`sagc.trace`); lengths that drift, and a control, come from the
log-normal generator of `sagc.simulation`.

Parts of the result: risk curves of the trace, scaling with the horizon, the constant of the V rule against budgets, a
coarse grid, drift, and rivals: every fixed size, and the same law with the risk of a size learnt only from batches
played at that size.

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
from sagc.simulation import FixedSize, LengthModel, Lengths, Policy, Run, score, simulate, true_risk
from sagc.trace import TraceModel, read_trace
from sagc.utility import static_utility

TRACE = Path(__file__).parents[2] / "docs" / "measurements" / "rollouts_smollm2.jsonl.gz"
SIZES = tuple(range(2, 17))
UTILITY = static_utility("log", SIZES)
RANGE = float(UTILITY[-1] - UTILITY[0])
GROUPS = 8


@dataclass(frozen=True, eq=False)
class World:
    """Where lengths come from, what counts as an event, and budgets between the risks of the sizes."""

    name: str
    lengths: Lengths
    event: StragglerEvent
    budgets: tuple[float, ...]


TRACE_BUDGETS = (0.3, 0.4, 0.5, 0.6, 0.7)
CONTROLS = (
    World("log-normal", LengthModel(), StragglerEvent(tau=2.0), (0.2, 0.3, 0.4, 0.5, 0.6)),
    World("longer", LengthModel(growth=3.0, max_length=800), StragglerEvent(tau=2.0), (0.2, 0.3, 0.4, 0.5, 0.6)),
    World("wider", LengthModel(sigma=0.3, sigma_growth=2.0), StragglerEvent(tau=2.0), (0.2, 0.3, 0.4, 0.5, 0.6)),
)

PolicyMaker = Callable[[World, float, int], Policy]  # of world, budget and horizon


@dataclass
class PlayedOnly:
    """The same control law, but a batch teaches only the risk of its own size; untried sizes count as free of risk."""

    rho: float
    v: float
    event: StragglerEvent
    group_size: int = SIZES[-1]
    queue: float = 0.0
    forgetting_factor: float = 0.95
    events: FloatArray = field(default_factory=lambda: np.zeros(len(SIZES)))
    groups: FloatArray = field(default_factory=lambda: np.zeros(len(SIZES)))

    def observe(self, lengths: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> None:
        event = straggler_events(lengths, self.event, truncated)
        self.queue = max(0.0, self.queue + float(event.mean()) - self.rho)
        index = SIZES.index(self.group_size)
        self.events *= self.forgetting_factor
        self.groups *= self.forgetting_factor
        self.events[index] += event.sum()
        self.groups[index] += event.size
        risk = np.divide(self.events, self.groups, out=np.zeros(len(SIZES)), where=self.groups > 0)
        self.group_size = SIZES[choose_group_size(UTILITY, risk, self.v, self.queue)]


@cache
def risk_of(world: World, steps: int) -> FloatArray:
    samples = 40_000 if world.lengths.drifts else 400_000
    return true_risk(world.lengths, world.event, SIZES, steps, samples)


@cache
def stepwise_optimum(world: World, steps: int, rho: float) -> float:
    """Average utility of the best mixture of each step that meets the budget at that step (or comes closest)."""
    rows = risk_of(world, steps)[:: max(steps // 30, 1)]
    return float(np.mean([hindsight_optimum(UTILITY, row, max(rho, float(row.min())))[0] for row in rows]))


def sagc_policy(
    world: World, rho: float, steps: int, constant: float = V_PER_SQRT_HORIZON, forgetting_factor: float = 0.95
) -> Policy:
    v = constant * steps**0.5 / RANGE
    config = ControllerConfig(sizes=SIZES, rho=rho, event=world.event, v=v, forgetting_factor=forgetting_factor)
    return GroupSizeController(config)


def played_only_policy(world: World, rho: float, steps: int) -> Policy:
    return PlayedOnly(rho, V_PER_SQRT_HORIZON * steps**0.5 / RANGE, world.event)


def run_of(policy: Policy, world: World, steps: int, seed: int) -> Run:
    return simulate(policy, world.lengths, world.event, steps, GROUPS, seed)


def judge(run: Run, world: World, rho: float) -> dict[str, float]:
    steps = len(run.sizes)
    risk = risk_of(world, steps)
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


def repeated(policy: PolicyMaker, world: World, rho: float, steps: int, seeds: int) -> list[dict[str, float]]:
    """One judged run for each seed."""
    runs = (run_of(policy(world, rho, steps), world, steps, seed) for seed in range(seeds))
    return [judge(run, world, rho) for run in runs]


def trace_risk(world: World) -> dict[str, list[float]]:
    """Risk of each size of the trace, for several ratios of longest to median."""
    return {
        f"{tau:g}": true_risk(world.lengths, StragglerEvent(tau=tau), SIZES, 1, samples=200_000)[0].tolist()
        for tau in (2.0, 3.0, 4.0)
    }


def scaling(
    world: World, horizons: Sequence[int], seeds: int, forgetting_factor: float = 0.95
) -> list[dict[str, Any]]:
    policy = partial(sagc_policy, forgetting_factor=forgetting_factor)
    rows: list[dict[str, Any]] = []
    for rho in world.budgets[:-1]:
        runs = [repeated(policy, world, rho, steps, seeds) for steps in horizons]
        names = ("violation", "regret_at_spent_budget")
        tables = {name: np.array([[run[name] for run in at] for at in runs]) for name in names}
        slopes = {name: slope(horizons, table) for name, table in tables.items()}
        by_horizon = [summary(at) for at in runs]
        rows.append({"rho": rho, "horizons": list(horizons), "by_horizon": by_horizon, "slopes": slopes})
        print(
            f"scaling, {world.name}, forgetting {forgetting_factor}, rho {rho}",
            {k: {n: round(x, 2) for n, x in v.items()} for k, v in slopes.items()},
            flush=True,
        )
    return rows


def constants(world: World, steps: int, seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for constant in (0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5):
        policy = partial(sagc_policy, constant=constant)
        for rho in world.budgets:
            runs = repeated(policy, world, rho, steps, seeds)
            rows.append({"constant": constant, "rho": rho, **summary(runs)})
        over = [round(100 * row["rate_over_budget"]["mean"], 1) for row in rows[-len(world.budgets) :]]
        print(f"constant {constant}, {world.name}: over budget in % {over}", flush=True)
    return rows


def coarse_grid(world: World, steps: int, seeds: int) -> list[dict[str, Any]]:
    """Sizes 2, 4, 8 and 16 only."""
    sizes = (2, 4, 8, 16)
    rows: list[dict[str, Any]] = []
    utility, risk = static_utility("log", sizes), risk_of(world, steps)[:, [SIZES.index(g) for g in sizes]]
    v = V_PER_SQRT_HORIZON * steps**0.5 / float(utility[-1] - utility[0])
    for rho in world.budgets[:-1]:
        config = ControllerConfig(sizes=sizes, rho=rho, event=world.event, v=v)
        runs = [run_of(GroupSizeController(config), world, steps, seed) for seed in range(seeds)]
        results = [score(run, sizes, utility, risk, rho) for run in runs]
        figures = [
            {"rate_over_budget": r.rate / rho - 1, "utility_over_optimum": r.utility / r.optimum - 1} for r in results
        ]
        rows.append({"rho": rho, **summary(figures)})
        print("coarse grid", rho, {k: round(100 * v["mean"], 1) for k, v in summary(figures).items()}, flush=True)
    return rows


def rivals(worlds: Sequence[World], steps: int, seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for world in worlds:
        for rho in world.budgets:
            if risk_of(world, steps).mean(axis=0).min() > rho:
                continue
            row: dict[str, Any] = {"world": world.name, "rho": rho, "steps": steps}
            row["optimum"] = hindsight_optimum(UTILITY, risk_of(world, steps), rho)[0]
            row["stepwise_optimum"] = stepwise_optimum(world, steps, rho)
            for label, policy in (("sagc", sagc_policy), ("played_only", played_only_policy)):
                runs = [run_of(policy(world, rho, steps), world, steps, seed) for seed in range(seeds)]
                row[label] = summary([judge(run, world, rho) for run in runs])
                row[label]["mean_utility"] = float(
                    np.mean([UTILITY[np.searchsorted(SIZES, run.sizes)].mean() for run in runs])
                )
                row[label]["mean_rate"] = float(np.mean([run.rates.mean() for run in runs]))
            rows.append(row)
            print(
                f"{world.name} {steps} rho {rho}: over budget, utility to optimum, efficiency in %: "
                + ", ".join(f"{label} {_percent(row[label])}" for label in ("sagc", "played_only")),
                flush=True,
            )
    return rows


def _percent(result: dict[str, dict[str, float]]) -> list[float]:
    return [round(100 * result[key]["mean"], 1) for key in ("rate_over_budget", "utility_over_optimum", "efficiency")]


def fixed_sizes(worlds: Sequence[World], steps: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for world in worlds:
        for index, size in enumerate(SIZES):
            runs = [run_of(FixedSize(size), world, steps, seed) for seed in range(seeds)]
            rate = float(np.mean([run.rates.mean() for run in runs]))
            truth = float(risk_of(world, steps).mean(axis=0)[index])
            rows.append(
                {"world": world.name, "size": size, "rate": rate, "risk": truth, "utility": float(UTILITY[index])}
            )
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
    for rho in sorted({row["rho"] for row in report["constants"]}):
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


def plot_frontier(report: dict[str, Any], world: World, drifting: World, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(18, 5), layout="constrained")
    for tau, curve in report["trace_risk"].items():
        axes[0].plot(SIZES, curve, "o-", label=f"tau {tau}")
    axes[0].set(xlabel="group size", ylabel="probability of a straggler event", ylim=(0, 1))
    axes[0].set_title("the recorded groups", fontsize=10)
    steps, risk = report["steps"], risk_of(world, report["steps"])
    budgets = np.linspace(float(risk[0].min()), float(risk[0].max()), 40)
    optimum = [hindsight_optimum(UTILITY, risk[0], budget + 1e-9)[0] for budget in budgets]
    axes[1].plot(budgets, optimum, "k-", label="optimum in hindsight")
    fixed = [row for row in report["fixed_sizes"] if row["world"] == world.name]
    rates, utilities = [row["rate"] for row in fixed], [row["utility"] for row in fixed]
    axes[1].plot(rates, utilities, "s", c="tab:grey", label="fixed size")
    for row in fixed:
        point = (row["rate"], row["utility"])
        axes[1].annotate(str(row["size"]), point, (5, -9), textcoords="offset points", fontsize=8)
    for label, marker, text in (("sagc", "o", "SAGC"), ("played_only", "x", "risk learnt at played sizes only")):
        rows = [row[label] for row in report["rivals"] if row["world"] == world.name and row["steps"] == steps]
        axes[1].plot([r["mean_rate"] for r in rows], [r["mean_utility"] for r in rows], marker, label=text, ms=8)
    for rho in world.budgets:
        axes[1].axvline(rho, color="tab:red", alpha=0.25, lw=1, label="budgets" if rho == world.budgets[0] else None)
    axes[1].set(xlabel="straggler rate (fraction of groups)", ylabel="average utility (log G)")
    axes[1].set_title(f"recorded groups, tau {world.event.tau:g}, {steps} batches of {GROUPS}", fontsize=10)
    _plot_drifting_run(axes[2], drifting, steps)
    for axis, place in zip(axes, ("lower right", "lower right", "upper left"), strict=True):
        axis.legend(fontsize=8, loc=place)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _plot_drifting_run(axis: Any, world: World, steps: int) -> None:
    rho = 0.3
    run = run_of(sagc_policy(world, rho, steps), world, steps, 0)
    risk = risk_of(world, steps)
    for size in (3, 16):
        axis.plot(risk[:, SIZES.index(size)], lw=1, label=f"true risk of size {size}")
    axis.plot(np.cumsum(run.rates) / np.arange(1, steps + 1), "k-", label="straggler rate so far")
    axis.axhline(rho, color="tab:red", lw=1, label="budget")
    axis.set(xlabel="batch", ylabel="fraction of groups", ylim=(0, 1))
    twin = axis.twinx()
    twin.plot(run.sizes, ".", c="tab:purple", ms=4, alpha=0.6)
    twin.set_ylabel("group size (purple dots)")
    twin.set_ylim(0, 30)
    axis.set_title("one run, generated lengths whose spread doubles", fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter horizons and fewer seeds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded trace (sagc.trace)")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--plots", type=Path, help="folder for the pictures; needs matplotlib")
    arguments = parser.parse_args()
    horizons = (50, 100, 200) if arguments.quick else (100, 200, 400, 800, 1600)
    seeds, steps = (2, 100) if arguments.quick else (10, 300)
    # With tau 2 even pairs straggle too often for budgets below 0.5.
    recorded = World("trace", TraceModel(read_trace(arguments.trace)), StragglerEvent(tau=4.0), TRACE_BUDGETS)
    control = CONTROLS[0]
    worlds = (recorded, *CONTROLS)
    report: dict[str, Any] = {
        "command": "python scripts/bench/group_size_control.py" + (" --quick" if arguments.quick else ""),
        "seeds": seeds,
        "steps": steps,
        "groups": GROUPS,
        "sizes": list(SIZES),
        "trace_risk": trace_risk(recorded),
        "risk": {world.name: risk_of(world, steps).mean(axis=0).tolist() for world in worlds},
        "scaling": scaling(recorded, horizons, seeds),
        "scaling_without_forgetting": scaling(recorded, horizons, seeds, forgetting_factor=1.0),
        "scaling_log_normal": scaling(control, horizons, seeds),
        "constants": constants(recorded, steps, seeds),
        "constants_log_normal": constants(control, steps, seeds),
        "rivals": rivals(worlds, steps // 3, seeds) + rivals(worlds, steps, seeds),
        "coarse_grid": coarse_grid(recorded, steps, seeds),
        "fixed_sizes": fixed_sizes(worlds, steps, seeds),
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plots:
        plot_scaling(report, arguments.plots / "group_size_control_scaling.png")
        plot_frontier(report, recorded, CONTROLS[2], arguments.plots / "group_size_control_frontier.png")


if __name__ == "__main__":
    main()
