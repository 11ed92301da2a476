"""Record how long a model's completions are: many of each prompt, as a trace for simulations (`sagc.trace`).

    python scripts/record_rollouts.py --config configs/rollout_trace.yaml --output rollouts.jsonl
    python scripts/record_rollouts.py --config configs/rollout_trace.yaml --output rollouts.jsonl --prompts 64

Samples with vLLM where it is installed, and else with transformers, which knows no finish times. An interrupted run
goes on where it was when the same command is given again. `sagc.trace` reads the file gzipped, too (`gzip -9n`).
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from trainers.demo import RewardFunction, embedded_model, reasoning_task

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Settings:
    """
    What to record. Fields of the configuration file; all but `tasks` are flags too.

    Args:
        tasks (`dict[str, dict]`):
            Names of `reasoning-gym` tasks and, for each, arguments of `trainers.demo.reasoning_task`: `system_prompt`,
            `prompt_suffix`, `examples` and the task's own options.
        model (`str`, *optional*, defaults to `"embedded"`):
            Model to sample from, as for `from_pretrained`.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Number type of its weights.
        prompts (`int`, *optional*, defaults to `32`):
            Prompts of each task.
        completions (`int`, *optional*, defaults to `32`):
            Completions of each prompt.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        max_tokens (`int`, *optional*, defaults to `512`):
            Length at which completions are cut off.
        prompts_per_batch (`int`, *optional*, defaults to `4`):
            Prompts sampled at once: all their completions start together.
        seed (`int`, *optional*, defaults to `0`):
            Seed of prompts and sampling.
    """

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: str = EMBEDDED
    dtype: str = "bfloat16"
    prompts: int = 32
    completions: int = 32
    temperature: float = 1.0
    max_tokens: int = 512
    prompts_per_batch: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tasks, dict) or not self.tasks:
            raise ValueError(f"tasks must be a mapping of at least one reasoning-gym task, got {self.tasks!r}.")
        for name, options in self.tasks.items():
            if not isinstance(options, dict) or options.keys() & {"name", "size", "seed"}:
                raise ValueError(
                    f"tasks: {name} must be a mapping of options ({{}} for none) without name, size and seed, got "
                    f"{options!r}. prompts is the number of prompts, seed is one for all."
                )
        if self.completions < 2:
            raise ValueError(f"completions must be at least 2, got {self.completions}: a group has more than one.")
        for name in ("prompts", "max_tokens", "prompts_per_batch", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample from."""

    task: str
    index: int
    token_ids: list[int]

    @property
    def name(self) -> str:
        """Its `prompt_id` in the trace."""
        return f"{self.task}/{self.index}"


@dataclass(frozen=True)
class Completion:
    """What is kept of a completion; `seconds` is None where the engine does not tell."""

    text: str
    length: int
    truncated: bool
    seconds: float | None


Sampler = Callable[[list[list[int]], int], list[Completion]]  # of token ids, one list for each row, and a seed


def parse(argv: list[str] | None) -> tuple[Settings, Path]:
    """Settings, from the file and then from flags, and the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="YAML file with the fields of `Settings`")
    parser.add_argument("--output", type=Path, required=True, help="trace to write or to go on with: a .jsonl file")
    scalars = [item for item in fields(Settings) if item.name != "tasks"]
    for item in scalars:
        parser.add_argument(f"--{item.name}", type=type(item.default), help=f"default: {item.default}")
    arguments = parser.parse_args(argv)
    if arguments.output.suffix != ".jsonl":
        raise ValueError(f"--output must be a .jsonl file, got {arguments.output}. Compress it when it is complete.")
    given = yaml.safe_load(arguments.config.read_text())
    known = {item.name for item in fields(Settings)}
    if not isinstance(given, dict) or given.keys() - known:
        wrong = sorted(given.keys() - known) if isinstance(given, dict) else given
        raise ValueError(f"{arguments.config} must be a mapping with keys out of {sorted(known)}, got {wrong}.")
    flags = {item.name: getattr(arguments, item.name) for item in scalars}
    settings = {**given, **{name: value for name, value in flags.items() if value is not None}}
    for item in scalars:
        value = settings.get(item.name, item.default)
        if type(value) is not type(item.default) and (type(value), type(item.default)) != (int, float):
            raise ValueError(f"{item.name} must be of type {type(item.default).__name__}, got {value!r}.")
    return Settings(**settings), arguments.output


def build_prompts(settings: Settings, tokenizer: Any) -> tuple[list[Prompt], dict[str, RewardFunction]]:
    """All prompts, task after task, and the rewards of the tasks."""
    prompts: list[Prompt] = []
    rewards = {}
    for name, options in settings.tasks.items():
        dataset, rewards[name] = reasoning_task(name, settings.prompts, settings.seed, **options)
        for index, messages in enumerate(dataset["prompt"]):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            prompts.append(Prompt(name, index, ids))
    return prompts, rewards


def engine_name() -> str:
    """vLLM if it is installed, else transformers, with its version."""
    if find_spec("vllm") is None:
        return f"transformers {version('transformers')}"
    # In this process, so that its random numbers can be seeded.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    return f"vllm {vllm.__version__}"


def vllm_sampler(settings: Settings, model: str, longest: int) -> Sampler:
    """Samples with vLLM; on a CPU with a fixed cache."""
    import torch
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    from trainers.vllm_cpu import KV_CACHE_BYTES
    from trainers.vllm_rollouts import rollout_llm

    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES} if current_platform.is_cpu() else {}
    llm = rollout_llm(
        model=model,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=longest + settings.max_tokens,
        max_num_seqs=settings.prompts_per_batch * settings.completions,
        **on_cpu,
    )
    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)

    def sample(rows: list[list[int]], seed: int) -> list[Completion]:
        torch.manual_seed(seed)  # not a seed for each request: vLLM 0.32 fails on those on a CPU
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in rows], sampling, use_tqdm=False)
        return [
            Completion(one.text, len(one.token_ids), one.finish_reason == "length", round(seconds, 4))
            for one, seconds in zip((output.outputs[0] for output in outputs), llm.finish_seconds, strict=True)
        ]

    return sample


def transformers_sampler(settings: Settings, model: str, tokenizer: Any) -> Sampler:
    """Samples with transformers, on a GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = AutoModelForCausalLM.from_pretrained(model, dtype=settings.dtype).to(device).eval()
    eos = network.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    generation = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        max_new_tokens=settings.max_tokens,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
    )

    def sample(rows: list[list[int]], seed: int) -> list[Completion]:
        torch.manual_seed(seed)
        inputs = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(device)
        with torch.no_grad():
            output = network.generate(**inputs, generation_config=generation)
        completions = []
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            length = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
            text = tokenizer.decode(ids[:length], skip_special_tokens=True)
            completions.append(Completion(text, length, ids[length - 1] not in ends, None))
        return completions

    return sample


def provenance(settings: Settings, engine: str) -> dict[str, Any]:
    """How the trace was made; `settings` and `engine` must not change when a run goes on."""
    packages = ("torch", "transformers", "reasoning-gym")
    return {
        "settings": asdict(settings),
        "engine": engine,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def begin(output: Path, made_by: dict[str, Any]) -> set[str]:
    """Writes the first line, or reads which prompts are recorded already. A half-written last line is dropped."""
    if not output.exists() or not output.stat().st_size:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"provenance": made_by}) + "\n")
        return set()
    content = output.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    try:
        first, *rows = [json.loads(line) for line in complete.splitlines()]
        before, recorded = first["provenance"], {row["prompt_id"] for row in rows}
        old, new = ({"engine": one["engine"], **one["settings"]} for one in (before, made_by))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{output} is no trace of this script. Choose another --output, or delete it.") from error
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if changed:
        differences = "; ".join(f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in changed)
        raise ValueError(f"{output} was begun with other settings: {differences}. Choose another --output.")
    if len(complete) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(complete))
    return recorded


def row_of(prompt: Prompt, completions: Sequence[Completion], reward: RewardFunction) -> dict[str, Any]:
    """The line of a prompt."""
    texts, count = [one.text for one in completions], len(completions)
    rewards = reward(prompts=[None] * count, completions=texts, task_index=[prompt.index] * count)
    seconds = [one.seconds for one in completions]
    return {
        "prompt_id": prompt.name,
        "task": prompt.task,
        "step": 0,
        "prompt_tokens": len(prompt.token_ids),
        "lengths": [one.length for one in completions],
        "truncated": [one.truncated for one in completions],
        "seconds": None if None in seconds else seconds,
        "rewards": [round(value, 4) for value in rewards],
    }


def record(
    settings: Settings,
    output: Path,
    prompts: Sequence[Prompt],
    recorded: set[str],
    sample: Sampler,
    rewards: dict[str, RewardFunction],
) -> None:
    """Samples what is missing, batch after batch, and adds a line for each prompt."""
    start, step, new = time.monotonic(), settings.prompts_per_batch, 0
    missing = sum(prompt.name not in recorded for prompt in prompts)
    for first in range(0, len(prompts), step):
        batch = [prompt for prompt in prompts[first : first + step] if prompt.name not in recorded]
        if not batch:
            continue
        completions = sample(
            [prompt.token_ids for prompt in batch for _ in range(settings.completions)], settings.seed + first
        )
        groups = [completions[i : i + settings.completions] for i in range(0, len(completions), settings.completions)]
        rows = [row_of(prompt, group, rewards[prompt.task]) for prompt, group in zip(batch, groups, strict=True)]
        with output.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        new += len(batch)
        left = (time.monotonic() - start) / new * (missing - new)
        print(
            f"{len(prompts) - missing + new:>4}/{len(prompts)}  {batch[0].task:<20}"
            f"  mean {sum(one.length for one in completions) / len(completions):5.0f} tokens"
            f"  cut off {sum(one.truncated for one in completions) / len(completions):4.0%}"
            f"  reward {sum(sum(row['rewards']) for row in rows) / len(completions):.2f}"
            f"  about {left / 60:.0f} min left",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Parse, sample, write."""
    try:
        settings, output = parse(argv)
        model = str(embedded_model()) if settings.model == EMBEDDED else settings.model
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts, rewards = build_prompts(settings, tokenizer)
        recorded = begin(output, provenance(settings, engine_name()))
        if all(prompt.name in recorded for prompt in prompts):
            print(f"{output} is complete: {len(prompts)} prompts.")
            return 0
        longest = max(len(prompt.token_ids) for prompt in prompts)
        sample = (
            vllm_sampler(settings, model, longest)
            if find_spec("vllm")
            else transformers_sampler(settings, model, tokenizer)
        )
    except (ValueError, OSError, ImportError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        record(settings, output, prompts, recorded, sample, rewards)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {output} keeps what is recorded; the same command goes on from there.", flush=True)
        return 130
    print(f"{output} is complete: {len(prompts)} prompts of {settings.completions} completions.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
