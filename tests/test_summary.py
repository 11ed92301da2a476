"""A run's summary: arithmetic on known histories."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.summary import format_summary, plot, seconds_saved, summarize, training_steps


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
    with pytest.raises(ValueError, match="a duration and a longest length"):
        seconds_saved([8, 4], [1.0], [9.0, 9.0], largest=8)


def test_summarize() -> None:
    summary = summarize(history([8, 8, 6, 4, 2, 8]), largest=8)
    assert summary.steps == 6
    assert summary.mean_group_size == pytest.approx(6.0)
    assert summary.straggler_rate == pytest.approx(0.25)
    assert summary.rollouts == 4 * 36
    assert summary.reward_window == 3
    assert summary.reward_first == pytest.approx(0.1)
    assert summary.reward_last == pytest.approx(0.4)
    assert summary.saved == pytest.approx(24.0)


def test_first_and_last_rewards_share_no_step() -> None:
    summary = summarize(history([8, 4, 2, 8]), largest=8)
    assert (summary.reward_window, summary.reward_first, summary.reward_last) == (2, 0.05, 0.25)


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
