"""Recorded completion lengths: many completions of each prompt, from a real model (`scripts/record_rollouts.py`).

A trace is a file of JSON lines, plain or gzipped, one for each prompt:

    {"prompt_id": "chain_sum/0", "step": 0, "prompt_tokens": 52, "lengths": [25, 31], "truncated": [false, false],
     "seconds": [1.2, 1.5], "task": "chain_sum", "rewards": [1.0, 0.0]}

`seconds` (until the completion was finished) and `rewards` may be null or missing; keys that are not listed here are
passed over. A first line `{"provenance": {...}}` tells how the trace was made.

The completions of a prompt are drawn from one policy, so any subset of them is a group as GRPO would sample it. That
is what [`TraceModel`] draws from. Groups put together across prompts would straggle far more often.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .events import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class PromptRecord:
    """
    Completions of one prompt under one policy.

    Args:
        prompt_id (`str`):
            Name of the prompt.
        step (`int`):
            Training step of the policy.
        prompt_tokens (`int`):
            Tokens of the prompt.
        lengths (`np.ndarray` of shape `(n,)`):
            Tokens of each completion.
        truncated (`np.ndarray` of bool of shape `(n,)`):
            Whether each was cut off.
        seconds (`np.ndarray` of shape `(n,)`, *optional*):
            Seconds until each was finished.
        rewards (`np.ndarray` of shape `(n,)`, *optional*):
            Reward of each.
        task (`str`, *optional*, defaults to `""`):
            Name of the task.
    """

    prompt_id: str
    step: int
    prompt_tokens: int
    lengths: npt.NDArray[np.int64]
    truncated: BoolArray
    seconds: FloatArray | None = None
    rewards: FloatArray | None = None
    task: str = ""


@dataclass(frozen=True, eq=False)
class Trace:
    """
    A recorded trace.

    Args:
        records (`tuple` of [`PromptRecord`]):
            One for each prompt and step.
        provenance (`dict`):
            How it was made; empty if the file does not say.
    """

    records: tuple[PromptRecord, ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    def of_task(self, task: str) -> "Trace":
        """
        The part of one task.

        Args:
            task (`str`):
                Name of the task.

        Returns:
            [`Trace`]

        Raises:
            `ValueError`: If no prompt is of that task.
        """
        records = tuple(record for record in self.records if record.task == task)
        if not records:
            raise ValueError(f"The trace has no task {task!r}, only {self.tasks}.")
        return Trace(records, self.provenance)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        return sorted({record.task for record in self.records})


def read_trace(path: str | Path) -> Trace:
    """
    Reads a trace.

    Args:
        path (`str` or `Path`):
            File of JSON lines, gzipped if its name ends in `.gz`.

    Returns:
        [`Trace`]

    Raises:
        `FileNotFoundError`: If there is no such file.
        `ValueError`: If a line is not as described at the top of this module, or the file ends in the middle of one;
            the message names file and line.
    """
    path = Path(path)
    provenance: dict[str, Any] = {}
    records: list[PromptRecord] = []
    seen: dict[tuple[str, int], int] = {}
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"is not an object but {line[:40]!r}")
            if number == 1 and "provenance" in row:
                provenance = dict(row["provenance"])
                continue
            record = _record(row)
            key = (record.prompt_id, record.step)
            if key in seen:
                raise ValueError(f"repeats prompt_id {key[0]!r} at step {key[1]}, which line {seen[key]} has")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from error
        seen[key] = number
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no prompts.")
    return Trace(tuple(records), provenance)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, after line {number}: the file is damaged ({error}).") from error


def _record(row: dict[str, Any]) -> PromptRecord:
    missing = {"prompt_id", "step", "prompt_tokens", "lengths", "truncated"} - row.keys()
    if missing:
        raise ValueError(f"has no {', '.join(sorted(missing))}")
    if not isinstance(row["prompt_id"], str):
        raise ValueError(f"prompt_id must be a string, got {row['prompt_id']!r}")
    for name in ("step", "prompt_tokens"):
        if type(row[name]) is not int or row[name] < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {row[name]!r}")
    if not isinstance(row["lengths"], list) or not row["lengths"]:
        raise ValueError("lengths must be a list of at least one number")
    count = len(row["lengths"])
    lengths = _numbers(row, "lengths", count)
    if (lengths < 1).any() or (lengths % 1).any():
        raise ValueError("lengths must be whole numbers of at least 1")
    truncated = row["truncated"]
    if not isinstance(truncated, list) or len(truncated) != count or not all(type(t) is bool for t in truncated):
        raise ValueError(f"truncated must be a list of {count} times true or false, one for each length")
    return PromptRecord(
        prompt_id=row["prompt_id"],
        step=row["step"],
        prompt_tokens=row["prompt_tokens"],
        lengths=lengths.astype(np.int64),
        truncated=np.array(truncated),
        seconds=None if row.get("seconds") is None else _numbers(row, "seconds", count),
        rewards=None if row.get("rewards") is None else _numbers(row, "rewards", count),
        task=str(row.get("task", "")),
    )


def _numbers(row: dict[str, Any], name: str, count: int) -> FloatArray:
    values = row[name]
    if not isinstance(values, list) or len(values) != count or not all(type(v) in (int, float) for v in values):
        raise ValueError(f"{name} must be a list of {count} numbers, one for each length")
    numbers = np.array(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be finite numbers")
    return numbers


@dataclass(frozen=True, eq=False)
class TraceModel:
    """
    Draws groups from a trace, in the place of [`~sagc.simulation.LengthModel`].

    Each group belongs to a prompt drawn at random; its completions are drawn from the recorded ones of that prompt
    without replacement. If the trace holds several training steps, a run goes through them.

    Args:
        trace ([`Trace`]):
            A trace with equally many completions of each prompt.

    Raises:
        `ValueError`: If the prompts have different numbers of completions.
    """

    trace: Trace

    def __post_init__(self) -> None:
        first = self.trace.records[0]
        for record in self.trace.records:
            if len(record.lengths) != len(first.lengths):
                raise ValueError(
                    f"Prompt {record.prompt_id!r} has {len(record.lengths)} completions, {first.prompt_id!r} has "
                    f"{len(first.lengths)}: groups can only be drawn from a trace with equally many of each."
                )

    @cached_property
    def _steps(self) -> list[tuple[npt.NDArray[np.int64], BoolArray]]:
        """Lengths and truncation of all prompts, for each training step."""
        steps = sorted({record.step for record in self.trace.records})
        parts: list[Sequence[PromptRecord]] = [
            [record for record in self.trace.records if record.step == step] for step in steps
        ]
        return [
            (np.stack([record.lengths for record in part]), np.stack([record.truncated for record in part]))
            for part in parts
        ]

    @property
    def drifts(self) -> bool:
        """Whether the risk may change over the run."""
        return len(self._steps) > 1

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
                Number of groups.
            size (`int`):
                Completions in each group.

        Returns:
            `tuple`: lengths in tokens and truncation flags, both of shape `(groups, size)`.

        Raises:
            `ValueError`: If fewer completions than `size` were recorded of each prompt.
        """
        lengths, truncated = self._steps[round(progress * (len(self._steps) - 1))]
        prompts, recorded = lengths.shape
        if size > recorded:
            raise ValueError(f"The trace has {recorded} completions of each prompt, too few for groups of {size}.")
        prompt = rng.integers(prompts, size=(groups, 1))
        chosen = rng.permuted(np.tile(np.arange(recorded), (groups, 1)), axis=1)[:, :size]
        return lengths[prompt, chosen].astype(np.float64), truncated[prompt, chosen]
