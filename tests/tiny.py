"""A language model of a few thousand parameters with a tokenizer, made on the spot: trainer tests need no download."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainers import SAGCConfig, SAGCGRPOTrainer

torch.set_num_threads(1)  # matrices of 16 x 16: threads only wait for each other

WORDS = [f"w{i}" for i in range(29)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights: at each token the end comes with probability near 1 / 32, so lengths spread widely."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    )


def prompts(count: int = 24) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"w{i % 29} w{(3 * i) % 29}" for i in range(count)], "index": list(range(count))}
    )


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Reward: share of even words, so that groups differ."""
    words = [completion.split() for completion in completions]
    return [sum(w[1:].isdigit() and int(w[1:]) % 2 == 0 for w in row) / max(len(row), 1) for row in words]


def tiny_config(output_dir: Path | str, config_class: Any = SAGCConfig, **overrides: Any) -> Any:
    """Four prompts of up to 8 completions per generation, on the CPU."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 24,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    return config_class(output_dir=str(output_dir), **{**settings, **overrides})


def tiny_trainer(
    output_dir: Path | str,
    trainer_class: type = SAGCGRPOTrainer,
    arguments: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """`arguments` go to the trainer, `overrides` to its configuration."""
    defaults: dict[str, Any] = {
        "model": tiny_model(),
        "reward_funcs": even_words,
        "args": tiny_config(output_dir, **overrides),
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
    }
    return trainer_class(**{**defaults, **(arguments or {})})
