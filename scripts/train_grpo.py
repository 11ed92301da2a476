"""Train a model with GRPO or DAPO whose group size keeps within a straggler budget.

    python scripts/train_grpo.py --config configs/quickstart.yaml
    python scripts/train_grpo.py --config configs/quickstart.yaml --rho 0.2 --max_steps 40
    python scripts/train_grpo.py --config configs/quickstart.yaml --resume_from_checkpoint true
    python scripts/train_grpo.py --config configs/dapo.yaml

Fields are those of `RunArguments` below, `trainers.SAGCConfig` (and so of `trl.GRPOConfig`; with `trainer: dapo` of
`trainers.SAGCDAPOConfig`) and `trl.ModelConfig`; a flag overrides the file. Weights & Biases records the run: offline
where no key is configured or it cannot be reached.
"""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import yaml
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from requests.utils import get_netrc_auth
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, set_seed
from trl import ModelConfig, TrlParser, get_peft_config

from trainers import SAGCConfig, SAGCDAPOConfig, SAGCDAPOTrainer, SAGCGRPOTrainer
from trainers.demo import RewardFunction, dataset_task, embedded_model, reasoning_task
from trainers.summary import format_summary, plot, summarize, training_steps

EMBEDDED = "embedded"
TRAINERS: dict[str, tuple[type[SAGCGRPOTrainer], type[SAGCConfig]]] = {
    "grpo": (SAGCGRPOTrainer, SAGCConfig),
    "dapo": (SAGCDAPOTrainer, SAGCDAPOConfig),
}
FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class RunArguments:
    """
    What to train with, and on.

    Args:
        trainer (`str`, *optional*, defaults to `"grpo"`):
            `"grpo"` or `"dapo"`.
        task (`str`, *optional*, defaults to `"basic_arithmetic"`):
            Name of a `reasoning-gym` task.
        num_prompts (`int`, *optional*, defaults to `256`):
            Number of prompts.
        task_options (`dict`, *optional*):
            Options of the task; on the command line as JSON.
        system_prompt (`str`, *optional*):
            System message of each prompt.
        prompt_suffix (`str`, *optional*, defaults to `""`):
            Text added to each question.
        examples (`dict`, *optional*):
            Questions and their answers, shown before each question; on the command line as JSON.
        dataset_name (`str`, *optional*):
            A dataset for `datasets.load_dataset`, or a JSON, CSV or Parquet file, instead of `task`: needs a column
            `prompt` and a column `answer`. The reward is 1 where the completion's answer equals it.
        dataset_config (`str`, *optional*):
            Configuration of that dataset.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of that dataset.
    """

    trainer: str = field(default="grpo", metadata={"help": "grpo or dapo."})
    task: str = field(default="basic_arithmetic", metadata={"help": "Name of a reasoning-gym task."})
    num_prompts: int = field(default=256, metadata={"help": "Number of prompts."})
    task_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Options of the task (JSON)."})
    system_prompt: str | None = field(default=None, metadata={"help": "System message of each prompt."})
    prompt_suffix: str = field(default="", metadata={"help": "Text added to each question."})
    examples: dict[str, str] | str | None = field(
        default=None, metadata={"help": "Questions and their answers shown before each question (JSON)."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset or a file of one, instead of a task."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of that dataset."})

    def __post_init__(self) -> None:
        if self.trainer not in TRAINERS:
            raise ValueError(f"trainer must be one of {', '.join(TRAINERS)}, got {self.trainer!r}.")
        for name in ("task_options", "examples"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except ValueError as error:
                    raise ValueError(f"{name} is not valid JSON ({error}): {value}") from error
            if not isinstance(value, dict | None):
                raise ValueError(f"{name} must be a mapping, got {value!r}.")
            setattr(self, name, value or {})


class LenientParser(TrlParser):
    """TRL's parser, which reports a wrong flag in one line instead of the usage of some 300 flags."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ValueError(message)


class Parser(LenientParser):
    """Refuses keys that no field has, too."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take the file's values as defaults, and refuse keys that no field has."""
        unknown = super().set_defaults_with_config(**kwargs)[::2]  # flag, value, flag, value, ...
        if unknown:
            known = [action.dest for action in self._actions]
            names = [flag.removeprefix("--") for flag in unknown]
            hints = [f"{name} (nearest: {', '.join(get_close_matches(name, known, n=2, cutoff=0))})" for name in names]
            raise ValueError(f"The config file has unknown keys: {'; '.join(hints)}")
        return []


class StepLines(TrainerCallback):
    """One line per step, instead of TRL's dictionary of some fifty metrics."""

    began = False
    """Whether training is under way: the checkpoint to resume from, if any, has been loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that the first, slowest, step is under way."""
        self.began = True
        if state.is_world_process_zero:
            print(
                f"Training, steps {state.global_step + 1} to {state.max_steps}; lines as steps are logged:", flush=True
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the step."""
        if state.is_world_process_zero and logs is not None and "sagc/group_size" in logs:
            # TRL logs no reward where none of the completions was scored.
            reward = "none" if logs["reward"] is None else f"{logs['reward']:.2f}"
            sampling = ""
            if "dapo/kept_fraction" in logs:
                refills = logs["dapo/refills"]
                sampling = f"  kept {logs['dapo/kept_fraction']:.2f} ({refills:g} refill{'' if refills == 1 else 's'})"
            print(
                f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
                f"  G={logs['sagc/group_size']:<4g}"
                f" reward {reward}{sampling}"
                f"  stragglers {logs['sagc/straggler_rate']:.2f} (so far {logs['sagc/straggler_rate_running']:.2f},"
                f" budget {logs['sagc/budget']:g})"
                f"  tokens {logs['completions/mean_length']:.0f}"
                f"  {logs['step_time']:.1f} s",
                flush=True,
            )


def parse(argv: list[str] | None = None) -> tuple[RunArguments, SAGCConfig, ModelConfig]:
    """Arguments of the run: file first, then flags."""
    # The trainer comes first: the other fields depend on it. Help is that of all fields.
    first, *_ = LenientParser([RunArguments], add_help=False).parse_args_and_config(
        argv, return_remaining_strings=True
    )
    parser = Parser([RunArguments, TRAINERS[first.trainer][1], ModelConfig])
    parser.set_defaults_with_config(report_to="wandb", logging_steps=1)
    try:
        run, config, model = parser.parse_args_and_config(argv)
    except TypeError as error:  # a list where a number belongs, such as `max_steps: [1]`
        raise ValueError(f"A setting has a value of the wrong type: {error}") from error
    return run, config, model


def build_task(run: RunArguments, seed: int) -> tuple[Dataset, RewardFunction]:
    """Prompts and reward."""
    if run.dataset_name is not None:
        try:
            return dataset_task(load_rows(run.dataset_name, run.dataset_config, run.dataset_split))
        except (ValueError, OSError, DatasetsError) as error:
            raise ValueError(f"dataset_name={run.dataset_name}: {error}") from error
    return reasoning_task(
        run.task,
        run.num_prompts,
        seed,
        system_prompt=run.system_prompt,
        prompt_suffix=run.prompt_suffix,
        examples=cast(dict[str, str], run.examples),  # mappings since __post_init__
        **cast(dict[str, Any], run.task_options),
    )


def load_rows(name: str, config: str | None, split: str) -> Dataset:
    """A dataset, by name or from a file."""
    path = Path(name).expanduser()
    kind = FILE_KINDS.get(path.suffix)
    if path.is_file() and kind is None:
        raise ValueError(f"the file is none of {', '.join(FILE_KINDS)}.")
    if kind is None and not looks_like_a_path(name):
        return load_dataset(name, config, split=split)
    if not path.exists():
        raise FileNotFoundError("there is no such file or folder.")
    if path.is_dir():
        return load_dataset(str(path), config, split=split)
    if config is not None:
        raise ValueError(f"a file has no configurations; leave out dataset_config={config}.")
    return load_dataset(kind, data_files=str(path), split=split)


def looks_like_a_path(name: str) -> bool:
    """Whether it cannot be a name on the Hub, which has one slash at most."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def model_path(name: str | None) -> str:
    """Folder or Hub name of the model."""
    if name in (None, EMBEDDED):
        print("Preparing the embedded model (the first time takes about half a minute)", flush=True)
        return str(embedded_model())
    assert name is not None
    path = Path(name).expanduser()
    if not path.exists() and not looks_like_a_path(name):
        return name
    if not path.is_dir():
        raise FileNotFoundError(
            f"model_name_or_path: there is no folder {name}. Give the folder of a model, its name on the Hub, or "
            f"'{EMBEDDED}'."
        )
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"model_name_or_path: the folder {name} holds no model, for it has no config.json. Give one that "
            "save_pretrained wrote."
        )
    return str(path)


def set_up_wandb(config: SAGCConfig) -> str | None:
    """Keep W&B's files under `output_dir`, and W&B offline unless a key and a connection are there. Never asks."""
    if "wandb" not in config.report_to:
        return None
    import wandb

    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    folder = os.environ.setdefault("WANDB_DIR", config.output_dir)
    os.environ.setdefault("WANDB_PROJECT", "sagc")
    if "WANDB_MODE" not in os.environ:
        url = wandb.Settings().base_url
        if not os.environ.get("WANDB_API_KEY") and get_netrc_auth(url) is None:
            reason = "no key is configured (`wandb login` sets one)"
        elif not _reachable(url):
            reason = f"{url} cannot be reached"
        else:
            return folder
        os.environ["WANDB_MODE"] = "offline"
        print(f"Weights & Biases: offline, because {reason}. `wandb sync` uploads the run later.")
    return folder


def _reachable(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 443), timeout=5):
            return True
    except OSError:
        return False


def build_trainer(run: RunArguments, config: SAGCConfig, model: ModelConfig) -> SAGCGRPOTrainer:
    """The trainer, from parsed arguments."""
    dataset, reward = build_task(run, config.seed)
    name = model_path(model.model_name_or_path)
    config.model_init_kwargs = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        **(config.model_init_kwargs or {}),
    }
    trainer_class, _ = TRAINERS[run.trainer]
    trainer = trainer_class(
        model=name, reward_funcs=reward, args=config, train_dataset=dataset, peft_config=get_peft_config(model)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def last_checkpoint(output_dir: str, since: float = 0.0) -> str | None:
    """The latest complete checkpoint, finished after `since`: `trainer_state.json` is written last."""
    steps = {
        int(path.parent.name.removeprefix("checkpoint-")): path.parent
        for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")
        if path.parent.name.removeprefix("checkpoint-").isdecimal() and path.stat().st_mtime >= since
    }
    return str(steps[max(steps)]) if steps else None


def checkpoint_to_resume(config: SAGCConfig) -> str | None:
    """The checkpoint named by `resume_from_checkpoint`: a path, or the last of `output_dir` for `true`."""
    wanted = str(config.resume_from_checkpoint or "")
    if wanted.lower() in ("", "false", "none"):
        return None
    if wanted.lower() != "true":
        if not Path(wanted).is_dir():
            raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {wanted}.")
        if not (Path(wanted) / "trainer_state.json").is_file():
            raise FileNotFoundError(f"resume_from_checkpoint: {wanted} is no complete checkpoint.")
        checkpoint = wanted
    else:
        last = last_checkpoint(config.output_dir)
        if last is None:
            raise FileNotFoundError(f"resume_from_checkpoint: {config.output_dir} holds no complete checkpoint yet.")
        checkpoint = last
    _refuse_finished(checkpoint, config)
    return checkpoint


def _refuse_finished(checkpoint: str, config: SAGCConfig) -> None:
    """Resumed at its end, a run would train one step more than asked for, or none and report nothing."""
    try:
        state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"resume_from_checkpoint: trainer_state.json of {checkpoint} is damaged ({error}). Resume from another "
            "checkpoint."
        ) from error
    if 0 < config.max_steps <= state.global_step:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is at step {state.global_step}, so nothing is left of --max_steps "
            f"{config.max_steps}. Set --max_steps above {state.global_step} to train on."
        )
    if config.max_steps <= 0 and state.epoch is not None and state.epoch >= config.num_train_epochs:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is at the end of epoch {state.epoch:g}, so nothing is left of "
            f"--num_train_epochs {config.num_train_epochs:g}. Set a larger --num_train_epochs, or --max_steps."
        )


def report(trainer: SAGCGRPOTrainer, entries: int, checkpoint: str | None, wandb_dir: str | None) -> None:
    """Write the metrics and the picture, and print the table. With no more than `entries` logged, files stay."""
    config, history = trainer.args, trainer.state.log_history
    logged = len(history) > entries and bool(training_steps(history))
    places = write_metrics(history, Path(config.output_dir)) if logged else {}
    if wandb_dir is not None:
        places["wandb"] = str(Path(wandb_dir) / "wandb")
    places["checkpoint"] = checkpoint or "none saved (see save_steps)"
    print()
    if logged:
        micro_batches = config.steps_per_generation * config.num_iterations
        generation_steps = Fraction(micro_batches, config.gradient_accumulation_steps)
        summary = summarize(history, config.num_generations, generation_steps)
        print(format_summary(summary, places))
    else:
        print("No step was logged.", *(f"{name}  {place}" for name, place in places.items()), sep="\n")
    state = trainer.state
    if state.global_step < state.max_steps:
        again = (
            f"run the same command with --resume_from_checkpoint {checkpoint} to go on"
            if checkpoint
            else "without a checkpoint, a new run starts from the beginning"
        )
        print(f"\nNot finished: step {state.global_step} of {state.max_steps}; {again}.")
    print(flush=True)


def write_metrics(history: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Metrics and picture, each replaced at once: a full disk leaves the one from before. Returns what was written."""
    metrics, picture = folder / "metrics.jsonl", folder / "summary.png"
    partial = folder / "partial.jsonl", folder / "partial.png"
    places = {}
    try:
        partial[0].write_text("".join(json.dumps(entry) + "\n" for entry in history))
        os.replace(partial[0], metrics)
        places["metrics"] = str(metrics)
        plot(history, partial[1])
        os.replace(partial[1], picture)
        places["plot"] = str(picture)
    except OSError as error:  # such as a full disk: the table is still shown
        print(f"error: metrics and plot could not be written completely: {error}", file=sys.stderr)
        for path in partial:
            path.unlink(missing_ok=True)
    return places


def train(trainer: SAGCGRPOTrainer, checkpoint: str | None, wandb_dir: str | None) -> int:
    """Train, and report whatever happens."""
    # A scheduler's SIGTERM ends the run as Ctrl-C does: with its metrics written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.time()
    entries = 0  # logged before; read now, because save_total_limit may delete the checkpoint
    if checkpoint is not None:
        entries = len(TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json")).log_history)
    lines = StepLines()
    trainer.add_callback(lines)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        print("\nInterrupted.", flush=True)
        return 130
    except ValueError as error:
        if lines.began:
            raise
        return refuse(error)  # the checkpoint is not one of this run
    finally:
        if trainer.is_world_process_zero() and lines.began:
            # Not one that another run left in the same folder.
            saved = last_checkpoint(trainer.args.output_dir, since=started) or checkpoint
            report(trainer, entries, saved, wandb_dir)
    return 0


def refuse(error: Exception) -> int:
    """One line, whatever the message is, and the exit status of a wrong command."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Parse, build, run."""
    try:
        run, config, model = parse(argv)
        checkpoint = checkpoint_to_resume(config)
        wandb_dir = set_up_wandb(config)
        set_seed(config.seed)
        trainer = build_trainer(run, config, model)
    except (ValueError, OSError, ImportError, yaml.YAMLError) as error:
        return refuse(error)
    return train(trainer, checkpoint, wandb_dir)


if __name__ == "__main__":
    sys.exit(main())
