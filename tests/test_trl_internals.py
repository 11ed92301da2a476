"""The installed TRL still has what the trainers override and touch (`trainers/trl_internals.py`)."""

import inspect
import warnings
from pathlib import Path

import pytest
import trl
from tiny import tiny_trainer
from trl import GRPOTrainer, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trainers.trl_internals import (
    ATTRIBUTES,
    GRPO_ATTRIBUTES,
    OVERRIDDEN_METHODS,
    RLOO_METHODS,
    TESTED_TRL,
    warn_if_untested,
)


@pytest.mark.parametrize("name", OVERRIDDEN_METHODS)
def test_methods_have_the_known_signature(name: str) -> None:
    assert name in dir(GRPOTrainer), f"TRL {trl.__version__} has no GRPOTrainer.{name}: mend trainers/sagc_trainer.py"
    parameters = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert parameters == OVERRIDDEN_METHODS[name], f"TRL {trl.__version__} changed GRPOTrainer.{name}"


@pytest.mark.parametrize("name", RLOO_METHODS)
def test_methods_of_rloo_have_the_known_signature(name: str) -> None:
    assert name in dir(RLOOTrainer), f"TRL {trl.__version__} has no RLOOTrainer.{name}: mend trainers/sagc_trainer.py"
    parameters = list(inspect.signature(getattr(RLOOTrainer, name)).parameters)
    assert parameters == RLOO_METHODS[name], f"TRL {trl.__version__} changed RLOOTrainer.{name}"


def test_generate_returns_what_is_known() -> None:
    source = inspect.getsource(GRPOTrainer._generate)
    expected = "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert expected in source, f"TRL {trl.__version__} changed what GRPOTrainer._generate returns"
    source = inspect.getsource(RLOOTrainer._generate)
    expected = "return prompt_ids, completion_ids, completions"
    assert expected in source, f"TRL {trl.__version__} changed what RLOOTrainer._generate returns"


def test_attributes_exist(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, GRPOTrainer)
    missing = [name for name in (*ATTRIBUTES, *GRPO_ATTRIBUTES) if name not in dir(trainer)]
    assert not missing, f"TRL {trl.__version__} has no GRPOTrainer attributes {missing}"
    assert set(trainer._logs) == {"images", "prompt", "completion", "rewards", "advantages", "extra"}


def test_names_of_vllm_generation_exist() -> None:
    """What `trainers/vllm_cpu.py` exchanges and overrides."""
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    for name in ("_init_vllm", "sync_weights", "_iter_named_params"):
        parameters = list(inspect.signature(getattr(VLLMGeneration, name)).parameters)
        assert parameters == ["self"], f"TRL {trl.__version__} changed VLLMGeneration.{name}"


def test_installed_trl_is_a_tested_one() -> None:
    assert TESTED_TRL.contains(trl.__version__), "raise TESTED_TRL in trainers/trl_internals.py once all tests pass"


def test_untested_version_warns_once_and_names_both() -> None:
    with pytest.warns(UserWarning, match=r"TRL 9\.0 is installed, but .* TRL <1\.17,>=1\.16") as record:
        warn_if_untested("9.0")
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("1.16.3")
