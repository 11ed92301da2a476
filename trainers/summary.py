"""What a run did, from its log history: arithmetic, a table and a picture. No I/O but the picture's file.

The log history is `trainer.state.log_history`, a list of dicts; evaluations are left out. TRL averages each metric
over the steps since the entry before (`logging_steps`), so an entry counts as often as it has steps, or generations
where the metric is of a generation: with `num_iterations` above 1 not every step generates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

# Rewards of single generations are noisy: first and last are means over at least this many, where the log allows.
REWARD_WINDOW = 3

SAMPLED_REWARD = "dapo/reward_sampled"

FloatArray = npt.NDArray[np.float64]
LogHistory = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RunSummary:
    """
    What a run did.

    Args:
        steps (`int`):
            Logged training steps.
        generations (`int`):
            Logged generations.
        largest (`int`):
            Largest group size the run could have used.
        mean_group_size (`float`):
            Mean group size over the generations.
        straggler_rate (`float`):
            Mean fraction of groups that were straggler events.
        budget (`float`):
            Straggler budget rho.
        reward_first (`float`), reward_last (`float`):
            Mean reward of the first and of the last generations.
        reward_windows (`tuple[int, int]`):
            Generations in each of these means.
        all_sampled (`bool`):
            Whether dynamic sampling dropped groups: the rewards are then of all sampled completions, dropped ones
            included, because those of the kept groups alone are near the middle however well the model does.
        rollouts (`int`):
            Completions generated.
        seconds (`float`):
            Seconds in steps, in total.
        saved (`float`), saved_error (`float`):
            Estimated seconds saved against the largest group size throughout, and the standard error; NaN if not
            identifiable (see [`seconds_saved`]).
    """

    steps: int
    generations: int
    largest: int
    mean_group_size: float
    straggler_rate: float
    budget: float
    reward_first: float
    reward_last: float
    reward_windows: tuple[int, int]
    all_sampled: bool
    rollouts: int
    seconds: float
    saved: float
    saved_error: float


@dataclass(frozen=True)
class LoggedWindow:
    """
    One training entry of a log history and the steps that it averages over.

    Args:
        entry (`dict`):
            The entry.
        steps (`int`):
            Optimizer steps since the training entry before.
        generations (`int`):
            Generations in these steps.
        aligned (`bool`):
            Whether a generation's use ends with the window, so that the next step generates.
    """

    entry: dict[str, Any]
    steps: int
    generations: int
    aligned: bool


def seconds_saved(
    group_sizes: npt.ArrayLike,
    seconds: npt.ArrayLike,
    longest: npt.ArrayLike,
    largest: int,
    counts: npt.ArrayLike | None = None,
) -> tuple[float, float]:
    """
    Seconds saved against using the largest group size at every generation, estimated from the run itself.

    Least squares of the seconds of a generation and its steps on group size and longest completion, seconds =
    a + b G + c L, without the first (warm-up: allocation, compilation). A size G then saves b (largest - G), so

        saved = b * sum_t (largest - G_t),    standard error = se(b) * sum_t (largest - G_t).

    Important notes:
    - The number of prompts is the same at each generation, so rows are proportional to G and a line is apt.
    - L takes out the drift of the lengths over the run, which would otherwise pass for an effect of the size. It also
      takes out that larger groups have longer longest completions: the estimate counts rows, not waiting, and is low.
    - An estimate within two standard errors of zero says that the run cannot tell.
    - A line holds for means as well: a mean over n generations has the weight n.

    Args:
        group_sizes (`ArrayLike`):
            Group size of each generation, in order, or means over several.
        seconds (`ArrayLike`):
            Seconds of each.
        longest (`ArrayLike`):
            Tokens of the longest completion of each.
        largest (`int`):
            Group size to compare with.
        counts (`ArrayLike`, *optional*):
            Generations behind each value. Defaults to 1.

    Returns:
        `tuple[float, float]`: estimate and standard error. Both are NaN if it is not identifiable: after the warm-up
        only one size ran, the lengths moved only together with the size, or there were fewer than two values more than
        coefficients. Both are 0 if every generation, the first included, used the largest.
    """
    sizes, times = np.asarray(group_sizes, dtype=float), np.asarray(seconds, dtype=float)
    lengths = np.asarray(longest, dtype=float)
    weights = np.ones_like(sizes) if counts is None else np.asarray(counts, dtype=float)
    if not sizes.shape == times.shape == lengths.shape == weights.shape or sizes.ndim != 1:
        raise ValueError(
            f"Need a duration, a longest length and a count for each group size, got shapes {times.shape}, "
            f"{lengths.shape}, {weights.shape} and {sizes.shape}."
        )
    smaller = float(np.sum(weights * (largest - sizes)))
    if sizes.size > 0 and np.all(sizes == largest):
        return 0.0, 0.0
    x, y, root = sizes[1:], times[1:], np.sqrt(weights[1:])
    columns = [np.ones_like(x), x]
    if lengths[1:].size and np.ptp(lengths[1:]) > 0:
        columns.append(lengths[1:])
    design = np.stack(columns, axis=1)
    spare = x.size - design.shape[1]
    if spare < 2 or not np.isfinite(design).all() or np.linalg.matrix_rank(design) < design.shape[1]:
        return math.nan, math.nan
    design, y = design * root[:, None], y * root
    coefficients = np.linalg.lstsq(design, y)[0]
    residuals = y - design @ coefficients
    covariance = float(residuals @ residuals) / spare * np.linalg.inv(design.T @ design)
    return float(coefficients[1]) * smaller, math.sqrt(max(covariance[1, 1], 0.0)) * smaller


def training_steps(log_history: LogHistory) -> list[dict[str, Any]]:
    """
    Entries of the training steps in which completions were generated.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.

    Returns:
        `list[dict]`: the entries with `sagc/group_size`, in order.
    """
    return [entry for entry in log_history if "sagc/group_size" in entry]


def logged_windows(log_history: LogHistory, generation_steps: Fraction | int = 1) -> list[LoggedWindow]:
    """
    Training entries with the steps that each averages over.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        generation_steps (`Fraction` or `int`, *optional*, defaults to `1`):
            Optimizer steps per generation, `steps_per_generation * num_iterations / gradient_accumulation_steps`.

    Returns:
        `list[LoggedWindow]`: in order. After a resume between two entries, what was not logged before is missing from
        the means, and they count for the whole window.
    """
    windows, before = [], 0
    for entry in log_history:
        if "step_time" in entry:  # also in the last entry of a run, which has the steps since the one before
            step = int(entry["step"])
            generations = math.ceil(step / Fraction(generation_steps)) - math.ceil(before / Fraction(generation_steps))
            aligned = (step / Fraction(generation_steps)).denominator == 1
            windows.append(LoggedWindow(entry, step - before, generations, aligned))
            before = step
    return windows


def summarize(log_history: LogHistory, largest: int, generation_steps: Fraction | int = 1) -> RunSummary:
    """
    Summary of a run.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        largest (`int`):
            Largest group size, `num_generations` of the configuration.
        generation_steps (`Fraction` or `int`, *optional*, defaults to `1`):
            Optimizer steps per generation, `steps_per_generation * num_iterations / gradient_accumulation_steps`.

    Returns:
        [`RunSummary`]

    Raises:
        `ValueError`: If no training step was logged.
    """
    windows = logged_windows(log_history, generation_steps)
    generating = [window for window in windows if window.generations > 0 and "sagc/group_size" in window.entry]
    if not generating:
        raise ValueError("No training step was logged: nothing to summarize. Check logging_steps and max_steps.")
    entries, counts = [window.entry for window in generating], np.array([window.generations for window in generating])
    rewards = _series(entries, _reward_key(entries))
    first = _enough(counts)
    last = _enough(counts[::-1])
    saved, saved_error = _seconds_saved(windows, largest)
    steps = np.array([window.steps for window in windows])
    return RunSummary(
        steps=int(steps.sum()),
        generations=int(counts.sum()),
        largest=largest,
        mean_group_size=_mean(_series(entries, "sagc/group_size"), counts),
        straggler_rate=_mean(_series(entries, "sagc/straggler_rate"), counts),
        budget=float(_series(entries, "sagc/budget")[-1]),
        reward_first=_mean(rewards[:first], counts[:first]),
        reward_last=_mean(rewards[-last:], counts[-last:]),
        reward_windows=(int(counts[:first].sum()), int(counts[-last:].sum())),
        all_sampled=_reward_key(entries) == SAMPLED_REWARD,
        rollouts=round(float(np.nansum(_series(entries, "sagc/rollouts") * counts))),
        seconds=float(np.nansum(_series([window.entry for window in windows], "step_time") * steps)),
        saved=saved,
        saved_error=saved_error,
    )


def _enough(counts: npt.NDArray[np.int_]) -> int:
    """Entries that hold `REWARD_WINDOW` generations, but at most half of them: first and last share none."""
    wanted = int(np.searchsorted(np.cumsum(counts), REWARD_WINDOW)) + 1
    return max(1, min(wanted, len(counts) // 2))


def _reward_key(entries: LogHistory) -> str:
    return SAMPLED_REWARD if any(SAMPLED_REWARD in entry for entry in entries) else "reward"


def _mean(values: FloatArray, counts: npt.NDArray[np.int_]) -> float:
    known = np.isfinite(values)
    return float(np.average(values[known], weights=counts[known])) if known.any() else math.nan


def _seconds_saved(windows: Sequence[LoggedWindow], largest: int) -> tuple[float, float]:
    """Over stretches that begin and end between generations, so that the seconds of each belong to its sizes."""
    sizes, seconds, longest, counts = [], [], [], []
    stretch: list[LoggedWindow] = []
    for window in windows:
        stretch.append(window)
        if not window.aligned:
            continue
        generating = [one for one in stretch if one.generations > 0]
        weights = np.array([one.generations for one in generating])
        entries = [one.entry for one in generating]
        total = sum(one.steps * float(one.entry["step_time"]) for one in stretch)
        sizes.append(_mean(_series(entries, "sagc/group_size"), weights))
        longest.append(_mean(_series(entries, "completions/max_length"), weights))
        seconds.append(total / weights.sum())
        counts.append(int(weights.sum()))
        stretch = []
    return seconds_saved(sizes, seconds, longest, largest, counts)


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
    generations = "" if s.generations == s.steps else f"{s.generations} generations, "
    unit = "steps" if s.generations == s.steps else "generations"
    first, last = s.reward_windows
    window = f"first and last {first}" if first == last else f"first {first} and last {last}"
    if s.all_sampled:
        unit += ", dropped groups included"
    rows = {
        "steps": f"{s.steps} ({generations}{s.seconds:.0f} s in steps, {s.rollouts} completions)",
        "mean group size": f"{s.mean_group_size:.1f} of at most {s.largest}",
        "straggler rate": f"{s.straggler_rate:.2f}, {verdict} the budget of {s.budget:.2f}",
        "reward": f"{s.reward_first:.2f} -> {s.reward_last:.2f} (means of the {window} {unit})",
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
    """NaN where an entry lacks the key, or has None, as TRL writes for a metric without a value."""
    values = [entry.get(key) for entry in entries]
    return np.array([math.nan if value is None else float(value) for value in values])


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
    right.set_ylim(0, max(1.0, 1.6 * float(np.nan_to_num(queue).max())))
    right.set_ylabel("queue (budget overspent so far)", color="C1")
    right.spines["top"].set_visible(False)
    _integer_steps(axis)


def _plot_rate(axis: Any, steps: FloatArray, entries: LogHistory) -> None:
    budget = float(_series(entries, "sagc/budget")[-1])
    axis.bar(steps, _series(entries, "sagc/straggler_rate"), color="C7", alpha=0.45, label="as logged")
    axis.plot(steps, _series(entries, "sagc/straggler_rate_running"), color="C0", linewidth=2, label="running mean")
    axis.axhline(budget, color="C3", linestyle="--", label=f"budget {budget:g}")
    axis.set(title="Groups with a straggler", ylabel="fraction of groups", ylim=(0, 1.05))
    axis.legend(loc="upper right", frameon=False)
    _integer_steps(axis)


def _plot_reward(axis: Any, steps: FloatArray, entries: LogHistory) -> None:
    key = _reward_key(entries)
    rewards = _series(entries, key)
    recent = [rewards[max(0, i - 4) : i + 1] for i in range(rewards.size)]
    smooth = [_mean(values, np.ones(values.size, dtype=int)) for values in recent]
    axis.plot(steps, rewards, color="C7", alpha=0.6, marker="o", markersize=3, linestyle=":", label="as logged")
    axis.plot(steps, smooth, color="C2", linewidth=2, label="mean of the last 5")
    title = "Reward, dropped groups included" if key == SAMPLED_REWARD else "Reward"
    axis.set(title=title, ylabel="mean reward")
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
