"""What a group of a size is worth: the named utilities and the chance of mixed rewards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import share_of_mixed

from sagc import mixed_reward_curves
from sagc.utility import extrapolate_mixed, static_utility


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=1, max_size=12))
def test_mixed_reward_curve_equals_counting_all_subsets(rewards: list[float]) -> None:
    sizes = range(1, len(rewards) + 1)
    curve = mixed_reward_curves([rewards], sizes)[0]
    np.testing.assert_allclose(curve, [share_of_mixed(rewards, size) for size in sizes], atol=1e-12)


def test_mixed_reward_curves_average_to_the_signal_of_smaller_groups() -> None:
    rng = np.random.default_rng(3)
    success = rng.beta(0.7, 1.3, (40_000, 1))
    rewards = (rng.random((40_000, 8)) < success).astype(float)
    for size, signal in zip((2, 4), mixed_reward_curves(rewards, [2, 4]).mean(axis=0), strict=True):
        assert (1 - success**size - (1 - success) ** size).mean() == pytest.approx(signal, abs=0.01)


def test_rewards_that_differ_by_rounding_count_as_equal() -> None:
    assert mixed_reward_curves([[0.1 + 0.2, 0.3, 0.3]], [2, 3]).max() == 0


def test_float32_rewards_give_the_same_curve() -> None:
    rewards = [[0.1, 0.7, 0.1, 0.3]]
    expected = mixed_reward_curves(rewards, [2, 4])
    np.testing.assert_array_equal(mixed_reward_curves(np.asarray(rewards, dtype=np.float32), [2, 4]), expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(2, 8), st.integers(1, 16))
def test_extrapolated_signal_is_optimistic(success: list[float], size: int, more: int) -> None:
    p = np.asarray(success)

    def signal(group: int) -> float:
        return float((1 - p**group - (1 - p) ** group).mean())

    predicted = extrapolate_mixed([signal(size - 1), signal(size)], size, [size + more])[0]
    assert signal(size + more) - 1e-9 <= predicted <= 1


def test_named_utilities() -> None:
    np.testing.assert_allclose(static_utility("log", (2, 8)), np.log([2, 8]))
    np.testing.assert_allclose(static_utility("variance", (2, 8)), [0.5, 0.875])
