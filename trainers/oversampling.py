"""Over-sampling: sample more completions than a group needs, keep those that finish first, stop the others.

A baseline that attacks the same stall as the group size does. Its known flaw: what finishes first is short, so the
kept completions are shorter than the policy's own, which biases the gradient towards short answers (docs/baselines.md
has the size of it).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import StoppingCriteria


class FirstFinishers(StoppingCriteria):
    """
    Stops a group of rows as soon as enough of them have finished.

    Args:
        sampled (`int`):
            Rows of each group, one after the other.
        kept (`int`):
            Rows of each group that must finish.
        eos_token_ids (`list[int]`):
            Tokens that end a completion.
        device (`torch.device`):
            Device of the generation.
    """

    def __init__(self, sampled: int, kept: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.sampled, self.kept = sampled, kept
        self.eos = torch.tensor(list(eos_token_ids), device=device)
        self.finished_at: torch.Tensor | None = None  # step of each row's end; infinite while it runs
        self.stopped: torch.Tensor | None = None
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which rows are done."""
        if self.finished_at is None or self.stopped is None:
            self.finished_at = torch.full((len(input_ids),), torch.inf, device=input_ids.device)
            self.stopped = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self.step += 1
        ended = torch.isin(input_ids[:, -1], self.eos) & self.finished_at.isinf() & ~self.stopped
        self.finished_at[ended] = self.step
        enough = self.finished_at.isfinite().view(-1, self.sampled).sum(dim=1) >= self.kept
        self.stopped |= enough.repeat_interleave(self.sampled) & self.finished_at.isinf()
        return self.finished_at.isfinite() | self.stopped


@contextmanager
def stopping_early(model: Any, criterion: FirstFinishers) -> Iterator[None]:
    """Hands a stopping criterion to the `model.generate` that TRL calls without one."""
    model.generate = partial(model.generate, stopping_criteria=[criterion])
    try:
        yield
    finally:
        del model.generate


def first_finishers(finished: npt.ArrayLike, sampled: int, kept: int) -> list[int]:
    """
    Rows to keep: of each group those that finished first, in their order within the group.

    Args:
        finished (array-like of shape `(groups * sampled,)`):
            When each row finished, in any unit; infinite or NaN for one that was stopped or cut off.
        sampled (`int`):
            Rows of each group.
        kept (`int`):
            Rows to keep of each; on equal times the earlier row.

    Returns:
        `list[int]`: ascending indices, `kept` for each group.
    """
    times = np.nan_to_num(np.asarray(finished, dtype=np.float64), nan=np.inf).reshape(-1, sampled)
    first = np.sort(np.argsort(times, axis=1, kind="stable")[:, :kept], axis=1)
    return [int(index) for index in (first + sampled * np.arange(len(times))[:, None]).ravel()]
