"""Between generation and training: records what each generation showed, samples in rounds, over-samples, sorts.

TRL generates, scores and prepares a batch in one method. To sample in several rounds and train on a selection, a round
runs generation and rewards only, and TRL's method then runs once on the chosen completions, with `_generate` and
`_calculate_rewards` answering from what is known. So nothing of TRL's preparation is repeated here, and completions
that are dropped cost no log probabilities.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer

from .length_sorting import sorted_micro_batches
from .oversampling import FirstFinishers, first_finishers, stopping_early
from .rollouts import LocalRecord, Rollout, Round, repeat_rows

# The mixin is for any GRPOTrainer: it is one to the type checker, and at run time comes before yours.
if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object


class RolloutMixin(_Trainer):
    """Keeps the rollouts of a generation at hand for a group size controller, samplers and baselines."""

    _pending_extra_logs: defaultdict[str, list[Any]]
    _buffered_inputs: list[dict[str, torch.Tensor]] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._local = LocalRecord()
        self._rounds: list[Round] = []  # synchronous generations of the current batch
        self._groups: list[Round] = []  # its groups, where they differ in size
        self._replayed: list[Rollout] | None = None
        single_turn = not (isinstance(self, GRPOTrainer) and (self.tools or self.rollout_func is not None))
        self._has_seconds = self.args.use_vllm and self.args.vllm_mode == "colocate" and single_turn
        for setting, is_set in self._needs_plain_rollouts().items():
            if is_set and not single_turn:
                raise ValueError(
                    f"{setting} does not work with tools, environments or rollout_func, which do not generate in one "
                    f"turn of TRL's own. Leave {setting} at its default."
                )

    def _needs_plain_rollouts(self) -> dict[str, bool]:
        """Settings that only work where TRL itself generates, in one turn."""
        return {
            "straggler_event='duration'": self.args.straggler_event == "duration",
            "extra_rollouts": self.args.extra_rollouts > 0,
        }

    # --- What a generation showed

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._replayed is not None:
            return _generated(self._replayed)
        output = super()._generate(prompts)
        if self.model.training:
            completion_ids = output[1]
            tool_mask = output[2] if isinstance(self, GRPOTrainer) else None
            # Lengths count the tokens that the model generated, as TRL's `completions/*_length` do.
            self._local.lengths += [len(ids) for ids in completion_ids] if tool_mask is None else map(sum, tool_mask)
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self._local.truncated += [bool(ids) and ids[-1] not in ends for ids in completion_ids]
        return output

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        if self._replayed is not None:
            rewards = [rollout.rewards for rollout in self._replayed]
            return self.accelerator.gather(torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device))
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self._local.rewards.append(self._total_rewards(rewards))
        return rewards

    def _total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the reward functions, NaN for a completion that none of them scored."""
        total = (rewards * self.reward_weights.to(rewards.device).unsqueeze(0)).nansum(dim=1)
        return total.masked_fill(torch.isnan(rewards).all(dim=1), torch.nan)

    def _close_round(self, groups: int | None = None) -> Round:
        """Gathers what all processes saw since the last round, of the first `groups` groups."""
        local, self._local = self._local, LocalRecord()

        def gathered(values: Sequence[float] | Sequence[bool]) -> Any:
            rows = self.accelerator.gather(torch.tensor(values, device=self.accelerator.device))
            return rows.cpu().numpy().reshape(-1, self.num_generations)[:groups]

        rewards = torch.cat(local.rewards).cpu().numpy()
        latest = Round(
            lengths=gathered(local.lengths),
            truncated=gathered(local.truncated),
            seconds=gathered(local.seconds) if self._has_seconds else None,
            rewards=rewards.reshape(-1, self.num_generations)[:groups],
        )
        self._rounds.append(latest)
        return latest

    # --- Sampling in rounds

    def _sample_round(self, rows: list[dict[str, Any]], size: int, groups: int | None = None) -> list[Rollout]:
        """
        Generates and scores `size` completions for each row, without preparing them for training.

        Args:
            rows (`list[dict]`):
                Rows of this process, equally many on each.
            size (`int`):
                Completions of each.
            groups (`int`, *optional*):
                How many groups of all processes count; those after them are padding.

        Returns:
            `list[Rollout]`: those of this process.
        """
        if any(key in row for row in rows for key in ("image", "images")):
            raise ValueError(
                "dynamic_sampling and adaptive_budgets do not support images. Set dynamic_sampling=False or "
                "adaptive_budgets=False."
            )
        self.num_generations = size
        rows = repeat_rows(rows, size)
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, tool_mask, completions, logprobs, fields, *_ = self._generate(prompts)
        for name, values in fields.items():  # what a rollout function returns beside tokens goes to the rewards
            for row, value in zip(rows, values if isinstance(values, list) else [values] * len(rows), strict=True):
                row[name] = value
        rewards = self._calculate_rewards(rows, prompts, completions, completion_ids)
        self._close_round(groups)
        start = self.accelerator.process_index * len(rows)
        extra, self._pending_extra_logs = self._pending_extra_logs, defaultdict(list)
        return [
            Rollout(
                row=row,
                prompt=prompts[i],
                prompt_ids=prompt_ids[i],
                completion_ids=completion_ids[i],
                tool_mask=None if tool_mask is None else tool_mask[i],
                completion=completions[i],
                logprobs=None if logprobs is None else logprobs[i],
                rewards=rewards[start + i].tolist(),
                extra={column: values[i] for column, values in extra.items()},
            )
            for i, row in enumerate(rows)
        ]

    def _train_on(self, rollouts: list[Rollout]) -> dict[str, Any]:
        """TRL's training batch of these completions: whole groups, equally many rows on each process."""
        for column in sorted({column for rollout in rollouts for column in rollout.extra}):
            self._pending_extra_logs[column] = [rollout.extra.get(column) for rollout in rollouts]
        self._replayed = rollouts
        try:
            return super()._generate_and_score_completions([rollout.row for rollout in rollouts])
        finally:
            self._replayed = None

    # --- Over-sampling and sorting

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not (self.model.training and self.args.extra_rollouts):
            output = super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
            if self._has_seconds and self.model.training:
                self._local.seconds += self._finish_seconds(len(prompt_ids))
            return output
        if images is not None or multimodal_fields:
            raise ValueError("extra_rollouts does not support images. Set extra_rollouts=0.")
        kept, sampled = self.num_generations, self.num_generations + self.args.extra_rollouts
        many = [ids for ids in prompt_ids[::kept] for _ in range(sampled)]
        if args:  # GRPOTrainer tells the engine how many rows share a prompt
            args = (sampled, *args[1:])
        if self.args.use_vllm:
            engine = self.vllm_generation.llm
            engine.keep_first = (sampled, kept)
            try:
                output = super()._generate_single_turn(many, images, multimodal_fields, *args, **kwargs)
            finally:
                engine.keep_first = None
            finished = self._finish_seconds(len(many))
        else:
            model = self.accelerator.unwrap_model(self.model_wrapped)
            criterion = FirstFinishers(sampled, kept, self.eos_token_ids, self.accelerator.device)
            with stopping_early(model, criterion):
                output = super()._generate_single_turn(many, images, multimodal_fields, *args, **kwargs)
            finished = [] if criterion.finished_at is None else criterion.finished_at.tolist()
        first = first_finishers(finished, sampled, kept)
        if self._has_seconds:
            self._local.seconds += [finished[row] for row in first]
        if not isinstance(output, tuple):  # RLOOTrainer returns no log probabilities
            return [output[row] for row in first]
        return tuple(None if part is None else [part[row] for row in first] for part in output)

    def _finish_seconds(self, rows: int) -> list[float]:
        # With tensor parallelism each engine holds the requests of all its ranks.
        start = self.accelerator.process_index % self.args.vllm_tensor_parallel_size * rows
        seconds: list[float] = self.vllm_generation.llm.finish_seconds
        return seconds[start : start + rows]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        made = self._buffered_inputs
        if not (self.args.length_sorted_batches and self.model.training) or made is None or made is before:
            return inputs
        order = torch.Generator().manual_seed(self.args.seed + self._step)
        self._buffered_inputs = sorted_micro_batches(made, order)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]


def _generated(rollouts: list[Rollout]) -> tuple[Any, ...]:
    """What `GRPOTrainer._generate` returns, for known completions."""
    first = rollouts[0]
    return (
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.completion_ids for rollout in rollouts],
        None if first.tool_mask is None else [rollout.tool_mask for rollout in rollouts],
        [rollout.completion for rollout in rollouts],
        None if first.logprobs is None else [rollout.logprobs for rollout in rollouts],
        {},
        None,
        [],
    )
