"""The training script as a user runs it: real model, real task, W&B offline, wrong input, resume, interrupt."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny import WORDS, even_words, tiny_model, tiny_tokenizer

from trainers import SAGCDAPOConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import train_grpo  # noqa: E402

SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 32,
    "tau": 1.2,
    "rho": 0.1,
    "V": 0.02,
    "num_prompts": 16,
    "save_steps": 2,
    "seed": 3,
}


def command(output: Path, **overrides: Any) -> list[str]:
    script, config = ROOT / "scripts" / "train_grpo.py", ROOT / "configs" / "quickstart.yaml"
    settings = {**SMALL, "output_dir": output, **overrides}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [sys.executable, str(script), "--config", str(config), *flags]


def environment() -> dict[str, str]:
    """W&B as on a machine where nobody has configured it."""
    hidden = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    # One thread: beside other work, two threads mostly wait for each other.
    return {**kept, "PYTHONUNBUFFERED": "1", "NETRC": os.devnull, "OMP_NUM_THREADS": "1"}


def run(output: Path, **overrides: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(output, **overrides), capture_output=True, text=True, timeout=600, env=environment(), cwd=output.parent
    )


def sizes(output: Path) -> list[float]:
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [entry["sagc/group_size"] for entry in entries if "sagc/group_size" in entry]


@pytest.mark.slow
def test_a_real_run_its_repetition_and_its_resumption(tmp_path: Path) -> None:
    first = run(tmp_path / "first", max_steps=4)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    for text in ("offline, because no key is configured", "mean group size", "straggler rate", "seconds saved"):
        assert text in first.stdout
    assert (tmp_path / "first" / "summary.png").stat().st_size > 10_000
    assert list((tmp_path / "first" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(sizes(tmp_path / "first")) == 4
    assert len(set(sizes(tmp_path / "first"))) > 1, "the budget binds, so the size must move"

    (tmp_path / "again").mkdir()
    checkpoint = tmp_path / "first" / "checkpoint-2"
    resumed = run(tmp_path / "again", max_steps=4, resume_from_checkpoint=checkpoint)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert "step 2/4" not in resumed.stdout
    assert sizes(tmp_path / "again") == sizes(tmp_path / "first"), "the same seed gives the same decisions"


@pytest.mark.slow
def test_interrupted_in_the_middle_of_a_step(tmp_path: Path) -> None:
    output = tmp_path / "run"
    for name in ("checkpoint-best", "checkpoint-40"):  # left by an earlier run
        (output / name).mkdir(parents=True)
        (output / name / "trainer_state.json").write_text("{}")
        os.utime(output / name / "trainer_state.json", (0, 0))
    process = subprocess.Popen(
        command(output, max_steps=50), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step  3/50"):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            break
    lines += process.stdout.readlines()
    text = "".join(lines)
    assert process.wait(timeout=120) == 130, text[-3000:]
    checkpoint = output / "checkpoint-2"
    assert f"Not finished: step 3 of 50; run the same command with --resume_from_checkpoint {checkpoint}" in text
    assert len(sizes(output)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"task": "chain_summ"}, "no task 'chain_summ'. Did you mean chain_sum"),
        ({"rho": 1.5}, "rho must lie between 0 and 1"),
        ({"min_group_size": 5}, "min_group_size (5) is above num_generations (4)"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"resume_from_checkpoint": "nowhere"}, "there is no folder nowhere"),
        ({"resume_from_checkpoint": "."}, ". is no complete checkpoint"),
        ({"model_name_or_path": "/nowhere/model"}, "/nowhere/model"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    result = run(tmp_path / "run", **overrides)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# --- The script in this process, on the tiny model and a file of prompts


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model and its data, as a user has them on disk. The script sets a signal handler, which is put back."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = {"prompt": [f"w{i} w{3 * i % 29}" for i in range(24)], "answer": [WORDS[i] for i in range(24)]}
    Dataset.from_dict(rows).to_json(tmp_path / "data.json")
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def flags(folder: Path, **overrides: Any) -> list[str]:
    settings = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data.json",
        "output_dir": folder / "run",
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 24,
        "max_steps": 2,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "rho": 0.2,
        "V": 0.05,
        **overrides,
    }
    return [text for name, value in settings.items() if value is not None for text in (f"--{name}", str(value))]


def test_a_finished_run_is_not_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_grpo.main(flags(folder)) == 0
    before = (folder / "run" / "metrics.jsonl").read_text()
    assert train_grpo.main(flags(folder, resume_from_checkpoint=True)) == 2
    error = capsys.readouterr().err
    assert "checkpoint-2 is at step 2, so nothing is left of --max_steps 2. Set --max_steps above 2" in error
    assert (folder / "run" / "metrics.jsonl").read_text() == before
    assert train_grpo.main(flags(folder, resume_from_checkpoint=True, max_steps=3, save_total_limit=1)) == 0
    assert len(sizes(folder / "run")) == 3
    epochs = {"max_steps": None, "num_train_epochs": 1, "output_dir": folder / "epochs"}
    assert train_grpo.main(flags(folder, **epochs)) == 0
    assert train_grpo.main(flags(folder, **epochs, resume_from_checkpoint=True)) == 2
    assert "end of epoch 1, so nothing is left of --num_train_epochs 1" in capsys.readouterr().err


def test_a_resume_that_fails_at_once_leaves_the_metrics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_grpo.main(flags(folder)) == 0
    capsys.readouterr()
    files = {name: (folder / "run" / name).read_bytes() for name in ("metrics.jsonl", "summary.png")}
    arguments = {"resume_from_checkpoint": True, "max_steps": 4}
    assert train_grpo.main(flags(folder, **arguments, min_group_size=4)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: The saved controller has group sizes (2, 3, 4, 5, 6, 7, 8), this run has")
    state = folder / "run" / "checkpoint-2" / "sagc_state.json"
    state.write_text("{")
    assert train_grpo.main(flags(folder, **arguments)) == 2
    assert "sagc_state.json is damaged" in capsys.readouterr().err
    assert {name: (folder / "run" / name).read_bytes() for name in files} == files


def test_a_resume_that_fails_in_its_first_step_leaves_the_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run had gone on to step 4 after its checkpoint; a failure in step 3 of the resumption must not lose that."""
    assert train_grpo.main(flags(folder, max_steps=4, save_steps=3)) == 0
    before = (folder / "run" / "metrics.jsonl").read_text()
    checkpoint = folder / "run" / "checkpoint-3"

    def broken(dataset: Dataset) -> tuple[Dataset, Any]:
        def reward(completions: list[str], **_: Any) -> list[float]:
            raise ValueError("a fault in the reward")

        return dataset, reward

    monkeypatch.setattr(train_grpo, "dataset_task", broken)
    with pytest.raises(ValueError, match="a fault in the reward"):  # with its traceback: it is no setting
        train_grpo.main(flags(folder, max_steps=5, resume_from_checkpoint=checkpoint))
    assert "No step was logged." in capsys.readouterr().out
    assert (folder / "run" / "metrics.jsonl").read_text() == before


def test_a_full_disk_leaves_the_files_of_before_and_shows_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_grpo.main(flags(folder)) == 0
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    write_text = Path.write_text

    def full(path: Path, text: str) -> int:
        write_text(path, text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    trained = train_grpo.main(flags(folder, save_strategy="no"))
    monkeypatch.undo()
    output = capsys.readouterr()
    assert trained == 0
    assert "No space left on device" in output.err
    assert output.out.count("mean group size") == 2
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before
    assert not list((folder / "run").glob("partial*"))


def test_the_table_counts_steps_and_generations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_grpo.main(flags(folder, max_steps=5, logging_steps=2, num_iterations=2, save_steps=9)) == 0
    assert "steps            5 (3 generations, " in capsys.readouterr().out


def words_reward(dataset: Dataset) -> tuple[Dataset, Any]:
    return dataset, even_words


@pytest.mark.parametrize("by_file", [True, False])
def test_dapo(
    folder: Path, by_file: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named in the file or by a flag, with fields that only DAPO has in the file."""
    monkeypatch.setattr(train_grpo, "dataset_task", words_reward)
    (folder / "dapo.yaml").write_text("max_refills: 1\noverlong_buffer: 8\n" + "trainer: dapo\n" * by_file)
    trainer = None if by_file else "dapo"
    arguments = flags(folder, config=folder / "dapo.yaml", trainer=trainer, overlong_penalty=0.5)
    run, config, _ = train_grpo.parse(arguments)
    assert (run.trainer, type(config)) == ("dapo", SAGCDAPOConfig)
    assert (config.max_refills, config.overlong_buffer, config.overlong_penalty) == (1, 8, 0.5)
    assert train_grpo.main(arguments) == 0
    output = capsys.readouterr().out
    assert re.search(r"step 2/2  G=\d .* kept \d\.\d\d \(\d refills?\)", output)
    assert "dropped groups included" in output
    log = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(key.startswith("rewards/") and "overlong" in key for key in log[0])


def test_the_quickstart_of_dapo_is_the_quickstarts_task() -> None:
    parsed = [
        train_grpo.parse(["--config", str(ROOT / "configs" / f"{name}.yaml")]) for name in ("quickstart", "dapo")
    ]
    (run, config, model), (dapo_run, dapo_config, dapo_model) = parsed
    assert (run.trainer, dapo_run.trainer) == ("grpo", "dapo")
    assert replace(dapo_run, trainer="grpo") == run
    assert dapo_model == model
    for name in ("num_generations", "per_device_train_batch_size", "max_completion_length", "tau", "rho", "max_steps"):
        assert getattr(dapo_config, name) == getattr(config, name)
    assert dapo_config.dynamic_sampling
    assert (dapo_config.overlong_buffer, dapo_config.utility) == (16, "signal")


def test_help_is_that_of_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train_grpo.parse(["--trainer", "dapo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--task", "--max_refills", "--rho", "--lora_r"))


def test_a_step_without_a_scored_completion_has_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL logs None as its reward, and DAPO finds no group to keep."""

    def unscored(dataset: Dataset) -> tuple[Dataset, Any]:
        return dataset, lambda completions, **_: [None] * len(completions)

    monkeypatch.setattr(train_grpo, "dataset_task", unscored)
    assert train_grpo.main(flags(folder)) == 0
    assert "reward none  stragglers" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_files_of_prompts(folder: Path, kind: str) -> None:
    path = folder / f"rows.{kind}"
    rows = Dataset.from_json(str(folder / "data.json"))
    write = {"json": rows.to_json, "jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}
    write[kind](path)
    dataset, reward = train_grpo.build_task(train_grpo.RunArguments(dataset_name=str(path)), seed=0)
    assert dataset["prompt"][:2] == ["w0 w0", "w1 w3"]
    assert reward(prompts=["", ""], completions=["w0", "w5"], answer=dataset["answer"][:2]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_name_or_path": "./nowhere"}, "model_name_or_path: there is no folder ./nowhere. Give the folder"),
        ({"model_name_or_path": "{folder}"}, "holds no model, for it has no config.json"),
        ({"dataset_name": "{folder}/nowhere.json"}, "nowhere.json: there is no such file or folder"),
        ({"dataset_name": "data.json"}, "dataset_name=data.json: there is no such file or folder"),
        ({"dataset_name": "{folder}/column.csv"}, "has no column ['answer'], only ['prompt', 'solution']: rename one"),
        ({"dataset_name": "{folder}/broken.json"}, "broken.json: "),
        ({"dataset_name": "{folder}/data.txt"}, "data.txt: the file is none of .json, .jsonl, .csv, .parquet"),
        ({"dataset_split": "test"}, 'Unknown split "test"'),
        ({"dataset_config": "main"}, "a file has no configurations; leave out dataset_config=main"),
        ({"resume_from_checkpoint": "{folder}/damaged"}, "trainer_state.json of {folder}/damaged is damaged"),
        ({"rho": 1.5}, "rho must lie between 0 and 1"),
        ({"rho": "much"}, "argument --rho: invalid float value: 'much'"),
        ({"tau": 1}, "tau must be above 1"),
        ({"utility": "square"}, "square"),
        ({"min_group_size": 9}, "min_group_size (9) is above num_generations (8)"),
        ({"num_generations": 5}, "must be divisible by num_generations"),
        ({"straggler_event": "absolute"}, "set straggler_length"),
        ({"lr_scheduler_type": "none_such"}, "none_such"),
        ({"per_device_train_batch_size": 256}, "train_dataset has 24 prompts, fewer than the 32"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"trainer": "ppo"}, "trainer must be one of grpo, dapo, got 'ppo'"),
        ({"trainer": "dapo", "no_such_field": 1}, "no_such_field"),
        ({"trainer": "dapo", "overlong_buffer": 25}, "overlong_buffer must lie in 1 to max_completion_length (24)"),
        ({"config": "{folder}/ppo.yaml"}, "trainer must be one of grpo, dapo, got 'ppo'"),
        ({"config": "{folder}/dapo_key.yaml"}, "unknown keys: max_refills (nearest: "),
        ({"config": "{folder}/wrong_type.yaml"}, "A setting has a value of the wrong type"),
        ({"config": "{folder}/key.yaml"}, "unknown keys: rhoo (nearest: rho"),
        ({"config": "{folder}/no.yaml"}, "no.yaml"),
        ({"config": "{folder}/broken.yaml"}, "broken.yaml"),
    ],
)
def test_a_wrong_setting_is_one_line(
    folder: Path, overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Dataset.from_dict({"prompt": ["w1"], "solution": ["w2"]}).to_csv(folder / "column.csv")
    (folder / "broken.json").write_text('{"prompt": ')
    (folder / "data.txt").write_text("w1")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "trainer_state.json").write_text("{")
    (folder / "wrong_type.yaml").write_text("warmup_steps: [1]")
    (folder / "key.yaml").write_text("rhoo: 0.3")
    (folder / "ppo.yaml").write_text("trainer: ppo")
    (folder / "dapo_key.yaml").write_text("max_refills: 1")
    (folder / "broken.yaml").write_text("rho: [0.3\ntau: 2")
    given = {
        name: value.format(folder=folder) if isinstance(value, str) else value for name, value in overrides.items()
    }
    assert train_grpo.main(flags(folder, **given)) == 2
    error = capsys.readouterr().err
    assert message.format(folder=folder) in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert error.rstrip().endswith(lines[0]), "nothing comes after it"
    assert "Traceback" not in error
