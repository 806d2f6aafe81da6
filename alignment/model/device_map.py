"""A model spread over devices: the `device_map` of `from_pretrained`, balanced by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from alignment.model.shape import ModelShape


def partition_layers(shape: ModelShape, devices: Sequence[str]) -> dict[str, str]:
    """Spread a model over `devices` in forward order: module name -> device, for
    `from_pretrained(device_map=...)`.

    Each device gets one contiguous run of [embedding, layers, head]; the largest run is as small
    and, among such splits, the bytes are as even as they can be. The last norm stays with the last
    layer, a tied head with its embedding, and rotary embeddings with the first device, which
    computes them. Of more devices than modules, the first ones are used.

    A map that mixes "cpu" with GPUs is for our own moves only: accelerate offloads "cpu" weights,
    so they cannot be trained."""
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"partition_layers needs at least one device, each listed once, got {list(devices)}"
        )
    runs: list[list[str]] = [[]]
    for name in shape.parameters:
        if name in shape.layers or name == shape.head:
            runs.append([])
        runs[-1].append(name)
    if shape.is_tied:
        runs[0] += runs.pop()
    sizes = []
    for run in runs:
        parameters_of_modules = [shape.parameters[name] for name in run]
        sizes.append(sum(parameters_of_modules))
    owners = [devices[part] for part in split_evenly(sizes, min(len(devices), len(sizes)))]
    device_of = {}
    for run, device in zip(runs, owners, strict=True):
        device_of |= dict.fromkeys(run, device)
    return {name: device_of[name] for name in shape.parameters}


def split_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """The part, of `parts` contiguous and non-empty ones, that each item of `sizes` falls in; 1 <=
    parts <= len(sizes).

    Exact, in O(parts * len(sizes)^2): the largest part's sum is minimal and, among such cuts, so is
    the second largest's, and so on, so that one big embedding does not excuse a lopsided rest. What
    is best of some parts stays so with one more."""
    ends = list(accumulate(sizes, initial=0))
    # By end: of the best cut of the first `end` items into the parts so far, the sums, largest
    # first, and each item's part.
    best: dict[int, tuple[list[int], list[int]]] = {0: ([], [])}
    for part in range(parts):
        longer = {}
        for end in range(part + 1, len(ends)):
            cuts = []
            for start, (sums, owners) in best.items():
                if start < end:
                    sums_with_part = sorted([*sums, ends[end] - ends[start]], reverse=True)
                    cuts.append((sums_with_part, owners + [part] * (end - start)))
            longer[end] = min(cuts)
        best = longer
    return best[len(sizes)][1]
