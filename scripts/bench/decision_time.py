"""How long one boundary of the controller takes: 512 rollouts in 64 groups observed and the next size decided.

    python scripts/bench/decision_time.py --json docs/measurements/decision_time.json

Beside it, in turn on the same array: numpy sorting the 512 lengths by group, the least that any reading of the groups'
medians must do. A ratio of two medians taken in turn says more than milliseconds on a machine that others use as well.
The tables for a new group size are built once, at its first batch; that time is reported apart.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sagc import ControllerConfig, GroupSizeController
from sagc.controller import Observation, update

GRIDS = (tuple(range(2, 9)), (2, 4, 8))


def milliseconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return 1e3 * (time.perf_counter() - start)


def spread(times: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(times, [0.1, 0.5, 0.9])
    return {"median_ms": float(middle), "p10_ms": float(low), "p90_ms": float(high)}


def measure(sizes: tuple[int, ...], utility: str, groups: int, repeats: int) -> dict[str, Any]:
    """Times `observe`, the law without input checks, and the sort, in turn."""
    rng = np.random.default_rng(0)
    size = sizes[-1]
    controller = GroupSizeController(ControllerConfig(sizes=sizes, rho=0.3, utility=utility))
    batches = []
    for _ in range(16):
        lengths = np.ceil(rng.lognormal(5, 0.5, (groups, size)))
        rewards = (rng.random((groups, size)) < 0.4).astype(float)
        batches.append((np.minimum(lengths, 400), lengths > 400, rewards))
    first = milliseconds(partial(controller.observe, *batches[0]))
    observe: list[float] = []
    law: list[float] = []
    sort: list[float] = []
    for repeat in range(repeats):
        batch = batches[repeat % len(batches)]
        observe.append(milliseconds(partial(controller.observe, *batch)))
        law.append(milliseconds(partial(update, controller.config, controller.state, Observation(*batch))))
        sort.append(milliseconds(partial(np.sort, batch[0], axis=1)))
    return {
        "sizes": list(sizes),
        "utility": utility,
        "groups": groups,
        "rollouts": groups * size,
        "first_batch_ms": first,
        "observe": spread(observe),
        "update": spread(law),
        "numpy_sort": spread(sort),
        "observe_over_sort": statistics.median(observe) / statistics.median(sort),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    arguments = parser.parse_args()
    repeats = 100 if arguments.quick else 2000
    results = [measure(grid, utility, 64, repeats) for grid in GRIDS for utility in ("log", "signal")]
    report = {
        "command": "python scripts/bench/decision_time.py" + (" --quick" if arguments.quick else ""),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "repeats": repeats,
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    for result in results:
        print(
            f"{result['rollouts']} rollouts, sizes {result['sizes']}, {result['utility']}: "
            f"observe {result['observe']['median_ms']:.3f} ms (p90 {result['observe']['p90_ms']:.3f}), "
            f"first batch {result['first_batch_ms']:.1f} ms, sort {result['numpy_sort']['median_ms']:.4f} ms, "
            f"ratio {result['observe_over_sort']:.0f}"
        )


if __name__ == "__main__":
    main()
