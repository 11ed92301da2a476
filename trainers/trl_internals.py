"""Everything of TRL that is not public API and that the trainers touch, in one place.

`tests/test_trl_internals.py` checks each entry against the installed TRL and names the one that changed. When a new
TRL fails there, mend the trainers, then raise `TESTED_TRL`.

Overridden methods of `GRPOTrainer` and `RLOOTrainer` (each calls `super()` unless said otherwise):

| method | why |
|---|---|
| `get_train_dataloader` | the loader's batch is in prompts, not rows (replaces TRL's) |
| `_get_train_sampler` | each prompt once instead of `num_generations` times (replaces TRL's) |
| `_generate_and_score_completions` | repeats the prompts G times, then observes the batch |
| `_generate` | reads the completions' lengths and truncation; answers from known ones when sampling in rounds |
| `_generate_single_turn` | reads finish times; samples more rows than are kept (over-sampling) |
| `_calculate_rewards` | reads the rewards; answers from known ones as `_generate` does |
| `_prepare_inputs` | sorts the micro-batches by length |
| `_save_checkpoint`, `_load_optimizer_and_scheduler` | carry the controller's state |

Attributes: `num_generations` is written before each generation; `_step` is restored and `_buffered_inputs` dropped on
resume, so that the phase within a generation cycle is right; `_metrics` takes our metrics; `_logs`, the buffer of the
completions table, is emptied before each generation (TRL sizes it for the largest group, so a smaller one would leave
rows of the batch before); `_pending_extra_logs`, the columns that reward functions log, is carried from the rounds to
the batch; `_buffered_inputs`, the micro-batches, is sorted; `reward_weights`, `num_iterations`, `eos_token_ids`,
`shuffle_dataset`, `model_wrapped`, `tools` and `rollout_func` (GRPO) and `_tokenizer` are read.

vLLM on CPU needs a few more names; they are listed in `trainers/vllm_cpu.py`, which alone touches them.
"""

import warnings

import trl
from packaging.specifiers import SpecifierSet
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset

__all__ = ["TESTED_TRL", "RepeatSampler", "repeat_iterable_dataset", "warn_if_untested"]

TESTED_TRL = SpecifierSet(">=1.16,<1.17")

OVERRIDDEN_METHODS = {
    "get_train_dataloader": ["self"],
    "_get_train_sampler": ["self", "dataset"],
    "_get_dataloader": ["self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate": ["self", "prompts"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_prepare_inputs": ["self", "generation_batch"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_get_output_dir": ["self", "trial"],
}

# RLOOTrainer differs here: it has neither tools nor log probabilities of the engine.
RLOO_METHODS = OVERRIDDEN_METHODS | {"_generate_single_turn": ["self", "prompt_ids", "images", "multimodal_fields"]}

ATTRIBUTES = (
    "num_generations",
    "num_iterations",
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_logs",
    "reward_weights",
    "eos_token_ids",
    "shuffle_dataset",
    "_tokenizer",
    "_pending_extra_logs",
    "model_wrapped",
)

GRPO_ATTRIBUTES = ("tools", "rollout_func")


def warn_if_untested(installed: str = trl.__version__) -> None:
    """
    Warns once when the installed TRL lies outside the range that the trainers were tested with.

    Args:
        installed (`str`, *optional*):
            Version of TRL. Defaults to the installed one.
    """
    if not TESTED_TRL.contains(installed, prereleases=True):
        warnings.warn(
            f"TRL {installed} is installed, but these trainers were tested with TRL {TESTED_TRL} only. If something "
            f'fails, install a tested one: pip install "trl{TESTED_TRL}".',
            UserWarning,
            stacklevel=2,
        )
