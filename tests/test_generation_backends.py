"""Continuous batching and Liger: what of them runs on the CPU. docs/compatibility.md names each test."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model, tiny_trainer

from trainers import SAGCGRPOTrainer

SMALL_CACHE = {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256}


class Recording(SAGCGRPOTrainer):
    """Keeps the batches that it generates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.batches.append(output)
        return output


def trained(output_dir: Path, continuous: bool, seed: int = 0, **settings: Any) -> Any:
    """`seed` is that of the model's weights."""
    trainer = tiny_trainer(
        output_dir,
        Recording,
        {"model": tiny_model(seed)},
        use_transformers_continuous_batching=continuous,
        transformers_continuous_batching_config=SMALL_CACHE if continuous else None,
        rho=0.05,
        tau=1.5,
        V=0.01,
        **settings,
    )
    trainer.train()
    return trainer


def test_continuous_batching_runs_fewer_rows_for_smaller_groups(tmp_path: Path) -> None:
    trainer = trained(tmp_path, continuous=True, max_steps=2)
    log = [entry for entry in trainer.state.log_history if "sagc/group_size" in entry]
    sizes = [int(entry["sagc/group_size"]) for entry in log]
    assert sizes[0] == 8
    assert sizes[1] < 8
    assert [len(batch["completion_ids"]) for batch in trainer.batches] == [4 * size for size in sizes]
    for batch, entry in zip(trainer.batches, log, strict=True):
        lengths = batch["completion_mask"].sum(dim=1).float()
        assert entry["sagc/stall_fraction"] == pytest.approx(1 - (lengths.mean() / lengths.max()).item())


def test_continuous_batching_keeps_completions_with_their_prompts(tmp_path: Path) -> None:
    """Requests end in another order than they came; greedily, each prompt must get the completion of `generate`."""
    ours, theirs = (
        trained(tmp_path / str(continuous), continuous, seed=3, max_steps=1, top_k=1).batches[0]
        for continuous in (True, False)
    )
    assert ours["prompt_ids"].equal(theirs["prompt_ids"])
    assert len(set(theirs["completion_mask"].sum(dim=1).tolist())) > 1, "some end before others"
    assert ours["completion_ids"].equal(theirs["completion_ids"])


def test_continuous_batching_cannot_stop_extra_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra_rollouts cannot stop completions under continuous batching"):
        tiny_config(tmp_path, use_transformers_continuous_batching=True, extra_rollouts=2)


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_liger_that_is_not_installed_is_named_before_the_first_step(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, Recording, use_liger_kernel=True)
    with pytest.raises(ImportError, match=r"liger-kernel .* is not available. Please install it"):
        trainer.train()
    assert trainer.batches == []


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels are Triton's and need a GPU")
def test_liger(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, Recording, use_liger_kernel=True, use_cpu=False, rho=0.05, tau=1.5, V=0.01)
    trainer.train()
    sizes = [int(entry["sagc/group_size"]) for entry in trainer.state.log_history if "sagc/group_size" in entry]
    assert sizes[-1] < sizes[0] == 8
