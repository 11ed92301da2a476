"""Answers that are wrong, not missing: find them before decoding.

As many answers as may be wrong are set aside, one at a time the one farthest from what the others say. Then they come
back, the closest first, as long as one fits those that are kept. Setting aside first matters: with several wrong
answers each makes the others look less wrong. Distances are externally studentised deletion residuals (the F test of
one more observation), and kernel and ridge are chosen by the median leave-one-out error, which fewer than half of the
answers cannot move far.

Limits. Of n answers at most (n - 3) / 2 may be wrong. A wrong answer within `OUTLIER` times the usual residual passes,
and does no more harm than that. Where f is not smooth at the scale of the data the usual residual is as large as f
itself, and only gross errors are found. Wrong answers that are the majority among their neighbours, or two different
answers for a point that nothing else is near, cannot be told from right ones. An honest answer where f changes
abruptly may be set aside; its point is then estimated.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .decoders import FittedDecoder
from .ridge import FloatArray

# Distances above this are wrong answers. With smooth functions on a curve the default decoder confused no honest
# answer with a wrong one between 4 and 6, and let wrong ones pass from 10 on.
OUTLIER = 6.0


def find_wrong(
    fit: Callable[[tuple[int, ...]], FittedDecoder], responders: Sequence[int], outputs_gram: FloatArray, most: int
) -> tuple[int, ...]:
    """
    Workers whose answers do not fit the others.

    Args:
        fit (`Callable`):
            Fits a decoder to an ascending tuple of workers.
        responders (sequence of `int`):
            Workers that answered.
        outputs_gram (`np.ndarray` of shape `(n, n)`):
            Inner products of their answers.
        most (`int`):
            How many may be set aside.

    Returns:
        `tuple[int, ...]`: at most `most` workers, ascending.

    Raises:
        `ValueError`: If `most` is negative or more than the answers can bear.
    """
    bearable = max((len(responders) - 3) // 2, 0)
    if not 0 <= most <= bearable:
        raise ValueError(f"`wrong={most}`: {len(responders)} answers can bear from 0 to {bearable} wrong ones.")
    place = {worker: row for row, worker in enumerate(responders)}

    def outlyingness(workers: list[int]) -> FloatArray:
        rows = [place[worker] for worker in workers]
        return fit(tuple(workers)).outlyingness(outputs_gram[np.ix_(rows, rows)])

    kept, aside = sorted(responders), []
    for _ in range(most):
        aside.append(kept.pop(int(np.argmax(outlyingness(kept)))))
    while aside:
        trials = [sorted([*kept, worker]) for worker in aside]
        distances = [outlyingness(trial)[trial.index(worker)] for trial, worker in zip(trials, aside, strict=True)]
        closest = int(np.argmin(distances))
        if distances[closest] > OUTLIER:
            break
        kept = trials[closest]
        aside.pop(closest)
    return tuple(sorted(aside))
