"""What GRPOTrainer can be combined with, on group sizes that change. docs/compatibility.md names each test."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tiny import even_words, prompts, tiny_model, tiny_tokenizer, tiny_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from trainers import SAGCGRPOTrainer, SAGCMixin

# A budget that the first generation breaks, so that the second one has smaller groups.
BINDING = {"min_group_size": 2, "num_generations": 8, "rho": 0.05, "tau": 1.5, "V": 0.01, "max_steps": 2}


class Counting(SAGCGRPOTrainer):
    """Writes down the batches that it generates and the rows that it trains on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.trained: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append({**output, "size": self.num_generations, "inputs": inputs})
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            self.trained.append(len(inputs["completion_ids"]))
        return super()._compute_loss(model, inputs)


def train_log(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def sizes(trainer: Any) -> list[int]:
    return [int(entry["sagc/group_size"]) for entry in train_log(trainer) if "sagc/group_size" in entry]


def run(tmp_path: Path, trainer_class: type = Counting, /, **settings: Any) -> Any:
    """A trained trainer; names that are arguments of the trainer go to it, all others to its configuration."""
    names = {"model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "peft_config", "tools"}
    names |= {"rollout_func", "environment_factory", "reward_processing_classes", "callbacks"}
    arguments = {name: settings.pop(name) for name in list(settings) if name in names}
    trainer = tiny_trainer(tmp_path, trainer_class, arguments, **{**BINDING, **settings})
    trainer.train()
    return trainer


def assert_controlled(trainer: Any, prompts_per_batch: int = 4) -> None:
    """The size went down, and generated, trained and counted rows are those of the size."""
    assert sizes(trainer)[0] == 8
    assert sizes(trainer)[1] < 8
    rows = [prompts_per_batch * size for size in sizes(trainer)]
    assert [len(batch["completion_ids"]) for batch in trainer.batches] == rows
    assert sum(trainer.trained) == sum(rows) * trainer.num_iterations
    assert [e["sagc/rollouts"] for e in train_log(trainer) if "sagc/rollouts" in e] == rows
    for batch in trainer.batches:  # groups: the advantages of each add up to zero
        grouped = batch["advantages"].reshape(-1, batch["size"])
        assert grouped.sum(dim=1).abs().max() < 1e-3
        assert grouped.abs().sum() > 0


def test_lora(tmp_path: Path) -> None:
    """Only the adapter is trained, and it is."""
    trainer = run(tmp_path, peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=4), learning_rate=0.1)
    assert_controlled(trainer)
    before, after = tiny_model(), trainer.model
    for name, weight in before.named_parameters():
        wrapped = f"base_model.model.{name}".replace("proj.weight", "proj.base_layer.weight")
        found = dict(after.named_parameters())
        assert found.get(wrapped, found.get(f"base_model.model.{name}")).equal(weight)
    assert max(p.abs().max() for n, p in after.named_parameters() if "lora_B" in n) > 0


def test_gradient_checkpointing_gives_the_same_gradient(tmp_path: Path) -> None:
    with_it, without = (
        run(tmp_path / str(value), gradient_checkpointing=value, max_steps=2) for value in (True, False)
    )
    assert with_it.model.is_gradient_checkpointing
    assert not without.model.is_gradient_checkpointing
    assert_controlled(with_it)
    for ours, theirs in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_steps_per_generation_and_num_iterations(tmp_path: Path) -> None:
    """Two micro-batches used twice: the batch is generated once, split evenly, and each row is trained on twice."""
    trainer = run(tmp_path, per_device_train_batch_size=16, steps_per_generation=2, num_iterations=2, max_steps=8)
    assert_controlled(trainer)
    assert trainer.trained == [2 * size for size in sizes(trainer) for _ in range(4)]


def test_iterable_dataset(tmp_path: Path) -> None:
    """A stream without a length: each prompt comes once, in whole groups."""
    seen: list[int] = []

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        seen.extend(index)
        return even_words(completions)

    stream = IterableDataset.from_generator(lambda: iter(prompts(24)))
    trainer = run(tmp_path, train_dataset=stream, reward_funcs=reward, max_steps=6)
    assert_controlled(trainer)
    expected = Counter()
    for batch in trainer.batches:
        expected.update({row["index"]: batch["size"] for row in batch["inputs"]})
    assert Counter(seen) == expected
    assert len(expected) == 24


def test_several_rewards_with_weights(tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [len(completion) / 100 for completion in completions]

    trainer = run(tmp_path, reward_funcs=[even_words, length], reward_weights=[0.25, 2.0])
    assert_controlled(trainer)
    for entry in train_log(trainer):
        expected = 0.25 * entry["rewards/even_words/mean"] + 2.0 * entry["rewards/length/mean"]
        assert entry["reward"] == pytest.approx(expected, rel=1e-5)
        assert entry["rewards/length/mean"] > 0


def test_async_reward(tmp_path: Path) -> None:
    calls: list[int] = []

    async def later(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return even_words(completions)

    trainer = run(tmp_path, reward_funcs=[later, even_words])
    assert_controlled(trainer)
    assert calls == [4 * size for size in sizes(trainer)]
    for entry in train_log(trainer):
        assert entry["rewards/later/mean"] == entry["rewards/even_words/mean"]


def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config).eval()


def test_reward_model(tmp_path: Path) -> None:
    """The rewards are the model's own scores of prompt and completion, row by row."""
    model, tokenizer = reward_model(), tiny_tokenizer()
    trainer = run(tmp_path, reward_funcs=model, reward_processing_classes=tokenizer, log_completions=True, max_steps=3)
    assert_controlled(trainer)
    for step, size in enumerate(sizes(trainer), start=1):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        (column,) = set(table.columns) - {"step", "prompt", "completion", "advantage"}
        assert len(table) == 4 * size
        for row in table.to_dict("records"):
            ids = tokenizer(row["prompt"] + row["completion"], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert model(ids).logits.item() == pytest.approx(row[column], abs=1e-4)


# --- Tools and environments: a byte-level tokenizer that can write Qwen's template, and scripted answers


def byte_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=specials[1:2]
    )
    fast.chat_template = qwen2_5_chat_template
    return fast


def byte_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=2048,
            pad_token_id=0,
            eos_token_id=2,
            bos_token_id=2,
        )
    )


class ScriptedTurns(GRPOTrainer):
    """
    Says what a trained model would: every second completion calls a tool and then answers with what it returned,
    others answer at once. Answers have lengths of their own, so that some groups straggle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.trained: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        texts = []
        for row, ids in enumerate(prompt_ids):
            prompt = self._tokenizer.decode(ids)
            if "<tool_response>" in prompt:
                result = prompt.split("<tool_response>\n")[-1].split("\n")[0]
                texts.append(f"It is {result}." + "!" * (5 * row % 17))
            elif row % 2 == 0:
                question = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
                number = "".join(filter(str.isdigit, question)) or "0"
                texts.append(f'<tool_call>\n{{"name": "double", "arguments": {{"number": {number}}}}}\n</tool_call>')
            else:
                texts.append("?" * (1 + 7 * row % 23))
        return [self._tokenizer(text + "<|im_end|>")["input_ids"] for text in texts], None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.batches.append({**output, "size": self.num_generations, "inputs": inputs})
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.trained.append(len(inputs["completion_ids"]))
        return super()._compute_loss(model, inputs)


class SAGCScriptedTurns(SAGCMixin, ScriptedTurns):
    pass


def questions(count: int = 24) -> Dataset:
    rows = [[{"role": "user", "content": f"Double {i}"}] for i in range(count)]
    return Dataset.from_dict({"prompt": rows, "index": list(range(count))})


def right_answer(completions: list[Any], index: list[int], **_: Any) -> list[float]:
    """1 where the answer holds twice the number of the row's own prompt."""
    return [float(f"is {2 * i}." in turns[-1]["content"]) for turns, i in zip(completions, index, strict=True)]


TOOL_SETTINGS = {"max_completion_length": 400, "rho": 0.05, "tau": 1.2, "V": 0.001}


def assert_tool_turns(trainer: Any) -> None:
    """Rows of a tool's answer are masked, and the controller counts only what the model wrote."""
    for batch, entry in zip(trainer.batches, train_log(trainer), strict=True):
        written = (batch["completion_mask"] * batch["tool_mask"]).sum(dim=1).float()
        whole = batch["completion_mask"].sum(dim=1)
        called = torch.arange(len(written)) % 2 == 0
        assert (whole[called] > written[called]).all()
        assert whole[~called].equal(written[~called].long())
        assert entry["completions/mean_length"] == pytest.approx(written.mean().item())
        assert entry["sagc/stall_fraction"] == pytest.approx(1 - (written.mean() / written.max()).item())
        assert entry["reward"] == 0.5, "exactly those that called the tool are right"


def test_tools(tmp_path: Path) -> None:
    calls: list[int] = []

    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        calls.append(number)
        return 2 * number

    trainer = run(
        tmp_path,
        SAGCScriptedTurns,
        model=byte_model(),
        processing_class=byte_tokenizer(),
        train_dataset=questions(),
        reward_funcs=right_answer,
        tools=[double],
        **TOOL_SETTINGS,
    )
    assert_controlled(trainer)
    assert_tool_turns(trainer)
    assert len(calls) == sum(len(batch["completion_ids"]) for batch in trainer.batches) / 2
    assert [entry["tools/call_frequency"] for entry in train_log(trainer)] == [0.5, 0.5]


class Doubling:
    """An environment: knows the row's number, has one tool, and owns the reward."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, index: int, **_: Any) -> str:
        self.index, self.called = index, False
        return f", please: {index}"

    def double(self, number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        assert str(number).endswith(str(self.index)), "each row has its own environment"
        self.called = True
        return 2 * self.index

    def get_reward(self) -> float:
        return float(self.called)


def test_environments(tmp_path: Path) -> None:
    Doubling.made = 0
    trainer = run(
        tmp_path,
        SAGCScriptedTurns,
        model=byte_model(),
        processing_class=byte_tokenizer(),
        train_dataset=questions(),
        reward_funcs=right_answer,
        environment_factory=Doubling,
        reward_weights=[0.0],
        **TOOL_SETTINGS,
    )
    assert_controlled(trainer)
    assert_tool_turns(trainer)
    assert Doubling.made == 32, "one for each row of the largest batch, reused in the next"
    for entry in train_log(trainer):
        assert entry["rewards/Doubling/mean"] == entry["rewards/right_answer/mean"] == 0.5


class OwnPrompt(Doubling):
    """Owns the data too: without a training set, `reset` is given an empty prompt."""

    made = 0

    def reset(self, **_: Any) -> str:
        return super().reset(index=type(self).made % 10)


def test_environment_that_owns_the_data(tmp_path: Path) -> None:
    trainer = run(
        tmp_path,
        SAGCScriptedTurns,
        model=byte_model(),
        processing_class=byte_tokenizer(),
        train_dataset=None,
        reward_funcs=None,
        environment_factory=OwnPrompt,
        **TOOL_SETTINGS,
    )
    assert_controlled(trainer)
    assert_tool_turns(trainer)


# --- Rollout functions


def rollouts(mask: bool, extra: bool, outside: int = 5) -> Any:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        lengths = [2 + (5 * i) % 11 for i in range(len(prompts))]
        output: dict[str, Any] = {
            "prompt_ids": [[3, 4] for _ in lengths],
            "completion_ids": [[3, 4] + [outside] * (n - 2) + [1] for n in lengths],
            "logprobs": [[-1.0] * (n + 1) for n in lengths],
        }
        if mask:  # all but the first two tokens come from outside
            output["env_mask"] = [[1, 1] + [0] * (n - 1) for n in lengths]
        if extra:
            output["row"] = list(range(len(prompts)))
            output["round"] = trainer.state.global_step
        return output

    return rollout


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "extra fields"])
def test_rollout_func(tmp_path: Path, extra: bool) -> None:
    fields: list[Any] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        fields.append((columns.get("row"), columns.get("round")))
        return [float(len(completion)) for completion in completions]

    trainer = run(tmp_path, rollout_func=rollouts(False, extra), reward_funcs=reward)
    assert_controlled(trainer)
    for step, (size, got) in enumerate(zip(sizes(trainer), fields, strict=True)):
        expected = (list(range(4 * size)), [step] * 4 * size) if extra else (None, None)
        assert got == expected
    for batch, entry in zip(trainer.batches, train_log(trainer), strict=True):
        lengths = batch["completion_mask"].sum(dim=1).float()
        assert entry["sagc/stall_fraction"] == pytest.approx(1 - (lengths.mean() / lengths.max()).item())


def test_rollout_func_with_env_mask(tmp_path: Path) -> None:
    """
    All rows have two tokens of the model's own: nothing straggles, and what follows them has no gradient, so other
    tokens in its place lead to the same weights.
    """

    def by_row(completions: list[str], row: list[int], **_: Any) -> list[float]:
        return [float(i % 3) for i in row]

    def weights(mask: bool, outside: int) -> list[torch.Tensor]:
        trainer = run(tmp_path, rollout_func=rollouts(mask, True, outside), reward_funcs=by_row, learning_rate=0.1)
        if mask:
            assert sizes(trainer) == [8, 8]
            assert [entry["sagc/straggler_rate"] for entry in train_log(trainer)] == [0, 0]
            assert [entry["completions/max_length"] for entry in train_log(trainer)] == [2, 2]
        return list(trainer.model.parameters())

    masked = weights(True, outside=5)
    assert all(ours.equal(theirs) for ours, theirs in zip(masked, weights(True, outside=6), strict=True))
    assert not all(ours.equal(theirs) for ours, theirs in zip(masked, tiny_model().parameters(), strict=True))
    assert not all(ours.equal(theirs) for ours, theirs in zip(masked, weights(False, outside=6), strict=True))


# --- Evaluation, resume, tables


def test_evaluation_during_training(tmp_path: Path) -> None:
    """Evaluation has its own group size and leaves the controller and the training's size alone."""
    seen: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append(prompts)
        return even_words(completions)

    common = {"max_steps": 4, "reward_funcs": reward}
    trainer = run(
        tmp_path / "with",
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=4,
        per_device_eval_batch_size=16,
        **common,
    )
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 4
    assert all("eval_reward" in entry for entry in evaluations)
    assert not any("sagc" in key for entry in evaluations for key in entry)
    assert [len(rows) for rows in seen[1::2]] == [16] * 4
    assert all(max(Counter(rows).values()) == 4 for rows in seen[1::2])
    assert_controlled(trainer)
    assert trainer.group_size_controller.state.boundary == 4


def test_resume(tmp_path: Path) -> None:
    common = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "whole", **common)
    resumed = tiny_trainer(tmp_path / "resumed", Counting, **{**BINDING, **common})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert len(set(sizes(whole))) > 1
    assert sizes(resumed) == sizes(whole)
    assert len(resumed.batches) == 3
    for ours, theirs in zip(resumed.batches, whole.batches[2:], strict=True):
        assert ours["completion_ids"].equal(theirs["completion_ids"])
        assert ours["advantages"].equal(theirs["advantages"])


def test_log_completions(tmp_path: Path) -> None:
    """The table of a step has its batch and nothing of the one before, with rewards and extra columns in place."""

    def reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("copy", list(completions))
        log_metric("rows", float(len(completions)))
        return even_words(completions)

    trainer = run(tmp_path, reward_funcs=reward, log_completions=True, max_steps=3)
    assert_controlled(trainer)
    for step, (batch, entry) in enumerate(zip(trainer.batches, train_log(trainer), strict=True), start=1):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert len(table) == entry["rows"] == 4 * batch["size"]
        assert table["copy"].tolist() == table["completion"].tolist()
        assert table["reward"].tolist() == pytest.approx(even_words(table["completion"].tolist()))
        assert table["advantage"].tolist() == pytest.approx(batch["advantages"].tolist())
        assert Counter(table["prompt"]) == Counter({row["prompt"]: batch["size"] for row in batch["inputs"]})
