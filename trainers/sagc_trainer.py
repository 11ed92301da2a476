"""GRPO with group sizes chosen online under a straggler budget (`sagc.controller`).

How a group size takes effect, without padded rows: the sampler yields each prompt once, and the trainer repeats it G
times at the start of each generation. So G is decided when it is used, a data loader's look-ahead cannot make it
stale, whole groups live on one process, and a smaller group generates, scores and back-propagates fewer rows. TRL's
reward reshaping, vLLM de-duplication and advantages follow `self.num_generations`, set to G before each generation.

Every process gathers the same lengths, truncation flags and rewards; rank 0 decides and broadcasts the controller's
state, so all use the same size at every boundary.

A subclass that samples in several rounds overrides `_sample`: it calls `_sample_round` as often as it needs, and
`_train_on` with the completions it chose.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from torch.utils.data import DataLoader
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from sagc import Decision, GroupSizeController, StragglerEvent, default_v, straggler_events
from sagc.controller import initial_state, utilities

from .adaptive_budgets import AdaptiveBudgets, budget_grid, sample_adaptively
from .rollout_mixin import RolloutMixin
from .rollouts import LocalRecord, Round, merged, repeat_rows, stall
from .sagc_config import SAGCArguments, SAGCConfig
from .trl_internals import RepeatSampler, repeat_iterable_dataset, warn_if_untested
from .vllm_cpu import colocated_on_cpu
from .vllm_rollouts import rollout_engine
from .vllm_server import bounded_server

logger = get_logger(__name__)

STATE_FILE = "sagc_state.json"


class SAGCMixin(RolloutMixin):
    """
    Straggler-aware group control for any subclass of [`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`].

    Put it before your trainer: `class MySAGCTrainer(SAGCMixin, MyGRPOTrainer): pass`, and pass a [`SAGCConfig`]
    ([`SAGCRLOOConfig`] for RLOO).

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
        config = self._find_config([*args, *kwargs.values()])
        with colocated_on_cpu(config), rollout_engine(config), bounded_server(config.vllm_request_timeout):
            super().__init__(*args, **kwargs)
        self._controller = self._build_controller(config, group_size_utility)
        self._budgets = self._build_budgets(config)
        self._resumed_mid_cycle = False
        self._warned_infeasible = False
        self.accelerator.print(
            f"SAGC: group sizes {self._controller.config.sizes}, straggler budget rho={config.rho}, "
            f"{config.prompts_per_process} prompts per process and generation, V={self._controller.config.v:.3g}"
        )

    def _find_config(self, given: list[Any]) -> SAGCArguments:
        # Your trainer's signature may differ from TRL's, so the configuration is known by its type.
        config = next((value for value in given if isinstance(value, SAGCArguments)), None)
        if config is None:
            kinds = (GRPOConfig, RLOOConfig, dict)
            found = next((type(value).__name__ for value in given if isinstance(value, kinds)), "none")
            raise TypeError(
                f"{type(self).__name__} needs args=SAGCConfig(...), got {found}: SAGCConfig takes every field of "
                "GRPOConfig and adds the straggler budget (SAGCRLOOConfig does so for RLOOConfig). A trainer that "
                "builds its own configuration must be given one."
            )
        return config

    def _build_controller(
        self, config: SAGCArguments, group_size_utility: Callable[[int], float] | None
    ) -> GroupSizeController:
        dataset = self.train_dataset
        self._horizon = config.decision_horizon(None if isinstance(dataset, IterableDataset) else len(dataset))
        parameters = config.controller_config(1.0 if config.V is None else config.V)
        if group_size_utility is not None:
            parameters = replace(parameters, utility=group_size_utility)
        if config.V is None:
            values = utilities(parameters, initial_state(parameters))
            spread = 1.0 if parameters.utility == "signal" else float(np.ptp(values))
            parameters = replace(parameters, v=default_v(self._horizon, spread))
        return GroupSizeController(parameters)

    def _build_budgets(self, config: SAGCArguments) -> AdaptiveBudgets | None:
        if not config.adaptive_budgets:
            return None
        if config.world_size > 1 or not isinstance(self, GRPOTrainer):
            raise ValueError(
                "adaptive_budgets works on one process and with GRPO only. Set adaptive_budgets=False, or train on "
                "one process with SAGCGRPOTrainer."
            )
        grid = budget_grid(config.min_group_size, config.num_generations)
        return AdaptiveBudgets(grid, config.adaptive_miscoverage, config.seed)

    def _needs_plain_rollouts(self) -> dict[str, bool]:
        # A rollout function is given rows and gives completions, so it may be called in rounds; tools may not.
        uses_tools = isinstance(self, GRPOTrainer) and bool(self.tools)
        return {**super()._needs_plain_rollouts(), "adaptive_budgets": self.args.adaptive_budgets and uses_tools}

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
            self.num_generations = self._next_group_size()
        self._empty_completions_table()
        self._local, self._rounds, self._groups = LocalRecord(), [], []
        output = self._sample(inputs)
        if not replayed:
            self._observe_batch()
        return output

    def _next_group_size(self) -> int:
        schedule, sizes = self.args.group_size_schedule, self._controller.config.sizes
        if schedule is None:
            return self._controller.group_size
        return scheduled_size(schedule, sizes, self._controller.state.boundary, self._horizon)

    def _sample(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generates the groups of these prompts and prepares the batch to train on."""
        if self._budgets is not None:
            return sample_adaptively(self, self._budgets, inputs)
        output = super()._generate_and_score_completions(repeat_rows(inputs, self.num_generations))
        self._close_round()
        return output

    def _observe_batch(self) -> None:
        start = time.perf_counter()
        if self._groups:  # groups of several sizes: no controller chose them, so their events are only counted
            rate, count = mean_event_rate(self._groups, self._controller.config.event)
            self._controller.count_events(rate)
            metrics = {"group_size": count, "straggler_rate": rate}
            metrics["straggler_rate_running"] = self._controller.straggler_rate_running
        else:
            batch = merged(self._rounds, axis=0)
            by_duration = self._controller.config.event.kind == "duration"
            observed = batch.seconds if by_duration else batch.lengths
            assert observed is not None  # colocated vLLM reports seconds, and the configuration asks for it
            decision = self._controller.observe(observed, batch.truncated, batch.rewards)
            metrics = self._decision_metrics(decision)
        metrics["decision_seconds"] = time.perf_counter() - start
        # All ranks computed the same; rank 0's word makes it so on machines that round differently.
        self._controller.load_state_dict(broadcast_object_list([self._controller.state_dict()])[0])
        for name, value in {**metrics, **self._rollout_metrics()}.items():
            self._metrics["train"][f"sagc/{name}"].append(float(value))

    def _decision_metrics(self, decision: Decision) -> dict[str, float]:
        if decision.infeasible and not self._warned_infeasible and self.args.group_size_schedule is None:
            self._warned_infeasible = True
            lowest = min(decision.risk.values())
            logger.warning(
                f"Every group size breaks the straggler budget: the lowest risk is {lowest:.2f}, the budget rho is "
                f"{self._controller.config.rho}. The least risky size is used. Raise rho or tau, or lower "
                "max_completion_length."
            )
        return {
            "group_size": self.num_generations,
            "straggler_rate": decision.straggler_rate,
            "straggler_rate_running": decision.straggler_rate_running,
            "queue": decision.queue,
            "utility": decision.utility[self.num_generations],
            "infeasible": float(decision.infeasible),
            **{f"risk_at_size/{size}": risk for size, risk in decision.risk.items()},
        }

    def _rollout_metrics(self) -> dict[str, float]:
        idle_tokens, idle_share = stall([one.lengths for one in self._rounds])
        metrics = {
            "budget": self._controller.config.rho,
            "stall_fraction": idle_share,
            "stall_tokens": idle_tokens,
            "rollouts": sum(one.lengths.size for one in self._rounds),
        }
        seconds = [one.seconds for one in self._rounds if one.seconds is not None]
        if seconds:
            metrics["stall_seconds"] = stall(seconds)[0]
            metrics["rollout_seconds"] = sum(float(one.max()) for one in seconds)
        return metrics

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
                **self._sampler_state(),
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
        self._load_sampler_state(state, self._resumed_mid_cycle)

    def _sampler_state(self) -> dict[str, Any]:
        """What a sampler adds to the checkpoint, as plain JSON types."""
        if self._budgets is None:
            return {}
        return {"budgets": {"groups": self._budgets.groups, "generation": self._budgets.generation}}

    def _load_sampler_state(self, state: dict[str, Any], mid_cycle: bool) -> None:
        """Restores it; `mid_cycle` when the batch of the checkpoint is going to be generated again."""
        if self._budgets is not None and "budgets" in state:
            self._budgets = replace(self._budgets, **state["budgets"])


def scheduled_size(schedule: list[int], sizes: Sequence[int], boundary: int, horizon: int) -> int:
    """
    Group size of a fixed schedule.

    Args:
        schedule (`list[int]`):
            One size, or the first and the last of a linear schedule.
        sizes (sequence of `int`):
            Feasible sizes, ascending.
        boundary (`int`):
            Generations so far.
        horizon (`int`):
            Generations in the run.

    Returns:
        `int`: the feasible size nearest to the line, the larger of two.
    """
    share = min(boundary / max(horizon - 1, 1), 1.0)
    wanted = schedule[0] + share * (schedule[-1] - schedule[0])
    return min(sizes, key=lambda size: (abs(size - wanted), -size))


def mean_event_rate(groups: Sequence[Round], event: StragglerEvent) -> tuple[float, float]:
    """Share of groups with a straggler event, and mean group size, of groups of several sizes."""
    events = [straggler_events(one.lengths, event, one.truncated) for one in groups]
    count = sum(len(one) for one in events)
    return sum(float(one.sum()) for one in events) / count, sum(one.lengths.size for one in groups) / count


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


class SAGCRLOOTrainer(SAGCMixin, RLOOTrainer):
    """
    [`~trl.RLOOTrainer`] whose group size follows a straggler budget.

    Takes the arguments of [`~trl.RLOOTrainer`], with `args` a [`SAGCRLOOConfig`], and `group_size_utility` as
    [`SAGCGRPOTrainer`] does.
    """

    _tag_names: ClassVar = ["trl", "rloo", "sagc"]
