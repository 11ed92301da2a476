"""Configuration of the straggler-aware DAPO trainer."""

from dataclasses import dataclass, field

from .sagc_config import SAGCConfig


@dataclass
class SAGCDAPOConfig(SAGCConfig):
    r"""
    Configuration class for the [`SAGCDAPOTrainer`].

    Takes every parameter of [`SAGCConfig`], and sets or adds what DAPO ([DAPO: An Open-Source LLM Reinforcement
    Learning System at Scale](https://huggingface.co/papers/2503.14476)) consists of. Each part can be switched off.

    Parameters:
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Clip-higher (section 3.1): upper clipping range of the probability ratio. `None` clips symmetrically, with
            `epsilon` on both sides.
        loss_type (`str`, *optional*, defaults to `"dapo"`):
            Token-level loss (section 3.3): `"dapo"` gives each token of the batch the same weight; `"grpo"` gives each
            completion the same weight.
        dynamic_sampling (`bool`, *optional*, defaults to `True`):
            Dynamic sampling (section 3.2): groups whose rewards are all equal have no gradient; they are dropped and
            replaced by groups of further prompts.
        max_refills (`int`, *optional*, defaults to `4`):
            Most rounds of replacements for one batch, at least 0. A batch that is still not full then trains on the
            groups it has. Each refill waits for its own longest completion.
        overlong_buffer (`int`, *optional*):
            Soft overlong punishment (section 3.4): completions that enter the last `overlong_buffer` tokens before
            `max_completion_length` lose reward, linearly to `overlong_penalty` at the limit. `None` switches it off.
            `mask_truncated_completions=True` is the overlong filtering of the same section.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Largest punishment, in units of the reward.
    """

    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Clip-higher: upper clipping range. None: epsilon on both sides."}
    )
    loss_type: str = field(
        default="dapo", metadata={"help": "'dapo': each token has the same weight; 'grpo': each completion."}
    )
    dynamic_sampling: bool = field(
        default=True, metadata={"help": "Replace groups whose rewards are all equal by groups of further prompts."}
    )
    max_refills: int = field(default=4, metadata={"help": "Most rounds of replacements for one batch."})
    overlong_buffer: int | None = field(
        default=None, metadata={"help": "Tokens before max_completion_length over which the reward is lowered."}
    )
    overlong_penalty: float = field(default=1.0, metadata={"help": "Largest overlong punishment."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_refills < 0:
            raise ValueError(f"max_refills must be at least 0, got {self.max_refills}.")
        if self.overlong_buffer is not None and not 0 < self.overlong_buffer <= self.max_completion_length:
            raise ValueError(
                f"overlong_buffer must lie in 1 to max_completion_length ({self.max_completion_length}), got "
                f"{self.overlong_buffer}. Leave it out to switch the punishment off."
            )
        if self.overlong_penalty <= 0:
            raise ValueError(
                f"overlong_penalty must be positive, got {self.overlong_penalty}. To switch the punishment off, leave "
                "overlong_buffer out."
            )
        if self.dynamic_sampling and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "dynamic_sampling drops groups whose summed rewards are equal, but multi_objective_aggregation="
                f"'{self.multi_objective_aggregation}' gives them an advantage. Set it to 'sum_then_normalize', or "
                "dynamic_sampling=False."
            )
        if self.dynamic_sampling and self.adaptive_budgets:
            raise ValueError("dynamic_sampling and adaptive_budgets exclude each other. Switch one of them off.")
