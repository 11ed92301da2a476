"""Settings that cannot work fail at construction, with a sentence that names the setting and the fix."""

from pathlib import Path
from typing import Any

import pytest
from tiny import even_words, tiny_config, tiny_model
from trl import GRPOTrainer, TrlParser

from trainers import SAGCConfig, SAGCMixin


class UsersSAGCTrainer(SAGCMixin, GRPOTrainer):
    pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": "2"}, r"tau must be of type float, got '2'"),
        ({"V": "null"}, r"V must be of type float \| None, got 'null'"),
        ({"min_group_size": 2.5}, r"min_group_size must be of type int, got 2\.5"),
        ({"group_size_schedule": 4}, r"group_size_schedule must be of type list\[int\] \| None, got 4"),
        ({"adaptive_budgets": "no"}, "adaptive_budgets must be of type bool, got 'no'"),
        ({"tau": float("inf")}, "tau must be above 1 and finite, got inf"),
        ({"straggler_length": 9}, "straggler_length=9 has no effect with straggler_event='ratio'"),
        ({"straggler_event": "duration"}, "only colocated vLLM reports. Set use_vllm=True"),
        ({"group_size_schedule": [9]}, r"out of the feasible sizes \(2, 3, 4, 5, 6, 7, 8\), got \[9\]"),
        ({"adaptive_miscoverage": 1.0}, r"adaptive_miscoverage must lie in \(0, 1\)"),
        ({"adaptive_budgets": True, "extra_rollouts": 1}, "must not be set with it"),
        ({"vllm_request_timeout": 0}, "vllm_request_timeout must be positive"),
    ],
)
def test_settings_that_cannot_work_name_themselves(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **settings)


def test_defaults_have_their_types_also_after_a_parser_was_built(tmp_path: Path) -> None:
    """Transformers' parser overwrites the types that a dataclass tells of its fields."""
    TrlParser([SAGCConfig])
    assert tiny_config(tmp_path, tau=3, V=1).straggler_length is None


def test_a_trainer_that_builds_its_own_configuration_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs args=SAGCConfig.*got dict.*builds its own configuration"):
        UsersSAGCTrainer(model=tiny_model(), reward_funcs=even_words, args={"output_dir": str(tmp_path)})
