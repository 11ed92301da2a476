"""Draws what a code does: the curve through the points in both orders, the coded points, and the decoded answers.

    python scripts/bench/coded_picture.py --plot docs/coded_computing.png

24 points on a noisy spiral in the plane, in random order, 36 workers of which 6 are late; f is one smooth number.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from coded.gcc import fit_encoder, random_stragglers
from coded.gcc.kernels import line_kernel, line_trend
from coded.gcc.ridge import FloatArray, KernelRidge

matplotlib.use("Agg")
from matplotlib import pyplot as plt

POINTS, WORKERS, LATE = 24, 36, 6


def spiral(rng: np.random.Generator) -> FloatArray:
    t = rng.permutation(np.linspace(0.6, 3.2, POINTS)) * np.pi
    return np.stack([t * np.cos(t), t * np.sin(t)], axis=1) / 10 + rng.normal(0, 0.01, (POINTS, 2))


def answer(x: FloatArray) -> FloatArray:
    return np.sin(4 * x[:, 0]) + np.cos(3 * x[:, 1])


def curve(x: FloatArray, alpha: FloatArray) -> FloatArray:
    """The encoder's curve through the points, at 800 positions."""
    fine = np.linspace(alpha.min(), alpha.max(), 800)
    regression = KernelRidge.fit(line_kernel("sobolev", alpha, alpha), line_trend("sobolev", alpha))
    return regression.weights(1e-9, line_kernel("sobolev", fine, alpha), line_trend("sobolev", fine)) @ x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True, help="write the picture here")
    args = parser.parse_args()
    rng = np.random.default_rng(3)
    x = spiral(rng)
    answered = random_stragglers(rng, WORKERS, LATE)
    late = np.setdiff1d(np.arange(WORKERS), answered)
    codes = {
        "standard: points as they come": fit_encoder(x, WORKERS, scheme="spline", order="given"),
        "manifold-aware, systematic (default)": fit_encoder(x, WORKERS),
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for column, (title, code) in enumerate(codes.items()):
        coded = code.encode(x)
        result = code.decode(answer(coded)[answered], answered)
        above, below = axes[:, column]
        above.plot(*curve(x, code.alpha).T, color="0.7", linewidth=1, label="encoder's curve")
        above.plot(*coded.T, "x", color="C0", label="coded points: where workers evaluate f")
        above.plot(*coded[late].T, "o", mfc="none", mec="C3", markersize=10, label="late workers")
        above.plot(*x.T, ".", color="black", label="data points")
        above.set_title(title)
        above.set_aspect("equal")
        order = np.argsort(code.alpha)
        below.plot(code.beta[answered], answer(coded)[answered], "x", color="C0", label="answers")
        below.plot(code.alpha[order], answer(x)[order], ".", color="black", label="f at the data points")
        estimated = np.flatnonzero(~result.exact)
        below.errorbar(
            code.alpha[estimated],
            result.values[estimated],
            yerr=2 * result.error[estimated],
            fmt="s",
            mfc="none",
            color="C3",
            capsize=3,
            label="estimates, ± 2 expected errors",
        )
        error = np.mean((result.values - answer(x)) ** 2) / np.var(answer(x))
        below.set_title(f"mean squared error / variance: {error:.2g}", fontsize=10)
        below.set_xlabel("position on the curve")
        below.set_ylim(-2.6, 2.6)
    points, names = axes[0, 1].get_legend_handles_labels()
    figure.legend(points, names, ncols=4, loc="outside upper center", frameon=False)
    points, names = axes[1, 1].get_legend_handles_labels()
    figure.legend(points, names, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(args.plot, dpi=100)


if __name__ == "__main__":
    main()
