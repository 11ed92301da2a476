"""Manifold-aware against standard general coded computing: network inference and polynomials on image data.

    python scripts/bench/coded_manifold.py --json docs/measurements/coded_manifold.json

Relative mean squared error over all K outputs (1 is the variance within the group), on reporting groups, the same
groups, stragglers and number of workers for every scheme. For each task and setting: the mean over seeds, and the
paired difference to standard GCC with its 95% confidence interval (Student, over seeds).

- `standard`: spline curve through the points as they come, Chebyshev positions (LeTCC); its two ridges are the best of
  a grid on selection groups, as are those of the others.
- `berrut`: BACC. `path`, `diffusion`: the same as `standard`, with the manifold-aware order and positions.
- `systematic`: the default code. `replication`: the same decoder without coding.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from coded_tasks import Split, Task, all_tasks, relative_error
from scipy import stats
from tqdm import tqdm

from coded.gcc import fit_encoder, independent_stragglers, random_stragglers

SCHEMES: dict[str, dict[str, Any]] = {
    "standard": {"scheme": "spline", "order": "given"},
    "berrut": {"scheme": "berrut", "order": "given"},
    "path": {"scheme": "spline", "order": "path"},
    "diffusion": {"scheme": "spline", "order": "diffusion"},
    "systematic, curve": {"decoder": "curve"},
    "systematic": {},
    "replication": {"scheme": "replication"},
}
# K, N and S stragglers, or each worker with probability p.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"points": 8, "workers": 12, "stragglers": 3},
    {"points": 16, "workers": 20, "stragglers": 1},
    {"points": 16, "workers": 20, "stragglers": 4},
    {"points": 16, "workers": 24, "stragglers": 4},
    {"points": 16, "workers": 32, "stragglers": 8},
    {"points": 24, "workers": 36, "stragglers": 6},
    {"points": 16, "workers": 24, "probability": 0.1},
    {"points": 16, "workers": 24, "probability": 0.3},
)


def responders(setting: dict[str, Any], seed: int) -> list[int]:
    """The workers that answer in a setting, the same for every scheme."""
    rng = np.random.default_rng([seed, setting["workers"]])
    if "probability" in setting:
        return independent_stragglers(rng, setting["workers"], setting["probability"])
    return random_stragglers(rng, setting["workers"], setting["stragglers"])


def errors(
    task: Task, setting: dict[str, Any], seeds: int, schemes: dict[str, dict[str, Any]], split: Split
) -> dict[str, np.ndarray]:
    """Relative error of each scheme for each seed."""
    result: dict[str, list[float]] = {name: [] for name in schemes}
    for seed in range(seeds):
        points = task.draw(setting["points"], seed, split)
        truth = task.function(points)
        answered = responders(setting, seed)
        for name, options in schemes.items():
            code = fit_encoder(points, setting["workers"], **options)
            answers = task.function(code.encode(points))[answered]
            result[name].append(relative_error(code.decode(answers, answered).values, truth))
    return {name: np.array(values) for name, values in result.items()}


def summary(values: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Means, ratios and paired differences to standard GCC."""
    standard = values["standard"]
    rows = {}
    for name, error in values.items():
        difference = standard - error
        half = float(stats.t.ppf(0.975, len(error) - 1) * stats.sem(difference)) if name != "standard" else 0.0
        rows[name] = {
            "error": float(error.mean()),
            "times_lower": float(standard.mean() / error.mean()),
            "difference": float(difference.mean()),
            "difference_half_width": half,
        }
    return rows


def label(setting: dict[str, Any]) -> str:
    late = f"S={setting['stragglers']}" if "stragglers" in setting else f"p={setting['probability']}"
    return f"K={setting['points']} N={setting['workers']} {late}"


def report(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """How many times lower than standard GCC: each task and setting, then the median and the worst of each scheme."""
    names = [name for name in SCHEMES if name != "standard"]
    lines = [f"{'':48s}{'standard':>10s}" + "".join(f"{name:>19s}" for name in names)]
    for task, settings in results.items():
        for setting, rows in settings.items():
            cells = []
            for name in names:
                row = rows[name]
                sure = abs(row["difference"]) > row["difference_half_width"]
                cells.append(f"{row['times_lower']:.2f}{' ' if sure else '?'}")
            lines.append(
                f"{task + ', ' + setting:48.48s}{rows['standard']['error']:10.4f}"
                + "".join(f"{c:>19s}" for c in cells)
            )
    for title, average in (("median", np.median), ("least", np.min)):
        ratios = [average([r[n]["times_lower"] for s in results.values() for r in s.values()]) for n in names]
        lines.append(f"{title:58s}" + "".join(f"{ratio:18.2f} " for ratio in ratios))
    return "\n".join(lines)


def selection(seeds: int) -> str:
    """Geometric mean of the error over tasks and settings on selection groups, for a grid of ridges."""
    schemes = {
        f"{name}: encoder {encoder:g}, decoder {decoder}": SCHEMES[name]
        | {"encoder_ridge": encoder, "decoder_ridge": decoder}
        for name in ("standard", "path", "systematic, curve", "systematic")
        for encoder in (1e-9, 1e-6, 1e-4)
        for decoder in (1e-9, 1e-6, 1e-4, "loo")
    }
    logarithms: dict[str, list[float]] = {name: [] for name in schemes}
    for task in tqdm(all_tasks(), desc="tasks"):
        for setting in SETTINGS:
            for name, error in errors(task, setting, seeds, schemes, "selection").items():
                logarithms[name].append(np.log(error.mean()))
    return "\n".join(f"{name:50s}{np.exp(np.mean(values)):10.4f}" for name, values in logarithms.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30, help="groups for each task and setting (default: 30)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--select", action="store_true", help="compare ridges on the selection groups instead")
    args = parser.parse_args()
    if args.select:
        print(selection(args.seeds))
        return
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    tasks = all_tasks()
    with tqdm(total=len(tasks) * len(SETTINGS), desc="settings") as progress:
        for task in tasks:
            results[task.name] = {}
            for setting in SETTINGS:
                results[task.name][label(setting)] = summary(errors(task, setting, args.seeds, SCHEMES, "report"))
                progress.update()
    print(report(results))
    print("times lower than standard GCC; ? where the 95% interval of the paired difference contains 0")
    if args.json:
        args.json.write_text(json.dumps({"seeds": args.seeds, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
