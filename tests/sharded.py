"""Run by `test_sharded.py` under `accelerate launch`: trains, resumes, and writes what each rank did."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from tiny import tiny_model, tiny_trainer
from torch.distributed.tensor import DTensor
from trl import GRPOTrainer

from trainers import SAGCMixin


class OnCPUs(GRPOTrainer):
    """accelerate shards on accelerators only, though torch and DeepSpeed do so on CPUs too: it is told otherwise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rows: list[int] = []
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if "ZERO_STAGE" in os.environ:  # after the process group is made, which ACCELERATE_USE_CPU is needed for
            os.environ.pop("ACCELERATE_USE_CPU", None)
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        super().create_accelerator_and_postprocess()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.rows.append(len(output["completion_ids"]))
        return output


class ShardedTrainer(SAGCMixin, OnCPUs):
    pass


def trainer(folder: Path, **overrides: Any) -> ShardedTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "max_steps": 4,
        "rho": 0.6,
        "V": 0.05,
        "max_completion_length": 64,
    }
    if "ZERO_STAGE" in os.environ:
        sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        settings["deepspeed"] = {
            "zero_optimization": {"stage": int(os.environ["ZERO_STAGE"]), "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            **dict.fromkeys(sizes, "auto"),
        }
    return tiny_trainer(folder, ShardedTrainer, **{**settings, **overrides})


def record(run: ShardedTrainer) -> dict[str, Any]:
    parameters = list(run.model_wrapped.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]  # ZeRO-3 leaves empty ones
    return {
        "log": [entry for entry in run.state.log_history if "sagc/group_size" in entry],
        "rows": run.rows,
        "state": run.group_size_controller.state_dict(),
        "wrapped": type(run.model_wrapped).__name__,
        "local_share": sum(p.numel() for p in local) / tiny_model().num_parameters(),
    }


def main(folder: Path) -> None:
    whole = trainer(folder / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    result = {"whole": record(whole), "resumed": record(resumed)}
    (folder / f"rank{PartialState().process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
