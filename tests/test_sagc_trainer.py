"""The trainers on a tiny real model: TRL's behaviour is preserved, and a group size takes effect everywhere."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset
from tiny import even_words, prompts, tiny_config, tiny_model, tiny_tokenizer, tiny_trainer
from trl import GRPOTrainer

from sagc import default_v
from trainers import SAGCConfig, SAGCGRPOTrainer, SAGCMixin
from trainers.sagc_trainer import STATE_FILE


def train_log(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def decisions(trainer: Any) -> list[float]:
    return [entry["sagc/group_size"] for entry in train_log(trainer) if "sagc/group_size" in entry]


def trained(output_dir: Path, trainer_class: type = SAGCGRPOTrainer, **overrides: Any) -> Any:
    """Construction seeds the process, so each trainer is built and run before the next one is built."""
    trainer = tiny_trainer(output_dir, trainer_class, **overrides)
    trainer.train()
    return trainer


def test_fixed_size_is_plain_grpo(tmp_path: Path) -> None:
    """With min = max size, losses, rewards, lengths and gradients equal those of GRPOTrainer on the same seed."""
    settings = {"min_group_size": 8, "max_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 16}
    plain, sagc = trained(tmp_path / "plain", GRPOTrainer, **settings), trained(tmp_path / "sagc", **settings)
    assert any("reward" in entry for entry in train_log(plain))
    for ours, theirs in zip(train_log(sagc), train_log(plain), strict=True):
        untimed = theirs.keys() - {"step_time"}
        assert {key: ours[key] for key in untimed} == {key: theirs[key] for key in untimed}
    for ours, theirs in zip(sagc.model.parameters(), plain.model.parameters(), strict=True):
        assert ours.equal(theirs)


class RowCountingTrainer(GRPOTrainer):
    """A user's own trainer: counts the rows that are generated, scored and back-propagated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generated: list[int] = []
        self.trained: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.generated.append(len(prompt_ids))
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.trained.append(inputs["completion_ids"].shape[0])
        return super()._compute_loss(model, inputs)


class UsersSAGCTrainer(SAGCMixin, RowCountingTrainer):
    pass


def test_smaller_groups_run_fewer_rows_in_a_users_own_trainer(tmp_path: Path) -> None:
    scored: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        scored.append(len(completions))
        return even_words(completions)

    trainer = tiny_trainer(
        tmp_path, UsersSAGCTrainer, arguments={"reward_funcs": reward}, max_steps=6, rho=0.2, tau=1.5, V=0.05
    )
    trainer.train()
    sizes = decisions(trainer)
    assert len(set(sizes)) > 1, "the budget binds, so the size must move"
    rows = [4 * int(size) for size in sizes]
    assert trainer.generated == scored == trainer.trained == rows
    assert [entry["sagc/rollouts"] for entry in train_log(trainer)] == rows


def test_groups_hold_completions_of_one_prompt(tmp_path: Path) -> None:
    """Rows reach the reward function as whole groups, prompt after prompt, at every size."""
    seen: list[list[int]] = []

    def reward(completions: list[str], index: list[int], **kwargs: Any) -> list[float]:
        seen.append(list(index))
        return even_words(completions)

    trainer = tiny_trainer(
        tmp_path,
        arguments={"reward_funcs": reward, "train_dataset": prompts(24)},
        max_steps=6,
        rho=0.2,
        tau=1.5,
        V=0.05,
    )
    trainer.train()
    epoch: list[int] = []
    for size, index in zip(decisions(trainer), seen, strict=True):
        unique = index[:: int(size)]
        assert index == [i for i in unique for _ in range(int(size))]
        epoch += unique
    assert sorted(epoch) == list(range(24)), "one epoch sees each prompt once, whatever the sizes"


@pytest.mark.parametrize(
    ("settings", "save_at"),
    [
        pytest.param({}, 4, id="second epoch"),
        pytest.param({"steps_per_generation": 4, "per_device_train_batch_size": 8}, 6, id="middle of a cycle"),
    ],
)
def test_resume_takes_the_decisions_of_an_uninterrupted_run(
    tmp_path: Path, settings: dict[str, Any], save_at: int
) -> None:
    common = {"save_strategy": "steps", "save_steps": save_at, "rho": 0.3, "tau": 1.5, "V": 0.1, **settings}
    steps = 2 * save_at + 2

    def trainer(folder: str) -> Any:
        return tiny_trainer(tmp_path / folder, arguments={"train_dataset": prompts(12)}, max_steps=steps, **common)

    whole = trainer("whole")
    whole.train()
    checkpoint = tmp_path / "whole" / f"checkpoint-{save_at}"
    saved = json.loads((checkpoint / STATE_FILE).read_text())
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.group_size_controller.state.boundary > saved["controller"]["boundary"]
    assert len(set(decisions(whole))) > 1
    if settings:  # the interrupted batch is generated again, from a later model: same size, counted once
        assert resumed.group_size_controller.state.boundary == whole.group_size_controller.state.boundary
        assert len(decisions(resumed)) == len(decisions(whole))
    else:
        assert resumed.group_size_controller.state_dict() == whole.group_size_controller.state_dict()
        assert train_log(resumed)[-1]["loss"] == train_log(whole)[-1]["loss"]
        assert decisions(resumed) == decisions(whole)


def test_same_seed_same_decisions(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / name, max_steps=5, rho=0.3, V=0.1) for name in "ab")
    assert len(set(decisions(first))) > 1
    assert first.group_size_controller.state_dict() == second.group_size_controller.state_dict()


def test_size_moves_and_rate_approaches_a_binding_budget(tmp_path: Path) -> None:
    """The largest group overspends the budget by a lot; the controlled run ends near it."""
    common = {"max_steps": 20, "max_completion_length": 64, "learning_rate": 0.0}
    fixed = trained(tmp_path / "fixed", min_group_size=8, **common)
    controlled = trained(tmp_path / "sagc", rho=0.6, V=0.05, **common)
    rate, fixed_rate = (train_log(t)[-1]["sagc/straggler_rate_running"] for t in (controlled, fixed))
    assert fixed_rate > 0.75
    assert abs(rate - 0.6) < 0.1
    assert len(set(decisions(controlled))) > 2


def test_majority_cut_off_is_a_straggler_event(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1, max_completion_length=2)
    assert train_log(trainer)[0]["completions/clipped_ratio"] > 0.8
    assert train_log(trainer)[0]["sagc/straggler_rate"] == 1.0


def test_missing_and_nan_rewards_leave_the_controller_sound(tmp_path: Path) -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        values: list[float | None] = [*even_words(completions)]
        values[0], values[-1] = None, float("nan")
        return values

    arguments = {"reward_funcs": [reward, lambda completions, **_: [None] * len(completions)]}
    trainer = trained(tmp_path, arguments=arguments, utility="signal", max_steps=3)
    text = json.dumps(trainer.group_size_controller.state_dict())
    assert "NaN" not in text
    assert "Infinity" not in text
    # The first and the last of four groups lack a reward at each of three steps, so two teach the utility.
    weight = trainer.group_size_controller.state.mixed_weight
    assert weight[0] == pytest.approx(2 * (1 + 0.95 + 0.95**2))
    assert all(0 <= entry["sagc/utility"] <= 1 for entry in train_log(trainer))


def test_infeasible_budget_warns_once_and_stays_small(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trained(tmp_path, max_steps=6, max_completion_length=3, rho=0.05)
    log = train_log(trainer)
    assert log[-1]["sagc/infeasible"] == 1.0
    assert sum("Every group size breaks" in record.getMessage() for record in caplog.records) == 1


def test_steps_per_generation_num_iterations_and_evaluation(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        arguments={
            "reward_funcs": [even_words, lambda completions, **_: [float(len(c)) for c in completions]],
            "eval_dataset": prompts(4),
        },
        per_device_train_batch_size=16,
        per_device_eval_batch_size=8,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
        rho=0.2,
        V=0.05,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer.train()
    assert len(decisions(trainer)) == 2, "8 steps are two generations of 2 x 2 steps"
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) >= 2
    assert not any(key.startswith("eval_sagc") for entry in evaluations for key in entry)


def test_streams(tmp_path: Path) -> None:
    def trainer(**overrides: Any) -> Any:
        return tiny_trainer(tmp_path, arguments={"train_dataset": prompts().to_iterable_dataset()}, **overrides)

    running = trainer(max_steps=3, rho=0.2, V=0.05)
    running.train()
    assert len(decisions(running)) == 3
    with pytest.raises(ValueError, match="max_steps"):
        trainer(max_steps=-1)
    with pytest.raises(ValueError, match="dispatch_batches"):
        trainer(accelerator_config={"dispatch_batches": True})


def test_completions_table_holds_one_batch(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=4, rho=0.2, V=0.05, log_completions=True)
    assert len(set(decisions(trainer))) > 1
    for step, size in enumerate(decisions(trainer), start=1):
        assert len(pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")) == 4 * size


def test_users_utility(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, arguments={"group_size_utility": lambda size: -abs(size - 5.0)}, max_steps=3, rho=0.9
    )
    trainer.train()
    assert decisions(trainer) == [8, 5, 5]
    assert trainer.group_size_controller.config.v == default_v(3, utility_range=3.0)  # from -3 at sizes 2 and 8 to 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_group_size": 9}, r"min_group_size \(9\) is above num_generations \(8\)"),
        ({"min_group_size": 1}, "min_group_size must be at least 2"),
        ({"tau": 1.0}, "tau must be above 1 and finite, got 1.0"),
        ({"tau": float("nan")}, "tau must be above 1"),
        ({"rho": 0.0}, "rho must lie between 0 and 1"),
        ({"rho": 1.0}, "rho must lie between 0 and 1"),
        ({"V": -1.0}, "V must be positive"),
        ({"V": float("inf")}, "V must be positive and finite"),
        ({"utility": "square"}, "Unknown utility 'square'"),
        ({"forgetting_factor": 0.0}, "forgetting_factor"),
        ({"change_every": 0}, "change_every"),
        ({"straggler_event": "late"}, "Unknown straggler event 'late'"),
        ({"straggler_event": "absolute"}, "set straggler_length"),
        ({"straggler_event": "absolute", "straggler_length": 25}, "above max_completion_length"),
        ({"eval_strategy": "epoch", "per_device_eval_batch_size": 3}, r"global eval batch size .* must be divisible"),
        ({"num_generations": 5}, "must be divisible by num_generations"),
        ({"per_device_train_batch_size": 8, "steps_per_generation": 7, "num_generations": 7}, "No group size from"),
    ],
)
def test_bad_settings_fail_at_construction(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **settings)


def test_feasible_sizes_follow_the_batch(tmp_path: Path) -> None:
    assert tiny_config(tmp_path).group_sizes == (2, 3, 4, 5, 6, 7, 8)
    config = tiny_config(tmp_path, per_device_train_batch_size=6, num_generations=12, steps_per_generation=4)
    assert config.prompts_per_process == 2
    assert config.group_sizes == (2, 4, 6, 8, 10, 12)


def test_wrong_arguments_name_the_fix(tmp_path: Path) -> None:
    from trl import GRPOConfig

    plain = GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=r"needs args=SAGCConfig\(\.\.\.\), got GRPOConfig"):
        SAGCGRPOTrainer(model=tiny_model(), reward_funcs=even_words, args=plain, train_dataset=prompts())
    with pytest.raises(ValueError, match="train_dataset has 3 prompts, fewer than the 4"):
        tiny_trainer(tmp_path, arguments={"train_dataset": Dataset.from_dict({"prompt": ["w1", "w2", "w3"]})})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"step": "a", "cycle_group_size": 8, "controller": {}}',
        '{"controller": {}}',
        '{"step": 2, "cycle_group_size": 8}',
    ],
)
def test_damaged_state_file_names_the_fix(tmp_path: Path, content: str) -> None:
    trained(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    (tmp_path / "checkpoint-2" / STATE_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"sagc_state\.json is damaged .* Resume from another checkpoint"):
        tiny_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_checkpoint_without_a_state_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    (tmp_path / "checkpoint-2" / STATE_FILE).unlink()
    trainer = tiny_trainer(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.group_size_controller.state.boundary == 1
    assert any("controller starts anew" in record.getMessage() for record in caplog.records)


class OwnSignatureTrainer(GRPOTrainer):
    def __init__(self, network: Any, config: SAGCConfig) -> None:
        super().__init__(
            model=network,
            reward_funcs=even_words,
            args=config,
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
        )


class OwnSignatureSAGCTrainer(SAGCMixin, OwnSignatureTrainer):
    pass


def test_a_users_trainer_may_have_its_own_signature(tmp_path: Path) -> None:
    trainer = OwnSignatureSAGCTrainer(network=tiny_model(), config=tiny_config(tmp_path, max_steps=2, rho=0.6, V=0.05))
    trainer.train()
    assert len(set(decisions(trainer))) > 1


def conversations() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    rows = [[{"role": "user", "content": f"w{i}"}] for i in range(24)]
    return {
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_dict({"prompt": rows, "meta": [{"a": i, "b": None} for i in range(24)]}),
        "reward_funcs": lambda completions, meta, **_: even_words([turns[0]["content"] for turns in completions]),
    }


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        pytest.param(conversations(), {}, id="conversations"),
        pytest.param({}, {"dataloader_num_workers": 2}, id="workers"),
    ],
)
def test_what_grpo_accepts_works(tmp_path: Path, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    trainer = tiny_trainer(tmp_path, arguments=arguments, max_steps=3, rho=0.5, tau=1.5, V=0.05, **settings)
    trainer.train()
    assert len(set(decisions(trainer))) > 1


def test_checkpoint_of_another_grid_names_the_fix(tmp_path: Path) -> None:
    saved = tiny_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    saved.train()
    other = tiny_trainer(tmp_path, max_steps=4, min_group_size=4)
    with pytest.raises(ValueError, match=r"saved controller has group sizes \(2, .*this run has \(4, .*delete"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("horizon", "settings"), [(10, {"max_steps": 10}), (12, {"num_train_epochs": 2})])
def test_default_v_follows_the_horizon(tmp_path: Path, horizon: int, settings: dict[str, Any]) -> None:
    trainer = tiny_trainer(tmp_path, **{"max_steps": -1, "utility": "signal", **settings})
    assert trainer.group_size_controller.config.v == default_v(horizon)


def test_config_loads_from_yaml_and_flags(tmp_path: Path) -> None:
    from trl import TrlParser

    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nnum_generations: 4\nrho: 0.4\nuse_cpu: true\nbf16: false\nreport_to: none\n"
    )
    parser = TrlParser(SAGCConfig)
    (config,) = parser.parse_args_and_config(["--config", str(path), "--rho", "0.25", "--V", "0.5"])
    assert (config.num_generations, config.rho, config.V) == (4, 0.25, 0.5)


def test_a_trainer_above_the_mixin_may_generate_in_chunks(tmp_path: Path) -> None:
    """Lengths of all calls of one batch count, and those of the batch before do not."""

    class Chunking(SAGCGRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            half = len(prompts) // 2
            first, second = super()._generate(prompts[:half]), super()._generate(prompts[half:])
            ids = (first[0] + second[0], first[1] + second[1])
            return (*ids, None, first[3] + second[3], None, {}, None, [])

    trainer = tiny_trainer(tmp_path, Chunking, max_steps=3, rho=0.3, tau=1.5, V=0.05)
    trainer.train()
    assert [entry["sagc/rollouts"] for entry in train_log(trainer)] == [4 * size for size in decisions(trainer)]
