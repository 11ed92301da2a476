"""How fast the error of general coded computing falls with the number of workers, and grows with that of stragglers.

    python scripts/bench/coded_rates.py --json docs/measurements/coded_rates.json --plot docs/coded_rates.png

K = 8 points in 4 dimensions; f a random network, smooth (tanh) or not (ReLU), or |x| summed. Mean squared error over
the outputs, in units of their variance; log-log slopes by least squares, per seed (each seed another f and other
points).

- worst case: the adversary of `coded.gcc.stragglers`, the same search for every scheme. Bound of the paper: S^3 N^-3.
- probabilistic: every worker is late with probability p; mean over patterns. Bound: log_{1/p}(N)^3 N^-3.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from coded_tasks import relative_error
from tqdm import tqdm

from coded.gcc import fit_encoder, independent_stragglers, worst_case_stragglers

matplotlib.use("Agg")
from matplotlib import pyplot as plt

POINTS, SIZE = 8, 4
WORKERS = (16, 24, 32, 48, 64, 96)  # at 4 stragglers
STRAGGLERS = (1, 2, 4, 8, 16)  # at 64 workers
MANY_WORKERS = (16, 32, 64, 128, 256)  # with probability
PROBABILITIES = (0.1, 0.3)
PATTERNS = 30
SCHEMES: dict[str, dict[str, Any]] = {
    "GCC (spline)": {"scheme": "spline", "order": "given", "encoder_ridge": 1e-11, "decoder_ridge": 1e-11},
    "BACC": {"scheme": "berrut", "order": "given"},
}
Function = Callable[[np.ndarray], np.ndarray]


def functions(seed: int) -> dict[str, Function]:
    """Functions of 4 variables with 3 outputs."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(SIZE, 16)) / 2, rng.normal(size=(16, 3)) / 4
    return {
        "tanh network": lambda x: np.tanh(x @ first) @ second,
        "ReLU network": lambda x: np.maximum(x @ first, 0.0) @ second,
        "absolute value": lambda x: np.abs(x @ first[:, :3]),
    }


def worst_error(function: Function, points: np.ndarray, workers: int, late: int, options: dict[str, Any]) -> float:
    code = fit_encoder(points, workers, **options)
    answers, truth = function(code.encode(points)), function(points)

    def loss(responders: list[int]) -> float:
        return relative_error(code.decode(answers[responders], responders).values, truth)

    return loss(worst_case_stragglers(loss, workers, late, exhaustive_limit=500))


def mean_error(
    function: Function, points: np.ndarray, workers: int, probability: float, options: dict[str, Any]
) -> float:
    code = fit_encoder(points, workers, **options)
    answers, truth = function(code.encode(points)), function(points)
    rng = np.random.default_rng(workers)
    patterns = [independent_stragglers(rng, workers, probability) for _ in range(PATTERNS)]
    return float(np.mean([relative_error(code.decode(answers[r], r).values, truth) for r in patterns]))


@dataclass(frozen=True)
class Sweep:
    """Errors at some abscissae, and the paper's bound there up to a constant."""

    name: str
    abscissae: tuple[int, ...]
    error: Callable[[Function, np.ndarray, int, dict[str, Any]], float]
    bound: Callable[[np.ndarray], np.ndarray]


def late_with(probability: float) -> Sweep:
    """The error against N with independent stragglers."""
    return Sweep(
        f"N, late with p = {probability}",
        MANY_WORKERS,
        lambda f, x, n, options: mean_error(f, x, n, probability, options),
        lambda n: (np.log(n) / np.log(1 / probability)) ** 3 * n**-3.0,
    )


SWEEPS = (
    Sweep("N, worst case of S = 4", WORKERS, lambda f, x, n, o: worst_error(f, x, n, 4, o), lambda n: n**-3.0),
    Sweep("S, worst case of N = 64", STRAGGLERS, lambda f, x, s, o: worst_error(f, x, 64, s, o), lambda s: s**3.0),
    *(late_with(probability) for probability in PROBABILITIES),
)


def measure(seeds: int) -> dict[str, Any]:
    """Errors `(seeds, abscissae)` of each sweep, function and scheme."""
    result: dict[str, Any] = {}
    names = list(functions(0))
    with tqdm(total=len(SWEEPS) * len(names) * len(SCHEMES) * seeds, desc="curves") as progress:
        for sweep in SWEEPS:
            result[sweep.name] = {"abscissae": list(sweep.abscissae), "errors": {}}
            for name in names:
                for scheme, options in SCHEMES.items():
                    curves = []
                    for seed in range(seeds):
                        points = np.random.default_rng(1000 + seed).normal(size=(POINTS, SIZE))
                        function = functions(seed)[name]
                        curves.append([sweep.error(function, points, value, options) for value in sweep.abscissae])
                        progress.update()
                    result[sweep.name]["errors"][f"{name}, {scheme}"] = curves
    return result


def slopes(abscissae: list[int], curves: list[list[float]]) -> np.ndarray:
    """Log-log slope of each seed's curve."""
    return np.array([np.polyfit(np.log(abscissae), np.log(curve), 1)[0] for curve in curves])


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a sweep: geometric means over seeds, and the bound through the first point of the smooth function."""
    figure, axes = plt.subplots(1, len(result), figsize=(4.2 * len(result), 4.6), layout="constrained")
    for axis, sweep in zip(axes, SWEEPS, strict=True):
        data = result[sweep.name]
        abscissae = np.array(data["abscissae"])
        for index, (name, curves) in enumerate(data["errors"].items()):
            mean = np.exp(np.mean(np.log(curves), axis=0))
            style = "-" if "GCC" in name else "--"
            axis.loglog(
                abscissae, mean, style, color=f"C{index // len(SCHEMES)}", marker="o", markersize=3, label=name
            )
        bound = sweep.bound(abscissae.astype(float))
        start = max(np.exp(np.mean(np.log(curves), axis=0))[0] for curves in data["errors"].values())
        axis.loglog(abscissae, bound / bound[0] * start, "k:", label="bound's rate")
        axis.set_xticks(abscissae, [str(value) for value in abscissae])
        axis.minorticks_off()
        axis.set_xlabel(sweep.name)
    axes[0].set_ylabel("mean squared error / variance")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="functions and point sets (default: 5)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write the plot here")
    args = parser.parse_args()
    result = measure(args.seeds)
    for sweep, data in result.items():
        for name, curves in data["errors"].items():
            slope = slopes(data["abscissae"], curves)
            print(
                f"{sweep:28s}{name:32s} slope {slope.mean():6.2f} +- {slope.std(ddof=1) if len(slope) > 1 else 0:.2f}"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
