"""Sharded training does what replicated training does: the same sizes, losses and gradients, also on resume."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_several_processes import launch

pytestmark = pytest.mark.slow

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed (`make test-slow`)")


def trained(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    result = launch("sharded.py", str(folder))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes with a whole model each do."""
    ranks = trained(tmp_path_factory.mktemp("replicated"))
    assert len({entry["sagc/group_size"] for entry in ranks[0]["whole"]["log"]}) > 1, "the size must move"
    assert ranks[0]["whole"]["wrapped"] == "DistributedDataParallel" and ranks[0]["whole"]["local_share"] == 1
    return ranks


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        untimed = {key for key in other if "time" not in key and "seconds" not in key}
        assert {key: mine[key] for key in untimed} == pytest.approx({key: other[key] for key in untimed}, rel=1e-4)


def assert_does_what(sharded: list[dict[str, Any]], replicated: list[dict[str, Any]]) -> None:
    for rank, expected in zip(sharded, replicated, strict=True):
        assert rank["whole"]["rows"] == [2 * entry["sagc/group_size"] for entry in expected["whole"]["log"]]
        assert_same(rank["whole"]["log"], expected["whole"]["log"])
        assert_same(rank["resumed"]["log"], rank["whole"]["log"])
        assert rank["resumed"]["state"] == rank["whole"]["state"] == expected["whole"]["state"]


@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_fsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicated: list[dict[str, Any]], state_dict: str
) -> None:
    for name, value in {**FSDP, "FSDP_STATE_DICT_TYPE": state_dict}.items():
        monkeypatch.setenv(name, value)
    ranks = trained(tmp_path)
    assert_does_what(ranks, replicated)
    for rank in ranks:
        assert 0.4 < rank["whole"]["local_share"] < 0.6, "each of the two holds its half"


@needs_deepspeed
@pytest.mark.parametrize(("stage", "share"), [("2", 1), ("3", 0)], ids=["ZeRO-2", "ZeRO-3"])
def test_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicated: list[dict[str, Any]], stage: str, share: int
) -> None:
    monkeypatch.setenv("ZERO_STAGE", stage)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ranks = trained(tmp_path)
    assert_does_what(ranks, replicated)
    for rank in ranks:
        assert rank["whole"]["wrapped"] == "DeepSpeedEngine"
        assert rank["whole"]["local_share"] == share, "between steps, stage 3 leaves empty parameters"
