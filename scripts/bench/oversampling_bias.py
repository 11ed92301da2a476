"""What over-sampling does to the completions that are trained on: of G' started, the first G to finish are kept.

    python scripts/bench/oversampling_bias.py --json docs/measurements/oversampling_bias.json

From a recorded trace: groups of G' completions of one prompt are drawn without replacement, all start together, and
one that is longer finishes later. `kept` are the first G, `all` is the policy itself (every completion alike), `plain`
are ordinary groups of G. Differences are averaged over prompts; their standard error is that over prompts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagc import StragglerEvent, straggler_events
from sagc.trace import PromptRecord, read_trace

TRACE = Path(__file__).parents[2] / "docs" / "measurements" / "rollouts_smollm2.jsonl.gz"
GROUPS = ((4, 6), (4, 8), (8, 10), (8, 16))  # G of G'
TAUS = (2.0, 4.0)


def of_prompt(record: PromptRecord, kept: int, started: int, draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Averages over random groups of a prompt: for the kept, for all, and for ordinary groups of the same size."""
    count = len(record.lengths)
    groups = rng.permuted(np.tile(np.arange(count), (draws, 1)), axis=1)[:, :started]
    lengths = record.lengths[groups]
    order = np.argsort(lengths, axis=1, kind="stable")  # within a group the places are random, so ties are too
    first = np.take_along_axis(groups, order[:, :kept], axis=1)
    plain = groups[:, :kept]
    end = record.lengths[first].max(axis=1, keepdims=True)
    result = {
        "length_kept": record.lengths[first].mean(),
        "length_all": record.lengths.mean(),
        "cut_off_kept": record.truncated[first].mean(),
        "cut_off_all": record.truncated.mean(),
        "longest_kept": end.mean(),
        "longest_plain": record.lengths[plain].max(axis=1).mean(),
        "tokens_per_kept": np.minimum(lengths, end).sum(axis=1).mean() / kept,
    }
    if record.rewards is not None:
        result |= {"reward_kept": record.rewards[first].mean(), "reward_all": record.rewards.mean()}
    for tau in TAUS:
        event = StragglerEvent(tau=tau)
        for name, rows in (("kept", first), ("plain", plain)):
            rate = straggler_events(record.lengths[rows], event, record.truncated[rows]).mean()
            result[f"events_tau_{tau:g}_{name}"] = rate
    return {name: float(value) for name, value in result.items()}


def averaged(records: Sequence[PromptRecord], kept: int, started: int, draws: int) -> dict[str, Any]:
    """Means over prompts, and the differences that over-sampling makes, relative for lengths."""
    rng = np.random.default_rng(0)
    rows = [of_prompt(record, kept, started, draws, rng) for record in records]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    ratios = np.array([row["length_kept"] / row["length_all"] - 1 for row in rows])
    differences = {"length": ratios}
    if "reward_all" in means:
        differences["reward"] = np.array([row["reward_kept"] - row["reward_all"] for row in rows])
    for name, values in differences.items():
        means[f"{name}_change"] = float(values.mean())
        means[f"{name}_change_error"] = float(values.std(ddof=1) / len(values) ** 0.5)
    return {"kept": kept, "started": started, "prompts": len(rows), **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded trace (sagc.trace)")
    parser.add_argument("--draws", type=int, default=4000, help="random groups of each prompt")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    rows = []
    for task in ("", *trace.tasks):
        part = trace.of_task(task) if task else trace
        for kept, started in GROUPS:
            row = {"task": task or "all", **averaged(part.records, kept, started, arguments.draws)}
            rows.append(row)
            print(
                f"{row['task']:<16} {kept} of {started:<3}"
                f" length {row['length_all']:5.0f} -> {row['length_kept']:5.0f}"
                f" ({row['length_change']:+.0%} ± {row['length_change_error']:.0%} of each prompt's)"
                f"  reward {row['reward_all']:.3f} {row['reward_change']:+.3f} ± {row['reward_change_error']:.3f}"
                f"  events at tau 2 {row['events_tau_2_plain']:.2f} -> {row['events_tau_2_kept']:.2f}"
                f"  longest {row['longest_plain']:.0f} -> {row['longest_kept']:.0f}"
            )
    arguments.json.write_text(
        json.dumps({"trace": trace.provenance, "draws": arguments.draws, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
