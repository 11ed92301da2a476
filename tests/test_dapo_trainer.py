"""DAPO: dynamic sampling against a brute-force reference, refills, resume, overlong punishment, switches."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scripted import Script, numbered_prompts, outcome, scripted_reward
from tiny import even_words, prompts, tiny_config, tiny_model, tiny_tokenizer, tiny_trainer
from trl import GRPOTrainer

from sagc import mixed_reward_curves
from sagc.utility import informative_groups
from trainers import SAGCConfig, SAGCDAPOConfig, SAGCDAPOTrainer
from trainers.prompt_stream import PromptStream
from trainers.sagc_trainer import STATE_FILE


def dapo_config(output_dir: Path, **overrides: Any) -> SAGCDAPOConfig:
    config: SAGCDAPOConfig = tiny_config(output_dir, SAGCDAPOConfig, **overrides)
    return config


class RecordingTrainer(SAGCDAPOTrainer):
    """Records which prompts each batch trains on, with their rewards, and the rows of the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained: list[list[int]] = []
        self.fills: list[float] = []
        self.loss_rows: list[int] = []
        super().__init__(*args, **kwargs)

    def _train_on(self, rollouts: list[Any]) -> dict[str, Any]:
        self.trained.append([rollout.row["index"] for rollout in rollouts][:: self.num_generations])
        return super()._train_on(rollouts)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.loss_rows.append(int(inputs["completion_mask"].any(dim=1).sum()))
        return super()._compute_loss(model, inputs)


def dapo_trainer(
    output_dir: Path, count: int = 24, script: Script | None = None, **overrides: Any
) -> RecordingTrainer:
    return RecordingTrainer(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=dapo_config(output_dir, **overrides),
        train_dataset=numbered_prompts(count),
        processing_class=tiny_tokenizer(),
        rollout_func=script or Script(),
    )


def log(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def reference(count: int, steps: int, sizes: list[int], max_refills: int, wanted: int = 4) -> dict[str, list[Any]]:
    """Brute force: prompts one at a time in the stream's order, a group kept if it has a right and a wrong answer."""
    order: list[int] = []
    epoch = 0
    result: dict[str, list[Any]] = {"kept": [], "refills": [], "discarded": [], "sampled": []}
    for step in range(steps):
        kept: list[int] = []
        taken: list[int] = []
        rounds = 0
        while len(kept) < wanted and rounds <= max_refills:
            rounds += 1
            for _ in range(wanted - len(kept)):
                if not order:
                    order = torch.randperm(count, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
                    epoch += 1
                taken.append(order.pop(0))
            kept = [i for i in taken if 0 < sum(outcome(0, i, step, j)[1] for j in range(sizes[step])) < sizes[step]]
        result["kept"].append(kept)
        result["refills"].append(rounds - 1)
        result["discarded"].append((len(taken) - len(kept)) * sizes[step])
        result["sampled"].append(taken)
    return result


@pytest.mark.parametrize("max_refills", [0, 1, 8])
def test_dynamic_sampling_equals_brute_force(tmp_path: Path, max_refills: int) -> None:
    """Same kept groups, refills and discarded rollouts; no prompt is lost or doubled over two epochs."""
    script = Script()
    trainer = dapo_trainer(tmp_path, 40, script, max_steps=12, max_refills=max_refills, rho=0.3, tau=1.5, V=0.05)
    trainer.train()
    entries = log(trainer)
    sizes = [int(entry["sagc/group_size"]) for entry in entries]
    expected = reference(40, 12, sizes, max_refills)
    assert len(set(sizes)) > 1
    assert [[i for i in row if i in kept] for row, kept in zip(trainer.trained, expected["kept"], strict=True)] == (
        expected["kept"]
    )
    assert [entry["dapo/refills"] for entry in entries] == expected["refills"]
    assert [entry["dapo/discarded_rollouts"] for entry in entries] == expected["discarded"]
    kept_fraction = [len(k) / len(s) for k, s in zip(expected["kept"], expected["sampled"], strict=True)]
    assert [entry["dapo/kept_fraction"] for entry in entries] == pytest.approx(kept_fraction)
    assert script.sampled == [i for taken in expected["sampled"] for i in taken]
    epochs = [script.sampled[start : start + 40] for start in range(0, len(script.sampled), 40)]
    assert len(epochs) >= 2
    for epoch in epochs[:-1]:
        assert sorted(epoch) == list(range(40)), "each epoch has every prompt once"
    assert max(Counter(epochs[-1]).values()) == 1
    # Exactly the kept groups reach the loss.
    assert trainer.loss_rows == [len(kept) * size for kept, size in zip(expected["kept"], sizes, strict=True)]


def test_sampler_and_signal_utility_see_the_same_success_rate(tmp_path: Path) -> None:
    """The share of groups that the sampler keeps is the controller's signal at the sampled size, batch by batch."""
    trainer = dapo_trainer(tmp_path, max_steps=1, utility="signal", max_refills=2)
    trainer.train()
    state = trainer.group_size_controller.state
    assert state.mixed_sum[-1] / state.mixed_weight[-1] == pytest.approx(log(trainer)[0]["dapo/kept_fraction"])
    rewards = np.random.default_rng(0).integers(0, 2, size=(50, 3)).astype(float)
    assert (mixed_reward_curves(rewards, [3])[:, 0] == informative_groups(rewards)).all()
    assert not informative_groups([[0.1 + 0.2, 0.3]])[0], "equal but for rounding"
    assert informative_groups([[1, np.nan], [np.nan, np.nan], [0, 1]]).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("size", "micro_batches"), [pytest.param(8, 1, id="no filler"), pytest.param(3, 2, id="masked filler")]
)
def test_gradient_is_that_of_the_kept_groups_alone(tmp_path: Path, size: int, micro_batches: int) -> None:
    """One step from equal weights: dynamic sampling with refills moves them as training on the kept groups does."""
    sgd = {"max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0}
    batch = {"per_device_train_batch_size": 32 // micro_batches, "gradient_accumulation_steps": micro_batches}
    dapo = dapo_trainer(tmp_path / "dapo", 26, max_refills=1, group_size_schedule=[size], **batch, **sgd)
    dapo.train()
    kept = reference(26, 1, [size], 1)["kept"][0]
    assert len(kept) == 3, "the batch of four is not full, or this shows nothing about dropped groups"
    batch = {"per_device_train_batch_size": size * len(kept), "num_generations": size, "min_group_size": size}
    plain = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=dapo_config(tmp_path / "plain", dynamic_sampling=False, **batch, **sgd),
        train_dataset=numbered_prompts(26).select(kept),
        processing_class=tiny_tokenizer(),
        rollout_func=Script(),
    )
    plain.train()
    for ours, theirs in zip(dapo.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    start = tiny_model().parameters()
    assert any(not ours.equal(theirs) for ours, theirs in zip(dapo.model.parameters(), start, strict=True))
    for key in ("loss", "reward", "reward_std", "rewards/scripted_reward/mean"):
        assert log(dapo)[0][key] == pytest.approx(log(plain)[0][key], rel=1e-4, abs=1e-6)


def test_no_informative_group_leaves_a_step_without_gradient(tmp_path: Path) -> None:
    trainer = RecordingTrainer(
        model=tiny_model(),
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        args=dapo_config(tmp_path, max_steps=2, max_refills=1, steps_per_generation=2, per_device_train_batch_size=16),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert [entry["grad_norm"] for entry in log(trainer)] == [0.0, 0.0]
    assert log(trainer)[0]["dapo/kept_fraction"] == 0.0
    assert log(trainer)[0]["dapo/batch_fill"] == 0.0
    for ours, start in zip(trainer.model.parameters(), tiny_model().parameters(), strict=True):
        assert ours.equal(start)


def test_off_switches_make_it_sagc_grpo(tmp_path: Path) -> None:
    """With every part off, losses, rewards and weights equal those of SAGCGRPOTrainer on the same seed."""
    common = {"max_steps": 3, "loss_type": "grpo", "epsilon_high": None}
    sagc = tiny_trainer(tmp_path / "sagc", **common)
    sagc.train()
    dapo = SAGCDAPOTrainer(
        model=tiny_model(),
        reward_funcs=even_words,
        args=dapo_config(tmp_path / "dapo", dynamic_sampling=False, **common),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    dapo.train()
    for ours, theirs in zip(log(dapo), log(sagc), strict=True):
        timed = {"step_time", "sagc/decision_seconds"}
        assert {k: v for k, v in ours.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}
    for ours, theirs in zip(dapo.model.parameters(), sagc.model.parameters(), strict=True):
        assert ours.equal(theirs)


def test_clip_higher_and_token_level_loss_are_set(tmp_path: Path) -> None:
    trainer = dapo_trainer(tmp_path, epsilon=0.2)
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.loss_type) == (0.2, 0.28, "dapo")
    symmetric = dapo_trainer(tmp_path, epsilon=0.2, epsilon_high=None, loss_type="grpo")
    assert (symmetric.epsilon_low, symmetric.epsilon_high, symmetric.loss_type) == (0.2, 0.2, "grpo")


def test_overlong_punishment_lowers_the_reward_and_not_the_selection(tmp_path: Path) -> None:
    """Equation 13 of the paper on each completion, times its weight; the sampler sees the rewards without it."""
    script = Script()
    config = dapo_config(tmp_path, max_steps=1, overlong_buffer=10, overlong_penalty=0.5, max_completion_length=16)
    trainer = RecordingTrainer(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=config,
        train_dataset=numbered_prompts(24),
        processing_class=tiny_tokenizer(),
        rollout_func=script,
    )
    trainer.train()
    assert config.reward_weights is None, "the user's configuration is left alone"
    expected = reference(24, 1, [8], 4)["kept"][0]
    assert trainer.trained[0] == expected
    lengths = [outcome(0, i, 0, j)[0] for i in expected for j in range(8)]
    rewards = [outcome(0, i, 0, j)[1] for i in expected for j in range(8)]
    punished = [-min(max(length - 6, 0) / 10, 1.0) for length in lengths]
    entry = log(trainer)[0]
    assert entry["rewards/soft_overlong_punishment_reward/mean"] == pytest.approx(np.mean(punished), abs=1e-6)
    assert entry["reward"] == pytest.approx(np.mean(rewards) + 0.5 * np.mean(punished), abs=1e-6)
    assert min(punished) < 0


def test_overlong_punishment_does_not_score_what_no_reward_function_scored(tmp_path: Path) -> None:
    script = Script()

    def every_other(scripted_reward: list[float], **_: Any) -> list[float | None]:
        return [reward if row % 2 else None for row, reward in enumerate(scripted_reward)]

    trainer = RecordingTrainer(
        model=tiny_model(),
        reward_funcs=every_other,
        args=dapo_config(tmp_path, max_steps=1, overlong_buffer=10, max_completion_length=16, min_group_size=8),
        train_dataset=numbered_prompts(24),
        processing_class=tiny_tokenizer(),
        rollout_func=script,
    )
    seen: list[torch.Tensor] = []
    prepare = trainer._train_on
    trainer._train_on = lambda rollouts: seen.append(prepare(rollouts)) or seen[-1]  # type: ignore[method-assign]
    trainer.train()
    outcomes = [[outcome(0, i, 0, j) for j in range(1, 8, 2)] for i in trainer.trained[0]]
    rewards = np.array([[reward - min(max(n - 6, 0) / 10, 1.0) for n, reward in group] for group in outcomes])
    assert log(trainer)[0]["reward"] == pytest.approx(rewards.mean(), abs=1e-6)
    advantages = seen[0]["advantages"].reshape(-1, 8).numpy()
    assert np.all(advantages[:, ::2] == 0)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(advantages[:, 1::2], centred / (rewards.std(axis=1, ddof=1) + 1e-4)[:, None], atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "save_at"),
    [
        pytest.param({}, 3, id="between generations"),
        pytest.param({"steps_per_generation": 4, "per_device_train_batch_size": 8}, 6, id="middle of a cycle"),
    ],
)
def test_resume_draws_the_prompts_of_an_uninterrupted_run(
    tmp_path: Path, settings: dict[str, Any], save_at: int
) -> None:
    common = {"max_steps": 2 * save_at, "rho": 0.3, "tau": 1.5, "V": 0.05, "max_refills": 3, **settings}
    whole = dapo_trainer(tmp_path / "whole", 10, save_strategy="steps", save_steps=save_at, **common)
    whole.train()
    checkpoint = tmp_path / "whole" / f"checkpoint-{save_at}"
    resumed = dapo_trainer(tmp_path / "resumed", 10, **common)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert len(resumed.trained) == len(whole.trained) - save_at // (4 if settings else 1)
    if not settings:
        assert resumed.trained == whole.trained[-len(resumed.trained) :]
        assert resumed.group_size_controller.state_dict() == whole.group_size_controller.state_dict()
        assert [e["loss"] for e in log(resumed)] == [e["loss"] for e in log(whole)]
        for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert ours.equal(theirs)
    else:  # the batch is generated again, at a later step and so with other draws, from the prompts that it had
        saved = json.loads((checkpoint / STATE_FILE).read_text())
        assert saved["cycle_prompts"] != saved["prompts"]
        stream = PromptStream(numbered_prompts(10), 7, True)
        stream.load_state_dict(saved["cycle_prompts"])
        script = resumed.rollout_func
        assert script.sampled == [row["index"] for row in stream.take(len(script.sampled))], "no prompt lost"


def test_several_micro_batches_and_iterations(tmp_path: Path) -> None:
    trainer = dapo_trainer(
        tmp_path, max_steps=8, steps_per_generation=2, num_iterations=2, per_device_train_batch_size=16, max_refills=0
    )
    trainer.train()
    assert len(trainer.trained) == 2
    assert len(trainer.loss_rows) == 8
    assert all(math.isfinite(entry["loss"]) for entry in log(trainer))


def test_completions_table_holds_the_trained_rows(tmp_path: Path) -> None:
    """Columns that a reward function logs stay with their completions through selection."""

    def reward(completions: list[str], index: list[int], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("index", list(index))
        return scripted_reward(completions, **columns)

    trainer = dapo_trainer(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=1)
    trainer.reward_funcs = [reward]
    trainer.train()
    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    expected = [i for i in trainer.trained[0] for _ in range(8)]
    assert table["index"].tolist() == expected
    assert [int(p.split()[0][1:]) for p in table["prompt"]] == [i % 29 for i in expected]


def test_streamed_training_set(tmp_path: Path) -> None:
    script = Script()
    trainer = RecordingTrainer(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=dapo_config(tmp_path, max_steps=6, shuffle_dataset=True),
        train_dataset=numbered_prompts(20).to_iterable_dataset(),
        processing_class=tiny_tokenizer(),
        rollout_func=script,
    )
    trainer.train()
    assert len(script.sampled) > 20
    assert sorted(script.sampled[:20]) == list(range(20))
    stream = PromptStream(numbered_prompts(20).to_iterable_dataset(), 7, True)
    stream.take(27)
    again = PromptStream(numbered_prompts(20).to_iterable_dataset(), 7, True)
    again.load_state_dict(stream.state_dict())
    assert stream.take(30) == again.take(30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_refills": -1}, "max_refills must be at least 0"),
        ({"overlong_buffer": 25}, "overlong_buffer must lie in 1 to max_completion_length"),
        ({"overlong_buffer": 4, "overlong_penalty": 0.0}, "overlong_penalty must be positive"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "Set it to 'sum_then_normalize'"),
        ({"adaptive_budgets": True}, "exclude each other"),
    ],
)
def test_bad_settings_fail_at_construction(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dapo_config(tmp_path, **settings)


def test_other_configuration_and_tools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="needs args=SAGCDAPOConfig"):
        SAGCDAPOTrainer(tiny_model(), even_words, SAGCConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    with pytest.raises(ValueError, match="train_dataset is empty"):
        PromptStream(numbered_prompts(1).select([]), 0, True).take(1)
