"""Adaptive rollout budgets by split conformal prediction: when has a prompt been sampled often enough?

A prompt is sampled in rounds. After k completions its outcomes have frequencies; the adaptive prediction set (APS;
Romano, Sesia, Candes 2020) takes outcomes from the most frequent down until their mass reaches a threshold. When the
set has one member, more completions are not expected to change which outcome leads, and sampling stops. The threshold
of each k is the conformal quantile of the scores of the *full* group's leading outcome on recent full groups, so on
exchangeable prompts the set holds that outcome with probability at least 1 - miscoverage.

In the manner of conformal rollout budgets (C-GRPO), with two changes that let it run on any reward: the outcomes are
rewards instead of extracted answers, and the calibration groups are those that training samples at full size anyway.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .events import FloatArray


def outcome_masses(outcomes: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """
    Distinct outcomes and their shares, the most frequent first; of equally frequent ones the larger first.

    Args:
        outcomes (array-like of shape `(k,)`):
            Rewards, compared to six decimals; NaN counts as an outcome of its own.

    Returns:
        `tuple`: values and shares, each of shape `(distinct,)`.
    """
    values, counts = np.unique(np.round(np.asarray(outcomes, dtype=np.float64), 6), return_counts=True)
    order = np.lexsort((-values, -counts))
    return values[order], counts[order] / counts.sum()


def conformal_score(group: npt.ArrayLike, k: int, rng: np.random.Generator) -> float:
    """
    APS score of the full group's leading outcome among its first k: mass ahead of it plus a random part of its own.

    Args:
        group (array-like of shape `(n,)`):
            Rewards of a full group.
        k (`int`):
            Completions seen, up to n.
        rng (`np.random.Generator`):
            Makes the score continuous.

    Returns:
        `float` in [0, 1]: 1 if the outcome is not among the first k.
    """
    leader = outcome_masses(group)[0][0]
    values, shares = outcome_masses(np.asarray(group)[:k])
    found = np.flatnonzero((values == leader) | (np.isnan(values) & np.isnan(leader)))
    if len(found) == 0:
        return 1.0
    return float(shares[: found[0]].sum() + rng.random() * shares[found[0]])


def conformal_quantile(scores: Sequence[float], miscoverage: float) -> float:
    """
    Split-conformal quantile, the `ceil((n + 1) (1 - miscoverage))`-th smallest of n scores.

    Args:
        scores (sequence of `float`):
            Calibration scores.
        miscoverage (`float`):
            In (0, 1).

    Returns:
        `float`: 1.0 where n is too small for the promise, so that only unanimous outcomes stop a prompt.
    """
    rank = int(np.ceil((len(scores) + 1) * (1.0 - miscoverage)))
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else 1.0


def resolved(outcomes: npt.ArrayLike, quantile: float) -> bool:
    """
    Whether the prediction set of these outcomes has one member.

    Args:
        outcomes (array-like of shape `(k,)`):
            Rewards so far.
        quantile (`float`):
            Threshold for this k.

    Returns:
        `bool`
    """
    return bool(outcome_masses(outcomes)[1][0] >= quantile)
