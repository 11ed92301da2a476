"""Per-prompt rollout budgets (`sagc.conformal`): a baseline that spends fewer completions on settled prompts."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sagc.conformal import conformal_quantile, conformal_score, resolved

from .rollouts import Rollout, Round, blank, by_size, merged

if TYPE_CHECKING:
    from .sagc_trainer import SAGCMixin

# Full groups: until there are MIN_CALIBRATION of them, then in one generation of FULL_EVERY, the last KEPT count.
MIN_CALIBRATION, FULL_EVERY, KEPT = 16, 10, 64


@dataclass
class AdaptiveBudgets:
    """
    Budget grid and calibration.

    Args:
        grid (`tuple[int, ...]`):
            Completions after which a prompt may stop, ascending; the last is the full group.
        miscoverage (`float`):
            Of the conformal thresholds.
        seed (`int`):
            Seed of the scores' random part.
        groups (`list[list[float]]`, *optional*):
            Rewards of recent full groups.
        generation (`int`, *optional*, defaults to `0`):
            Generations so far.
    """

    grid: tuple[int, ...]
    miscoverage: float
    seed: int
    groups: list[list[float]] = field(default_factory=list)
    generation: int = 0

    def is_full(self) -> bool:
        """Whether this generation samples full groups, to calibrate on."""
        return len(self.groups) < MIN_CALIBRATION or self.generation % FULL_EVERY == 0

    def thresholds(self) -> dict[int, float]:
        """Conformal threshold of each budget but the last."""
        rng = np.random.default_rng([self.seed, self.generation])
        return {
            k: conformal_quantile([conformal_score(group, k, rng) for group in self.groups], self.miscoverage)
            for k in self.grid[:-1]
        }


def budget_grid(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes from the smallest, doubling, to the largest."""
    grid = [smallest]
    while grid[-1] * 2 < largest:
        grid.append(grid[-1] * 2)
    return tuple(sorted({*grid, largest}))


def sample_adaptively(trainer: "SAGCMixin", budgets: AdaptiveBudgets, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """
    Samples each row in rounds until it is settled, and prepares the batch of what was sampled.

    Args:
        trainer ([`SAGCMixin`]):
            The trainer.
        budgets ([`AdaptiveBudgets`]):
            Grid and calibration, which is updated.
        rows (`list[dict]`):
            Rows of the training set.

    Returns:
        `dict`: TRL's training batch. Its rows are the completions that were sampled, and as few masked ones as the
        split into micro-batches needs.
    """
    largest, full = budgets.grid[-1], budgets.is_full()
    thresholds = {} if full else budgets.thresholds()
    groups: list[list[Rollout]] = [[] for _ in rows]
    seen: list[list[Round]] = [[] for _ in rows]
    active, drawn = list(range(len(rows))), 0
    for budget in (largest,) if full else budgets.grid:
        sampled = trainer._sample_round([rows[i] for i in active], budget - drawn)
        for place, i in enumerate(active):
            groups[i] += sampled[place * (budget - drawn) : (place + 1) * (budget - drawn)]
            seen[i].append(trainer._rounds[-1].group(place))
        drawn = budget
        active = [i for i in active if not resolved(merged(seen[i]).rewards, thresholds.get(budget, 2.0))]
        if not active:
            break
    whole = [merged(parts) for parts in seen]
    trainer._groups = by_size(whole)
    if full:
        budgets.groups = [*budgets.groups, *(group.rewards[0].tolist() for group in whole)][-KEPT:]
    budgets.generation += 1
    trainer.num_generations = largest
    filled = [group + [blank(group[0])] * (largest - len(group)) for group in groups]
    output = trainer._train_on([rollout for group in filled for rollout in group])
    real = torch.tensor([place < len(group) for group in groups for place in range(largest)])
    return _without_padding(output, real, trainer.args.steps_per_generation)


def _without_padding(output: dict[str, Any], real: torch.Tensor, micro_batches: int) -> dict[str, Any]:
    mask = real.to(output["completion_mask"].device)
    output["completion_mask"] = output["completion_mask"] * mask.unsqueeze(1)
    keep = mask.nonzero().flatten()
    spare = (~mask).nonzero().flatten()
    keep = torch.cat([keep, spare[: -len(keep) % micro_batches]]).sort().values
    rows = len(mask)
    output = {
        key: value[keep] if torch.is_tensor(value) and value.dim() > 0 and len(value) == rows else value
        for key, value in output.items()
    }
    loss_mask = output["completion_mask"] * output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    output["num_items_in_batch"] = loss_mask.sum()
    return output
