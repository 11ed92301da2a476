"""Length-sorted micro-batches: a baseline that saves padding in the update."""

import torch

Batch = dict[str, torch.Tensor]


def sorted_micro_batches(batches: list[Batch], generator: torch.Generator) -> list[Batch]:
    """
    The same rows as micro-batches of similar completion length, each cut to its own longest.

    The micro-batches come in random order, so that no optimizer step is always the short one.

    Args:
        batches (`list[dict]`):
            TRL's micro-batches of one generation: equally many rows each, prompts padded left, completions right.
        generator (`torch.Generator`):
            Draws the order; give each process the same, so that all compute batches of similar length together.

    Returns:
        `list[dict]`: as many micro-batches of as many rows.

    Raises:
        `ValueError`: If the batch holds images.
    """
    if any(key.startswith(("pixel", "image", "num_images", "num_tiles", "spatial")) for key in batches[0]):
        raise ValueError("length_sorted_batches does not support images. Set length_sorted_batches=False.")
    rows, width = batches[0]["completion_ids"].shape
    merged = {
        key: value if value.dim() == 0 else torch.cat([batch[key] for batch in batches])
        for key, value in batches[0].items()
    }
    order = merged["completion_mask"].sum(dim=1).argsort(stable=True)
    batches_in_order = [_take(merged, order[start : start + rows], width) for start in range(0, len(order), rows)]
    return [batches_in_order[int(i)] for i in torch.randperm(len(batches_in_order), generator=generator)]


def _take(merged: Batch, index: torch.Tensor, width: int) -> Batch:
    longest = max(int(merged["completion_mask"][index].sum(dim=1).max()), 1)
    longest_prompt = max(int(merged["prompt_mask"][index].sum(dim=1).max()), 1)
    batch = {key: value if value.dim() == 0 else value[index] for key, value in merged.items()}
    for key, value in batch.items():
        if key in ("prompt_ids", "prompt_mask"):
            batch[key] = value[:, -longest_prompt:]
        elif value.dim() == 2 and value.shape[1] == width:
            batch[key] = value[:, :longest]
    return batch
