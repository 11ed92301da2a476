"""GRPO with group sizes chosen online under a straggler budget (`sagc.controller`).

How a group size takes effect, without padded rows: the sampler yields each prompt once, and the trainer repeats it G
times at the start of each generation. So G is decided when it is used, a data loader's look-ahead cannot make it
stale, whole groups live on one process, and a smaller group generates, scores and back-propagates fewer rows. TRL's
reward reshaping, vLLM de-duplication and advantages follow `self.num_generations`, set to G before each generation.

Every process gathers the same lengths, truncation flags and rewards; rank 0 decides and broadcasts the controller's
state, so all use the same size at every boundary.
"""

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from torch.utils.data import DataLoader
from trl import GRPOConfig, GRPOTrainer

from sagc import Decision, GroupSizeController, default_v
from sagc.controller import initial_state, utilities

from .sagc_config import SAGCConfig
from .trl_internals import RepeatSampler, repeat_iterable_dataset, warn_if_untested
from .vllm_cpu import colocated_on_cpu

logger = get_logger(__name__)

STATE_FILE = "sagc_state.json"

# The mixin is for any GRPOTrainer: it is one to the type checker, and at run time comes before yours.
if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object


class SAGCMixin(_Trainer):
    """
    Straggler-aware group control for any subclass of [`~trl.GRPOTrainer`].

    Put it before your trainer: `class MySAGCTrainer(SAGCMixin, MyGRPOTrainer): pass`, and pass a [`SAGCConfig`].

    Args:
        *args, **kwargs:
            Passed on to the trainer.
        group_size_utility (`Callable[[int], float]`, *optional*):
            Your own utility of a group size, instead of `args.utility`.

    Checkpoint behavior: `sagc_state.json` in each checkpoint holds the controller's queue, estimates and next size and
    the position in the generation cycle. A run resumed from a checkpoint between two generations takes the same
    decisions as an uninterrupted one, bit for bit. In the middle of a cycle (`steps_per_generation * num_iterations`
    above `gradient_accumulation_steps`) TRL generates the batch again: it gets the size it had and is not counted
    twice, but its new random draws make later batches differ, as they do in TRL.

    Raises:
        `TypeError`: If `args` is not a [`SAGCConfig`].
        `ValueError`: If the run's length is unknown or the training set smaller than one generation batch.
    """

    def __init__(self, *args: Any, group_size_utility: Callable[[int], float] | None = None, **kwargs: Any) -> None:
        warn_if_untested()
        # Your trainer's signature may differ from TRL's, so the configuration is known by its type.
        given = [*args, *kwargs.values()]
        config = next((value for value in given if isinstance(value, SAGCConfig)), None)
        if config is None:
            found = next((type(value).__name__ for value in given if isinstance(value, GRPOConfig)), "none")
            raise TypeError(
                f"{type(self).__name__} needs args=SAGCConfig(...), got {found}: SAGCConfig takes every field of "
                "GRPOConfig and adds the straggler budget."
            )
        with colocated_on_cpu(config):
            super().__init__(*args, **kwargs)
        self._controller = self._build_controller(config, group_size_utility)
        self._batch_lengths: tuple[list[int], list[bool]] = ([], [])
        self._batch_rewards: torch.Tensor | None = None
        self._resumed_mid_cycle = False
        self._warned_infeasible = False
        self.accelerator.print(
            f"SAGC: group sizes {self._controller.config.sizes}, straggler budget rho={config.rho}, "
            f"{config.prompts_per_process} prompts per process and generation, V={self._controller.config.v:.3g}"
        )

    def _build_controller(
        self, config: SAGCConfig, group_size_utility: Callable[[int], float] | None
    ) -> GroupSizeController:
        dataset = self.train_dataset
        horizon = config.decision_horizon(None if isinstance(dataset, IterableDataset) else len(dataset))
        parameters = config.controller_config(1.0 if config.V is None else config.V)
        if group_size_utility is not None:
            parameters = replace(parameters, utility=group_size_utility)
        if config.V is None:
            values = utilities(parameters, initial_state(parameters))
            spread = 1.0 if parameters.utility == "signal" else float(np.ptp(values))
            parameters = replace(parameters, v=default_v(horizon, spread))
        return GroupSizeController(parameters)

    @property
    def group_size_controller(self) -> GroupSizeController:
        """The controller, for reading its state and estimates."""
        return self._controller

    # Each prompt once per batch; the rows of a group come from `_generate_and_score_completions`.
    def _get_train_sampler(self, dataset: Any = None) -> RepeatSampler:
        self._prompt_sampler = RepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self.args.prompts_per_process * self.args.world_size,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return self._prompt_sampler

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Training data loader whose batches hold the prompts of one generation, each once."""
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            if self.shuffle_dataset:
                dataset = dataset.shuffle(seed=self.args.seed)
            dataset = repeat_iterable_dataset(
                dataset,
                mini_repeat_count=1,
                batch_size=self.args.prompts_per_process * self.args.world_size,
                repeat_count=self.num_iterations * self.args.steps_per_generation,
            )
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self.args.prompts_per_process,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        replayed, self._resumed_mid_cycle = self._resumed_mid_cycle, False
        if not replayed:
            self.num_generations = self._controller.group_size
        self._empty_completions_table()
        # TRL writes extra fields into rows, so each is a copy.
        rows = [copy.deepcopy(row) for row in inputs for _ in range(self.num_generations)]
        output = super()._generate_and_score_completions(rows)
        if not replayed:
            self._observe_batch()
        return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        output = super()._generate(prompts)
        if self.model.training:
            _, completion_ids, tool_mask, *_ = output
            # Lengths count the tokens that the model generated, as TRL's `completions/*_length` do.
            lengths = [len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask]
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self._batch_lengths = (lengths, [bool(ids) and ids[-1] not in ends for ids in completion_ids])
        return output

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            total = (rewards * self.reward_weights.to(rewards.device).unsqueeze(0)).nansum(dim=1)
            total[torch.isnan(rewards).all(dim=1)] = torch.nan  # no reward function scored it
            self._batch_rewards = total
        return rewards

    def _observe_batch(self) -> None:
        size = self.num_generations
        device = self.accelerator.device
        lengths, truncated = (
            self.accelerator.gather(torch.tensor(values, device=device)).cpu().numpy().reshape(-1, size)
            for values in self._batch_lengths
        )
        rewards = self._batch_rewards.cpu().numpy().reshape(-1, size) if self._batch_rewards is not None else None
        start = time.perf_counter()
        decision = self._controller.observe(lengths, truncated, rewards)
        seconds = time.perf_counter() - start
        # All ranks computed the same; rank 0's word makes it so on machines that round differently.
        self._controller.load_state_dict(broadcast_object_list([self._controller.state_dict()])[0])
        self._log_decision(decision, size, lengths, seconds)

    def _log_decision(
        self, decision: Decision, size: int, lengths: npt.NDArray[np.int64], decision_seconds: float
    ) -> None:
        metrics = {
            "group_size": size,
            "straggler_rate": decision.straggler_rate,
            "straggler_rate_running": decision.straggler_rate_running,
            "budget": self._controller.config.rho,
            "queue": decision.queue,
            "utility": decision.utility[size],
            "stall_fraction": 1.0 - lengths.mean() / lengths.max() if lengths.max() > 0 else 0.0,
            "rollouts": lengths.size,
            "infeasible": float(decision.infeasible),
            "decision_seconds": decision_seconds,
        }
        metrics |= {f"risk_at_size/{grid_size}": risk for grid_size, risk in decision.risk.items()}
        for name, value in metrics.items():
            self._metrics["train"][f"sagc/{name}"].append(float(value))
        if decision.infeasible and not self._warned_infeasible:
            self._warned_infeasible = True
            lowest = min(decision.risk.values())
            logger.warning(
                f"Every group size breaks the straggler budget: the lowest risk is {lowest:.2f}, the budget rho is "
                f"{self._controller.config.rho}. The least risky size is used. Raise rho or tau, or lower "
                "max_completion_length."
            )

    def _empty_completions_table(self) -> None:
        for column in ("images", "prompt", "completion", "advantages"):
            self._logs[column].clear()
        for columns in (self._logs["rewards"], self._logs["extra"]):
            for column in columns.values():
                column.clear()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # Ours first: a checkpoint that is complete for Trainer (trainer_state.json comes last) then has it too.
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "controller": self._controller.state_dict(),
                "step": self._step,
                "cycle_group_size": self.num_generations,
            }
            partial = folder / f"{STATE_FILE}.partial"
            partial.write_text(json.dumps(state, indent=1))
            os.replace(partial, folder / STATE_FILE)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # The sampler draws a new order each epoch; a new one must pass over those of finished epochs.
        if not isinstance(self.train_dataset, IterableDataset) and self.shuffle_dataset:
            for _ in range(int(self.state.epoch)):
                torch.randperm(self._prompt_sampler.num_samples, generator=self._prompt_sampler.generator)
        path = Path(checkpoint) / STATE_FILE
        text = [_read_state(path) if self.accelerator.is_main_process else None]
        broadcast_object_list(text)
        if text[0] is None:
            logger.warning(f"{path} is missing: the group size controller starts anew.")
            return
        try:
            state = json.loads(text[0])
            step, size, controller = int(state["step"]), int(state["cycle_group_size"]), dict(state["controller"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}). Resume from another checkpoint, or delete the "
                "file to start the group size controller anew."
            ) from error
        self._controller.load_state_dict(controller)
        self._step, self.num_generations, self._buffered_inputs = step, size, None
        self._resumed_mid_cycle = step % (self.args.steps_per_generation * self.num_iterations) != 0


def _read_state(path: Path) -> str | None:
    """None if there is no file; an unreadable one reads as empty, which is reported as damaged on every rank."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return ""


class SAGCGRPOTrainer(SAGCMixin, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose group size follows a straggler budget.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`):
            Model to train, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as for [`~trl.GRPOTrainer`].
        args ([`SAGCConfig`], *optional*):
            Configuration. Defaults to `SAGCConfig()`.
        group_size_utility (`Callable[[int], float]`, *optional*):
            Your own utility of a group size, instead of `args.utility`.
        **kwargs:
            All other arguments of [`~trl.GRPOTrainer`].

    Example:
    ```python
    from trainers import SAGCConfig, SAGCGRPOTrainer

    trainer = SAGCGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=reward_func,
        args=SAGCConfig(per_device_train_batch_size=128, num_generations=16, rho=0.3),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names: ClassVar = ["trl", "grpo", "sagc"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SAGCConfig | None = None,
        *others: Any,
        group_size_utility: Callable[[int], float] | None = None,
        **kwargs: Any,
    ) -> None:
        config = SAGCConfig() if args is None else args
        super().__init__(model, reward_funcs, config, *others, group_size_utility=group_size_utility, **kwargs)
