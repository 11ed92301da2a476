"""The benchmarks of coded computing run, and at small scale say what the documentation says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import coded_manifold  # noqa: E402
import coded_map  # noqa: E402
import coded_rates  # noqa: E402
from coded_tasks import all_tasks  # noqa: E402

MEASUREMENTS = BENCH.parent.parent / "docs" / "measurements"


def test_selection_and_report_groups_share_no_image() -> None:
    for task in all_tasks():
        groups = {
            split: np.concatenate([task.draw(8, seed, split) for seed in range(20)])
            for split in ("selection", "report")
        }
        common = set(map(bytes, groups["selection"])) & set(map(bytes, groups["report"]))
        assert not common, task.name
        np.testing.assert_array_equal(task.draw(8, 3, "report"), task.draw(8, 3, "report"))


def test_manifold_aware_codes_beat_standard_gcc() -> None:
    task = next(task for task in all_tasks() if task.name == "network, rotated digit")
    setting = {"points": 16, "workers": 24, "stragglers": 4}
    errors = coded_manifold.errors(task, setting, 8, coded_manifold.SCHEMES, "selection")
    rows = coded_manifold.summary(errors)
    for name in ("path", "systematic"):
        assert rows[name]["times_lower"] > 3
        assert rows[name]["difference"] > rows[name]["difference_half_width"]
    assert rows["standard"]["difference"] == 0
    assert rows["systematic"]["error"] < rows["replication"]["error"]
    table = coded_manifold.report({task.name: {coded_manifold.label(setting): rows}})
    assert "K=16 N=24 S=4" in table and "median" in table


def test_the_error_falls_faster_than_the_bound() -> None:
    points = np.random.default_rng(0).normal(size=(8, 4))
    function = coded_rates.functions(0)["tanh network"]
    workers = [16, 32, 64, 128]
    curves = {
        scheme: [[coded_rates.mean_error(function, points, n, 0.1, options) for n in workers]]
        for scheme, options in coded_rates.SCHEMES.items()
    }
    assert coded_rates.slopes(workers, curves["GCC (spline)"])[0] < -4.5
    assert -3.5 < coded_rates.slopes(workers, curves["BACC"])[0] < -1.5
    options = coded_rates.SCHEMES["GCC (spline)"]
    worst = coded_rates.worst_error(function, points, 12, 2, options)
    assert worst >= coded_rates.mean_error(function, points, 12, 2 / 12, options)


def test_the_map_has_coding_ahead_at_low_redundancy() -> None:
    task = next(task for task in all_tasks() if task.name == "network, rotated digit")
    errors = coded_map.errors(task, 22, 0.2, 15)
    assert np.mean(errors["replication"]) > 1.3 * np.mean(errors["systematic"])


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("coded_speed.py", ["--repetitions", "2", "--shape", "8", "16", "--json", "out.json"]),
        ("coded_picture.py", ["--plot", "out.png"]),
    ],
)
def test_scripts_run(script: str, options: list[str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(BENCH / script), *options], check=True, cwd=tmp_path, capture_output=True)
    assert (tmp_path / options[-1]).stat().st_size > 0


def test_the_documentation_has_the_measured_figures() -> None:
    text = (BENCH.parent.parent / "docs" / "coded_computing.md").read_text()
    results = json.loads((MEASUREMENTS / "coded_manifold.json").read_text())["results"]
    rows = re.findall(r"^\| ((?:network|random network|polynomial), [\w ]+) \| (.*) \|$", text, re.MULTILINE)
    assert {name for name, _ in rows} == set(results)
    names = ("berrut", "path", "diffusion", "systematic, curve", "systematic", "replication")
    for task, cells in rows:
        settings = results[task].values()
        expected = [np.median([s["standard"]["error"] for s in settings])]
        expected += [np.median([s[name]["times_lower"] for s in settings]) for name in names]
        assert [float(cell) for cell in cells.split("|")] == pytest.approx(expected, rel=0.05, abs=0.006)
