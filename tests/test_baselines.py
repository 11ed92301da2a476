"""Other ways to spend rollouts: schedules, over-sampling, adaptive budgets, length-sorted micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Script, numbered_prompts, outcome, scripted_reward
from tiny import even_words, prompts, tiny_config, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import LlamaForCausalLM

from sagc.conformal import conformal_quantile, conformal_score, outcome_masses, resolved
from trainers import SAGCGRPOTrainer, SAGCRLOOConfig, SAGCRLOOTrainer
from trainers.adaptive_budgets import AdaptiveBudgets, budget_grid
from trainers.length_sorting import sorted_micro_batches
from trainers.oversampling import FirstFinishers, first_finishers
from trainers.rollouts import stall
from trainers.sagc_trainer import scheduled_size

METRICS = {"group_size", "straggler_rate", "straggler_rate_running", "budget", "rollouts", "stall_fraction"}


def log(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def sizes(trainer: Any) -> list[float]:
    return [entry["sagc/group_size"] for entry in log(trainer)]


# --- Schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([4], [4] * 7),
        ([8, 2], [8, 7, 6, 5, 4, 3, 2]),
        ([2, 8], [2, 3, 4, 5, 6, 7, 8]),
        ([2, 4], [2, 2, 3, 3, 3, 4, 4]),
    ],
)
def test_a_schedule_sets_the_sizes(tmp_path: Path, schedule: list[int], expected: list[int]) -> None:
    trainer = tiny_trainer(tmp_path, max_steps=7, group_size_schedule=schedule, rho=0.01)
    trainer.train()
    assert sizes(trainer) == expected
    assert [entry["sagc/rollouts"] for entry in log(trainer)] == [4 * size for size in expected]


def test_a_schedule_takes_the_nearest_feasible_size() -> None:
    assert [scheduled_size([8, 2], (2, 4, 8), t, 4) for t in range(6)] == [8, 8, 4, 2, 2, 2]
    assert scheduled_size([8, 2], (2, 4, 8), 0, 1) == 8


def test_a_schedule_goes_on_after_resume(tmp_path: Path) -> None:
    common = {"max_steps": 7, "group_size_schedule": [8, 2]}
    whole = tiny_trainer(tmp_path / "whole", save_strategy="steps", save_steps=3, **common)
    whole.train()
    resumed = tiny_trainer(tmp_path / "resumed", **common)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert sizes(resumed) == sizes(whole) == [8, 7, 6, 5, 4, 3, 2]


# --- Over-sampling


def test_first_finishers_are_kept() -> None:
    assert first_finishers([5, 3, 9, 3, np.inf, 2, 7, np.nan], sampled=4, kept=2) == [1, 3, 5, 6]
    assert first_finishers([np.inf] * 3, sampled=3, kept=2) == [0, 1], "none finished: the first in order"


def test_a_group_stops_when_enough_have_finished() -> None:
    criterion = FirstFinishers(sampled=3, kept=2, eos_token_ids=[1], device=torch.device("cpu"))
    steps = [[5, 5, 1, 5, 5, 5], [1, 5, 1, 5, 5, 1], [1, 1, 1, 5, 1, 1]]
    done = [criterion(torch.tensor(step).unsqueeze(1), None).tolist() for step in steps]
    assert done[0] == [False, False, True, False, False, False]
    assert done[1] == [True, True, True, False, False, True], "two of the first group ended, the third is stopped"
    assert done[2] == [True] * 6
    assert criterion.finished_at is not None
    # The second row of the first group was stopped at step 2: its padding at step 3 is no end.
    assert criterion.finished_at.tolist() == [2, np.inf, 1, np.inf, 3, 2]


class CountingModel(LlamaForCausalLM):
    steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            type(self).steps += 1
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("trainer_class", [SAGCGRPOTrainer, SAGCRLOOTrainer])
def test_over_sampling_keeps_the_first_of_a_longer_group(tmp_path: Path, trainer_class: type) -> None:
    """Same number of rows in training, fewer decoding steps, shorter completions; evaluation is left alone."""
    result = {}
    for extra in (0, 6):
        CountingModel.steps = 0
        torch.manual_seed(0)
        model = CountingModel(tiny_model().config)
        rloo = {"args": _rloo_config(tmp_path, group_size_schedule=[8], extra_rollouts=extra)}
        kinds = rloo if trainer_class is SAGCRLOOTrainer else {}
        trainer = tiny_trainer(
            tmp_path / str(extra),
            trainer_class,
            arguments={"model": model, "eval_dataset": prompts(4), **kinds},
            max_steps=3,
            max_completion_length=64,
            group_size_schedule=[8],
            extra_rollouts=extra,
            learning_rate=0.0,
        )
        trainer.train()
        entries = log(trainer)
        assert [entry["sagc/rollouts"] for entry in entries] == [32] * 3
        mean = np.mean([entry["completions/mean_length"] for entry in entries])
        result[extra] = (CountingModel.steps, mean, entries[0]["completions/clipped_ratio"])
    assert result[6][0] < result[0][0]
    assert result[6][1] < result[0][1]
    assert result[6][2] == 0.0, "14 completions have 8 that end before the limit"


def _rloo_config(folder: Path, **overrides: Any) -> SAGCRLOOConfig:
    settings = {"max_steps": 3, "max_completion_length": 64, "learning_rate": 0.0, "beta": 0.0}
    config: SAGCRLOOConfig = tiny_config(folder, SAGCRLOOConfig, **{**settings, **overrides})
    return config


def test_over_sampling_needs_completions_that_it_can_stop(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra_rollouts does not work with tools, environments or rollout_func"):
        tiny_trainer(tmp_path, arguments={"rollout_func": Script()}, extra_rollouts=2)
    with pytest.raises(ValueError, match="cannot stop completions on a vLLM server"):
        tiny_config(tmp_path, extra_rollouts=2, use_vllm=True, vllm_mode="server")
    with pytest.raises(ValueError, match="extra_rollouts must be at least 0"):
        tiny_config(tmp_path, extra_rollouts=-1)


# --- RLOO


def test_rloo_with_a_binding_budget(tmp_path: Path) -> None:
    config = _rloo_config(
        tmp_path, group_size_schedule=None, rho=0.2, tau=1.5, V=0.05, max_steps=6, learning_rate=1e-3
    )
    trainer = SAGCRLOOTrainer(
        model=tiny_model(),
        reward_funcs=even_words,
        args=config,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert len(set(sizes(trainer))) > 1
    assert [entry["sagc/rollouts"] for entry in log(trainer)] == [4 * size for size in sizes(trainer)]
    assert any(not a.equal(b) for a, b in zip(trainer.model.parameters(), tiny_model().parameters(), strict=True))
    with pytest.raises(ValueError, match="adaptive_budgets works on one process and with GRPO only"):
        SAGCRLOOTrainer(
            model=tiny_model(),
            reward_funcs=even_words,
            args=_rloo_config(tmp_path, adaptive_budgets=True),
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
        )


# --- Adaptive budgets


def test_conformal_quantile_by_hand() -> None:
    assert conformal_quantile([0.3, 0.1, 0.2, 0.4], 0.25) == 0.4  # ceil(5 * 0.75) = 4th
    assert conformal_quantile([0.3, 0.1, 0.2, 0.4], 0.5) == 0.3  # ceil(2.5) = 3rd
    assert conformal_quantile([0.3, 0.1], 0.1) == 1.0, "two scores cannot promise 90%"
    values, shares = outcome_masses([1, 0, 0, np.nan, np.nan, 1.0000000001])
    assert (values[:2].tolist(), shares.tolist()) == ([1.0, 0.0], pytest.approx([1 / 3] * 3))
    assert resolved([1, 1, 1, 0], 0.75)
    assert not resolved([1, 1, 1, 0], 0.76)


def test_the_prediction_set_holds_the_leading_outcome_as_often_as_promised() -> None:
    """Monte Carlo over exchangeable prompts: stopping early is wrong no more often than the miscoverage."""
    rng = np.random.default_rng(0)
    groups = [rng.binomial(1, rng.beta(0.5, 0.5), size=8).astype(float) for _ in range(3000)]
    for k in (2, 4):
        covered = []
        for trial in range(60):
            calibration, test = groups[trial * 50 : trial * 50 + 40], groups[trial * 50 + 40 : trial * 50 + 50]
            threshold = conformal_quantile([conformal_score(g, k, rng) for g in calibration], 0.1)
            covered += [conformal_score(g, k, rng) <= threshold for g in test]
        assert 0.87 < np.mean(covered) <= 1.0


def test_budget_grid_doubles_up_to_the_full_group() -> None:
    assert budget_grid(2, 8) == (2, 4, 8)
    assert budget_grid(3, 8) == (3, 6, 8)
    assert budget_grid(8, 8) == (8,)


def test_adaptive_budgets_sample_in_rounds_and_stop_at_settled_prompts(tmp_path: Path) -> None:
    """Full groups calibrate; then every prompt stops at the first budget whose rewards reach the threshold."""
    script = Script()
    trainer = SAGCGRPOTrainer(
        model=tiny_model(),
        reward_funcs=scripted_reward,
        args=tiny_config(tmp_path, adaptive_budgets=True, adaptive_miscoverage=0.3, max_steps=8),
        train_dataset=numbered_prompts(40),
        processing_class=tiny_tokenizer(),
        rollout_func=script,
    )
    trainer.train()
    entries = log(trainer)
    assert [entry["sagc/group_size"] for entry in entries[:4]] == [8.0] * 4, "16 groups calibrate"
    assert 2 <= min(sizes(trainer)) < 8
    # Rounds: each prompt is sampled at 2, at 4 and at 8 until it stops; its rows are those of the metric.
    for entry in entries[4:]:
        assert 8 <= entry["sagc/rollouts"] == 4 * entry["sagc/group_size"] <= 32


class AdaptiveTrainer(SAGCGRPOTrainer):
    """Records thresholds and the rewards that are trained on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[tuple[dict[int, float], list[list[float]]]] = []
        self.loss_rows: list[tuple[int, int]] = []
        super().__init__(*args, **kwargs)

    def _train_on(self, rollouts: list[Any]) -> dict[str, Any]:
        budgets = self._budgets
        assert budgets is not None
        before = AdaptiveBudgets(**{**vars(budgets), "generation": budgets.generation - 1})
        rewards = [[r.rewards[0] for r in rollouts[i : i + 8]] for i in range(0, len(rollouts), 8)]
        self.seen.append((before.thresholds(), rewards))
        return super()._train_on(rollouts)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.loss_rows.append((inputs["completion_ids"].shape[0], int(inputs["completion_mask"].any(dim=1).sum())))
        return super()._compute_loss(model, inputs)


def test_adaptive_budgets_in_training(tmp_path: Path) -> None:
    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [float(i % 2) for i in index]  # settled at once: all right or all wrong

    trainer = tiny_trainer(
        tmp_path,
        AdaptiveTrainer,
        arguments={"reward_funcs": reward},
        adaptive_budgets=True,
        adaptive_miscoverage=0.3,
        max_steps=7,
        steps_per_generation=1,
    )
    trainer.train()
    entries = log(trainer)
    assert set(entries[0]) >= {f"sagc/{name}" for name in METRICS}
    assert sizes(trainer)[:4] == [8.0] * 4, "16 groups calibrate"
    assert sizes(trainer)[4:] == [2.0] * 3
    assert [entry["sagc/rollouts"] for entry in entries] == [32] * 4 + [8] * 3
    assert trainer.loss_rows == [(32, 32)] * 4 + [(8, 8)] * 3, "no masked row is computed"
    assert all(threshold < 1 for threshold in trainer.seen[-1][0].values())


def test_adaptive_budgets_give_unsettled_prompts_more(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        AdaptiveTrainer,
        arguments={"reward_funcs": lambda completions, **_: [float(len(c) % 2) for c in completions]},
        adaptive_budgets=True,
        adaptive_miscoverage=0.4,
        max_steps=10,
    )
    trainer.train()
    counts = set()
    for (thresholds, rewards), rows in zip(trainer.seen[4:], trainer.loss_rows[4:], strict=True):
        for group in rewards:
            real = [value for value in group if not np.isnan(value)]
            counts.add(len(real))
            stops = [k for k in (2, 4) if resolved(group[:k], thresholds[k])]
            assert len(real) == (stops[0] if stops else 8)
        assert rows[1] == sum((~np.isnan(group)).sum() for group in np.asarray(rewards))
    assert len(counts) > 1
    advantages = [entry["grad_norm"] for entry in log(trainer)]
    assert np.isfinite(advantages).all()


def test_adaptive_budgets_train_on_every_row_of_uneven_micro_batches(tmp_path: Path) -> None:
    """Where the sampled rows do not divide among the micro-batches, masked ones fill up and no row is lost."""
    trainer = tiny_trainer(
        tmp_path,
        AdaptiveTrainer,
        arguments={"reward_funcs": lambda completions, **_: [float(len(c) % 2) for c in completions]},
        adaptive_budgets=True,
        adaptive_miscoverage=0.4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=10,
    )
    trainer.train()
    batches = [trainer.loss_rows[i : i + 4] for i in range(0, len(trainer.loss_rows), 4)]
    assert [sum(real for _, real in batch) for batch in batches] == [e["sagc/rollouts"] for e in log(trainer)]
    assert all(len({rows for rows, _ in batch}) == 1 for batch in batches)
    assert any(rows != real for batch in batches for rows, real in batch), "some batch does not divide"


# --- Length-sorted micro-batches


def test_sorted_micro_batches_hold_the_same_rows() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, size=8)
    mask = torch.tensor([[1] * n + [0] * (12 - n) for n in lengths])
    ids = torch.tensor(rng.integers(5, 30, size=(8, 12))) * mask
    prompt_lengths = rng.integers(1, 6, size=8)
    prompt_mask = torch.tensor([[0] * (6 - n) + [1] * n for n in prompt_lengths])
    whole = {"prompt_ids": prompt_mask * 7, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask}
    whole |= {"advantages": torch.arange(8.0), "old_per_token_logps": -ids.float()}
    micro = [
        {**{k: v[i : i + 2] for k, v in whole.items()}, "num_items_in_batch": torch.tensor(9)} for i in range(0, 8, 2)
    ]
    batches = sorted_micro_batches(micro, torch.Generator().manual_seed(0))
    assert sorted(int(a) for b in batches for a in b["advantages"]) == list(range(8))
    widths = []
    for batch in batches:
        assert batch["num_items_in_batch"] == 9
        index = batch["advantages"].long()
        width = int(lengths[index.numpy()].max())
        widths.append(sorted(lengths[index.numpy()].tolist()))
        assert batch["completion_ids"].shape == (2, width)
        assert batch["completion_ids"].equal(ids[index, :width])
        assert batch["old_per_token_logps"].equal(-ids[index, :width].float())
        longest = int(prompt_lengths[index.numpy()].max())
        assert batch["prompt_mask"].equal(prompt_mask[index, -longest:])
    in_order = [length for batch in sorted(widths) for length in batch]
    assert in_order == sorted(lengths.tolist()), "the rows of a micro-batch are neighbours in length"
    with pytest.raises(ValueError, match="does not support images"):
        sorted_micro_batches([{"pixel_values": ids}], torch.Generator())


def test_sorted_micro_batches_leave_the_update_as_it_is(tmp_path: Path) -> None:
    """Over one accumulated step the token-level loss and gradient are the same; the padded tokens are fewer."""
    weights, tokens = [], []
    for sort in (False, True):

        class Trainer(SAGCGRPOTrainer):
            padded = 0

            def _compute_loss(self, model: Any, inputs: Any) -> Any:
                self.padded += inputs["completion_ids"].numel()
                return super()._compute_loss(model, inputs)

        trainer = tiny_trainer(
            tmp_path / str(sort),
            Trainer,
            max_steps=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            length_sorted_batches=sort,
            max_completion_length=64,
            optim="sgd",
            learning_rate=1.0,
        )
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        tokens.append(trainer.padded)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert tokens[1] < tokens[0]


def test_stall_by_hand() -> None:
    idle, share = stall([np.array([[2, 4], [6, 8]]), np.array([[1, 1]])])
    assert (idle, share) == (3.0, pytest.approx(3 * 4 / (8 * 4 + 1 * 2)))
    assert stall([np.zeros((2, 2))]) == (0.0, 0.0)
    assert outcome(0, 1, 2, 3) == outcome(0, 1, 2, 3)
