"""Run by `test_several_processes.py` under `accelerate launch`: trains, resumes, and writes what each rank decided."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tiny import tiny_trainer

from trainers import SAGCGRPOTrainer


class RecordingTrainer(SAGCGRPOTrainer):
    """Records size, local rows and state at each boundary."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.record.append(
                {
                    "size": self.num_generations,
                    "local_rows": len(output["completion_ids"]),
                    "prompts": [row["index"] for row in inputs],
                    "state": self.group_size_controller.state_dict(),
                }
            )
        return output


def trainer(folder: Path, **overrides: Any) -> RecordingTrainer:
    settings = {
        "per_device_train_batch_size": 16,
        "max_steps": 6,
        "rho": 0.6,
        "tau": 2.0,
        "V": 0.05,
        "max_completion_length": 64,
        **overrides,
    }
    recording = tiny_trainer(folder, RecordingTrainer, **settings)
    if PartialState().process_index == 1:  # left to itself, rank 1 would take other decisions
        controller = recording.group_size_controller
        controller.config = replace(controller.config, rho=0.95)
    return recording


def main(folder: Path) -> None:
    whole = trainer(folder / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    rank = PartialState().process_index
    (folder / f"rank{rank}.json").write_text(json.dumps({"whole": whole.record, "resumed": resumed.record}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
