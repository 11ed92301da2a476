"""Straggler models: the right numbers, and an adversary that finds the worst set."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from coded.gcc import first_responders, independent_stragglers, random_stragglers, worst_case_stragglers


def test_random_stragglers_are_uniform() -> None:
    rng = np.random.default_rng(0)
    counts = np.zeros(6)
    for _ in range(3000):
        responders = random_stragglers(rng, 6, 2)
        assert len(responders) == 4 and responders == sorted(set(responders))
        counts[responders] += 1
    np.testing.assert_allclose(counts / 3000, 4 / 6, atol=0.04)
    assert random_stragglers(rng, 3, 0) == [0, 1, 2]


def test_independent_stragglers_have_their_probability_and_never_are_all() -> None:
    rng = np.random.default_rng(0)
    rate = np.mean([10 - len(independent_stragglers(rng, 10, 0.3)) for _ in range(3000)]) / 10
    assert rate == pytest.approx(0.3, abs=0.02)
    assert all(independent_stragglers(rng, 2, 0.9) for _ in range(100))


def test_first_responders_of_recorded_times() -> None:
    seconds = [3.0, 1.0, np.inf, 2.0, 2.0]
    assert first_responders(seconds, count=2) == [1, 3]
    assert first_responders(seconds, count=5) == [0, 1, 2, 3, 4]
    assert first_responders(seconds, deadline=2.0) == [1, 3, 4]
    assert first_responders(seconds, deadline=0.5) == []


@pytest.mark.parametrize("exhaustive_limit", [3000, 0])
def test_the_adversary_finds_the_worst_set(exhaustive_limit: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values, pairs = rng.normal(size=8), rng.normal(size=(8, 8)) * 0.3

        def loss(responders: list[int], values: Any = values, pairs: Any = pairs) -> float:
            slow = np.setdiff1d(np.arange(8), responders)
            return float(values[slow].sum() + pairs[np.ix_(slow, slow)].sum())

        found = worst_case_stragglers(loss, 8, 3, exhaustive_limit)
        every = [[worker for worker in range(8) if worker not in slow] for slow in combinations(range(8), 3)]
        best = max(every, key=loss)
        if exhaustive_limit:
            assert found == best
        else:  # a local maximum: no swap is better, and most often the global one
            assert loss(found) >= np.quantile([loss(responders) for responders in every], 0.9)
            swaps = [set(found) - {out} | {into} for out in found for into in set(range(8)) - set(found)]
            assert all(loss(sorted(swap)) <= loss(found) for swap in swaps)


def test_the_adversary_without_stragglers_leaves_all() -> None:
    assert worst_case_stragglers(lambda responders: 0.0, 4, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rng: random_stragglers(rng, 4, 4), "below the 4 workers, got 4"),
        (lambda rng: random_stragglers(rng, 4, -1), "got -1"),
        (lambda rng: worst_case_stragglers(lambda _: 0.0, 4, 4), "below the 4 workers"),
        (lambda rng: independent_stragglers(rng, 4, 1.0), "`probability` must be"),
        (lambda rng: first_responders([1.0, 2.0]), "either `count` or `deadline`"),
        (lambda rng: first_responders([1.0, 2.0], count=1, deadline=2.0), "either `count` or `deadline`"),
        (lambda rng: first_responders([1.0, 2.0], count=3), "number of workers, 2, got 3"),
        (lambda rng: first_responders([1.0, np.nan], count=1), r"NaN for workers \[1\]"),
    ],
)
def test_wrong_numbers_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.random.default_rng(0))
