"""The claims: the budget is met and little utility is lost, against the optimum that knew every risk in advance."""

from functools import cache

import numpy as np
import pytest

from sagc import ControllerConfig, GroupSizeController, StragglerEvent, default_v, hindsight_optimum, risk_curves
from sagc.simulation import FixedSize, LengthModel, Run, Score, score, simulate, true_risk
from sagc.utility import static_utility

SIZES = tuple(range(2, 17))
EVENT = StragglerEvent(tau=2.0)
UTILITY = static_utility("log", SIZES)
STEPS = 300
SEEDS = range(5)

STATIONARY = LengthModel()
LONGER = LengthModel(growth=3.0, max_length=800)  # three times as long by the end, against a fixed limit
WIDER = LengthModel(sigma=0.3, sigma_growth=2.0)  # the risk of every size about triples


@cache
def risk_of(model: LengthModel) -> np.ndarray:
    return true_risk(model, EVENT, SIZES, STEPS, samples=10_000 if model.drifts else 200_000)


@cache
def controlled(model: LengthModel, rho: float, seed: int) -> Run:
    v = default_v(STEPS, UTILITY[-1] - UTILITY[0])
    controller = GroupSizeController(ControllerConfig(sizes=SIZES, rho=rho, event=EVENT, v=v))
    return simulate(controller, model, EVENT, STEPS, groups=8, seed=seed)


def scores(model: LengthModel, rho: float) -> list[Score]:
    return [score(controlled(model, rho, seed), SIZES, UTILITY, risk_of(model), rho) for seed in SEEDS]


def efficiency(run: Run, model: LengthModel) -> float:
    """Utility against the optimum at the budget that the chosen sizes spent: free of the luck of the draws."""
    spent = risk_of(model)[np.arange(STEPS), np.searchsorted(SIZES, run.sizes)].mean()
    utility = UTILITY[np.searchsorted(SIZES, run.sizes)].mean()
    return float(utility / hindsight_optimum(UTILITY, risk_of(model), spent)[0])


@pytest.mark.parametrize("rho", [0.2, 0.3, 0.4, 0.5, 0.6])
def test_stationary_runs_meet_the_budget_within_5_percent_and_the_optimum_within_2(rho: float) -> None:
    results = scores(STATIONARY, rho)
    assert all(abs(s.rate / rho - 1) < 0.05 for s in results)
    # One run's utility moves with the luck of its draws, since the budget is met on the draws and not on the truth.
    assert np.mean([s.utility / s.optimum for s in results]) > 0.98
    assert all(s.utility / s.optimum > 0.95 for s in results)


@pytest.mark.parametrize("rho", [0.2, 0.3, 0.4, 0.5])
def test_stationary_runs_waste_little_of_what_they_spend(rho: float) -> None:
    assert np.mean([efficiency(controlled(STATIONARY, rho, seed), STATIONARY) for seed in SEEDS]) > 0.98


@pytest.mark.parametrize(("model", "rho"), [(LONGER, 0.3), (LONGER, 0.4), (WIDER, 0.3), (WIDER, 0.4)])
def test_drifting_runs_meet_the_budget_within_20_percent_and_the_optimum_within_5(
    model: LengthModel, rho: float
) -> None:
    results = scores(model, rho)
    assert all(abs(s.rate / rho - 1) < 0.2 for s in results)
    assert np.mean([s.utility / s.optimum for s in results]) > 0.95


def test_the_risk_really_drifts() -> None:
    for model, least in ((LONGER, 0.05), (WIDER, 0.2)):
        risk = risk_of(model)
        assert np.abs(risk[-1] - risk[0]).max() > least


def test_no_fixed_size_within_the_budget_does_better() -> None:
    rho = 0.4
    risk = risk_of(STATIONARY)[0]
    mean = np.mean([s.utility for s in scores(STATIONARY, rho)])
    assert mean > UTILITY[risk <= rho].max()


def test_a_fixed_size_shows_its_true_risk() -> None:
    run = simulate(FixedSize(8), STATIONARY, EVENT, STEPS, groups=64, seed=3)
    assert set(run.sizes) == {8}
    assert run.rates.mean() == pytest.approx(risk_of(STATIONARY)[0, SIZES.index(8)], abs=0.012)


def test_the_true_risk_agrees_with_the_closed_form() -> None:
    for model in (STATIONARY, LengthModel(max_length=250)):
        rng = np.random.default_rng(9)
        lengths, truncated = model.sample(rng, 0.0, 20_000, SIZES[-1])
        curve = risk_curves(lengths, EVENT, SIZES, truncated).mean(axis=0)
        np.testing.assert_allclose(true_risk(model, EVENT, SIZES, 1)[0], curve, atol=0.012)


def test_a_seed_gives_the_same_run() -> None:
    first, again, other = (
        simulate(GroupSizeController(ControllerConfig(sizes=SIZES)), WIDER, EVENT, 40, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.sizes, again.sizes)
    np.testing.assert_array_equal(first.rates, again.rates)
    assert not np.array_equal(first.rates, other.rates)


def test_lengths_grow_widen_and_are_cut_off() -> None:
    model = LengthModel(growth=3.0, sigma_growth=2.0, prompt_spread=0.0, sigma_spread=0.0)
    for progress, median, sigma in ((0.0, 200.0, 0.45), (1.0, 600.0, 0.9)):
        lengths, truncated = model.sample(np.random.default_rng(0), progress, 4000, 8)
        assert np.median(lengths) == pytest.approx(median, rel=0.03)
        assert np.log(lengths).std() == pytest.approx(sigma, rel=0.03)
        assert not truncated.any()
    lengths, truncated = LengthModel(max_length=200).sample(np.random.default_rng(0), 0.0, 4000, 8)
    assert lengths.max() == 200
    assert truncated.mean() == pytest.approx(0.5, abs=0.03)
