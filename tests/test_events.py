"""What counts as a straggler event: ratio and absolute, with cut-off and empty completions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import is_event

from sagc import StragglerEvent, straggler_events
from sagc.events import check_lengths

RATIO = StragglerEvent(tau=2.0)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], list[bool]]:
    size = draw(st.integers(1, 12))
    length = st.one_of(st.integers(0, 8).map(float), st.floats(0.0, 1e6, allow_subnormal=False))
    return (
        draw(st.lists(length, min_size=size, max_size=size)),
        draw(st.lists(st.booleans(), min_size=size, max_size=size)),
    )


@given(groups(), st.sampled_from([StragglerEvent(tau=t) for t in (1.01, 1.5, 2.0, 3.0)]))
def test_ratio_event_is_longest_over_lower_median(
    group: tuple[list[float], list[bool]], event: StragglerEvent
) -> None:
    lengths, cut = group
    assert straggler_events([lengths], event, [cut])[0] == is_event(lengths, cut, event)


@given(groups(), st.floats(0.5, 10.0))
def test_absolute_event_is_longest_over_a_length(group: tuple[list[float], list[bool]], length: float) -> None:
    lengths, cut = group
    event = StragglerEvent("absolute", length=length)
    assert straggler_events([lengths], event, [cut])[0] == (max(lengths) >= length)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 20], True),  # lower median 10: group size 2 can fire
        ([10, 19], False),
        ([10, 20, 20], False),  # lower median 20
        ([10, 10, 20], True),
        ([10, 10, 20, 20], True),  # lower median 10, the upper one would be 20
        ([7], False),
        ([0, 0, 0, 0], False),  # all empty
        ([0, 0, 0, 1], True),  # one answer among empty ones
    ],
)
def test_cases_by_hand(lengths: list[float], expected: bool) -> None:
    assert straggler_events([lengths], RATIO)[0] == expected


def test_a_group_cut_off_in_the_majority_is_an_event() -> None:
    lengths = [[100.0, 100, 100, 60]]
    assert not straggler_events(lengths, RATIO)[0]
    assert straggler_events(lengths, RATIO, [[True, True, True, False]])[0]
    assert straggler_events([[100.0] * 4], RATIO, [[True] * 4])[0]


def test_a_group_cut_off_in_the_minority_is_judged_by_its_ratio() -> None:
    cut = [[True, False, False, False]]
    assert not straggler_events([[100.0, 60, 60, 60]], RATIO, cut)[0]
    assert straggler_events([[100.0, 50, 50, 50]], RATIO, cut)[0]


def test_a_cut_off_completion_is_no_shorter_than_its_group() -> None:
    # Lengths in seconds: the cut-off completion may stop early, its true length is still unknown.
    array, cut = check_lengths([[3.0, 9.0, 5.0]], [[True, False, False]])
    np.testing.assert_array_equal(array, [[9.0, 9.0, 5.0]])
    np.testing.assert_array_equal(cut, [[True, False, False]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.float32])
def test_any_number_type_gives_the_same_events(dtype: type) -> None:
    lengths = np.array([[60, 60, 61, 120], [100, 120, 110, 127]])
    assert straggler_events(lengths.astype(dtype), RATIO).tolist() == [True, False]


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[]], [[1.0, -1.0]], [[1.0, float("nan")]], [[1.0, float("inf")]], 3.0])
def test_bad_lengths_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="lengths must"):
        straggler_events(bad, RATIO)  # type: ignore[arg-type]


def test_a_wrong_shape_of_truncated_is_refused() -> None:
    with pytest.raises(ValueError, match="truncated has shape"):
        straggler_events([[1.0, 2.0]], RATIO, [[True]])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "speed"}, "speed"),
        ({"tau": 1.0}, "tau"),
        ({"tau": float("nan")}, "tau"),
        ({"tau": float("inf")}, "tau"),
        ({"kind": "absolute"}, "straggler_length"),
        ({"kind": "absolute", "length": 0.0}, "straggler_length"),
        ({"kind": "absolute", "length": float("nan")}, "straggler_length"),
    ],
)
def test_a_bad_definition_names_the_setting(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StragglerEvent(**arguments)  # type: ignore[arg-type]
