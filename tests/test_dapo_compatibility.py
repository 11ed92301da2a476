"""What DAPO with dynamic sampling can be combined with. docs/compatibility.md names each test."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from tiny import even_words, prompts, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl.chat_template_utils import qwen2_5_chat_template

from trainers import SAGCDAPOConfig, SAGCDAPOTrainer

# A budget that the first batch breaks, so that the second one has smaller groups.
BINDING = {"rho": 0.05, "tau": 1.5, "V": 0.01, "max_steps": 3, "max_refills": 2}


def some_hopeless(completions: list[str], index: list[int], **_: Any) -> list[float]:
    """Every second prompt has the same reward whatever the completion, so that its groups are dropped."""
    return [0.0 if i % 2 else reward for reward, i in zip(even_words(completions), index, strict=True)]


def dapo(output_dir: Path, **settings: Any) -> Any:
    """Names that are arguments of the trainer go to it, all others to its configuration."""
    names = {"reward_funcs", "reward_processing_classes", "eval_dataset", "peft_config", "processing_class", "tools"}
    arguments = {name: settings.pop(name) for name in list(settings) if name in {*names, "environment_factory"}}
    arguments = {"reward_funcs": some_hopeless, **arguments}
    return tiny_trainer(output_dir, SAGCDAPOTrainer, arguments, config_class=SAGCDAPOConfig, **BINDING, **settings)


def trained(output_dir: Path, **settings: Any) -> Any:
    trainer = dapo(output_dir, **settings)
    trainer.train()
    log = train_log(trainer)
    assert all(entry["dapo/kept_fraction"] < 1 for entry in log), "groups are dropped"
    assert all(entry["dapo/refills"] > 0 for entry in log), "and replaced"
    assert log[-1]["sagc/group_size"] < log[0]["sagc/group_size"] == 8
    return trainer


def train_log(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "sagc/group_size" in entry]


def table(output_dir: Path, step: int) -> pd.DataFrame:
    return pd.read_parquet(output_dir / "completions" / f"completions_{step:05d}.parquet")


def test_gradient_checkpointing_gives_the_same_weights(tmp_path: Path) -> None:
    ours, theirs = (trained(tmp_path / str(value), gradient_checkpointing=value) for value in (True, False))
    assert ours.model.is_gradient_checkpointing
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_lora(tmp_path: Path) -> None:
    trainer = trained(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], r=4), learning_rate=0.1)
    weights = dict(trainer.model.named_parameters())
    assert max(weight.abs().max() for name, weight in weights.items() if "lora_B" in name) > 0
    original = dict(tiny_model().named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"].equal(original)


def test_reward_model_async_reward_and_overlong_punishment(tmp_path: Path) -> None:
    """Each column of the trained rows is that of its own reward; the selection follows the one that has a weight."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_labels=1, pad_token_id=0)
    model, tokenizer = LlamaForSequenceClassification(config).eval(), tiny_tokenizer()

    async def later(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return some_hopeless(completions, index)

    trained(
        tmp_path,
        reward_funcs=[model, later],
        reward_processing_classes=[tokenizer, None],
        reward_weights=[0.0, 1.0],
        overlong_buffer=20,
        log_completions=True,
    )
    for step in (1, 2, 3):
        rows = table(tmp_path, step)
        fixed = ["step", "prompt", "completion", "advantage", "later"]
        punished, scored = sorted(set(rows.columns) - set(fixed), key=lambda name: "overlong" not in name)
        assert rows["later"].tolist() == pytest.approx(even_words(rows["completion"].tolist()))
        for row in rows.to_dict("records"):
            ids = tokenizer(row["prompt"] + row["completion"], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert model(ids).logits.item() == pytest.approx(row[scored], abs=1e-4)
        assert rows[punished].between(-1, 0).all()
        assert rows[punished].min() < 0


def test_evaluation_during_training(tmp_path: Path) -> None:
    """Evaluation has its own group size, drops nothing, and takes no prompt from the stream."""
    seen: list[tuple[bool, list[int]]] = []

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        seen.append((trainer.model.training, index))
        return some_hopeless(completions, index)

    trainer = dapo(
        tmp_path,
        reward_funcs=reward,
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=4,
        per_device_eval_batch_size=16,
    )
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 3
    assert not any("sagc" in key or "dapo" in key for entry in evaluations for key in entry)
    assert [Counter(index) for training, index in seen if not training] == [Counter(dict.fromkeys(range(4), 4))] * 3
    sampled = [i for training, index in seen if training for i in dict.fromkeys(index)]
    assert sorted(sampled[:24]) == list(range(24)), "each prompt once in the first epoch"
    assert trainer.group_size_controller.state.boundary == 3


class Adding:
    """An environment with one tool."""

    def reset(self, **_: Any) -> str:
        return ""

    def add(self, number: int) -> int:
        """
        Adds one.

        Args:
            number: The number.

        Returns:
            One more.
        """
        return number + 1


def add(number: int) -> int:
    """
    Adds one.

    Args:
        number: The number.

    Returns:
        One more.
    """
    return number + 1


@pytest.mark.parametrize(
    "arguments", [{"tools": [add]}, {"environment_factory": Adding}], ids=["tools", "environments"]
)
def test_tools_and_environments_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen2_5_chat_template
    given = {"processing_class": tokenizer, **arguments}
    with pytest.raises(ValueError, match="dynamic_sampling does not work with tools, environments"):
        dapo(tmp_path, **given)
    dapo(tmp_path, dynamic_sampling=False, **given)
