"""A run's summary: arithmetic on known histories."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import even_words, tiny_trainer

from trainers import SAGCGRPOTrainer
from trainers.summary import format_summary, logged_windows, plot, seconds_saved, summarize, training_steps


def history(sizes: list[int], *, slope: float = 2.0, warm_up: float = 30.0) -> list[dict[str, Any]]:
    steps = [
        {
            "step": step + 1,
            "reward": 0.1 * step,
            "completions/max_length": 40.0 + 3.0 * (step % 2),
            "step_time": 5.0 + slope * size + (warm_up if step == 0 else 0.0),
            "sagc/group_size": float(size),
            "sagc/straggler_rate": 0.25 * (step % 3),
            "sagc/straggler_rate_running": 0.25,
            "sagc/budget": 0.3,
            "sagc/queue": 0.1 * step,
            "sagc/rollouts": 4.0 * size,
            "sagc/risk_at_size/2": 0.1,
            "sagc/risk_at_size/8": 0.6,
        }
        for step, size in enumerate(sizes)
    ]
    return [*steps, {"step": len(sizes), "train_runtime": 1.0, "train_loss": 0.0}]


def test_seconds_saved_recovers_a_known_slope_and_ignores_the_warm_up_step() -> None:
    sizes, longest = np.array([8, 8, 6, 4, 2, 8, 5]), np.array([60, 60, 50, 60, 40, 30, 20])
    seconds = 5.0 + 2.0 * sizes + 0.3 * longest
    seconds[0] = 100.0
    estimate, error = seconds_saved(sizes, seconds, longest, largest=8)
    assert estimate == pytest.approx(2.0 * (2 + 4 + 6 + 3))
    assert error == pytest.approx(0.0, abs=1e-6)


def test_shorter_completions_do_not_pass_for_smaller_groups() -> None:
    """Lengths shrink while the size falls and rises again: only the cost of rows is attributed to the size."""
    sizes, longest = np.array([8, 8, 7, 3, 4, 8, 8, 8]), np.array([64, 64, 60, 50, 40, 30, 27, 25])
    seconds = 2.0 + 1.0 * sizes + 1.0 * longest
    assert seconds_saved(sizes, seconds, longest, largest=8)[0] == pytest.approx(1 + 5 + 4)


def test_seconds_saved_error_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    sizes, longest = rng.integers(2, 9, size=40), rng.integers(20, 65, size=40)
    truth = 1.5 * float(np.sum(8 - sizes))
    z = []
    for _ in range(500):
        seconds = 3.0 + 1.5 * sizes + 0.2 * longest + rng.normal(0, 2.0, size=40)
        estimate, error = seconds_saved(sizes, seconds, longest, largest=8)
        z.append((estimate - truth) / error)
    assert abs(float(np.mean(z))) < 0.15
    assert float(np.std(z)) == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize("sizes", [[4] * 8, [8, 4, 4, 4], [4], [8, 4, 2], []])
def test_seconds_saved_is_nan_where_not_identifiable(sizes: list[int]) -> None:
    assert all(math.isnan(value) for value in seconds_saved(sizes, [10.0] * len(sizes), [9.0] * len(sizes), largest=8))


def test_seconds_saved_is_nan_where_lengths_move_with_the_size() -> None:
    sizes = np.array([8, 6, 4, 2, 8, 4, 6])
    assert math.isnan(seconds_saved(sizes, 3.0 * sizes, 7.0 * sizes, largest=8)[0])


def test_the_largest_size_throughout_saves_nothing() -> None:
    assert seconds_saved([8, 8, 8], [30.0, 10.0, 11.0], [9.0, 9.0, 8.0], largest=8) == (0.0, 0.0)


def test_seconds_saved_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="a duration, a longest length and a count"):
        seconds_saved([8, 4], [1.0], [9.0, 9.0], largest=8)


def test_summarize() -> None:
    summary = summarize(history([8, 8, 6, 4, 2, 8]), largest=8)
    assert summary.steps == 6
    assert summary.mean_group_size == pytest.approx(6.0)
    assert summary.straggler_rate == pytest.approx(0.25)
    assert summary.rollouts == 4 * 36
    assert summary.reward_windows == (3, 3)
    assert summary.reward_first == pytest.approx(0.1)
    assert summary.reward_last == pytest.approx(0.4)
    assert summary.saved == pytest.approx(24.0)


def test_first_and_last_rewards_share_no_step() -> None:
    summary = summarize(history([8, 4, 2, 8]), largest=8)
    assert (summary.reward_windows, summary.reward_first, summary.reward_last) == ((2, 2), 0.05, 0.25)


def test_entries_of_other_kinds_are_left_out() -> None:
    assert len(training_steps(history([8, 4]))) == 2
    with pytest.raises(ValueError, match="No training step"):
        summarize([{"train_loss": 0.0}], largest=8)


def test_format_says_when_the_saving_is_not_identifiable() -> None:
    text = format_summary(summarize(history([4, 4, 4, 4]), largest=8), {"plot": "here.png"})
    assert "not identifiable" in text
    assert "here.png" in text
    assert "above" not in text


@pytest.mark.parametrize("sizes", [[8, 8, 6, 4, 2, 8], [8]])
def test_plot_writes_a_picture(tmp_path: Path, sizes: list[int]) -> None:
    plot(history(sizes), tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_format_says_when_the_saving_may_be_none() -> None:
    steps = history([8, 8, 6, 4, 2, 8])
    assert "not distinguishable" not in format_summary(summarize(steps, largest=8))
    for entry, noise in zip(steps, [0.0, 9.0, -9.0, 9.0, -9.0, -9.0], strict=False):
        entry["step_time"] += 10 * noise
    assert "not distinguishable" in format_summary(summarize(steps, largest=8))


class WrittenDown(SAGCGRPOTrainer):
    """Keeps what each step and generation was, beside TRL's averages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        self.rewards: list[float] = []
        self.seconds = 0.0
        super().__init__(*args, **kwargs)

    def _observe_batch(self) -> None:
        super()._observe_batch()
        self.sizes.append(self.num_generations)
        self.rates.append(self._metrics["train"]["sagc/straggler_rate"][-1])
        self.rewards.append(float(np.nanmean(self._rounds[-1].rewards)))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # TRL forgets the seconds it has summed once a step is complete, so they are read just before and after.
        before = len(self._metrics["train"]["step_time"])
        output = super().training_step(*args, **kwargs)
        self.seconds += sum(self._metrics["train"]["step_time"][before:])
        return output


@pytest.mark.parametrize(
    ("settings", "generations"),
    [
        pytest.param({"logging_steps": 1}, 7, id="each step"),
        pytest.param({"logging_steps": 3}, 7, id="three steps and a last one alone"),
        pytest.param({"logging_steps": 1, "num_iterations": 2}, 4, id="batches used twice"),
        pytest.param({"logging_steps": 3, "num_iterations": 2}, 4, id="both"),
        pytest.param({"logging_steps": 2, "logging_first_step": True}, 7, id="first step"),
        pytest.param(
            {
                "logging_steps": 2,
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 2,
            },
            14,
            id="two generations a step",
        ),
        pytest.param(
            {"logging_steps": 2, "per_device_train_batch_size": 8, "steps_per_generation": 4}, 2, id="micro-batches"
        ),
    ],
)
def test_totals_of_a_real_run_are_right_however_it_logs(
    tmp_path: Path, settings: dict[str, Any], generations: int
) -> None:
    trainer = tiny_trainer(tmp_path, WrittenDown, max_steps=7, rho=0.3, V=0.05, **settings)
    trainer.train()
    args = trainer.args
    generation_steps = Fraction(args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps)
    summary = summarize(trainer.state.log_history, largest=8, generation_steps=generation_steps)
    assert len(set(trainer.sizes)) > 1
    assert (summary.steps, summary.generations) == (7, generations)
    assert len(trainer.sizes) == generations
    assert summary.rollouts == 4 * sum(trainer.sizes)
    assert summary.mean_group_size == pytest.approx(np.mean(trainer.sizes))
    assert summary.straggler_rate == pytest.approx(np.mean(trainer.rates))
    assert summary.seconds == pytest.approx(trainer.seconds)
    first, last = summary.reward_windows
    assert summary.reward_first == pytest.approx(np.mean(trainer.rewards[:first]))
    assert summary.reward_last == pytest.approx(np.mean(trainer.rewards[-last:]))


def merged(entries: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """What TRL would have logged with this `logging_steps`."""
    parts = [entries[start : start + every] for start in range(0, len(entries), every)]
    keys = {key for entry in entries for key in entry}
    mean = lambda part, key: float(np.mean([entry[key] for entry in part if key in entry]))  # noqa: E731
    averaged = [
        {key: mean(part, key) for key in keys if any(key in entry for entry in part)} | {"step": part[-1]["step"]}
        for part in parts
    ]
    return [*averaged, {"step": entries[-1]["step"], "train_runtime": 1.0}]


SIZES = [8, 8, 6, 4, 2, 8, 5, 3, 7, 8, 2, 2]


@pytest.mark.parametrize("every", [1, 2])
def test_seconds_saved_does_not_depend_on_logging_steps(every: int) -> None:
    log = merged(history(SIZES, warm_up=0.0)[:-1], every)
    summary = summarize(log, largest=8)
    assert summary.saved == pytest.approx(2.0 * sum(8 - size for size in SIZES))
    assert summary.seconds == pytest.approx(sum(5.0 + 2.0 * size for size in SIZES))


def used_twice(sizes: list[int]) -> list[dict[str, Any]]:
    """Each generation is trained on for two steps; only the first has its metrics."""
    log = []
    for number, entry in enumerate(history(sizes, warm_up=0.0)[:-1]):
        update = {"step": 2 * number + 2, "step_time": 1.0 + 0.5 * sizes[number]}
        log += [{**entry, "step": 2 * number + 1}, update]
    return log


def test_seconds_saved_counts_all_steps_of_a_generation() -> None:
    """A row costs 2 s where it is generated and 0.5 s where it is used again."""
    log = used_twice(SIZES)
    summary = summarize(log, largest=8, generation_steps=2)
    assert summary.saved == pytest.approx(2.5 * sum(8 - size for size in SIZES))
    assert summary.steps == 24
    assert summary.generations == 12
    text = format_summary(summary)
    assert "24 (12 generations, " in text
    assert "first and last 3 generations" in text
    # Windows of 3 steps end between generations only at every second entry: two are taken together.
    longer = summarize(merged(used_twice(3 * SIZES), 3), largest=8, generation_steps=2)
    assert longer.saved == pytest.approx(3 * summary.saved)


def test_windows_that_never_end_between_generations_save_nothing_that_is_known() -> None:
    windows = logged_windows([{"step": step, "step_time": 1.0} for step in (3, 5, 7)], generation_steps=2)
    assert [(window.steps, window.generations, window.aligned) for window in windows] == [
        (3, 2, False),
        (2, 1, False),
        (2, 1, False),
    ]
    log = [{**history([8])[0], "step": step} for step in (3, 5, 7)]
    assert math.isnan(summarize(log, largest=8, generation_steps=2).saved)


def test_a_metric_without_a_value_is_left_out(tmp_path: Path) -> None:
    """TRL logs None where no completion of the window was scored."""
    calls: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        calls.append(len(completions))
        return [None] * len(completions) if len(calls) == 2 else [*even_words(completions)]

    trainer = tiny_trainer(tmp_path, arguments={"reward_funcs": reward}, max_steps=3)
    trainer.train()
    log = trainer.state.log_history
    assert log[1]["reward"] is None
    summary = summarize(log, largest=8)
    assert (summary.reward_first, summary.reward_last) == (log[0]["reward"], log[2]["reward"])
    plot(log, tmp_path / "summary.png")


def test_the_reward_of_dynamic_sampling_is_that_of_all_it_sampled(tmp_path: Path) -> None:
    steps = history([8, 8, 6, 4, 2, 8])
    assert "dropped groups" not in format_summary(summarize(steps, largest=8))
    for step, entry in enumerate(steps[:-1]):
        entry["reward"], entry["dapo/reward_sampled"] = 0.5, 0.1 * step
    summary = summarize(steps, largest=8)
    assert (summary.reward_first, summary.reward_last) == pytest.approx((0.1, 0.4))
    text = format_summary(summary)
    assert "0.10 -> 0.40 (means of the first and last 3 steps, dropped groups included)" in text
    plot(steps, tmp_path / "summary.png")
