"""What a run did, from its log history: arithmetic, a table and a picture. No I/O but the picture's file.

The log history is `trainer.state.log_history`, a list of dicts; entries without `sagc/group_size` (evaluations, the
last entry of a run) are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

# Rewards of single steps are noisy: first and last are means over this many steps.
REWARD_WINDOW = 3

FloatArray = npt.NDArray[np.float64]
LogHistory = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RunSummary:
    """
    What a run did.

    Args:
        steps (`int`):
            Logged training steps.
        largest (`int`):
            Largest group size the run could have used.
        mean_group_size (`float`):
            Mean group size over the steps.
        straggler_rate (`float`):
            Mean fraction of groups that were straggler events.
        budget (`float`):
            Straggler budget rho.
        reward_first (`float`), reward_last (`float`):
            Mean reward of the first and of the last `reward_window` steps.
        reward_window (`int`):
            Steps in each of these means.
        rollouts (`int`):
            Completions generated.
        seconds (`float`):
            Seconds in steps, in total.
        saved (`float`), saved_error (`float`):
            Estimated seconds saved against the largest group size throughout, and the standard error; NaN if not
            identifiable (see [`seconds_saved`]).
    """

    steps: int
    largest: int
    mean_group_size: float
    straggler_rate: float
    budget: float
    reward_first: float
    reward_last: float
    reward_window: int
    rollouts: int
    seconds: float
    saved: float
    saved_error: float


def seconds_saved(
    group_sizes: npt.ArrayLike, seconds: npt.ArrayLike, longest: npt.ArrayLike, largest: int
) -> tuple[float, float]:
    """
    Seconds saved against using the largest group size at every step, estimated from the run itself.

    Ordinary least squares of a step's seconds on its group size and its longest completion, seconds = a + b G + c L,
    without the first step (warm-up: allocation, compilation). A step of size G then saves b (largest - G), so

        saved = b * sum_t (largest - G_t),    standard error = se(b) * sum_t (largest - G_t).

    Important notes:
    - The number of prompts is the same at each step, so rows are proportional to G and a line is apt.
    - L takes out the drift of the lengths over the run, which would otherwise pass for an effect of the size. It also
      takes out that larger groups have longer longest completions: the estimate counts rows, not waiting, and is low.
    - An estimate within two standard errors of zero says that the run cannot tell.

    Args:
        group_sizes (`ArrayLike`):
            Group size of each step, in order.
        seconds (`ArrayLike`):
            Seconds of each step.
        longest (`ArrayLike`):
            Tokens of the longest completion of each step.
        largest (`int`):
            Group size to compare with.

    Returns:
        `tuple[float, float]`: estimate and standard error. Both are NaN if it is not identifiable: after the warm-up
        only one size ran, the lengths moved only together with the size, or there were fewer than two steps more than
        coefficients. Both are 0 if every step, the first included, used the largest.
    """
    sizes, times = np.asarray(group_sizes, dtype=float), np.asarray(seconds, dtype=float)
    lengths = np.asarray(longest, dtype=float)
    if not sizes.shape == times.shape == lengths.shape or sizes.ndim != 1:
        raise ValueError(
            f"Need a duration and a longest length for each group size, got shapes {times.shape}, {lengths.shape} and "
            f"{sizes.shape}."
        )
    smaller = float(np.sum(largest - sizes))
    if sizes.size > 0 and np.all(sizes == largest):
        return 0.0, 0.0
    x, y = sizes[1:], times[1:]
    columns = [np.ones_like(x), x]
    if lengths[1:].size and np.ptp(lengths[1:]) > 0:
        columns.append(lengths[1:])
    design = np.stack(columns, axis=1)
    spare = x.size - design.shape[1]
    if spare < 2 or np.linalg.matrix_rank(design) < design.shape[1]:
        return math.nan, math.nan
    coefficients = np.linalg.lstsq(design, y)[0]
    residuals = y - design @ coefficients
    covariance = float(residuals @ residuals) / spare * np.linalg.inv(design.T @ design)
    return float(coefficients[1]) * smaller, math.sqrt(max(covariance[1, 1], 0.0)) * smaller


def training_steps(log_history: LogHistory) -> list[dict[str, Any]]:
    """
    Entries of the training steps.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.

    Returns:
        `list[dict]`: the entries with `sagc/group_size`, in order.
    """
    return [entry for entry in log_history if "sagc/group_size" in entry]


def summarize(log_history: LogHistory, largest: int) -> RunSummary:
    """
    Summary of a run.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        largest (`int`):
            Largest group size, `num_generations` of the configuration.

    Returns:
        [`RunSummary`]

    Raises:
        `ValueError`: If no training step was logged.
    """
    entries = training_steps(log_history)
    if not entries:
        raise ValueError("No training step was logged: nothing to summarize. Check logging_steps and max_steps.")
    sizes, times = _series(entries, "sagc/group_size"), _series(entries, "step_time")
    rewards = _series(entries, "reward")
    rollouts = _series(entries, "sagc/rollouts")
    # The longest window up to REWARD_WINDOW that lets first and last share no step.
    window = max(1, min(REWARD_WINDOW, len(entries) // 2))
    saved, saved_error = seconds_saved(sizes, times, _series(entries, "completions/max_length"), largest)
    return RunSummary(
        steps=int(entries[-1].get("step", len(entries))),
        largest=largest,
        mean_group_size=float(sizes.mean()),
        straggler_rate=float(_series(entries, "sagc/straggler_rate").mean()),
        budget=float(_series(entries, "sagc/budget")[-1]),
        reward_first=float(rewards[:window].mean()),
        reward_last=float(rewards[-window:].mean()),
        reward_window=window,
        rollouts=int(rollouts.sum()),
        seconds=float(times.sum()),
        saved=saved,
        saved_error=saved_error,
    )


def format_summary(summary: RunSummary, places: dict[str, str] | None = None) -> str:
    """
    Table of a summary.

    Args:
        summary ([`RunSummary`]):
            The summary.
        places (`dict[str, str]`, *optional*):
            Further rows: where the run's files are.

    Returns:
        `str`: lines of two columns.
    """
    s = summary
    if math.isnan(s.saved):
        saved = f"not identifiable: too few steps or only one group size (compared with G={s.largest})"
    else:
        saved = f"{s.saved:.0f} s ± {s.saved_error:.0f} s (standard error) against G={s.largest} at every step"
        if abs(s.saved) < 2 * s.saved_error:
            saved += "; not distinguishable from none"
    verdict = "within" if s.straggler_rate <= s.budget else "above"
    rows = {
        "steps": f"{s.steps} ({s.seconds:.0f} s in steps, {s.rollouts} completions)",
        "mean group size": f"{s.mean_group_size:.1f} of at most {s.largest}",
        "straggler rate": f"{s.straggler_rate:.2f}, {verdict} the budget of {s.budget:.2f}",
        "reward": f"{s.reward_first:.2f} -> {s.reward_last:.2f} (means of the first and last {s.reward_window} steps)",
        "seconds saved": saved,
        **(places or {}),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def plot(log_history: LogHistory, path: str | PathLike[str]) -> None:
    """
    Picture of a run: group size, straggler rate against the budget, queue, reward, and risk by group size.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        path (`str` or `Path`):
            PNG file to write.

    Raises:
        `ValueError`: If no training step was logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = training_steps(log_history)
    if not entries:
        raise ValueError("No training step was logged: nothing to plot. Check logging_steps and max_steps.")
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=False)
    steps = _series(entries, "step")
    _plot_group_size(axes[0, 0], steps, entries)
    _plot_rate(axes[0, 1], steps, entries)
    _plot_reward(axes[1, 0], steps, entries)
    _plot_risk(axes[1, 1], entries)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def _series(entries: LogHistory, key: str) -> FloatArray:
    return np.array([float(entry.get(key, math.nan)) for entry in entries])


def _integer_steps(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_group_size(axis: Any, steps: FloatArray, entries: LogHistory) -> None:
    from matplotlib.ticker import MaxNLocator

    sizes, queue = _series(entries, "sagc/group_size"), _series(entries, "sagc/queue")
    axis.step(steps, sizes, where="mid", color="C0", marker="o", markersize=4)
    axis.set(title="Group size, and the queue that lowers it", ylim=(0, sizes.max() + 1))
    axis.set_ylabel("completions per prompt", color="C0")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    right = axis.twinx()
    right.plot(steps, queue, color="C1", linestyle="--")
    right.set_ylim(0, max(1.0, 1.6 * float(np.nanmax(queue))))
    right.set_ylabel("queue (budget overspent so far)", color="C1")
    right.spines["top"].set_visible(False)
    _integer_steps(axis)


def _plot_rate(axis: Any, steps: FloatArray, entries: LogHistory) -> None:
    budget = float(_series(entries, "sagc/budget")[-1])
    axis.bar(steps, _series(entries, "sagc/straggler_rate"), color="C7", alpha=0.45, label="of each step")
    axis.plot(steps, _series(entries, "sagc/straggler_rate_running"), color="C0", linewidth=2, label="running mean")
    axis.axhline(budget, color="C3", linestyle="--", label=f"budget {budget:g}")
    axis.set(title="Groups with a straggler", ylabel="fraction of groups", ylim=(0, 1.05))
    axis.legend(loc="upper right", frameon=False)
    _integer_steps(axis)


def _plot_reward(axis: Any, steps: FloatArray, entries: LogHistory) -> None:
    rewards = _series(entries, "reward")
    smooth = np.array([rewards[max(0, i - 4) : i + 1].mean() for i in range(rewards.size)])
    axis.plot(steps, rewards, color="C7", alpha=0.6, marker="o", markersize=3, linestyle=":", label="each step")
    axis.plot(steps, smooth, color="C2", linewidth=2, label="mean of the last 5 steps")
    axis.set(title="Reward", ylabel="mean reward")
    axis.legend(loc="best", frameon=False)
    _integer_steps(axis)


def _plot_risk(axis: Any, entries: LogHistory) -> None:
    from matplotlib.ticker import MaxNLocator

    prefix = "sagc/risk_at_size/"
    sizes = sorted({int(key[len(prefix) :]) for entry in entries for key in entry if key.startswith(prefix)})
    for label, color, entry in (("at the start", "C7", entries[0]), ("at the end", "C0", entries[-1])):
        risks = [float(entry.get(f"{prefix}{size}", math.nan)) for size in sizes]
        axis.plot(sizes, risks, color=color, marker="o", markersize=4, label=label)
    axis.axhline(float(entries[-1]["sagc/budget"]), color="C3", linestyle="--", label="budget")
    axis.set(title="Estimated chance of a straggler", xlabel="group size", ylabel="probability", ylim=(0, 1.05))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="best", frameon=False)
