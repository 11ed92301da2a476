"""What encoding and decoding cost, in units of the bare matrix product of the same sizes, measured in turn.

    python scripts/bench/coded_speed.py --json docs/measurements/coded_speed.json

K = 64 points of 2048 x 576 float32 numbers, N = 96 workers, 86 of which answer: the bare products are (96 x 64) by
(64 x 1,179,648) and (64 x 86) by (86 x 1,179,648). Ratios are medians over repetitions; in each one the product and
the code take turns. The first decoding of a set of responders, which fits the decoder, is reported on its own, as is
the time to fit an encoder for 170 points of 64 numbers and 256 workers in units of one eigendecomposition of 256 x
256.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from coded.gcc import fit_encoder

POINTS, WORKERS, LATE = 64, 96, 10


def seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def ratios(call: Callable[[], Any], bare: Callable[[], Any], repetitions: int) -> float:
    """Median over repetitions of the time of `call` over that of `bare`."""
    pairs = [(seconds(bare), seconds(call)) for _ in range(repetitions)]
    return float(np.median([mine / reference for reference, mine in pairs]))


def measure(x: Any, repetitions: int) -> dict[str, float]:
    """Ratios for a numpy array or a torch tensor of points."""
    code = fit_encoder(x, WORKERS)
    convert = torch.as_tensor if torch.is_tensor(x) else np.asarray
    generator, decoder = (
        convert(code.generator.astype(np.float32)),
        convert(np.ones((POINTS, WORKERS - LATE), np.float32)),
    )
    answers, responders = code.encode(x)[LATE:], list(range(LATE, WORKERS))
    rows, flat = x.reshape(POINTS, -1), answers.reshape(len(responders), -1)
    first = seconds(lambda: code.decode(answers, responders)) / seconds(lambda: decoder @ flat)
    return {
        "encode": ratios(lambda: code.encode(x), lambda: generator @ rows, repetitions),
        "decode": ratios(lambda: code.decode(answers, responders), lambda: decoder @ flat, repetitions),
        "first decode": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="pairs of runs (default: 9)")
    parser.add_argument("--shape", type=int, nargs="+", default=[2048, 576], help="of a point (default: 2048 576)")
    parser.add_argument("--device", default="cpu", help="of the torch tensors (default: cpu)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    points = np.random.default_rng(0).normal(size=(POINTS, *args.shape)).astype(np.float32)
    result = {
        "numpy": measure(points, args.repetitions),
        f"torch, {args.device}": measure(torch.as_tensor(points, device=args.device), args.repetitions),
    }
    small, square = np.random.default_rng(1).normal(size=(170, 64)), np.random.default_rng(2).normal(size=(256, 256))
    fit = ratios(lambda: fit_encoder(small, 256), lambda: np.linalg.eigh(square @ square.T), args.repetitions)
    milliseconds = 1e3 * float(np.median([seconds(lambda: fit_encoder(small, 256)) for _ in range(args.repetitions)]))
    for name, row in result.items():
        print(f"{name:16s}" + "   ".join(f"{key} {ratio:.2f}" for key, ratio in row.items()) + "   (bare product = 1)")
    print(f"fit 170 points, 256 workers: {fit:.1f} eigendecompositions of 256 x 256, {milliseconds:.0f} ms")
    if args.json:
        args.json.write_text(json.dumps(result | {"fit": fit, "fit milliseconds": milliseconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
