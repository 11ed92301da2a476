"""What a resumed trainer takes from its checkpoint, and what the controller sees of the rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import even_words, prompts, tiny_trainer

from trainers import SAGCGRPOTrainer
from trainers.sagc_trainer import STATE_FILE

# Micro-batches of a quarter of a generation, one step each: a checkpoint every 3 steps often lies in the middle.
CYCLES = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": 4,
    "save_strategy": "steps",
    "save_steps": 3,
    "rho": 0.2,
    "tau": 1.5,
    "V": 0.02,
}


class Recording(SAGCGRPOTrainer):
    """At which step which batch was generated, and which rows each step trained on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generated: list[tuple[int, int]] = []
        self.trained: list[Any] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.generated.append((self.state.global_step, len(output["completion_ids"])))
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.trained.append(inputs["completion_ids"])
        return super()._compute_loss(model, inputs)


def mid_cycle_checkpoint(trainer: Any) -> tuple[Path, dict[str, Any]]:
    """The first whose batch, half used, has neither the largest size nor that of the next batch."""
    for step in range(3, trainer.args.max_steps - 4, 3):
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        state = json.loads((folder / STATE_FILE).read_text())
        if step % 4 != 0 and state["cycle_group_size"] not in (8, state["controller"]["group_size"]):
            return folder, state
    raise AssertionError("the budget binds, so a batch in the middle of the run has smaller groups")


def test_a_batch_generated_again_has_the_size_it_had(tmp_path: Path) -> None:
    """The next size was decided when the batch was generated; the batch itself keeps its own."""
    whole = tiny_trainer(tmp_path / "whole", Recording, max_steps=16, **CYCLES)
    whole.train()
    checkpoint, state = mid_cycle_checkpoint(whole)
    step, size = state["step"], state["cycle_group_size"]
    assert (step - step % 4, 4 * size) in whole.generated
    resumed = tiny_trainer(tmp_path / "resumed", Recording, max_steps=16, **CYCLES)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.generated[0] == (step, 4 * size)
    assert resumed.generated[1][1] == 4 * state["controller"]["group_size"]
    assert len(resumed.trained[0]) == size


def test_a_trainer_that_has_trained_drops_its_batch_on_resume(tmp_path: Path) -> None:
    """Its last batch is of a later model and other prompts: the step after the checkpoint must not train on it."""
    trainer = tiny_trainer(tmp_path, Recording, max_steps=16, **CYCLES)
    trainer.train()
    checkpoint, state = mid_cycle_checkpoint(trainer)
    stale = trainer._buffered_inputs
    assert stale is not None
    trainer.generated, trainer.trained = [], []
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.generated[0][0] == state["step"]
    assert not any(rows is batch["completion_ids"] for rows in trainer.trained for batch in stale)


@pytest.mark.parametrize(("weights", "mixed"), [([1.0, 0.0], False), ([0.0, 1.0], True), ([1.0, 1.0], True)])
def test_the_signal_utility_weighs_rewards(tmp_path: Path, weights: list[float], mixed: bool) -> None:
    """A reward with the weight 0 gives no advantage, so it must not count as a signal."""

    def always(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer = tiny_trainer(
        tmp_path,
        arguments={"reward_funcs": [always, even_words]},
        reward_weights=weights,
        utility="signal",
        max_steps=2,
    )
    trainer.train()
    state = trainer.group_size_controller.state
    assert state.mixed_weight[0] > 0
    assert (state.mixed_sum[0] > 0) is mixed
    for entry in trainer.state.log_history[:2]:
        assert (entry["reward_std"] > 0) is mixed


def test_a_state_with_other_entries_names_its_file(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    path = tmp_path / "checkpoint-2" / STATE_FILE
    state = json.loads(path.read_text())
    state["controller"]["horizon"] = state["controller"].pop("queue")
    path.write_text(json.dumps(state))
    message = r"lacks the entries \['queue'\] and has the unknown entries \['horizon'\]: .* delete sagc_state\.json"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_a_resume_in_the_second_epoch_goes_on_with_its_prompts(tmp_path: Path) -> None:
    """On a trainer that has trained, too: each prompt comes once per epoch."""
    seen: list[int] = []

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        seen.extend(dict.fromkeys(index))
        return even_words(completions)

    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    trainer = tiny_trainer(
        tmp_path, arguments={"reward_funcs": reward, "train_dataset": prompts(12)}, rho=0.3, V=0.1, **settings
    )
    trainer.train()
    whole, seen = seen, []
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert sorted(whole[:12]) == sorted(whole[12:]) == list(range(12))
    assert seen == whole[16:]
