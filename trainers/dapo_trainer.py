"""DAPO with group sizes chosen online: dynamic sampling and overlong punishment on top of [`SAGCGRPOTrainer`].

Clip-higher and the token-level loss are TRL's own; [`SAGCDAPOConfig`] switches them on. Dynamic sampling works in
rounds. The first round samples the P prompts of the batch, each refill exactly as many further prompts as groups are
missing. Which groups count is decided from gathered rewards, so all processes refill together, and a process with
enough groups takes part. Prompts come from one stream that all processes hold (`trainers/prompt_stream.py`); when a
refill does not divide among the processes, the rest is padded with a repeated prompt whose completions are discarded.
"""

import copy
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from trl.rewards import get_soft_overlong_punishment

from sagc.utility import informative_groups

from .dapo_config import SAGCDAPOConfig
from .prompt_stream import PromptStream
from .rollouts import Rollout, blank
from .sagc_trainer import SAGCGRPOTrainer


class SAGCDAPOTrainer(SAGCGRPOTrainer):
    """
    DAPO whose group size follows a straggler budget.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`):
            Model to train, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as for [`~trl.GRPOTrainer`]. Dynamic sampling and the `"signal"` utility see their
            weighted sum, without the overlong punishment (section 3.2 of the paper asks for equal correctness).
        args ([`SAGCDAPOConfig`], *optional*):
            Configuration. Defaults to `SAGCDAPOConfig()`.
        **kwargs:
            All other arguments of [`SAGCGRPOTrainer`].

    With dynamic sampling, the length of the run counts batches (`max_steps`, or the batches of `num_train_epochs`
    without refills), and refills move through the training set faster. Each pass over the training set has every
    prompt once.

    Raises:
        `TypeError`: If `args` is not a [`SAGCDAPOConfig`].
        `ValueError`: If dynamic sampling is asked for with tools, environments or images.
    """

    _tag_names: ClassVar = ["trl", "grpo", "dapo", "sagc"]

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: SAGCDAPOConfig | None = None, *others: Any, **kwargs: Any
    ) -> None:
        config = SAGCDAPOConfig() if args is None else args
        if not isinstance(config, SAGCDAPOConfig):
            raise TypeError(
                f"{type(self).__name__} needs args=SAGCDAPOConfig(...), got {type(config).__name__}: SAGCDAPOConfig "
                "takes every field of SAGCConfig and adds those of DAPO."
            )
        self._overlong: int | None = None  # column of the overlong punishment among the rewards
        if config.overlong_buffer is not None:
            reward_funcs = [] if reward_funcs is None else reward_funcs
            reward_funcs = [*reward_funcs] if isinstance(reward_funcs, list) else [reward_funcs]
            self._overlong = len(reward_funcs)
            config, reward_funcs, kwargs = _with_overlong_punishment(config, reward_funcs, kwargs)
        super().__init__(model, reward_funcs, config, *others, **kwargs)
        self._prompts = PromptStream(self.train_dataset, config.seed, self.shuffle_dataset)
        self._cycle_prompts = self._prompts.state_dict()

    def _needs_plain_rollouts(self) -> dict[str, bool]:
        return {
            **super()._needs_plain_rollouts(),
            "dynamic_sampling": self.args.dynamic_sampling and bool(self.tools),
        }

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._overlong is not None and rewards.shape[1] > 1:
            # A completion that no reward function scored stays unscored: a punishment alone would score it as wrong.
            others = torch.arange(rewards.shape[1], device=rewards.device) != self._overlong
            rewards[torch.isnan(rewards[:, others]).all(dim=1)] = torch.nan
        return rewards

    def _total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        if self._overlong is not None:
            rewards = rewards.clone()
            rewards[:, self._overlong] = torch.nan
        return super()._total_rewards(rewards)

    def _sample(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.args.dynamic_sampling:
            return super()._sample(inputs)
        self._cycle_prompts = self._prompts.state_dict()
        size, processes = self.num_generations, self.accelerator.num_processes
        wanted = self.args.prompts_per_process * processes
        kept: list[list[Rollout]] = []  # of all processes, in the order of the stream
        dropped: list[list[Rollout]] = []
        padding = rounds = 0
        while len(kept) < wanted and rounds <= self.args.max_refills:
            rounds += 1
            missing = wanted - len(kept)
            rows = self._prompts.take(missing)
            share = math.ceil(missing / processes)
            rows += rows[-1:] * (share * processes - missing)
            start = self.accelerator.process_index * share
            local = self._sample_round(rows[start : start + share], size, groups=missing)
            groups = gather_object([local[i : i + size] for i in range(0, len(local), size)])[:missing]
            padding += (len(rows) - missing) * size
            for group, informative in zip(groups, informative_groups(self._rounds[-1].rewards), strict=True):
                (kept if informative else dropped).append(group)
        self._log_sampling(len(kept), len(dropped), rounds - 1, padding)
        return self._train_on_groups(kept, dropped)

    def _train_on_groups(self, kept: list[list[Rollout]], dropped: list[list[Rollout]]) -> dict[str, Any]:
        """Spreads the kept groups over the processes. Where the split needs more, blank ones are added, masked."""
        size, processes = self.num_generations, self.accelerator.num_processes
        share = max(1, math.ceil(len(kept) / processes))
        while share * size % self.args.steps_per_generation != 0:
            share += 1
        filled = [*kept, *([blank(rollout) for rollout in group] for group in dropped)][: share * processes]
        mine = slice(self.accelerator.process_index, None, processes)
        groups, real = filled[mine], [index < len(kept) for index in range(len(filled))][mine]
        output = self._train_on(list(chain.from_iterable(groups)))
        mask = torch.tensor(np.repeat(real, size), device=self.accelerator.device)
        output["completion_mask"] = output["completion_mask"] * mask.unsqueeze(1)
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        return output

    def _log_sampling(self, kept: int, dropped: int, refills: int, padding: int) -> None:
        rewards = np.concatenate([one.rewards.ravel() for one in self._rounds])
        scored = rewards[~np.isnan(rewards)]
        metrics = {
            "kept_fraction": kept / (kept + dropped),
            "refills": refills,
            "discarded_rollouts": dropped * self.num_generations,
            "padding_rollouts": padding,
            "batch_fill": kept / (self.args.prompts_per_process * self.accelerator.num_processes),
            "reward_sampled": float(scored.mean()) if scored.size else math.nan,
        }
        for name, value in metrics.items():
            self._metrics["train"][f"dapo/{name}"].append(float(value))

    def _sampler_state(self) -> dict[str, Any]:
        state = {"prompts": self._prompts.state_dict(), "cycle_prompts": self._cycle_prompts}
        return {**super()._sampler_state(), **state}

    def _load_sampler_state(self, state: dict[str, Any], mid_cycle: bool) -> None:
        super()._load_sampler_state(state, mid_cycle)
        position = state.get("cycle_prompts" if mid_cycle else "prompts")
        if position is not None:
            self._prompts.load_state_dict(position)


def _with_overlong_punishment(
    config: SAGCDAPOConfig, reward_funcs: list[Any], arguments: dict[str, Any]
) -> tuple[SAGCDAPOConfig, list[Any], dict[str, Any]]:
    """Adds TRL's soft overlong punishment to the reward functions and their weights, on copies."""
    assert config.overlong_buffer is not None
    weights: Sequence[float] = config.reward_weights or [1.0] * len(reward_funcs)
    config = copy.copy(config)
    config.reward_weights = [*weights, config.overlong_penalty]
    punishment = get_soft_overlong_punishment(config.max_completion_length, config.overlong_buffer)
    processing = arguments.get("reward_processing_classes")
    if processing is not None:
        processing = [*processing] if isinstance(processing, list) else [processing]
        arguments = {**arguments, "reward_processing_classes": [*processing, None]}
    return config, [*reward_funcs, punishment], arguments
