"""Two processes on the CPU (gloo): every rank uses the same size at every boundary, and resumes with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def launch(script: str, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    # "--multi_gpu" only selects torchrun as the launcher: "--cpu" would want MPI. ACCELERATE_USE_CPU picks gloo.
    kind = ["--multi_gpu"] if processes > 1 else []
    options = [
        *kind,
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    ]
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


@pytest.mark.slow
def test_two_processes_do_what_one_does_on_the_same_global_batch(tmp_path: Path) -> None:
    """Decisions, metrics, weights; with dynamic sampling also the prompts, none lost or doubled, also on resume."""
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        result = launch("same_global_batch.py", str(tmp_path / name), processes=processes)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    one = json.loads((tmp_path / "one" / "rank0.json").read_text())
    two = [json.loads((tmp_path / "two" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for run in ("grpo", "dapo", "resumed"):
        assert two[0][run]["state"] == two[1][run]["state"] == one[run]["state"]
        assert two[0][run]["weights"] == pytest.approx(one[run]["weights"], rel=1e-5)
        sizes = {entry["sagc/group_size"] for entry in one[run]["log"]}
        assert len(sizes) > 1
        for ours, alone in zip(two[0][run]["log"], one[run]["log"], strict=True):
            skipped = {key for key in alone if "time" in key or "seconds" in key}
            if run != "grpo":  # TRL's own statistics of a refill count the completions that pad it
                skipped |= {key for key in alone if key.startswith(("completions/", "num_tokens", "dapo/padding"))}
            assert ours == pytest.approx({**alone, **{key: ours[key] for key in skipped}}, rel=1e-4, abs=1e-6)
    assert any(entry["dapo/refills"] > 0 for entry in one["dapo"]["log"])
    assert any(entry["dapo/padding_rollouts"] > 0 for entry in two[0]["dapo"]["log"])
    assert one["resumed"]["state"] == one["dapo"]["state"]
    assert one["dapo"]["sampled"][-len(one["resumed"]["sampled"]) :] == one["resumed"]["sampled"]
    epochs = [one["dapo"]["sampled"][start : start + 40] for start in range(0, len(one["dapo"]["sampled"]), 40)]
    assert len(epochs) > 2
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs[:-1])
    for run in ("dapo", "resumed"):
        both = sorted(set(two[0][run]["sampled"]) | set(two[1][run]["sampled"]))
        assert both == sorted(set(one[run]["sampled"]))
        assert len(two[0][run]["sampled"]) == len(two[1][run]["sampled"]), "no process samples alone"
        padding = len(two[0][run]["sampled"]) * 2 - len(one[run]["sampled"])
        assert 0 <= padding < len(one[run]["sampled"])
