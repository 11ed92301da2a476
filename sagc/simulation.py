"""A small world to try the controller in: prompts of unequal difficulty, log-normal lengths, a length limit, drift.

Each group belongs to a prompt. Its lengths are log-normal around a median of the prompt's own and with a spread of the
prompt's own, so that groups differ in how risky they are and the family that `sagc.risk` extrapolates with is only
roughly right. Over a run the lengths may grow and the spread may widen; a limit cuts completions off.

The same loop runs the controller, a fixed size, or anything else with `group_size` and `observe`. The truth it is
judged by, [`true_risk`], is a plain Monte Carlo estimate from the generator and shares nothing with the controller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .events import BoolArray, FloatArray, StragglerEvent, straggler_events
from .oracle import hindsight_optimum


class Lengths(Protocol):
    """Where lengths come from: [`LengthModel`], or [`~sagc.trace.TraceModel`] for recorded ones."""

    @property
    def drifts(self) -> bool:
        """Whether the risk may change over the run."""

    def sample(
        self, rng: np.random.Generator, progress: float, groups: int, size: int
    ) -> tuple[FloatArray, BoolArray]:
        """One batch of groups: lengths and truncation flags."""


@dataclass(frozen=True)
class LengthModel:
    """
    Generator of completion lengths.

    Args:
        median (`float`, *optional*, defaults to `200.0`):
            Median length of the median prompt, in tokens.
        prompt_spread (`float`, *optional*, defaults to `0.5`):
            Standard deviation of the log of the prompts' medians.
        sigma (`float`, *optional*, defaults to `0.45`):
            Standard deviation of the log of the lengths of one prompt, for the median prompt.
        sigma_spread (`float`, *optional*, defaults to `0.4`):
            Standard deviation of the log of that over prompts.
        growth (`float`, *optional*, defaults to `1.0`):
            Factor by which lengths grow over the run.
        sigma_growth (`float`, *optional*, defaults to `1.0`):
            Factor by which the spread within a group grows over the run.
        max_length (`int`, *optional*):
            Limit at which completions are cut off. None means no limit.
    """

    median: float = 200.0
    prompt_spread: float = 0.5
    sigma: float = 0.45
    sigma_spread: float = 0.4
    growth: float = 1.0
    sigma_growth: float = 1.0
    max_length: int | None = None

    def sample(
        self, rng: np.random.Generator, progress: float, groups: int, size: int
    ) -> tuple[FloatArray, BoolArray]:
        """
        One batch of groups.

        Args:
            rng (`np.random.Generator`):
                Source of randomness.
            progress (`float`):
                Place in the run, from 0 to 1.
            groups (`int`):
                Number of groups, each of a prompt of its own.
            size (`int`):
                Completions in each group.

        Returns:
            `tuple`: lengths in whole tokens and truncation flags, both of shape `(groups, size)`.
        """
        prompt, spread = rng.standard_normal((2, groups, 1))
        median = self.median * self.growth**progress * np.exp(self.prompt_spread * prompt)
        sigma = self.sigma * self.sigma_growth**progress * np.exp(self.sigma_spread * spread)
        lengths = np.ceil(median * np.exp(sigma * rng.standard_normal((groups, size))))
        if self.max_length is None:
            return lengths, np.zeros(lengths.shape, dtype=bool)
        return np.minimum(lengths, self.max_length), lengths > self.max_length

    @property
    def drifts(self) -> bool:
        """Whether the risk may change over the run."""
        return self.growth != 1 or self.sigma_growth != 1


class Policy(Protocol):
    """What the loop runs: [`GroupSizeController`], [`FixedSize`], or a rival to compare with."""

    @property
    def group_size(self) -> int:
        """Size for the next batch."""

    def observe(self, lengths: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> Any:
        """Takes in one batch."""


@dataclass(frozen=True)
class FixedSize:
    """The policy of ordinary GRPO: one size throughout."""

    group_size: int

    def observe(self, lengths: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Run:
    """
    What happened in one simulated run.

    Args:
        sizes (`np.ndarray` of shape `(steps,)`):
            Group size of each batch.
        rates (`np.ndarray` of shape `(steps,)`):
            Fraction of each batch's groups that were straggler events.
    """

    sizes: npt.NDArray[np.int64]
    rates: FloatArray


@dataclass(frozen=True)
class Score:
    """
    A run against the optimum in hindsight.

    Args:
        rate (`float`):
            Average straggler rate of the run.
        utility (`float`):
            Average utility of the run.
        optimum (`float`):
            Average utility of the best fixed mixture of sizes that meets the budget on average.
        regret (`float`):
            Utility short of the optimum, summed over the steps. Negative if overspending the budget paid.
        violation (`float`):
            Straggler rate above the budget, summed over the steps, at least 0.
    """

    rate: float
    utility: float
    optimum: float
    regret: float
    violation: float


def simulate(policy: Policy, model: Lengths, event: StragglerEvent, steps: int, groups: int = 8, seed: int = 0) -> Run:
    """
    Runs a policy for a number of batches.

    Args:
        policy ([`Policy`]):
            Chooses the sizes; changed in place.
        model ([`Lengths`]):
            Generator of the lengths.
        event ([`StragglerEvent`]):
            Definition of the event that is counted.
        steps (`int`):
            Number of batches.
        groups (`int`, *optional*, defaults to `8`):
            Groups in each batch.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the generator.

    Returns:
        [`Run`].
    """
    rng = np.random.default_rng(seed)
    sizes, rates = np.zeros(steps, dtype=np.int64), np.zeros(steps)
    for step in range(steps):
        sizes[step] = policy.group_size
        lengths, truncated = model.sample(rng, step / max(steps - 1, 1), groups, policy.group_size)
        rates[step] = straggler_events(lengths, event, truncated).mean()
        policy.observe(lengths, truncated)
    return Run(sizes, rates)


def true_risk(
    model: Lengths, event: StragglerEvent, sizes: Sequence[int], steps: int, samples: int = 100_000, seed: int = 1
) -> FloatArray:
    """
    Event probability of each size at each step, by Monte Carlo.

    Under drift it is sampled at 21 places in the run and interpolated.

    Args:
        model ([`Lengths`]):
            Generator of the lengths.
        event ([`StragglerEvent`]):
            Definition of the event.
        sizes (sequence of `int`):
            Group sizes.
        steps (`int`):
            Number of batches in the run.
        samples (`int`, *optional*, defaults to `100000`):
            Groups drawn at each place; 100,000 give a standard error of at most 0.0016.
        seed (`int`, *optional*, defaults to `1`):
            Seed of the generator.

    Returns:
        `np.ndarray` of shape `(steps, sizes)`.
    """
    rng = np.random.default_rng(seed)
    places = np.linspace(0.0, 1.0, 21) if model.drifts else np.zeros(1)
    risk = np.zeros((len(places), len(sizes)))
    for row, place in enumerate(places):
        lengths, truncated = model.sample(rng, float(place), samples, max(sizes))
        for column, size in enumerate(
            sizes
        ):  # completions are exchangeable: the first `size` are a group of that size
            risk[row, column] = straggler_events(lengths[:, :size], event, truncated[:, :size]).mean()
    progress = np.arange(steps) / max(steps - 1, 1)
    return np.stack([np.interp(progress, places, column) for column in risk.T], axis=1)


def score(run: Run, sizes: Sequence[int], utility: npt.ArrayLike, risk: npt.ArrayLike, rho: float) -> Score:
    """
    Judges a run by the truth.

    Args:
        run ([`Run`]):
            The run.
        sizes (sequence of `int`):
            Grid of group sizes, ascending, which holds all sizes of the run.
        utility (array-like of shape `(sizes,)`):
            U(g).
        risk (array-like of shape `(steps, sizes)`):
            True event probabilities.
        rho (`float`):
            Straggler budget.

    Returns:
        [`Score`].
    """
    value = np.asarray(utility, dtype=np.float64)[np.searchsorted(sizes, run.sizes)]
    optimum, _ = hindsight_optimum(utility, risk, rho)
    return Score(
        rate=float(run.rates.mean()),
        utility=float(value.mean()),
        optimum=optimum,
        regret=float((optimum - value).sum()),
        violation=max(0.0, float((run.rates - rho).sum())),
    )
