"""Recording rollouts: a trace that can be read, nothing lost in an interrupt, and clear words for wrong settings."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_model, tiny_tokenizer

from sagc.trace import read_trace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import record_rollouts  # noqa: E402

TEMPLATE = "{% for message in messages %}{{ message.content[:40] }} {% endfor %}w1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, a configuration, and no vLLM."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    settings = {
        "tasks": {"chain_sum": {"max_digits": 1}, "coin_flip": {}},
        "model": str(tmp_path / "model"),
        "dtype": "float32",
        "prompts": 3,
        "completions": 4,
        "max_tokens": 24,
        "prompts_per_batch": 2,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(record_rollouts, "find_spec", lambda name: None)
    return tmp_path


def run(folder: Path, *flags: str, output: str = "trace.jsonl") -> int:
    return record_rollouts.main(["--config", str(folder / "config.yaml"), "--output", str(folder / output), *flags])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def interrupted_at(batch: int) -> Callable[..., record_rollouts.Sampler]:
    """In the place of `transformers_sampler`: Ctrl-C during a batch."""
    original, calls = record_rollouts.transformers_sampler, []

    def build(*args: Any) -> record_rollouts.Sampler:
        sample = original(*args)

        def sample_or_stop(*batch_args: Any) -> Any:
            calls.append(None)
            if len(calls) == batch:
                raise KeyboardInterrupt
            return sample(*batch_args)

        return sample_or_stop

    return build


def test_records_every_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    trace = read_trace(folder / "trace.jsonl")
    assert [record.prompt_id for record in trace.records] == [
        f"{task}/{index}" for task in ("chain_sum", "coin_flip") for index in range(3)
    ]
    for record in trace.records:
        assert record.lengths.shape == (4,)
        assert (record.lengths <= 24).all()
        assert (record.lengths[record.truncated] == 24).all()
        assert record.seconds is None, "transformers does not tell"
        assert record.rewards is not None and ((record.rewards >= 0) & (record.rewards <= 1)).all()
    assert trace.provenance["engine"].startswith("transformers ")
    assert trace.provenance["settings"]["max_tokens"] == 24
    out = capsys.readouterr().out
    assert "   2/6  chain_sum" in out and "   6/6  coin_flip" in out and "is complete: 6 prompts" in out


def test_lengths_are_those_up_to_the_end_of_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: " ".join(map(str, ids)))
    settings = record_rollouts.Settings(tasks={"chain_sum": {}}, dtype="float32", max_tokens=24)
    sample = record_rollouts.transformers_sampler(settings, str(folder / "model"), tokenizer)
    completions = sample([[3, 4, 5], [6]] * 20, 0)
    assert len({one.length for one in completions}) > 5
    for one in completions:
        ids = one.text.split()
        assert len(ids) == one.length
        assert tokenizer.eos_token_id == 1 and "1" not in ids[:-1]
        assert one.truncated == (ids[-1] != "1")
        assert one.length == 24 or not one.truncated
    assert any(one.truncated for one in completions) and not all(one.truncated for one in completions)
    assert sample([[3, 4, 5], [6]] * 20, 0) == completions
    assert sample([[3, 4, 5], [6]] * 20, 1) != completions


def test_an_interrupted_recording_goes_on_and_ends_as_an_uninterrupted_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(record_rollouts, "transformers_sampler", interrupted_at(batch=2))
        assert run(folder) == 130
    assert "Interrupted" in capsys.readouterr().out
    path = folder / "trace.jsonl"
    assert [row["prompt_id"] for row in rows(path)] == ["chain_sum/0", "chain_sum/1"]
    with path.open("a") as file:
        file.write('{"prompt_id": "chain_s')  # a line that a kill cut off
    assert run(folder) == 0
    assert run(folder, output="whole.jsonl") == 0
    assert rows(path) == rows(folder / "whole.jsonl")
    before = path.read_text()
    assert run(folder) == 0, "a complete recording is left as it is"
    assert path.read_text() == before


def test_other_settings_do_not_continue_a_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    before = (folder / "trace.jsonl").read_text()
    assert run(folder, "--temperature", "0.7") == 2
    assert "temperature was 1.0, is 0.7. Choose another --output" in capsys.readouterr().err
    assert (folder / "trace.jsonl").read_text() == before
    (folder / "notes.jsonl").write_text('{"a": 1}\n')
    assert run(folder, output="notes.jsonl") == 2
    assert "notes.jsonl is no trace of this script" in capsys.readouterr().err
    assert (folder / "notes.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"promts": 3}, "must be a mapping with keys out of"),
        ({"prompts": "3"}, "prompts must be of type int, got '3'"),
        ({"prompts": 0}, "prompts must be positive, got 0"),
        ({"completions": 1}, "completions must be at least 2, got 1"),
        ({"tasks": {}}, "tasks must be a mapping of at least one"),
        ({"tasks": ["chain_sum"]}, "tasks must be a mapping"),
        ({"tasks": {"chain_sum": None}}, "tasks: chain_sum must be a mapping of options"),
        ({"tasks": {"chain_sum": {"seed": 3}}}, "without name, size and seed"),
        ({"tasks": {"chain_som": {}}}, "no task 'chain_som'. Did you mean chain_sum"),
        ({"tasks": {"chain_sum": {"digits": 3}}}, "refuses the options {'digits': 3}"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_settings_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], message: str
) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **settings}))
    assert run(folder) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "trace.jsonl").exists()


def test_output_must_be_json_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, output="trace.jsonl.gz") == 2
    assert "--output must be a .jsonl file" in capsys.readouterr().err


def test_the_configuration_of_the_published_trace_is_valid() -> None:
    path = ROOT / "configs" / "rollout_trace.yaml"
    settings, _ = record_rollouts.parse(["--config", str(path), "--output", "x.jsonl"])
    published = read_trace(ROOT / "docs" / "measurements" / "rollouts_smollm2.jsonl.gz")
    assert published.provenance["settings"] == record_rollouts.asdict(settings)
    assert len(published.records) == settings.prompts * len(settings.tasks)
    assert {len(record.lengths) for record in published.records} == {settings.completions}
    assert published.tasks == sorted(settings.tasks)
