"""The choice by enumeration against cvxpy, and the optimum in hindsight."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc import choose_group_size, convex_group_size, hindsight_optimum


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000))
def test_enumeration_and_convex_program_choose_the_same_size(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    utility, risk = np.log(np.arange(2, count + 2)), np.sort(rng.random(count))
    v, queue = rng.exponential(1.0), rng.exponential(3.0)
    assert choose_group_size(utility, risk, v, queue) == convex_group_size(utility, risk, v, queue)


def test_ties_go_to_the_larger_size() -> None:
    assert choose_group_size([1.0, 1.0, 0.5], [0.3, 0.3, 0.3], v=1.0, queue=2.0) == 1
    assert choose_group_size([1.0, 1.0, 1.0], [0.1, 0.2, 0.3], v=1.0, queue=0.0) == 2


def test_an_empty_queue_chooses_the_most_useful_and_a_full_one_the_safest() -> None:
    utility, risk = [0.0, 1.0, 2.0], [0.2, 0.1, 0.9]
    assert choose_group_size(utility, risk, v=1.0, queue=0.0) == 2
    assert choose_group_size(utility, risk, v=1.0, queue=1e9) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 10_000))
def test_the_optimum_in_hindsight_is_at_least_any_fixed_size(count: int, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    utility, risk = rng.random((steps, count)), rng.random((steps, count))
    rho = float(rng.uniform(risk.mean(axis=0).min(), 1.0))
    best, mixture = hindsight_optimum(utility, risk, rho)
    feasible = risk.mean(axis=0) <= rho
    assert best >= utility.mean(axis=0)[feasible].max() - 1e-6
    assert mixture.sum() == pytest.approx(1, abs=1e-6) and mixture.min() >= -1e-6
    assert risk.mean(axis=0) @ mixture <= rho + 1e-6
    assert best == pytest.approx(utility.mean(axis=0) @ mixture, abs=1e-6)


def test_the_optimum_mixes_the_two_sizes_around_the_budget() -> None:
    best, mixture = hindsight_optimum([0.0, 1.0, 4.0], [0.1, 0.2, 0.6], rho=0.4)
    np.testing.assert_allclose(mixture, [0, 0.5, 0.5], atol=1e-5)
    assert best == pytest.approx(2.5, abs=1e-5)


def test_a_budget_that_only_the_safest_size_meets_exactly() -> None:
    best, mixture = hindsight_optimum([1.0, 2.0], [0.25, 0.5], rho=0.25)
    assert best == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(mixture, [1, 0], atol=1e-5)


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smallest average risk is 0\.300 > 0\.2"):
        hindsight_optimum([1.0, 2.0], [0.3, 0.5], rho=0.2)
