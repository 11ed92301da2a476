"""The SAGC control law: group sizes chosen online under a long-term straggler budget.

At each boundary t (one generation batch) the trainer ran groups of size G_t and observed lengths and rewards. With r_t
the fraction of its groups that were straggler events (`sagc.events`) and rho the budget:

    Q_{t+1} = max(0, Q_t + r_t - rho)                        virtual queue: the budget overspent so far
    G_{t+1} = argmax over the grid of V U(G) - Q_{t+1} p(G)  drift plus penalty; exact, by enumeration

p(G) is the estimated event probability of each size. Every batch teaches it at all sizes up to G_t exactly
(`sagc.risk`), so no size is tried just to learn about it; sizes above G_t get the family's extrapolation with the
smaller weight n / g, and are tried anyway as soon as the queue is empty. Estimates forget at a constant rate. No shape
is forced on the curve: the lower median makes even sizes riskier than their odd neighbours, and with many short
completions the risk even falls with the size; both are real, and a monotone fit gained nothing.

If even the least risky size breaks the budget beyond the estimate's uncertainty, the controller stays there and says
`infeasible`; the queue keeps the debt, since the budget is a long-run one.

Everything is a function of (config, state, observation); [`GroupSizeController`] is the thin stateful shell.

Source: *Faster Synchronous On-Policy RL via Straggler-Aware Group Sizing* (arXiv 2606.02218) for the problem and the
queue; Neely, *Stochastic Network Optimization* (2010), chapter 4, for drift plus penalty and its O(V) backlog against
O(1/V) regret, which V ~ sqrt(T) balances. The counterfactual risk curve goes past the paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .events import BoolArray, FloatArray, StragglerEvent, check_lengths, straggler_events
from .risk import extrapolate_risk, risk_curves
from .utility import extrapolate_mixed, mixed_reward_curves, static_utility

UTILITIES = ("log", "variance", "signal")
V_PER_SQRT_HORIZON = 0.05  # measured: the largest that meets binding budgets of 0.2 to 0.6 within 5% in 300 steps

_ANEW = (
    "Restore another state, such as that of an earlier checkpoint, or start the controller anew: for a trainer, "
    "delete sagc_state.json from the checkpoint."
)


def default_v(horizon: int, utility_range: float = 1.0) -> float:
    """
    Weight of the utility for a run of known length: `0.05 sqrt(horizon) / utility_range`.

    The queue settles near V dU/dp, and the budget is overspent by about that over the horizon, so V must grow slower
    than the horizon; regret falls as 1/V. The square root balances both (Neely 2010, section 4.5). Dividing by the
    spread of U over the grid makes V independent of the utility's unit.

    Args:
        horizon (`int`):
            Number of decisions (generation batches) in the run, at least 1.
        utility_range (`float`, *optional*, defaults to `1.0`):
            U at the largest size minus U at the smallest.

    Returns:
        `float`: V.
    """
    return V_PER_SQRT_HORIZON * math.sqrt(max(horizon, 1)) / (utility_range if utility_range > 0 else 1.0)


@dataclass(frozen=True)
class ControllerConfig:
    """
    Parameters of the control law.

    Args:
        sizes (`tuple[int, ...]`):
            Grid of group sizes, distinct, each at least 2 (a group of one has no advantage). The run starts at the
            largest, whose first batch teaches the risk of all.
        rho (`float`, *optional*, defaults to `0.3`):
            Straggler budget: long-run average fraction of groups that may be straggler events, in (0, 1).
        event ([`StragglerEvent`], *optional*):
            What counts as a straggler event. Defaults to longest >= 2 * lower median.
        v (`float`, *optional*, defaults to `1.0`):
            Weight of the utility against the queue, positive. See [`default_v`].
        utility (`str` or `Callable[[int], float]`, *optional*, defaults to `"log"`):
            `"log"`, `"variance"`, `"signal"` or a function of the group size (`sagc.utility`).
        forgetting_factor (`float`, *optional*, defaults to `0.95`):
            Weight that past batches keep at each new one, in (0, 1]. 0.95 remembers about 20 batches: long enough to
            average the noise of a few groups a batch, short against the drift of a training run. 1 never forgets.
        change_every (`int`, *optional*, defaults to `1`):
            Number of boundaries between changes of the size, at least 1. The queue is updated at every boundary.

    Raises:
        `ValueError`: If a parameter lies outside its range; the message names it.
    """

    sizes: tuple[int, ...]
    rho: float = 0.3
    event: StragglerEvent = field(default_factory=StragglerEvent)
    v: float = 1.0
    utility: str | Callable[[int], float] = "log"
    forgetting_factor: float = 0.95
    change_every: int = 1

    def __post_init__(self) -> None:
        sizes = tuple(sorted({int(size) for size in self.sizes}))
        if not sizes or sizes[0] < 2 or any(int(size) != size for size in self.sizes):
            raise ValueError(
                f"sizes must hold at least one group size, each a whole number of at least 2, got {tuple(self.sizes)}."
            )
        object.__setattr__(self, "sizes", sizes)
        if not 0 < self.rho < 1:
            raise ValueError(f"rho must lie between 0 and 1 (exclusive), got {self.rho}: it is a fraction of groups.")
        if not (math.isfinite(self.v) and self.v > 0):
            raise ValueError(f"V must be positive and finite, got {self.v}.")
        if not 0 < self.forgetting_factor <= 1:
            raise ValueError(f"forgetting_factor must lie in (0, 1], got {self.forgetting_factor}.")
        if not (self.change_every >= 1 and int(self.change_every) == self.change_every):
            raise ValueError(f"change_every must be a whole number of at least 1, got {self.change_every}.")
        if isinstance(self.utility, str) and self.utility not in UTILITIES:
            raise ValueError(f"Unknown utility {self.utility!r}: use one of {UTILITIES} or a function of the size.")
        if callable(self.utility):
            _called_utility(self.utility, sizes)


@dataclass(frozen=True)
class ControllerState:
    """
    All that the controller remembers. Plain numbers, so it serialises to JSON without loss.

    Args:
        group_size (`int`):
            Size for the next batch.
        boundary (`int`):
            Number of batches observed.
        queue (`float`):
            Virtual queue Q.
        event_rate_sum (`float`):
            Sum of the straggler rates of all batches.
        risk_sum, risk_weight (`tuple[float, ...]`):
            Discounted sum of event probabilities and number of groups behind it, one pair per grid size.
        mixed_sum, mixed_weight (`tuple[float, ...]`):
            The same for the chance of a group with mixed rewards.
    """

    group_size: int
    boundary: int
    queue: float
    event_rate_sum: float
    risk_sum: tuple[float, ...]
    risk_weight: tuple[float, ...]
    mixed_sum: tuple[float, ...]
    mixed_weight: tuple[float, ...]


@dataclass(frozen=True)
class Decision:
    """
    What one boundary showed and decided.

    Args:
        group_size (`int`):
            Size for the next batch.
        straggler_rate (`float`):
            Fraction of this batch's groups that were straggler events.
        straggler_rate_running (`float`):
            Average of that over all batches so far.
        queue (`float`):
            Virtual queue after this batch.
        risk, risk_error (`dict[int, float]`):
            Estimated event probability of each size and its standard error.
        utility (`dict[int, float]`):
            Utility of each size.
        infeasible (`bool`):
            Whether every size breaks the budget beyond two standard errors.
    """

    group_size: int
    straggler_rate: float
    straggler_rate_running: float
    queue: float
    risk: dict[int, float]
    risk_error: dict[int, float]
    utility: dict[int, float]
    infeasible: bool


@dataclass(frozen=True)
class Observation:
    """One batch: lengths, truncation flags and rewards of shape `(groups, n)`. Rewards may hold NaN, or be None."""

    lengths: FloatArray
    truncated: BoolArray
    rewards: FloatArray | None


def initial_state(config: ControllerConfig) -> ControllerState:
    """State before the first batch: empty queue, no estimates, the largest size."""
    none = (0.0,) * len(config.sizes)
    return ControllerState(config.sizes[-1], 0, 0.0, 0.0, none, none, none, none)


def update(
    config: ControllerConfig, state: ControllerState, observation: Observation
) -> tuple[ControllerState, Decision]:
    """
    One boundary of the control law.

    Args:
        config ([`ControllerConfig`]):
            Parameters.
        state ([`ControllerState`]):
            State before the batch.
        observation ([`Observation`]):
            The batch.

    Returns:
        `tuple`: the next state and the decision.
    """
    rate = float(straggler_events(observation.lengths, config.event, observation.truncated).mean())
    queue = max(0.0, state.queue + rate - config.rho)
    risk_sum, risk_weight = _learn_risk(config, state, observation)
    mixed_sum, mixed_weight = _learn_mixed(config, state, observation)
    state = replace(
        state,
        boundary=state.boundary + 1,
        queue=queue,
        event_rate_sum=state.event_rate_sum + rate,
        risk_sum=tuple(risk_sum.tolist()),
        risk_weight=tuple(risk_weight.tolist()),
        mixed_sum=tuple(mixed_sum.tolist()),
        mixed_weight=tuple(mixed_weight.tolist()),
    )
    risk, error = estimated_risk(config, state)
    utility = utilities(config, state)
    infeasible = bool((risk - 2 * error).min() > config.rho)
    if state.boundary % config.change_every == 0:
        index = int(np.argmin(risk)) if infeasible else choose_group_size(utility, risk, config.v, queue)
        state = replace(state, group_size=config.sizes[index])
    decision = Decision(
        group_size=state.group_size,
        straggler_rate=rate,
        straggler_rate_running=state.event_rate_sum / state.boundary,
        queue=queue,
        risk=dict(zip(config.sizes, risk.tolist(), strict=True)),
        risk_error=dict(zip(config.sizes, error.tolist(), strict=True)),
        utility=dict(zip(config.sizes, utility.tolist(), strict=True)),
        infeasible=infeasible,
    )
    return state, decision


def choose_group_size(utility: npt.ArrayLike, risk: npt.ArrayLike, v: float, queue: float) -> int:
    """
    Exact drift-plus-penalty choice: index of the size with the largest `v U(G) - queue p(G)`, the larger on a tie.

    Args:
        utility (array-like of shape `(sizes,)`):
            U(G), sizes ascending.
        risk (array-like of shape `(sizes,)`):
            p(G).
        v (`float`):
            Weight of the utility.
        queue (`float`):
            Virtual queue Q.

    Returns:
        `int`: index into the grid.
    """
    score = v * np.asarray(utility, dtype=np.float64) - queue * np.asarray(risk, dtype=np.float64)
    return len(score) - 1 - int(np.argmax(score[::-1]))


def estimated_risk(config: ControllerConfig, state: ControllerState) -> tuple[FloatArray, FloatArray]:
    """
    Event probability of each size with its standard error.

    Args:
        config ([`ControllerConfig`]):
            Parameters.
        state ([`ControllerState`]):
            State after at least one batch.

    Returns:
        `tuple`: probabilities and binomial standard errors, each of shape `(sizes,)`.
    """
    weight = np.asarray(state.risk_weight)
    risk = np.asarray(state.risk_sum) / weight
    smoothed = (risk * weight + 0.5) / (weight + 1)  # an all-or-nothing record still has an error
    return risk, np.sqrt(smoothed * (1 - smoothed) / weight)


def utilities(config: ControllerConfig, state: ControllerState) -> FloatArray:
    """
    Utility of each size under the configured definition.

    Args:
        config ([`ControllerConfig`]):
            Parameters.
        state ([`ControllerState`]):
            Only `"signal"` reads it; before any reward was seen it takes a success rate of one half.

    Returns:
        `np.ndarray` of shape `(sizes,)`.
    """
    if callable(config.utility):
        return _called_utility(config.utility, config.sizes)
    if config.utility != "signal":
        return static_utility(config.utility, config.sizes)
    weight = np.asarray(state.mixed_weight)
    if not weight.all():
        return 1.0 - 2.0 * 0.5 ** np.asarray(config.sizes, dtype=np.float64)
    return np.asarray(np.asarray(state.mixed_sum) / weight)


def _called_utility(utility: Callable[[int], float], sizes: tuple[int, ...]) -> FloatArray:
    values = np.asarray([float(utility(size)) for size in sizes])
    if not np.isfinite(values).all():
        got = dict(zip(sizes, values.tolist(), strict=True))
        raise ValueError(f"The utility function must be finite at every group size, got {got}.")
    return values


def _learn_risk(
    config: ControllerConfig, state: ControllerState, observation: Observation
) -> tuple[FloatArray, FloatArray]:
    groups, count = observation.lengths.shape
    seen = [size for size in config.sizes if size <= count]
    beyond = [size for size in config.sizes if size > count]
    curves = risk_curves(observation.lengths, config.event, [*seen, count], observation.truncated)
    total = np.zeros(len(config.sizes))
    total[: len(seen)] = curves[:, :-1].sum(axis=0)
    weight = np.full(len(config.sizes), float(groups))
    if beyond:
        # The record at the largest size seen, smoothed so that no event in few groups is not read as never.
        known = len(seen) - 1
        hits, trials = curves[:, -1].sum(), float(groups)
        if seen and seen[-1] == count:
            hits += config.forgetting_factor * state.risk_sum[known]
            trials += config.forgetting_factor * state.risk_weight[known]
        weight[len(seen) :] *= count / np.asarray(beyond, dtype=np.float64)
        risk = extrapolate_risk((hits + 0.5) / (trials + 1), count, beyond, config.event)
        total[len(seen) :] = weight[len(seen) :] * risk
    keep = config.forgetting_factor
    return keep * np.asarray(state.risk_sum) + total, keep * np.asarray(state.risk_weight) + weight


def _learn_mixed(
    config: ControllerConfig, state: ControllerState, observation: Observation
) -> tuple[FloatArray, FloatArray]:
    """Groups with a missing reward teach nothing here: which completions are missing need not be by chance."""
    before = np.asarray(state.mixed_sum), np.asarray(state.mixed_weight)
    if observation.rewards is None:
        return before
    rewards = observation.rewards[np.isfinite(observation.rewards).all(axis=1)]
    groups, count = rewards.shape
    if groups == 0 or count < 2:
        return before
    seen = [size for size in config.sizes if size <= count]
    beyond = [size for size in config.sizes if size > count]
    curve = mixed_reward_curves(rewards, [*seen, count - 1, count]).sum(axis=0)
    total, weight = np.zeros(len(config.sizes)), np.full(len(config.sizes), float(groups))
    total[: len(seen)] = curve[:-2]
    if beyond:
        weight[len(seen) :] *= count / np.asarray(beyond, dtype=np.float64)
        total[len(seen) :] = weight[len(seen) :] * extrapolate_mixed(curve[-2:] / groups, count, beyond)
    keep = config.forgetting_factor
    return keep * before[0] + total, keep * before[1] + weight


def _check_saved_numbers(values: dict[str, Any], sizes: Any) -> None:
    """A state that loads must also run: numbers where numbers belong, and one of each estimate per size."""
    try:
        curves = [np.asarray(values[name], dtype=np.float64) for name in values if name.endswith(("_sum", "_weight"))]
        numbers = np.concatenate([np.ravel(curve) for curve in curves] + [np.ravel(float(values["queue"]))])
        valid = np.isfinite(numbers).all() and values["group_size"] in sizes and int(values["boundary"]) >= 0
        valid = valid and all(curve.shape in ((), (len(sizes),)) for curve in curves)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"The saved controller is damaged: it lacks a finite number for each entry and size. {_ANEW}")


class GroupSizeController:
    """
    Stateful shell around the control law.

    Args:
        config ([`ControllerConfig`]):
            Parameters.

    Example:
    ```python
    >>> controller = GroupSizeController(ControllerConfig(sizes=(2, 4, 8), rho=0.3))
    >>> controller.group_size
    8
    >>> decision = controller.observe(lengths)  # lengths of shape (groups, 8)
    >>> controller.group_size
    4
    ```
    """

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.state = initial_state(config)

    @property
    def group_size(self) -> int:
        """Size for the next batch."""
        return self.state.group_size

    def observe(
        self,
        lengths: npt.ArrayLike,
        truncated: npt.ArrayLike | None = None,
        rewards: npt.ArrayLike | None = None,
    ) -> Decision:
        """
        Takes in one batch and decides the size of the next.

        Args:
            lengths (array-like of shape `(groups, n)`):
                Lengths of the completions of each group, at least 2 of them, in tokens or seconds. Zero is legal.
            truncated (array-like of shape `(groups, n)`, *optional*):
                Whether each completion was cut off at the length limit.
            rewards (array-like of shape `(groups, n)`, *optional*):
                Rewards; NaN marks a missing one. Only the `"signal"` utility uses them.

        Returns:
            [`Decision`]: what the batch showed and the next size.

        Raises:
            `ValueError`: If a shape is wrong or a length is not a finite number >= 0. The state is unchanged then.
        """
        array, cut = check_lengths(lengths, truncated)
        if array.shape[1] < 2:
            raise ValueError("Groups of one completion say nothing about stragglers: observe groups of at least 2.")
        reward_array = None if rewards is None else np.asarray(rewards, dtype=np.float64)
        if reward_array is not None and reward_array.shape != array.shape:
            raise ValueError(f"rewards has shape {reward_array.shape}, but lengths has shape {array.shape}.")
        self.state, decision = update(self.config, self.state, Observation(array, cut, reward_array))
        return decision

    def count_events(self, rate: float) -> None:
        """
        Takes in the event rate of a batch whose groups this controller did not size; the estimates stay as they are.

        Args:
            rate (`float`):
                Share of groups with a straggler event.
        """
        before = self.state
        self.state = replace(before, boundary=before.boundary + 1, event_rate_sum=before.event_rate_sum + rate)

    @property
    def straggler_rate_running(self) -> float:
        """Average event rate of all batches so far."""
        return self.state.event_rate_sum / max(self.state.boundary, 1)

    def state_dict(self) -> dict[str, Any]:
        """State and grid as plain JSON types."""
        return {"sizes": list(self.config.sizes), **asdict(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restores a state, such as one read from JSON. Decisions continue bit for bit.

        Args:
            state (`dict`):
                What [`~GroupSizeController.state_dict`] returned.

        Raises:
            `ValueError`: If entries are missing or unknown, or the state belongs to another grid of sizes.
        """
        values = dict(state)
        expected = {"sizes", *(item.name for item in fields(ControllerState))}
        if set(values) != expected:
            raise ValueError(
                f"The saved controller lacks the entries {sorted(expected - set(values))} and has the unknown entries "
                f"{sorted(set(values) - expected)}: it is damaged or of another version. {_ANEW}"
            )
        sizes: Sequence[int] = values.pop("sizes")
        _check_saved_numbers(values, sizes)
        if tuple(sizes) != self.config.sizes:
            raise ValueError(
                f"The saved controller has group sizes {tuple(sizes)}, this run has {self.config.sizes}: restore "
                "num_generations, min_group_size, the batch settings and the number of processes of the saved run, or "
                "delete sagc_state.json from the checkpoint to start the controller anew."
            )
        entries: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        self.state = ControllerState(**entries)
