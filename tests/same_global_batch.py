"""Run by `test_several_processes.py` on one and on two processes: the same scripted run, written down by each rank."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from scripted import Script, numbered_prompts, scripted_reward
from tiny import tiny_config, tiny_model, tiny_tokenizer

from trainers import SAGCConfig, SAGCDAPOConfig, SAGCDAPOTrainer, SAGCGRPOTrainer


def run(folder: Path, dapo: bool, resume_from: str | None = None) -> dict[str, Any]:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 32 // processes,
        "max_steps": 12,
        "rho": 0.3,
        "tau": 1.5,
        "V": 0.05,
        "optim": "sgd",
        "learning_rate": 0.1,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    script = Script()
    trainer_class, config_class = (SAGCDAPOTrainer, SAGCDAPOConfig) if dapo else (SAGCGRPOTrainer, SAGCConfig)
    trainer = trainer_class(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=tiny_config(folder, config_class, **settings),
        train_dataset=numbered_prompts(40),
        processing_class=tiny_tokenizer(),
        rollout_func=script,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return {
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "sampled": script.sampled,
        "state": trainer.group_size_controller.state_dict(),
        "weights": [float(parameter.double().abs().sum()) for parameter in trainer.model.parameters()],
    }


def main(folder: Path) -> None:
    result = {
        "grpo": run(folder / "grpo", dapo=False),
        "dapo": run(folder / "dapo", dapo=True),
        "resumed": run(folder / "resumed", dapo=True, resume_from=str(folder / "dapo" / "checkpoint-5")),
    }
    (folder / f"rank{PartialState().process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
