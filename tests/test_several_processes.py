"""Two processes on the CPU (gloo): every rank uses the same size at every boundary, and resumes with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    # "--multi_gpu" only selects torchrun as the launcher: "--cpu" would want MPI. ACCELERATE_USE_CPU picks gloo.
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    tests = Path(__file__).parent
    return subprocess.run(
        [*launcher, *options, str(tests / script), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": f"{tests}:{tests.parent}",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_all_ranks_use_one_size_and_resume_with_it(tmp_path: Path) -> None:
    result = launch("two_processes.py", str(tmp_path))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))

    def column(run: list[dict[str, Any]], key: str) -> list[Any]:
        return [entry[key] for entry in run]

    for run in ("whole", "resumed"):
        assert column(first[run], "state") == column(second[run], "state")
        assert column(first[run], "size") == column(second[run], "size")
        # Two prompts on each rank, in whole groups, and not the same ones.
        assert column(first[run], "local_rows") == [2 * size for size in column(first[run], "size")]
        assert column(second[run], "local_rows") == [2 * size for size in column(second[run], "size")]
    seen = [index for run in (first, second) for batch in column(run["whole"], "prompts") for index in batch]
    assert sorted(seen) == list(range(24)), "one epoch: each prompt once over both ranks"
    assert len(set(column(first["whole"], "size"))) > 1, "the budget binds, so the size must move"
    assert column(first["resumed"], "state") == column(first["whole"], "state")[3:]


@pytest.mark.slow
def test_prompts_that_do_not_split_over_the_processes(tmp_path: Path) -> None:
    script = tmp_path / "odd.py"
    script.write_text(
        "from tiny import tiny_config\n"
        f"tiny_config({str(tmp_path)!r}, per_device_train_batch_size=12, num_generations=8)\n"
    )
    result = launch(str(script))
    assert result.returncode != 0
    assert "24 / 8 = 3, must be a multiple of the number of processes (2)" in result.stderr
