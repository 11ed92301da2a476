"""Configurations of the straggler-aware trainers."""

import math
from dataclasses import dataclass, field
from inspect import formatannotation
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from trl import GRPOConfig, RLOOConfig

from sagc import ControllerConfig, StragglerEvent

# The mixin is for the configuration of any trainer with groups: it is one to the type checker.
if TYPE_CHECKING:
    from trl import GRPOConfig as _Config
else:
    _Config = object


@dataclass
class SAGCArguments(_Config):
    r"""
    The parameters that straggler-aware group control adds to a TRL configuration.

    `num_generations` is the *largest* group size: together with the generation batch it fixes the number of prompts
    per generation, P = `generation_batch_size / num_generations`, and the controller chooses how many of up to
    `num_generations` completions each of them gets.

    Parameters:
        > Parameters that control the straggler budget

        rho (`float`, *optional*, defaults to `0.3`):
            Straggler budget: long-run average fraction of groups that may be straggler events, in (0, 1). Lower waits
            less and makes groups smaller.
        straggler_event (`str`, *optional*, defaults to `"ratio"`):
            What counts as an event: `"ratio"` (longest completion >= `tau` times the group's lower median, or the
            median itself cut off at `max_completion_length`), `"duration"` (the same with the seconds until each
            completion was finished instead of tokens; needs colocated vLLM, which reports them) or `"absolute"`
            (longest >= `straggler_length` tokens).
        tau (`float`, *optional*, defaults to `2.0`):
            Ratio of the `"ratio"` and `"duration"` events, above 1. At 2.0 half of the group idles for half of the
            time.
        straggler_length (`int`, *optional*):
            Tokens of the `"absolute"` event, at most `max_completion_length`.

        > Parameters that control the group size

        min_group_size (`int`, *optional*, defaults to `2`):
            Smallest group size, at least 2 (a group of one has no advantage). Equal to `num_generations`, the size is
            fixed and training is that of `GRPOTrainer`.
        utility (`str`, *optional*, defaults to `"log"`):
            Worth of a group of size G: `"log"` (log G), `"variance"` (1 - 1/G) or `"signal"` (chance that its rewards
            are not all equal, estimated online; for rewards with few distinct values).
        V (`float`, *optional*):
            Weight of the utility against the budget's queue. Defaults to 0.05 sqrt(number of generations in the run),
            divided by the spread of the utility over the sizes (`sagc.default_v`): larger follows the utility longer
            and meets the budget later.
        forgetting_factor (`float`, *optional*, defaults to `0.95`):
            Weight that the estimates of past generations keep at each new one, in (0, 1]. 0.95 remembers about 20
            generations; lower follows faster drift with more noise.
        change_every (`int`, *optional*, defaults to `1`):
            Generations between changes of the size. Raise it where a new batch shape is expensive (compiled models).

        > Baselines: other ways to spend rollouts, with the same metrics (docs/baselines.md)

        group_size_schedule (`list[int]`, *optional*):
            Sizes that follow a schedule instead of the controller: `[4]` is a static size, `[8, 2]` goes linearly from
            8 to 2 over the run. Each must be a feasible size.
        extra_rollouts (`int`, *optional*, defaults to `0`):
            Over-sampling: each group samples this many completions more than its size G, keeps the G that finish first
            and stops the others. Prefers short completions.
        adaptive_budgets (`bool`, *optional*, defaults to `False`):
            Per-prompt budgets in the manner of conformal rollout budgets: a prompt is sampled in rounds up to 2, 4, 8,
            ... completions and stops once the most frequent reward's share reaches a threshold calibrated by split
            conformal prediction.
        adaptive_miscoverage (`float`, *optional*, defaults to `0.1`):
            Chance that an adaptive budget may stop at a reward which is not the most frequent one of the full group,
            in (0, 1).
        length_sorted_batches (`bool`, *optional*, defaults to `False`):
            Sorts the completions of a generation by length before they are split into `steps_per_generation`
            micro-batches, and cuts each micro-batch to its own longest.

        > Parameters that control vLLM

        vllm_enable_prefix_caching (`bool`, *optional*):
            Whether colocated vLLM keeps the key-value cache of common prefixes. `None` leaves vLLM's default.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that one request to a vLLM server may take before training stops with an error.
    """

    rho: float = field(
        default=0.3,
        metadata={"help": "Straggler budget: average fraction of groups that may be straggler events, in (0, 1)."},
    )
    straggler_event: str = field(
        default="ratio",
        metadata={
            "help": "What counts as a straggler event: 'ratio' (longest >= tau * lower median), 'duration' (the same "
            "with seconds) or 'absolute' (longest >= straggler_length).",
            "choices": ["ratio", "duration", "absolute"],
        },
    )
    tau: float = field(default=2.0, metadata={"help": "Ratio of the 'ratio' and 'duration' events, above 1."})
    straggler_length: int | None = field(default=None, metadata={"help": "Tokens of the 'absolute' event."})
    min_group_size: int = field(
        default=2, metadata={"help": "Smallest group size, at least 2; num_generations is the largest."}
    )
    utility: str = field(
        default="log",
        metadata={"help": "Worth of a group size: log, variance or signal.", "choices": ["log", "variance", "signal"]},
    )
    V: float | None = field(
        default=None,
        metadata={"help": "Weight of the utility against the queue. None: set from the length of the run."},
    )
    forgetting_factor: float = field(
        default=0.95, metadata={"help": "Weight that past estimates keep at each new generation, in (0, 1]."}
    )
    change_every: int = field(default=1, metadata={"help": "Generations between changes of the group size."})
    group_size_schedule: list[int] | None = field(
        default=None,
        metadata={"help": "Sizes without the controller: one is static, two are the ends of a linear schedule."},
    )
    extra_rollouts: int = field(
        default=0, metadata={"help": "Over-sampling: completions per group beyond its size; the first to finish stay."}
    )
    adaptive_budgets: bool = field(
        default=False, metadata={"help": "Per-prompt budgets in the manner of conformal rollout budgets."}
    )
    adaptive_miscoverage: float = field(
        default=0.1, metadata={"help": "Chance that an adaptive budget may stop too early, in (0, 1)."}
    )
    length_sorted_batches: bool = field(
        default=False, metadata={"help": "Sort a generation's completions by length before splitting micro-batches."}
    )
    vllm_enable_prefix_caching: bool | None = field(
        default=None, metadata={"help": "Prefix caching of colocated vLLM. None: vLLM's default."}
    )
    vllm_request_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that one request to a vLLM server may take."}
    )

    def __post_init__(self) -> None:
        _check_types(self)
        super().__post_init__()
        self._check_batch()
        self._check_event()
        self._check_baselines()
        # Checks the remaining parameters; the trainer builds its own with the run's V.
        self.controller_config(1.0 if self.V is None else self.V)

    def _check_event(self) -> None:
        if self.straggler_event == "duration" and not (self.use_vllm and self.vllm_mode == "colocate"):
            raise ValueError(
                "straggler_event='duration' needs the time at which each completion finished, which only colocated "
                "vLLM reports. Set use_vllm=True and vllm_mode='colocate', or straggler_event='ratio'."
            )
        if self.straggler_event == "absolute":
            if (self.straggler_length or 0) > self.max_completion_length:
                raise ValueError(
                    f"straggler_length ({self.straggler_length}) is above max_completion_length "
                    f"({self.max_completion_length}): no completion could reach it. Lower straggler_length."
                )
        elif self.straggler_length is not None:
            raise ValueError(
                f"straggler_length={self.straggler_length} has no effect with straggler_event="
                f"'{self.straggler_event}'. Set straggler_event='absolute', or leave straggler_length out."
            )

    def _check_baselines(self) -> None:
        schedule = self.group_size_schedule
        if schedule is not None and not (1 <= len(schedule) <= 2 and set(schedule) <= set(self.group_sizes)):
            raise ValueError(
                f"group_size_schedule must hold one size (static) or two (start and end of a linear schedule) out of "
                f"the feasible sizes {self.group_sizes}, got {schedule}."
            )
        if self.extra_rollouts < 0:
            raise ValueError(f"extra_rollouts must be at least 0, got {self.extra_rollouts}.")
        if self.extra_rollouts and self.use_vllm and self.vllm_mode == "server":
            raise ValueError(
                "extra_rollouts cannot stop completions on a vLLM server, so it would save no time. Set "
                "vllm_mode='colocate' or extra_rollouts=0."
            )
        if self.extra_rollouts and self.use_transformers_continuous_batching:
            raise ValueError(
                "extra_rollouts cannot stop completions under continuous batching. Set "
                "use_transformers_continuous_batching=False or extra_rollouts=0."
            )
        if not 0 < self.adaptive_miscoverage < 1:
            raise ValueError(f"adaptive_miscoverage must lie in (0, 1), got {self.adaptive_miscoverage}.")
        if self.adaptive_budgets and (schedule is not None or self.extra_rollouts):
            raise ValueError(
                "adaptive_budgets gives each prompt its own number of completions: group_size_schedule and "
                "extra_rollouts must not be set with it."
            )
        if self.vllm_request_timeout <= 0:
            raise ValueError(f"vllm_request_timeout must be positive, got {self.vllm_request_timeout} seconds.")

    def _check_batch(self) -> None:
        if self.min_group_size < 2:
            raise ValueError(
                f"min_group_size must be at least 2, got {self.min_group_size}: a group of one has no advantage."
            )
        if self.min_group_size > self.num_generations:
            raise ValueError(
                f"min_group_size ({self.min_group_size}) is above num_generations ({self.num_generations}), the "
                "largest group size. Lower min_group_size or raise num_generations."
            )
        prompts = self.generation_batch_size // self.num_generations
        if prompts % self.world_size != 0:
            raise ValueError(
                f"Whole groups live on one process, so the prompts per generation, generation_batch_size / "
                f"num_generations = {self.generation_batch_size} / {self.num_generations} = {prompts}, must be a "
                f"multiple of the number of processes ({self.world_size}). Change per_device_train_batch_size, "
                "steps_per_generation or num_generations."
            )
        if self.accelerator_config.split_batches and self.world_size > 1:
            raise ValueError(
                "accelerator_config.split_batches=True is not supported on several processes: it would split the "
                "prompts of each process again. Set it to False."
            )
        if self.min_group_size < self.num_generations and len(self.group_sizes) < 2:
            raise ValueError(
                f"No group size from min_group_size ({self.min_group_size}) to below num_generations "
                f"({self.num_generations}) fits: {self.prompts_per_process} prompts per process times the group size "
                f"must be a multiple of steps_per_generation ({self.steps_per_generation}). Lower "
                "steps_per_generation, raise per_device_train_batch_size, or set min_group_size equal to "
                "num_generations to fix the size."
            )

    @property
    def prompts_per_process(self) -> int:
        """Prompts of each process in one generation batch."""
        return int(self.generation_batch_size // self.num_generations // self.world_size)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that split evenly into `steps_per_generation` micro-batches, ascending."""
        return tuple(
            size
            for size in range(self.min_group_size, self.num_generations + 1)
            if (self.prompts_per_process * size) % self.steps_per_generation == 0
        )

    def controller_config(self, v: float) -> ControllerConfig:
        """
        Parameters of the controller.

        Args:
            v (`float`):
                Weight of the utility.

        Returns:
            [`~sagc.ControllerConfig`]

        Raises:
            `ValueError`: If a parameter lies outside its range.
        """
        event = StragglerEvent(
            kind=self.straggler_event,  # type: ignore[arg-type]  # checked by StragglerEvent
            tau=self.tau,
            length=None if self.straggler_length is None else float(self.straggler_length),
        )
        return ControllerConfig(
            sizes=self.group_sizes,
            rho=self.rho,
            event=event,
            v=v,
            utility=self.utility,
            forgetting_factor=self.forgetting_factor,
            change_every=self.change_every,
        )

    def decision_horizon(self, num_prompts: int | None) -> int:
        """
        Number of generation batches in the run.

        Args:
            num_prompts (`int`, *optional*):
                Size of the training set; None for a stream without a length.

        Returns:
            `int`: at least 1.

        Raises:
            `ValueError`: If the run's length is unknown, or the training set is smaller than one generation batch.
        """
        prompts = self.generation_batch_size // self.num_generations
        if num_prompts is not None and num_prompts < prompts:
            raise ValueError(
                f"train_dataset has {num_prompts} prompts, fewer than the {prompts} of one generation batch "
                f"(generation_batch_size / num_generations = {self.generation_batch_size} / {self.num_generations}). "
                "Use more prompts or a smaller batch."
            )
        if self.max_steps > 0:
            micro_batches = self.max_steps * self.gradient_accumulation_steps
            return math.ceil(micro_batches / (self.steps_per_generation * self.num_iterations))
        if num_prompts is None:
            raise ValueError("train_dataset has no length (it is iterable): set max_steps to a positive number.")
        return max(1, math.ceil(self.num_train_epochs * (num_prompts // prompts)))


def _check_types(config: SAGCArguments) -> None:
    """A value of the wrong type, such as a number in quotes, is named before it can fail somewhere else."""
    for name, kind in SAGCArguments.__annotations__.items():  # a parser changes what `fields` would tell
        value = getattr(config, name)
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if not any(_is_a(value, one) for one in kinds):
            raise ValueError(f"{name} must be of type {formatannotation(kind)}, got {value!r}.")


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(entry, get_args(kind)[0]) for entry in value)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass
class SAGCConfig(SAGCArguments, GRPOConfig):
    """
    Configuration class for the [`SAGCGRPOTrainer`].

    Takes every parameter of [`~trl.GRPOConfig`] and those of [`SAGCArguments`].
    """


@dataclass
class SAGCRLOOConfig(SAGCArguments, RLOOConfig):
    """
    Configuration class for [`~trl.RLOOTrainer`] with straggler-aware group control.

    Takes every parameter of [`~trl.RLOOConfig`] and those of [`SAGCArguments`].
    """
