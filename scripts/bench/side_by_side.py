"""SAGC against other ways to spend rollouts, on equal time, with the embedded model and vLLM on the CPU.

    python scripts/bench/side_by_side.py --seconds 90 --seeds 3 --output docs/measurements/side_by_side.json

Each run of `configs/baselines.yaml` trains the same task from the same weights with the same seed and prompts until
the budget of seconds is spent (the step that crosses it is finished; starting the engine does not count), then answers
the same held-out prompts. Each run is a process of one thread, `--parallel` at a time. Its seconds are CPU seconds,
which are those of the wall clock on a core of its own, whatever else the machine does; `--clock wall` takes the wall
clock. Finished runs are kept: the command goes on where it was interrupted.

LoRA on the last ten layers only, so that the update does not hide the generation on a CPU. What needs the length of
the run in steps, the linear schedule and the controller's V, is given `--steps`, about what the budget allows.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sagc import default_v

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 64
SAMPLES = 2  # answers to each held-out prompt
COMMON = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "lora_target_modules": [r"model\.layers\.2[0-9]\.self_attn\.(q|v)_proj"],
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 256,
    "vllm_enable_prefix_caching": False,
    "vllm_importance_sampling_correction": False,  # would compute each log probability twice
    "save_strategy": "no",
    "report_to": "none",
    "num_prompts": 256 + HELD_OUT,
}
COLUMNS = {
    "straggler_rate": "straggler rate",
    "stall_seconds": "stall s/step",
    "seconds_per_step": "s/step",
    "steps": "steps",
    "rollouts": "rollouts",
    "group_size": "mean G",
    "train_reward": "train reward (last 3)",
    "held_out_reward": "held-out reward",
    "held_out_length": "held-out tokens",
    "train_length": "train tokens (last 3)",
}


def train_one(name: str, seed: int, arguments: argparse.Namespace, path: Path) -> None:
    """One run, in this process."""
    seconds, steps = arguments.seconds, arguments.steps
    now = time.process_time if arguments.clock == "cpu" else time.perf_counter
    sys.path.insert(0, str(ROOT / "scripts"))
    import train_grpo
    from transformers import TrainerCallback, set_seed

    class Clock(TrainerCallback):
        """Stops training when the time is over."""

        started = spent = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.spent = now() - self.started
            control.should_training_stop |= self.spent >= seconds

    options = {**COMMON, **yaml.safe_load((ROOT / "configs" / "baselines.yaml").read_text())[name]}
    linear = len(options.get("group_size_schedule", [])) == 2
    options |= {"max_steps": steps if linear else 1000, "V": default_v(steps, np.log(8 / 2))}
    options |= {"seed": seed, "output_dir": str(path.with_suffix(""))}
    flags = [flag for key, value in options.items() for flag in (f"--{key}", *_flag_values(value))]
    run, config, model = train_grpo.parse(["--config", str(ROOT / "configs" / "quickstart.yaml"), *flags])
    set_seed(seed)
    trainer = train_grpo.build_trainer(run, config, model)
    dataset = trainer.train_dataset
    trainer.train_dataset = dataset.select(range(len(dataset) - HELD_OUT))
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    reward, length = answer(trainer, [dataset[i] for i in range(len(dataset) - HELD_OUT, len(dataset))])
    log = [entry for entry in trainer.state.log_history if "sagc/group_size" in entry]
    result = {"name": name, "seed": seed, "seconds": clock.spent, "log": log}
    path.write_text(json.dumps({**result, "held_out_reward": reward, "held_out_length": length}))


def answer(trainer: Any, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean reward and length of the trained policy's sampled answers to held-out prompts."""
    rows = [row for row in rows for _ in range(SAMPLES)]
    prompts = [row["prompt"] for row in rows]
    trainer.vllm_generation.sync_weights()
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    _, ids, _, _ = trainer.vllm_generation.generate(prompts=prompt_ids, images=None, num_generations=SAMPLES)
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = trainer.reward_funcs[0](prompts=prompts, completions=completions, **columns)
    return float(np.mean(rewards)), float(np.mean([len(row) for row in ids]))


def _flag_values(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]


def measured(run: dict[str, Any]) -> dict[str, float]:
    """Figures of one run."""
    log = run["log"]

    def mean(key: str, entries: list[dict[str, float]] = log) -> float:
        return float(np.mean([entry[key] for entry in entries]))

    return {
        "straggler_rate": mean("sagc/straggler_rate"),
        "stall_seconds": mean("sagc/stall_seconds"),
        "seconds_per_step": run["seconds"] / len(log),
        "steps": len(log),
        "rollouts": sum(entry["sagc/rollouts"] for entry in log),
        "group_size": mean("sagc/group_size"),
        "train_reward": mean("reward", log[-3:]),
        "train_length": mean("completions/mean_length", log[-3:]),
        "held_out_reward": run["held_out_reward"],
        "held_out_length": run["held_out_length"],
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation over seeds of each figure of each method."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(run["name"] for run in runs):
        rows = [measured(run) for run in runs if run["name"] == name]
        columns = {key: [row[key] for row in rows] for key in COLUMNS}
        table[name] = {
            key: {"mean": float(np.mean(v)), "sd": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0}
            for key, v in columns.items()
        }
    return table


def markdown(table: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table for the documentation."""
    lines = ["| method | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, row in table.items():
        cells = [f"{row[key]['mean']:.3g} ± {row[key]['sd']:.2g}" for key in COLUMNS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run all methods, or one in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="training time of each run")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="which seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps to plan the schedule and V for")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--methods", nargs="*", help="names from configs/baselines.yaml; default all")
    parser.add_argument("--folder", type=Path, default=Path("outputs/side_by_side"), help="where runs are kept")
    parser.add_argument("--output", type=Path, help="summary as JSON")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, seed = arguments.one
        path = arguments.folder / f"{name}-{seed}.json"
        train_one(name, int(seed), arguments, path)
        return 0
    return run_all(arguments)


def run_all(arguments: argparse.Namespace) -> int:
    """All methods and seeds, in parallel processes."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    names = arguments.methods or list(yaml.safe_load((ROOT / "configs" / "baselines.yaml").read_text()))
    tasks = [(name, seed) for seed in range(arguments.seeds) for name in names]

    def start(task: tuple[str, int]) -> bool:
        name, seed = task
        path = arguments.folder / f"{name}-{seed}.json"
        if path.is_file():
            return True
        command = [sys.executable, __file__, "--one", name, str(seed), "--folder", str(arguments.folder)]
        command += ["--seconds", str(arguments.seconds), "--steps", str(arguments.steps)]
        command += ["--clock", arguments.clock]
        port = str(29600 + tasks.index(task))  # of the engine: runs at the same time need different ones
        with path.with_suffix(".log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_PORT": port}
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        print(f"{time.strftime('%H:%M:%S')} {name} seed {seed}: {'done' if code == 0 else f'failed, see {log.name}'}")
        return code == 0

    with ThreadPoolExecutor(arguments.parallel) as pool:
        succeeded = list(pool.map(start, tasks))
    paths = [arguments.folder / f"{name}-{seed}.json" for name, seed in tasks]
    runs = [json.loads(path.read_text()) for path in paths if path.is_file()]
    table = summarize(runs)
    print(markdown(table))
    if arguments.output:
        settings = {
            "seconds": arguments.seconds,
            "clock": arguments.clock,
            "seeds": arguments.seeds,
            "planned_steps": arguments.steps,
        }
        figures = [{"name": run["name"], "seed": run["seed"], **measured(run)} for run in runs]
        arguments.output.write_text(json.dumps({"settings": settings, "summary": table, "runs": figures}, indent=1))
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
