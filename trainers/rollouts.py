"""Completions as the trainers handle them between generation and training: one object for each, groups in a row."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass
class Rollout:
    """
    One completion with all that TRL needs to train on it.

    Args:
        row (`dict`):
            Row of the training set, with what a rollout function added.
        prompt (`str` or `list[dict]`):
            Its prompt.
        prompt_ids, completion_ids (`list[int]`):
            Tokens.
        tool_mask (`list[int]`, *optional*):
            1 for each token that the model generated, 0 for one from a tool; None if all are the model's.
        completion (`str` or `list[dict]`):
            The completion as reward functions see it.
        logprobs (`list[float]`, *optional*):
            Log probabilities under the engine that sampled.
        rewards (`list[float]`):
            One reward for each reward function, before weights; NaN where there is none.
        extra (`dict`):
            Columns that reward functions logged for the completions table.
    """

    row: dict[str, Any]
    prompt: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    tool_mask: list[int] | None
    completion: Any
    logprobs: list[float] | None
    rewards: list[float]
    extra: dict[str, Any] = field(default_factory=dict)


def blank(rollout: Rollout) -> Rollout:
    """
    A stand-in without a reward, to fill up a batch: TRL leaves it out of means, and its advantage is zero.

    It has two tokens, because TRL's metrics take a batch of one-token completions for one value per sequence.

    Args:
        rollout ([`Rollout`]):
            Where the prompt comes from.

    Returns:
        [`Rollout`]
    """
    return replace(
        rollout,
        completion_ids=rollout.completion_ids[:1] * 2,
        tool_mask=None if rollout.tool_mask is None else [0, 0],
        logprobs=None if rollout.logprobs is None else [float("nan")] * 2,
        rewards=[float("nan")] * len(rollout.rewards),
        extra={},
    )


@dataclass(frozen=True)
class Round:
    """
    What one synchronous generation showed, on all processes.

    Args:
        lengths (`np.ndarray` of shape `(groups, n)`):
            Tokens that the model generated.
        truncated (`np.ndarray` of bool of shape `(groups, n)`):
            Whether each completion was cut off.
        seconds (`np.ndarray` of shape `(groups, n)`, *optional*):
            Seconds until each completion was finished, where the engine reports them.
        rewards (`np.ndarray` of shape `(groups, n)`):
            Weighted sum of the rewards; NaN where no reward function scored the completion.
    """

    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    seconds: npt.NDArray[np.float64] | None
    rewards: npt.NDArray[np.float64]

    def group(self, index: int) -> "Round":
        """One group of it."""
        one = slice(index, index + 1)
        seconds = None if self.seconds is None else self.seconds[one]
        return Round(self.lengths[one], self.truncated[one], seconds, self.rewards[one])


def merged(rounds: Sequence[Round], axis: int = 1) -> Round:
    """
    Several rounds as one: the same groups continued (axis 1), or groups of one size listed (axis 0).

    Args:
        rounds (sequence of [`Round`]):
            At least one.
        axis (`int`, *optional*, defaults to `1`):
            Axis of the arrays.

    Returns:
        [`Round`]
    """
    seconds = [one.seconds for one in rounds if one.seconds is not None]
    return Round(
        lengths=np.concatenate([one.lengths for one in rounds], axis),
        truncated=np.concatenate([one.truncated for one in rounds], axis),
        seconds=np.concatenate(seconds, axis) if seconds else None,
        rewards=np.concatenate([one.rewards for one in rounds], axis),
    )


def by_size(groups: Sequence[Round]) -> list[Round]:
    """Groups as one [`Round`] for each group size, ascending."""
    sizes = sorted({group.lengths.shape[1] for group in groups})
    return [merged([group for group in groups if group.lengths.shape[1] == size], axis=0) for size in sizes]


@dataclass
class LocalRecord:
    """What this process saw since the last round was closed; a trainer may generate a round in several calls."""

    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rewards: list[torch.Tensor] = field(default_factory=list)  # gathered already, by TRL


def repeat_rows(rows: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """
    Rows of whole groups: each row `size` times, as copies, because TRL writes into rows.

    Args:
        rows (sequence of `dict`):
            Rows of the training set.
        size (`int`):
            Group size.

    Returns:
        `list[dict]`
    """
    return [copy.deepcopy(row) for row in rows for _ in range(size)]


def stall(rounds: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """
    How long the slots of finished completions stood idle until the longest of their round was finished.

    Args:
        rounds (sequence of `np.ndarray`):
            Lengths or seconds of the completions of each round.

    Returns:
        `tuple`: sum over rounds of longest minus mean, and the share of the slots' time that stood idle, in [0, 1).
    """
    idle = sum(float(values.max() - values.mean()) for values in rounds)
    total = sum(float(values.max()) * values.size for values in rounds)
    waited = sum(float(values.max() - values.mean()) * values.size for values in rounds)
    return idle, waited / total if total > 0 else 0.0
