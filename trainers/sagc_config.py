"""Configuration of the straggler-aware GRPO trainer."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from sagc import ControllerConfig, StragglerEvent


@dataclass
class SAGCConfig(GRPOConfig):
    r"""
    Configuration class for the [`SAGCGRPOTrainer`].

    Only the parameters specific to straggler-aware group control are listed here; for the others see
    [`~trl.GRPOConfig`]. `num_generations` is the *largest* group size: together with the generation batch it fixes the
    number of prompts per generation, P = `generation_batch_size / num_generations`, and the controller chooses how
    many of up to `num_generations` completions each of them gets.

    Parameters:
        > Parameters that control the straggler budget

        rho (`float`, *optional*, defaults to `0.3`):
            Straggler budget: long-run average fraction of groups that may be straggler events, in (0, 1). Lower waits
            less and makes groups smaller.
        straggler_event (`str`, *optional*, defaults to `"ratio"`):
            What counts as an event: `"ratio"` (longest completion >= `tau` times the group's lower median, or the
            median itself cut off at `max_completion_length`) or `"absolute"` (longest >= `straggler_length` tokens).
        tau (`float`, *optional*, defaults to `2.0`):
            Ratio of the `"ratio"` event, above 1. At 2.0 half of the group idles for half of the time.
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
    """

    rho: float = field(
        default=0.3,
        metadata={"help": "Straggler budget: average fraction of groups that may be straggler events, in (0, 1)."},
    )
    straggler_event: str = field(
        default="ratio",
        metadata={
            "help": "What counts as a straggler event: 'ratio' (longest >= tau * lower median) or 'absolute' "
            "(longest >= straggler_length).",
            "choices": ["ratio", "absolute"],
        },
    )
    tau: float = field(default=2.0, metadata={"help": "Ratio of the 'ratio' event, above 1."})
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_batch()
        if self.straggler_event == "absolute" and (self.straggler_length or 0) > self.max_completion_length:
            raise ValueError(
                f"straggler_length ({self.straggler_length}) is above max_completion_length "
                f"({self.max_completion_length}): no completion could reach it. Lower straggler_length."
            )
        # Checks the remaining parameters; the trainer builds its own with the run's V.
        self.controller_config(1.0 if self.V is None else self.V)

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
