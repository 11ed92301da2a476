"""The training script as a user runs it: real model, real task, W&B offline, wrong input, resume, interrupt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
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
