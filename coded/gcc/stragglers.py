"""Which workers answer: fixed number at random, independent, recorded, and the worst case.

Each function returns the responders, ascending indices of the N workers. The adversary searches a loss that is given
as a function of the responders, so every scheme is searched with the same strength.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

EXHAUSTIVE_LIMIT = 3000  # straggler sets that are all tried; beyond, greedy choice and exchange


def random_stragglers(rng: np.random.Generator, workers: int, stragglers: int) -> list[int]:
    """
    A fixed number of stragglers, any set as likely as another.

    Args:
        rng (`np.random.Generator`):
            Source of randomness.
        workers (`int`):
            N.
        stragglers (`int`):
            S, at least 0 and below N.

    Returns:
        `list[int]`: the N - S responders.

    Raises:
        `ValueError`: If S is negative or not below N.
    """
    _check_count(workers, stragglers)
    return sorted(rng.choice(workers, workers - stragglers, replace=False).tolist())


def independent_stragglers(rng: np.random.Generator, workers: int, probability: float) -> list[int]:
    """
    Each worker straggles independently; at least one answers (drawn again otherwise).

    Args:
        rng (`np.random.Generator`):
            Source of randomness.
        workers (`int`):
            N.
        probability (`float`):
            p, at least 0 and below 1.

    Returns:
        `list[int]`: the responders.

    Raises:
        `ValueError`: If p lies outside [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"`probability` must be at least 0 and below 1, got {probability}.")
    while True:
        responders = np.flatnonzero(rng.random(workers) >= probability).tolist()
        if responders:
            return responders


def first_responders(seconds: npt.ArrayLike, count: int | None = None, deadline: float | None = None) -> list[int]:
    """
    The workers that answered first, from recorded times.

    Args:
        seconds (array-like of shape `(N,)`):
            Time of each worker's answer; infinite for one that never answered.
        count (`int`, *optional*):
            Wait for this many answers.
        deadline (`float`, *optional*):
            Wait until this time, in seconds. One of `count` and `deadline` must be given.

    Returns:
        `list[int]`: the responders; of workers with the same time the lower index comes first.

    Raises:
        `ValueError`: If not one of `count` and `deadline` is given, `count` is not from 1 to N, or a time is NaN.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if np.isnan(times).any():
        raise ValueError(f"`seconds` is NaN for workers {np.flatnonzero(np.isnan(times)).tolist()}.")
    if (count is None) == (deadline is None):
        raise ValueError("Give either `count` or `deadline`.")
    if deadline is not None:
        return np.flatnonzero(times <= deadline).tolist()
    assert count is not None
    if not 1 <= count <= len(times):
        raise ValueError(f"`count` must be from 1 to the number of workers, {len(times)}, got {count}.")
    return sorted(np.argsort(times, kind="stable")[:count].tolist())


def worst_case_stragglers(
    loss: Callable[[list[int]], float], workers: int, stragglers: int, exhaustive_limit: int = EXHAUSTIVE_LIMIT
) -> list[int]:
    """
    The straggler set with the largest loss: all sets tried where they are few, greedy choice and exchange otherwise.

    Greedy: the straggler that raises the loss most, one after another. Exchange: while a swap of a straggler and a
    responder raises the loss, the best such swap. The result is then a local maximum, a lower bound on the worst case.

    Args:
        loss (`Callable[[list[int]], float]`):
            Loss for ascending responders.
        workers (`int`):
            N.
        stragglers (`int`):
            S, at least 0 and below N.
        exhaustive_limit (`int`, *optional*, defaults to 3000):
            Try all sets up to this many.

    Returns:
        `list[int]`: the N - S responders.

    Raises:
        `ValueError`: If S is negative or not below N.
    """
    _check_count(workers, stragglers)

    def responders(slow: Sequence[int]) -> list[int]:
        return [worker for worker in range(workers) if worker not in slow]

    def worst(sets: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], float]:
        losses = [loss(responders(slow)) for slow in sets]
        best = int(np.argmax(losses))
        return sets[best], losses[best]

    if comb(workers, stragglers) <= exhaustive_limit:
        return responders(worst(list(combinations(range(workers), stragglers)))[0])
    chosen: tuple[int, ...] = ()
    value = -np.inf
    for _ in range(stragglers):
        chosen, value = worst([(*chosen, worker) for worker in responders(chosen)])
    while True:
        swaps = [(*(kept for kept in chosen if kept != out), into) for out in chosen for into in responders(chosen)]
        candidate, improved = worst(swaps)
        if improved <= value:
            return responders(chosen)
        chosen, value = candidate, improved


def _check_count(workers: int, stragglers: int) -> None:
    if not 0 <= stragglers < workers:
        raise ValueError(f"`stragglers` must be at least 0 and below the {workers} workers, got {stragglers}.")
