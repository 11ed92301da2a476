"""Where coding beats replication at equal compute: a map over redundancy N / K and straggling probability p.

    python scripts/bench/coded_map.py --json docs/measurements/coded_map.json --plot docs/coded_map.png

K = 16 points, N workers, one evaluation each, every worker late with probability p. `systematic` codes the workers
beyond the first K (beyond 2 K it repeats points as well), `replication` repeats points on all of them; what is still
missing is estimated by the same decoder. The map shows the ratio of the mean squared errors over the same groups and
patterns, on reporting groups. A star: the 95% interval of the paired difference does not contain 0. `exact`:
replication had every point in all patterns.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from coded_tasks import Task, all_tasks, relative_error
from scipy import stats
from tqdm import tqdm

from coded.gcc import fit_encoder, independent_stragglers

matplotlib.use("Agg")
from matplotlib import pyplot as plt

POINTS = 16
WORKERS = (18, 20, 22, 24, 28, 32, 40, 48)
PROBABILITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
TASKS = ("network, digits", "network, rotated digit", "polynomial, faces", "random network, moving window")
EXACT = 1e-9  # mean errors below this count as none: then replication had every point in all patterns
SCHEMES: dict[str, dict[str, Any]] = {"systematic": {}, "replication": {"scheme": "replication"}}


def errors(task: Task, workers: int, probability: float, seeds: int) -> dict[str, list[float]]:
    """Relative error of both schemes for each seed."""
    result: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for seed in range(seeds):
        points = task.draw(POINTS, seed, "report")
        truth = task.function(points)
        answered = independent_stragglers(np.random.default_rng([seed, workers]), workers, probability)
        for name, options in SCHEMES.items():
            code = fit_encoder(points, workers, **options)
            answers = task.function(code.encode(points))[answered]
            result[name].append(relative_error(code.decode(answers, answered).values, truth))
    return result


def measure(seeds: int) -> dict[str, Any]:
    """Mean errors, and whether their paired difference is sure, for each task and cell."""
    tasks = {task.name: task for task in all_tasks()}
    result: dict[str, Any] = {}
    with tqdm(total=len(TASKS) * len(WORKERS) * len(PROBABILITIES), desc="cells") as progress:
        for name in TASKS:
            cells = []
            for probability in PROBABILITIES:
                for workers in WORKERS:
                    error = errors(tasks[name], workers, probability, seeds)
                    difference = np.array(error["replication"]) - np.array(error["systematic"])
                    spread = stats.t.ppf(0.975, seeds - 1) * stats.sem(difference)
                    means = {scheme: float(np.mean(values)) for scheme, values in error.items()}
                    sure = bool(abs(difference.mean()) > spread)
                    cells.append({"workers": workers, "probability": probability, **means, "sure": sure})
                    progress.update()
            result[name] = cells
    return result


def table(cells: list[dict[str, Any]]) -> np.ndarray:
    """Replication's error over coding's, of shape `(probabilities, workers)`; 1 where both are exact."""
    ratios = [(cell["replication"] + EXACT) / (cell["systematic"] + EXACT) for cell in cells]
    return np.array(ratios).reshape(len(PROBABILITIES), len(WORKERS))


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a task; blue where coding is better."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (name, cells) in zip(axes.flat, result.items(), strict=True):
        ratios = table(cells)
        image = axis.imshow(np.log10(ratios), cmap="RdBu", vmin=-1.5, vmax=1.5, origin="lower", aspect="auto")
        for index, cell in enumerate(cells):
            row, column = divmod(index, len(WORKERS))
            exact = cell["replication"] < EXACT
            text = "exact" if exact else f"{ratios[row, column]:.2g}{'*' if cell['sure'] else ''}"
            shade = "white" if abs(np.log10(ratios[row, column])) > 0.9 else "black"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=shade)
        axis.set_xticks(range(len(WORKERS)), [f"{workers / POINTS:.3g}" for workers in WORKERS])
        axis.set_yticks(range(len(PROBABILITIES)), [str(probability) for probability in PROBABILITIES])
        axis.set_title(name, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("workers per point, N / K")
    for axis in axes[:, 0]:
        axis.set_ylabel("probability p of being late")
    label = "log10 of error of replication / error of coding"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60, help="groups for each cell, at least 2 (default: 60)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write the plot here")
    args = parser.parse_args()
    result = measure(args.seeds)
    for name, cells in result.items():
        print(f"{name}: error of replication / error of coding, p down, N / K across (* sure)")
        print(f"{'':8s}" + "".join(f"{workers / POINTS:9.3g}" for workers in WORKERS))
        for row, probability in enumerate(PROBABILITIES):
            sure = [cell["sure"] for cell in cells if cell["probability"] == probability]
            texts = [f"{ratio:.2g}{'*' if s else ' '}" for ratio, s in zip(table(cells)[row], sure, strict=True)]
            print(f"{probability:<8g}" + "".join(f"{text:>9s}" for text in texts))
    if args.json:
        args.json.write_text(json.dumps({"seeds": args.seeds, "cells": result}, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
