"""Recorded traces: what is read is what was written, faults are named by line, groups are subsets of one prompt's."""

import gzip
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sagc import StragglerEvent, straggler_events
from sagc.simulation import FixedSize, simulate, true_risk
from sagc.trace import TraceModel, read_trace

PROVENANCE = {"provenance": {"engine": "by hand"}}


def row(**overrides: Any) -> dict[str, Any]:
    values = {
        "prompt_id": "sum/0",
        "step": 0,
        "prompt_tokens": 7,
        "lengths": [3, 9, 4],
        "truncated": [False, True, False],
        "seconds": [0.3, 0.9, 0.4],
        "rewards": [1.0, 0.0, 0.5],
        "task": "sum",
        "note": "other keys are passed over",
    }
    return {**values, **overrides}


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    bare = {name: row()[name] for name in ("step", "prompt_tokens", "lengths", "truncated")}
    trace = read_trace(write(tmp_path / name, PROVENANCE, row(), {**bare, "prompt_id": "b", "seconds": None}))
    assert trace.provenance == {"engine": "by hand"}
    assert trace.tasks == ["", "sum"]
    first, second = trace.records
    assert (first.prompt_id, first.step, first.prompt_tokens, first.task) == ("sum/0", 0, 7, "sum")
    assert first.lengths.tolist() == [3, 9, 4]
    assert first.truncated.tolist() == [False, True, False]
    assert first.seconds is not None and first.seconds.tolist() == [0.3, 0.9, 0.4]
    assert first.rewards is not None and first.rewards.tolist() == [1.0, 0.0, 0.5]
    assert second.seconds is None and second.rewards is None
    assert [record.prompt_id for record in trace.of_task("sum").records] == ["sum/0"]
    with pytest.raises(ValueError, match="no task 'sun', only"):
        trace.of_task("sun")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('{"prompt_id": "a", ', "line 3"),
        ("[1, 2]", "line 3: is not an object"),
        ({"lengths": [1]}, "line 3: has no prompt_id, prompt_tokens, step, truncated"),
        (row(prompt_id=4), "line 3: prompt_id must be a string, got 4"),
        (row(prompt_id="b", step=-1), "line 3: step must be a whole number of at least 0, got -1"),
        (row(prompt_id="b", prompt_tokens=1.5), "line 3: prompt_tokens"),
        (row(prompt_id="b", lengths=[]), "line 3: lengths must be a list of at least one"),
        (row(prompt_id="b", lengths=[3, 0, 4]), "line 3: lengths must be whole numbers of at least 1"),
        (row(prompt_id="b", lengths=[3, "9", 4]), "line 3: lengths must be a list of 3 numbers"),
        (row(prompt_id="b", truncated=[0, 1, 0]), "line 3: truncated must be a list of 3 times true or false"),
        (row(prompt_id="b", truncated=[False, True]), "line 3: truncated must be a list of 3"),
        (row(prompt_id="b", seconds=[0.3, 0.9]), "line 3: seconds must be a list of 3 numbers"),
        (row(prompt_id="b", rewards=[0.3, float("nan"), 0.1]), "line 3: rewards must be finite"),
        (row(), "line 3: repeats prompt_id 'sum/0' at step 0, which line 2 has"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, wrong: Any, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", PROVENANCE, row(), wrong)
    with pytest.raises(ValueError, match=f"trace.jsonl, {message}"):
        read_trace(path)


def test_damaged_and_empty_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl.gz", PROVENANCE, *(row(prompt_id=str(i)) for i in range(200)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"trace.jsonl.gz, after line \d+: the file is damaged"):
        read_trace(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="after line 0: the file is damaged"):
        read_trace(path)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_trace(write(tmp_path / "empty.jsonl", PROVENANCE))
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")


@pytest.fixture
def model(tmp_path: Path) -> TraceModel:
    """Three prompts with lengths of their own: 101 to 106, 201 to 206, 301 to 306, of which the last is cut off."""
    rows = [
        row(
            prompt_id=f"p{prompt}",
            lengths=[100 * prompt + i for i in range(1, 7)],
            truncated=[prompt == 3 and i == 6 for i in range(1, 7)],
            seconds=None,
            rewards=None,
        )
        for prompt in (1, 2, 3)
    ]
    return TraceModel(read_trace(write(tmp_path / "trace.jsonl", *rows)))


def test_groups_are_drawn_without_replacement_from_one_prompt(model: TraceModel) -> None:
    lengths, truncated = model.sample(np.random.default_rng(0), 0.5, 6000, 4)
    assert lengths.shape == truncated.shape == (6000, 4)
    assert (lengths // 100 == lengths[:, :1] // 100).all()
    assert all(len(set(group)) == 4 for group in lengths)
    assert (truncated == (lengths == 306)).all()
    # Every completion of every prompt equally often, at every place: 6000 / 18 = 333, four standard deviations are 71.
    for place in range(4):
        values, counts = np.unique(lengths[:, place], return_counts=True)
        assert len(values) == 18
        assert np.abs(counts - 6000 / 18).max() < 71
    with pytest.raises(ValueError, match="has 6 completions of each prompt, too few for groups of 7"):
        model.sample(np.random.default_rng(0), 0.0, 1, 7)


def test_true_risk_of_a_trace_is_that_of_all_subsets(tmp_path: Path) -> None:
    rng, event, n = np.random.default_rng(1), StragglerEvent(tau=2.0), 8
    table = np.ceil(rng.lognormal(4, 0.6, (5, n))).astype(int)
    cut = table > 120
    rows = [
        row(prompt_id=str(i), lengths=one.tolist(), truncated=flags.tolist(), seconds=None, rewards=None)
        for i, (one, flags) in enumerate(zip(table, cut, strict=True))
    ]
    model = TraceModel(read_trace(write(tmp_path / "trace.jsonl", *rows)))
    assert not model.drifts
    risk = true_risk(model, event, (2, 3, 5), steps=4, samples=40_000)
    for column, size in enumerate((2, 3, 5)):
        subsets = np.array(list(combinations(range(n), size)))
        exact = np.mean([straggler_events(table[i][subsets], event, cut[i][subsets]).mean() for i in range(5)])
        assert risk[:, column] == pytest.approx(exact, abs=0.012)  # over four standard errors


def test_a_trace_of_several_steps_drifts(tmp_path: Path) -> None:
    rows = [row(step=step, lengths=[5 * step, 5 * step, 5 * step + 5], truncated=[False] * 3) for step in (1, 2, 3)]
    model = TraceModel(read_trace(write(tmp_path / "trace.jsonl", *rows)))
    assert model.drifts
    rng = np.random.default_rng(0)
    assert [model.sample(rng, progress, 1, 3)[0].min() for progress in (0.0, 0.2, 0.5, 0.8, 1.0)] == [5, 5, 10, 15, 15]
    # The longest is twice the median at the first step only.
    run = simulate(FixedSize(3), model, StragglerEvent(tau=2.0), steps=9)
    assert run.rates.tolist() == [1.0] * 3 + [0.0] * 6


def test_prompts_with_unequal_numbers_of_completions_are_refused(tmp_path: Path) -> None:
    rows = row(), row(prompt_id="b", lengths=[3, 4], truncated=[False, False], seconds=None, rewards=None)
    with pytest.raises(ValueError, match="Prompt 'b' has 2 completions, 'sum/0' has 3"):
        TraceModel(read_trace(write(tmp_path / "trace.jsonl", *rows)))
