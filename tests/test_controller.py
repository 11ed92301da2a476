"""The control law: what it learns from a batch, what it decides, and that its state survives anything."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc import ControllerConfig, Decision, GroupSizeController, StragglerEvent, default_v
from sagc.controller import ControllerState, Observation, estimated_risk, initial_state, update

SIZES = (2, 3, 4, 6, 8)


def config(**changes: Any) -> ControllerConfig:
    return ControllerConfig(**{"sizes": SIZES, "rho": 0.3, "v": 0.5, **changes})


def batch(rng: np.random.Generator, size: int, groups: int = 6, sigma: float = 0.5) -> dict[str, np.ndarray]:
    true = np.ceil(rng.lognormal(5, sigma, (groups, size)))
    rewards = (rng.random((groups, size)) < 0.4).astype(float)
    return {"lengths": np.minimum(true, 300), "truncated": true > 300, "rewards": rewards}


def is_finite(state: ControllerState) -> bool:
    return bool(np.isfinite(np.hstack([np.asarray(value, dtype=float) for value in asdict(state).values()])).all())


# --- the law ---------------------------------------------------------------------------------------------------------


def test_the_queue_counts_what_was_overspent() -> None:
    controller = GroupSizeController(config(rho=0.4))
    queue, total = 0.0, 0.0
    rng = np.random.default_rng(0)
    for step in range(1, 40):
        decision = controller.observe(**batch(rng, controller.group_size))
        queue = max(0.0, queue + decision.straggler_rate - 0.4)
        total += decision.straggler_rate
        assert decision.queue == pytest.approx(queue)
        assert decision.straggler_rate_running == pytest.approx(total / step)


def test_each_size_is_the_best_score_of_utility_and_queue() -> None:
    controller = GroupSizeController(config())
    rng = np.random.default_rng(1)
    for _ in range(30):
        decision = controller.observe(**batch(rng, controller.group_size))
        score = {g: 0.5 * math.log(g) - decision.queue * decision.risk[g] for g in SIZES}
        if not decision.infeasible:
            assert score[decision.group_size] == pytest.approx(max(score.values()))


def test_one_batch_of_the_largest_size_teaches_all_sizes() -> None:
    rng = np.random.default_rng(2)
    decision = GroupSizeController(config()).observe(rng.lognormal(5, 0.5, (4000, 8)))
    for size in SIZES:
        lengths = rng.lognormal(5, 0.5, (4000, size))
        median = np.sort(lengths, axis=1)[:, (size - 1) // 2]
        assert decision.risk[size] == pytest.approx((lengths.max(axis=1) >= 2 * median).mean(), abs=0.03)


def test_risk_that_falls_with_the_size_is_reported_so() -> None:
    """Exponential lengths: two are far apart more often than the longest of eight is from their median at tau = 8."""
    rng = np.random.default_rng(3)
    controller = GroupSizeController(config(event=StragglerEvent(tau=8.0)))
    decision = controller.observe(rng.exponential(100.0, (20_000, 8)))
    assert decision.risk[2] > decision.risk[4] > decision.risk[8]


def test_sizes_beyond_the_batch_are_predicted_and_trusted_less() -> None:
    rng = np.random.default_rng(13)
    decision = GroupSizeController(config()).observe(rng.lognormal(5, 0.5, (4000, 4)))
    lengths = rng.lognormal(5, 0.5, (4000, 8))
    rate = (lengths.max(axis=1) >= 2 * np.sort(lengths, axis=1)[:, 3]).mean()
    assert decision.risk[8] == pytest.approx(rate, abs=0.03)
    spread = {g: math.sqrt(decision.risk[g] * (1 - decision.risk[g]) / 4000) for g in (4, 8)}
    assert decision.risk_error[4] == pytest.approx(spread[4], rel=0.01)
    assert decision.risk_error[8] == pytest.approx(spread[8] * 2**0.5, rel=0.01)


def test_the_standard_error_shrinks_with_the_groups_seen() -> None:
    rng = np.random.default_rng(4)
    few = GroupSizeController(config()).observe(rng.lognormal(5, 0.5, (4, 8)))
    many = GroupSizeController(config()).observe(rng.lognormal(5, 0.5, (400, 8)))
    assert all(0 < many.risk_error[g] < few.risk_error[g] for g in SIZES)


def test_change_every_holds_the_size_between_changes() -> None:
    controller = GroupSizeController(config(change_every=5, v=0.05))
    rng = np.random.default_rng(5)
    sizes = [controller.group_size]
    for _ in range(40):
        controller.observe(**batch(rng, controller.group_size))
        sizes.append(controller.group_size)
    assert all(len(set(sizes[start : start + 5])) == 1 for start in range(0, 40, 5))
    assert len(set(sizes)) > 1
    assert controller.state.boundary == 40


def test_an_infeasible_budget_is_flagged_and_held_at_the_safest_size_then_recovers() -> None:
    controller = GroupSizeController(config(forgetting_factor=0.8))
    rng = np.random.default_rng(6)
    for _ in range(15):
        decision = controller.observe(**batch(rng, controller.group_size, sigma=3.0))
    assert decision.infeasible
    assert decision.group_size == min(decision.risk, key=lambda size: decision.risk[size])
    debt = decision.queue
    for _ in range(80):
        decision = controller.observe(**batch(rng, controller.group_size, sigma=0.1))
    assert not decision.infeasible
    assert decision.queue < debt
    assert decision.group_size == SIZES[-1]


def test_an_infeasible_budget_is_not_traded_for_utility() -> None:
    controller = GroupSizeController(config(rho=0.05, v=1000.0))
    decision = controller.observe(np.random.default_rng(7).lognormal(5, 1.0, (200, 8)))
    assert decision.infeasible
    assert decision.group_size == min(decision.risk, key=lambda size: decision.risk[size])


# --- censoring, empty completions, rewards ---------------------------------------------------------------------------


def test_batches_cut_off_in_the_majority_do_not_look_healthy() -> None:
    decision = GroupSizeController(config()).observe(np.full((8, 8), 300.0), np.full((8, 8), True))
    assert decision.straggler_rate == 1
    assert min(decision.risk.values()) == 1
    assert decision.infeasible


def test_a_minority_cut_off_counts_as_long_completions() -> None:
    lengths = np.tile([100.0] * 7 + [300.0], (8, 1))
    cut = lengths == 300
    flagged, plain = GroupSizeController(config()), GroupSizeController(config())
    assert flagged.observe(lengths, cut).straggler_rate == plain.observe(lengths).straggler_rate == 1
    # A single cut-off completion is never the median of two or more, so its flag adds nothing to its length.
    assert flagged.state.risk_sum == plain.state.risk_sum


def test_empty_completions_are_legal() -> None:
    controller = GroupSizeController(config())
    decision = controller.observe(np.zeros((4, 8)), rewards=np.zeros((4, 8)))
    assert decision.straggler_rate == 0
    assert max(decision.risk.values()) == 0
    assert is_finite(controller.state)


@given(st.integers(0, 1000), st.sampled_from([2, 3, 6, 8]))
@settings(max_examples=25, deadline=None)
def test_groups_with_missing_rewards_are_left_out(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    data = batch(rng, size)
    kept = rng.random(6) < 0.6
    missing = data["rewards"].copy()
    missing[~kept, rng.integers(size)] = rng.choice([np.nan, np.inf, -np.inf])
    with_missing, without = (
        GroupSizeController(config(utility="signal")),
        GroupSizeController(config(utility="signal")),
    )
    with_missing.observe(data["lengths"], data["truncated"], missing)
    assert is_finite(with_missing.state)
    lengths, cut = data["lengths"], data["truncated"]
    without.state, _ = update(without.config, without.state, Observation(lengths, cut, None))
    assert with_missing.state.risk_sum == without.state.risk_sum
    if kept.any():
        only_kept = GroupSizeController(config(utility="signal"))
        only_kept.observe(lengths[kept], cut[kept], data["rewards"][kept])
        assert with_missing.state.mixed_sum == only_kept.state.mixed_sum
        assert with_missing.state.mixed_weight == only_kept.state.mixed_weight
    else:
        assert with_missing.state.mixed_sum == without.state.mixed_sum


def test_signal_prefers_the_size_that_the_rewards_ask_for() -> None:
    """Hard prompts: larger groups are worth more than they are on easy ones."""
    rng = np.random.default_rng(8)
    lengths = rng.lognormal(5, 0.5, (4000, 8))
    gain = {}
    for success in (0.05, 0.5):
        controller = GroupSizeController(config(utility="signal"))
        decision = controller.observe(lengths, rewards=(rng.random((4000, 8)) < success).astype(float))
        for size in SIZES:
            expected = 1 - success**size - (1 - success) ** size
            assert decision.utility[size] == pytest.approx(expected, abs=0.03)
        gain[success] = decision.utility[8] / decision.utility[4]
    assert gain[0.05] > gain[0.5]


def test_signal_without_rewards_takes_a_success_rate_of_one_half() -> None:
    decision = GroupSizeController(config(utility="signal")).observe(np.ones((3, 8)), rewards=np.full((3, 8), np.nan))
    assert decision.utility[2] == pytest.approx(0.5)
    assert decision.utility[4] == pytest.approx(1 - 2 / 16)


# --- odd inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"lengths": np.ones((0, 8))},
        {"lengths": np.ones(8)},
        {"lengths": np.ones((4, 1))},
        {"lengths": np.full((4, 8), -1.0)},
        {"lengths": np.full((4, 8), np.nan)},
        {"lengths": np.ones((4, 8)), "truncated": np.zeros((4, 7), dtype=bool)},
        {"lengths": np.ones((4, 8)), "rewards": np.zeros((3, 8))},
        {"lengths": [[1.0, 2.0], [1.0]]},
    ],
)
def test_bad_batches_are_refused_and_change_nothing(bad: dict[str, Any]) -> None:
    controller = GroupSizeController(config())
    controller.observe(**batch(np.random.default_rng(0), 8))
    before = controller.state
    with pytest.raises(ValueError):
        controller.observe(**bad)
    assert controller.state == before


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=6),
    st.lists(st.integers(2, 24), min_size=1, max_size=4),
    st.sampled_from(["log", "variance", "signal"]),
    st.sampled_from([StragglerEvent(), StragglerEvent(tau=1.2), StragglerEvent("absolute", length=200.0)]),
    st.sampled_from([0.01, 0.95, 1.0]),
)
def test_any_grid_learns_from_groups_of_any_size(
    sizes: list[int], observed: list[int], utility: str, event: StragglerEvent, forgetting: float
) -> None:
    controller = GroupSizeController(
        config(sizes=tuple(sizes), utility=utility, event=event, forgetting_factor=forgetting)
    )
    rng = np.random.default_rng(len(sizes))
    for size in observed:
        decision = controller.observe(**batch(rng, size, groups=3))
        assert decision.group_size in sizes
        assert is_finite(controller.state)
        assert all(0 <= risk <= 1 for risk in decision.risk.values())
        assert all(math.isfinite(error) and error > 0 for error in decision.risk_error.values())


def test_lengths_of_any_number_type_give_the_same_state() -> None:
    lengths = np.random.default_rng(9).integers(1, 120, (5, 8))
    states = []
    for dtype in (np.int8, np.uint8, np.float32, np.float64):
        controller = GroupSizeController(config())
        controller.observe(lengths.astype(dtype))
        states.append(controller.state)
    assert all(state == states[0] for state in states)


def test_huge_groups() -> None:
    rng = np.random.default_rng(10)
    controller = GroupSizeController(config(sizes=(8, 128)))
    decision = controller.observe(**batch(rng, 128, groups=2))
    assert is_finite(controller.state)
    assert 0 <= decision.risk[8] <= decision.risk[128] <= 1


def test_a_utility_function_is_called_with_each_size() -> None:
    decision = GroupSizeController(config(utility=lambda size: size**0.5)).observe(np.ones((3, 8)))
    assert decision.utility[4] == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_utility_function_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="utility function must be finite"):
        config(utility=lambda size: value if size == 4 else 1.0)
    values = dict.fromkeys(SIZES, 1.0)
    controller = GroupSizeController(config(utility=values.__getitem__))
    before = controller.state
    values[4] = value  # turns bad during the run
    with pytest.raises(ValueError, match="utility function must be finite"):
        controller.observe(np.ones((3, 8)))
    assert controller.state == before


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("sizes", (), "sizes"),
        ("sizes", (1, 2), "sizes"),
        ("sizes", (2, 4.5), "sizes"),
        ("rho", 0.0, "rho"),
        ("rho", 1.0, "rho"),
        ("rho", float("nan"), "rho"),
        ("v", 0.0, "V"),
        ("v", float("inf"), "V"),
        ("v", float("nan"), "V"),
        ("utility", "square", "utility"),
        ("forgetting_factor", 0.0, "forgetting_factor"),
        ("forgetting_factor", 1.1, "forgetting_factor"),
        ("forgetting_factor", float("nan"), "forgetting_factor"),
        ("change_every", 0, "change_every"),
        ("change_every", 2.5, "change_every"),
        ("change_every", float("nan"), "change_every"),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**{setting: value})


def test_sizes_are_sorted_and_distinct() -> None:
    assert config(sizes=(8, 2, 2, np.int64(4))).sizes == (2, 4, 8)


def test_default_v_grows_with_the_root_of_the_horizon() -> None:
    assert default_v(400) == pytest.approx(2 * default_v(100))
    assert default_v(100, 0.5) == pytest.approx(2 * default_v(100, 1.0))
    assert default_v(0) > 0 and default_v(100, 0.0) > 0


# --- the state -------------------------------------------------------------------------------------------------------


def run(controller: GroupSizeController, rng: np.random.Generator, boundaries: int) -> list[Decision]:
    return [controller.observe(**batch(rng, controller.group_size)) for _ in range(boundaries)]


@pytest.mark.parametrize("utility", ["log", "variance", "signal"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_state_read_from_json_continues_bit_for_bit(utility: str, seed: int) -> None:
    settings = config(utility=utility, change_every=2)
    kept = GroupSizeController(settings)
    rng = np.random.default_rng(seed)
    run(kept, rng, 37)
    restored = GroupSizeController(settings)
    restored.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    assert restored.state == kept.state
    later = rng.bit_generator.state
    expected = run(kept, rng, 60)
    rng.bit_generator.state = later
    assert run(restored, rng, 60) == expected


def test_a_state_of_another_grid_is_refused() -> None:
    controller = GroupSizeController(config())
    before = controller.state
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 3, 4, 6, 8\)"):
        controller.load_state_dict(GroupSizeController(config(sizes=(2, 4))).state_dict())
    assert controller.state == before


def test_a_state_with_missing_or_unknown_entries_is_refused() -> None:
    controller = GroupSizeController(config())
    whole = controller.state_dict()
    for broken in ({k: v for k, v in whole.items() if k != "queue"}, {**whole, "more": 1}, {}):
        with pytest.raises(ValueError, match="entries"):
            controller.load_state_dict(broken)
    assert controller.state == initial_state(controller.config)


def test_the_law_is_a_pure_function() -> None:
    settings = config()
    rng = np.random.default_rng(12)
    observation = Observation(rng.lognormal(5, 0.5, (4, 8)), np.zeros((4, 8), dtype=bool), None)
    state = initial_state(settings)
    first, second = update(settings, state, observation), update(settings, state, observation)
    assert first == second
    assert state == initial_state(settings)
    np.testing.assert_array_equal(estimated_risk(settings, first[0])[0], estimated_risk(settings, second[0])[0])


@pytest.mark.parametrize(
    "damage",
    [{"queue": None}, {"queue": float("nan")}, {"risk_sum": [1.0]}, {"group_size": 99}, {"mixed_sum": None}],
)
def test_a_damaged_state_is_refused_when_it_is_loaded(damage: dict[str, Any]) -> None:
    controller = GroupSizeController(config())
    with pytest.raises(ValueError, match="damaged"):
        controller.load_state_dict({**controller.state_dict(), **damage})
