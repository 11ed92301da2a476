"""The risk curve in closed form, against all subsets counted one by one and against Monte Carlo."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import share_of_events

from sagc import StragglerEvent, risk_curve, risk_curves, straggler_events
from sagc.risk import extrapolate_risk, subset_share


@st.composite
def groups(draw: st.DrawFn, largest: int = 12) -> tuple[list[float], list[bool]]:
    """A group with ties and zeros; its cut-off completions stand at its longest."""
    size = draw(st.integers(1, largest))
    length = draw(
        st.sampled_from(
            [st.integers(0, 4).map(float), st.integers(0, 30).map(float), st.floats(0, 1e6, allow_subnormal=False)]
        )
    )
    lengths = draw(st.lists(length, min_size=size, max_size=size))
    cut = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return [max(lengths) if c else x for x, c in zip(lengths, cut, strict=True)], cut


EVENTS = [StragglerEvent(tau=tau) for tau in (1.01, 1.5, 2.0, 4.0)] + [
    StragglerEvent("absolute", length=length) for length in (1.0, 3.0, 25.0)
]


@settings(max_examples=150, deadline=None)
@given(groups(), st.sampled_from(EVENTS))
def test_risk_curve_equals_counting_all_subsets(group: tuple[list[float], list[bool]], event: StragglerEvent) -> None:
    lengths, cut = group
    sizes = range(1, len(lengths) + 1)
    curve = risk_curves([lengths], event, sizes, [cut])[0]
    np.testing.assert_allclose(curve, [share_of_events(lengths, cut, event, size) for size in sizes], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=10), st.integers(5, 40), st.sampled_from(EVENTS))
def test_risk_curve_under_a_length_limit(true_lengths: list[int], limit: int, event: StragglerEvent) -> None:
    lengths = [float(min(x, limit)) for x in true_lengths]
    cut = [x > limit for x in true_lengths]
    sizes = range(1, len(lengths) + 1)
    curve = risk_curves([lengths], event, sizes, [cut])[0]
    np.testing.assert_allclose(curve, [share_of_events(lengths, cut, event, size) for size in sizes], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(groups(), st.sampled_from(EVENTS))
def test_risk_at_the_full_size_is_the_event_itself(
    group: tuple[list[float], list[bool]], event: StragglerEvent
) -> None:
    lengths, cut = [group[0]], [group[1]]
    happened = float(straggler_events(lengths, event, cut)[0])
    assert risk_curves(lengths, event, [len(group[0])], cut)[0, 0] == pytest.approx(happened)


@settings(max_examples=40, deadline=None)
@given(groups(), st.sampled_from(EVENTS), st.integers(0, 100))
def test_order_and_unit_of_the_lengths_do_not_matter(
    group: tuple[list[float], list[bool]], event: StragglerEvent, seed: int
) -> None:
    lengths, cut = np.array(group[0]), np.array(group[1])
    sizes = range(1, len(lengths) + 1)
    order = np.random.default_rng(seed).permutation(len(lengths))
    expected = risk_curves([lengths], event, sizes, [cut])
    np.testing.assert_array_equal(risk_curves([lengths[order]], event, sizes, [cut[order]]), expected)
    if event.kind == "ratio":  # a power of two scales without rounding
        np.testing.assert_array_equal(risk_curves([4 * lengths], event, sizes, [cut]), expected)


def test_risk_curve_of_many_lengths_equals_sampled_subsets() -> None:
    rng = np.random.default_rng(5)
    lengths, event = rng.lognormal(5.0, 0.6, 16), StragglerEvent(tau=1.8)
    curve = risk_curve(lengths, 1.8, [2, 4, 8])
    subsets = np.argsort(rng.random((20_000, 16)), axis=1)
    sampled = [straggler_events(lengths[subsets[:, :size]], event).mean() for size in (2, 4, 8)]
    np.testing.assert_allclose(curve, sampled, atol=0.012)  # 3 standard errors


def test_the_average_curve_is_the_event_rate_of_smaller_groups() -> None:
    """Unbiased: the curves of observed groups of 8 average to the rate that groups of 2, 3 and 5 show."""
    rng = np.random.default_rng(7)
    event, cap = StragglerEvent(tau=2.0), 300.0

    def draw(size: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.exp(5 + 0.5 * rng.standard_normal((20_000, 1)) + 0.6 * rng.standard_normal((20_000, size)))
        return np.minimum(lengths, cap), lengths > cap

    lengths, cut = draw(8)
    curve = risk_curves(lengths, event, [2, 3, 5], cut).mean(axis=0)
    for size, risk in zip((2, 3, 5), curve, strict=True):
        smaller, smaller_cut = draw(size)
        assert straggler_events(smaller, event, smaller_cut).mean() == pytest.approx(risk, abs=0.015)


def test_a_group_cut_off_in_the_majority_is_risky_at_every_size() -> None:
    lengths = [100.0] * 6 + [90.0] * 2
    cut = [True] * 6 + [False] * 2
    assert risk_curve(lengths, 2.0, [2, 4, 8]).max() == 0  # without the flags it looks healthy
    curve = risk_curve(lengths, 2.0, [2, 4, 8], cut)
    assert curve[0] == pytest.approx(math.comb(6, 2) / math.comb(8, 2))
    assert curve[2] == 1


def test_empty_completions_are_no_risk() -> None:
    assert risk_curve([0.0] * 6, 2.0, [2, 3, 6]).max() == 0


def test_float32_lengths_give_the_same_curve() -> None:
    lengths = np.random.default_rng(1).integers(1, 2000, (4, 16))
    event = StragglerEvent()
    expected = risk_curves(lengths, event, [2, 5, 16])
    np.testing.assert_array_equal(risk_curves(lengths.astype(np.float32), event, [2, 5, 16]), expected)
    np.testing.assert_array_equal(risk_curves(lengths.astype(np.int16), event, [2, 5, 16]), expected)


def test_large_groups_stay_exact() -> None:
    """Binomials of 128 overflow no float: the shares stay probabilities and match exact integers."""
    share = subset_share(128, (2, 64, 128))
    for column, size in enumerate((2, 64, 128)):
        exact = [math.comb(marked, size) / math.comb(128, size) for marked in range(129)]
        np.testing.assert_allclose(share[:, column], exact, rtol=1e-12)
    curve = risk_curve(np.random.default_rng(0).lognormal(5, 0.5, 128), 2.0, [2, 64, 128])
    assert np.isfinite(curve).all() and (curve >= 0).all() and (curve <= 1).all()


@pytest.mark.parametrize("sizes", [[0], [4], [-1, 2]])
def test_sizes_outside_the_observed_group_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="between 1 and the number of observed"):
        risk_curve([1.0, 2.0, 3.0], 2.0, sizes)


@pytest.mark.parametrize(("size", "sizes"), [(4, (2, 3, 8, 16)), (3, (2, 5, 7, 12))])
def test_extrapolation_is_right_for_lognormal_lengths(size: int, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(11)
    lengths, event = rng.lognormal(5.0, 0.5, (40_000, 16)), StragglerEvent(tau=2.0)
    rate = {g: float(straggler_events(lengths[:, :g], event).mean()) for g in (size, *sizes)}
    predicted = extrapolate_risk(rate[size], size, sizes, event)
    np.testing.assert_allclose(predicted, [rate[g] for g in sizes], atol=0.015)


@given(st.integers(1, 8), st.lists(st.integers(1, 32), min_size=1, max_size=4), st.floats(0, 0.8))
def test_extrapolation_of_the_absolute_event(size: int, sizes: list[int], q: float) -> None:
    event = StragglerEvent("absolute", length=10.0)
    predicted = extrapolate_risk(1 - (1 - q) ** size, size, sizes, event)
    np.testing.assert_allclose(predicted, [1 - (1 - q) ** g for g in sizes], atol=1e-6)


@settings(deadline=None)
@given(st.integers(2, 16), st.integers(2, 32), st.floats(0, 1), st.floats(0, 1), st.sampled_from(EVENTS[2:5]))
def test_extrapolation_rises_with_the_risk(
    size: int, other: int, first: float, second: float, event: StragglerEvent
) -> None:
    low, high = sorted((first, second))
    predicted = [extrapolate_risk(risk, size, [other], event)[0] for risk in (low, high)]
    assert 0 <= predicted[0] <= predicted[1] <= 1


@given(st.integers(2, 16), st.floats(0.001, 1), st.sampled_from(EVENTS[2:5]))
def test_extrapolation_to_the_same_size_changes_nothing(size: int, risk: float, event: StragglerEvent) -> None:
    assert extrapolate_risk(risk, size, [size], event)[0] == pytest.approx(risk, abs=1e-6)
