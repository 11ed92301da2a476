"""When a group of completions counts as a straggler event.

Three definitions:

- `ratio`: longest >= tau * median. The median is the *lower* one, the `ceil(n / 2)`-th smallest: it is always one of
  the observed lengths (so a subset's event probability has a closed form, see `sagc.risk`), it is what `torch.median`
  returns, and it can fire at group size 2, where the upper median never could.
- `duration`: the same on the seconds until each completion was finished, where the backend reports them. It sees what
  lengths do not, such as a completion that waited for its turn.
- `absolute`: longest >= a fixed length.

A completion that was cut off at `max_completion_length` is *censored*: its true length is unknown and at least that.
It is therefore taken as no shorter than the longest of its group, and under `ratio` and `duration` a group whose
median is itself cut off is an event: its ratio would read 1.0 although the whole group stalled to the limit. A group
of empty completions is no event.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StragglerEvent:
    """
    Definition of a straggler event.

    Args:
        kind (`str`, *optional*, defaults to `"ratio"`):
            `"ratio"` (longest >= `tau` * lower median), `"duration"` (the same rule; the observed lengths are seconds)
            or `"absolute"` (longest >= `length`).
        tau (`float`, *optional*, defaults to `2.0`):
            Ratio that makes an event, above 1. At 2.0 half of the group's engine time goes to waiting.
        length (`float`, *optional*):
            Length that makes an event when `kind="absolute"`, in the unit of the observed lengths.

    Raises:
        `ValueError`: If `kind` is unknown, `tau <= 1`, or `length` is missing or not positive for `"absolute"`.
    """

    kind: Literal["ratio", "duration", "absolute"] = "ratio"
    tau: float = 2.0
    length: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("ratio", "duration", "absolute"):
            raise ValueError(f"Unknown straggler event {self.kind!r}: use 'ratio', 'duration' or 'absolute'.")
        if not (np.isfinite(self.tau) and self.tau > 1):
            raise ValueError(
                f"tau must be above 1 and finite, got {self.tau}: at 1 every group is a straggler event. "
                "Usual values: 1.5 to 3."
            )
        if self.kind == "absolute" and not (self.length is not None and np.isfinite(self.length) and self.length > 0):
            raise ValueError(
                f"The 'absolute' straggler event needs a positive length, got {self.length}: set straggler_length."
            )


def check_lengths(lengths: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> tuple[FloatArray, BoolArray]:
    """
    Validates lengths and raises those of cut-off completions to the longest of their group.

    Args:
        lengths (array-like of shape `(groups, n)`):
            Observed lengths, finite and not negative. Zero is legal.
        truncated (array-like of shape `(groups, n)`, *optional*):
            Whether each completion was cut off. None means that none was.

    Returns:
        `tuple`: lengths as floats and the truncation flags, both of shape `(groups, n)`.

    Raises:
        `ValueError`: If a shape is wrong or a length is negative, NaN or infinite.
    """
    array = np.asarray(lengths, dtype=np.float64)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"lengths must have shape (groups, n) with at least one completion, got {array.shape}.")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError("lengths must be finite and not negative; a completion of zero tokens has length 0.")
    if truncated is None:
        return array, np.zeros(array.shape, dtype=bool)
    cut = np.asarray(truncated, dtype=bool)
    if cut.shape != array.shape:
        raise ValueError(f"truncated has shape {cut.shape}, but lengths has shape {array.shape}.")
    return np.where(cut, array.max(axis=1, keepdims=True), array), cut


def straggler_events(
    lengths: npt.ArrayLike, event: StragglerEvent, truncated: npt.ArrayLike | None = None
) -> BoolArray:
    """
    Tells for each group whether it is a straggler event.

    Args:
        lengths (array-like of shape `(groups, n)`):
            Lengths of the completions of each group.
        event ([`StragglerEvent`]):
            Definition of the event.
        truncated (array-like of shape `(groups, n)`, *optional*):
            Whether each completion was cut off.

    Returns:
        `np.ndarray` of bool of shape `(groups,)`.
    """
    array, cut = check_lengths(lengths, truncated)
    longest = array.max(axis=1)
    if event.kind == "absolute":
        assert event.length is not None
        return np.asarray(longest >= event.length)
    # Finished completions in order, then the cut-off ones: the median is cut off when too few finished.
    size = array.shape[1]
    rank = lower_median_rank(size)
    median = np.sort(array, axis=1)[:, rank - 1]
    finished = size - cut.sum(axis=1)
    return np.asarray((finished < rank) | ((longest >= event.tau * median) & (longest > 0)))


def lower_median_rank(size: int) -> int:
    """Rank of the lower median among `size` sorted lengths, counted from 1."""
    return (size + 1) // 2
