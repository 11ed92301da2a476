"""Slow definitions, written out from the words of `sagc.events` and `sagc.utility`, to hold the fast code against."""

from collections.abc import Sequence
from itertools import combinations

from sagc import StragglerEvent


def is_event(lengths: Sequence[float], cut: Sequence[bool], event: StragglerEvent) -> bool:
    """A group's straggler event: the lower median of finished completions in order, then the cut-off ones."""
    longest = max(lengths)
    if event.kind == "absolute":
        assert event.length is not None
        return longest >= event.length
    order = sorted(length for length, was_cut in zip(lengths, cut, strict=True) if not was_cut)
    lower_median = (len(lengths) - 1) // 2  # index from 0
    if lower_median >= len(order):
        return True
    return longest > 0 and longest >= event.tau * order[lower_median]


def share_of_events(lengths: Sequence[float], cut: Sequence[bool], event: StragglerEvent, size: int) -> float:
    """Share of all subsets of a size that are straggler events."""
    subsets = list(combinations(range(len(lengths)), size))
    return sum(is_event([lengths[i] for i in s], [cut[i] for i in s], event) for s in subsets) / len(subsets)


def share_of_mixed(rewards: Sequence[float], size: int) -> float:
    """Share of all subsets of a size whose rewards are not all equal."""
    subsets = list(combinations(rewards, size))
    return sum(len(set(subset)) > 1 for subset in subsets) / len(subsets)
