"""How many slots? What the draft head costs by its number of rows N, and what other N would give.

A larger vocabulary lets more drafts be right and makes every draft dearer: each of the K steps of a cycle multiplies
one hidden state by N rows and takes the largest. Torch is imported only to measure: the report predicts without it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redraft.acceptance import length_of_shares
from redraft.bench.cycle import CycleTime, tokens_per_second

if TYPE_CHECKING:
    import torch

SECONDS = 2.0
"""What measuring may take, the filling of the weights aside."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 100
MOST_BYTES = 2 << 30
"""Of a head."""
OF_FREE = 0.25
"""Of the memory that is free, for a head, and for what stands for the target."""
OVER_CACHE = 1.5
"""Times the last cache of the processor: of a larger target no more need be read to leave nothing else in it."""
NEAR = 0.01
"""Of the fastest rate that is predicted."""
DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16"}
"""As engines name them; others, and what follows the checkpoint, are bfloat16: a drafter's files are."""


@dataclass(frozen=True)
class Setting:
    """Where and how an engine multiplies the head."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """As torch names it."""
    threads: int | None = None
    """Of the processor; None for those that this process has."""
    parts: int = 1
    """Devices that hold an equal share of the rows each."""


@dataclass(frozen=True)
class Reads:
    """What a cycle reads besides the heads."""

    target: int
    """Bytes, once."""
    layer: int
    """Bytes of the drafter without its head, before every head."""
    drafts: int
    """Heads of a cycle."""


def setting_of(described: Mapping[str, Any], threads: int | None = None) -> Setting | None:
    """Where an engine ran, by its description; None if that is not known, or not to be had from this process.

    Args:
        described: `Engine.describe()`.
        threads: those of a server on the processor, if it was given a number.
    """
    if described.get("joined"):
        return None
    import torch

    dtype = DTYPES.get(str(described.get("dtype")), "bfloat16")
    device = "cpu" if described.get("device") == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():  # the server has a torch of its own
        return None
    own = described.get("threads") or threads
    return Setting(device, dtype, own if device == "cpu" else None, int(described.get("tp_size") or 1))


def measure_head(
    hidden: int, sizes: Sequence[int], setting: Setting, reads: Reads, seconds: float = SECONDS
) -> dict[str, float]:
    """Time of one position's head by N, ms: the product of a hidden state with N rows, and its argmax.

    How much of a head a cache still holds depends on what was read since: so whole cycles are played, with as many
    bytes of other weights in place of target and layer. The sizes take turns, each with one cycle before the timed one.

    Args:
        hidden: of the drafter.
        sizes: N, ascending; those that do not fit the memory are left out.
        setting: see there. The product is over the rows of one of its `parts`; gathering the logits is not in it.
        reads: of a cycle of the engine.
        seconds: about how long to measure.
    """
    import torch

    dtype, device = getattr(torch, setting.dtype), torch.device(setting.device)
    row, free = hidden * dtype.itemsize, int(OF_FREE * _free(device))
    shares = {size: -(-size // setting.parts) for size in sizes}
    shares = {size: rows for size, rows in shares.items() if rows * row <= min(MOST_BYTES, free)}
    if not shares:
        return {}
    target = min(reads.target // setting.parts, int(OVER_CACHE * _cache(device)), free)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or before)
    try:
        with torch.inference_mode():
            head, rest = (
                _filled(max(1, rows), hidden, dtype, device) for rows in (max(shares.values()), target // row)
            )
            layer = rest[: max(1, reads.layer // setting.parts // row)]
            taken = _play(head, shares, [rest, *[layer] * reads.drafts], seconds)
            return {str(size): round(float(np.median(times)), 5) for size, times in taken.items()}
    finally:
        torch.set_num_threads(before)


def _play(
    head: "torch.Tensor", shares: Mapping[int, int], others: Sequence["torch.Tensor"], seconds: float
) -> dict[int, list[float]]:
    """Mean ms of the heads of a cycle, by size and cycle; `shares` are rows of the head, `others` what is read besides.

    The first of these opens a cycle, each further one comes before a head.
    """
    import torch

    state = torch.randn(head.shape[1]).to(head)

    def read(weights: "torch.Tensor") -> float:
        start = time.perf_counter()
        int(torch.nn.functional.linear(state, weights).argmax())  # as a number: waits for a GPU
        return 1000 * (time.perf_counter() - start)

    def cycle(rows: int) -> float:
        heads = []
        read(others[0])
        for layer in others[1:]:
            read(layer)
            heads.append(read(head[:rows]))
        return float(np.mean(heads))

    taken: dict[int, list[float]] = {size: [] for size in shares}
    began = time.perf_counter()
    while (done := len(taken[min(taken)])) < MOST_ROUNDS:
        if done >= LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for size, rows in shares.items():
            cycle(rows)  # that the caches are as between two cycles of this size
            taken[size].append(cycle(rows))
    return taken


def _filled(rows: int, hidden: int, dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """Weights [rows, hidden], every page of them written: one that was not is shared, and stays in the cache."""
    import torch

    some = torch.randn(min(rows, 1024), hidden).to(device, dtype)
    weights = torch.empty(rows, hidden, dtype=dtype, device=device)
    for start in range(0, rows, len(some)):
        weights[start : start + len(some)] = some[: rows - start]
    return weights


def _free(device: "torch.device") -> int:
    """Bytes."""
    import psutil
    import torch

    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


def _cache(device: "torch.device") -> int:
    """Bytes of the last cache, 64 MiB where it is not told."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 1 << 10, "M": 1 << 20}
    told = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(each[:-1]) * units[each[-1]] for each in told if each[-1:] in units), default=64 << 20)


def head_cost(head_ms: Mapping[str, float], slots: int) -> float:
    """Time of one head of `slots` rows, ms: on the line a + b N through the measured ones, no part below 0.

    Args:
        head_ms: of a bench, ms by N; at least one. Of a single N the time is taken as proportional to N.
        slots: N.
    """
    measured = {int(size): ms for size, ms in head_ms.items()}
    if len(measured) == 1:
        ((size, ms),) = measured.items()
        return ms * slots / size
    return CycleTime.fit(measured).at(slots)


def cycle_with(cycle_ms: float, spec_steps: int, head_ms: Mapping[str, float], slots: int, other_slots: int) -> float:
    """A cycle with K = `spec_steps` drafts, measured with a head of `slots` rows, were it one of `other_slots`; ms."""
    return cycle_ms + spec_steps * (head_cost(head_ms, other_slots) - head_cost(head_ms, slots))


@dataclass(frozen=True)
class Predicted:
    """What one number of slots would give one stream."""

    slots: int
    head_ms: float
    cycle_ms: float
    accept_length: float
    tokens_per_second: float


def predict_slots(
    row: Mapping[str, Any], head_ms: Mapping[str, float], slots: int, shares: Mapping[int, float]
) -> list[Predicted]:
    """Predict a chain with heads of other sizes, ascending.

    A draft can only be right if its token has a slot. Where it has, it is taken to be right as often as measured, so
    that the chance of every draft, given that those before it were right, goes with the share of tokens that have one.

    Args:
        row: of a chain that was measured: `steps`, `accepted_at`, `cycle_ms`.
        head_ms: of the same bench.
        slots: N of the drafter that was measured.
        shares: by N, that of `slots` included, of the tokens to draft those with a slot.
    """
    found = []
    for size, share in sorted(shares.items()):
        accepted = _scaled(row["accepted_at"], share / shares[slots] if shares[slots] else 1.0)
        length = length_of_shares(accepted, row["steps"])
        cycle = cycle_with(row["cycle_ms"], row["steps"], head_ms, slots, size)
        rate = tokens_per_second(length, cycle)
        found.append(Predicted(size, head_cost(head_ms, size), cycle, length, rate))
    return found


def _scaled(accepted_at: Sequence[float], by: float) -> list[float]:
    """Shares of verify steps that accept at least k drafts, where each next draft is right `by` times as often."""
    scaled, before, kept = [], 1.0, 1.0
    for share in accepted_at:
        kept *= min(1.0, by * share / before) if before else 0.0
        scaled.append(kept)
        before = share
    return scaled


def knee(predicted: Sequence[Predicted]) -> Predicted:
    """The smallest that is within `NEAR` of the fastest: from there on more slots bring nothing that could be seen."""
    best = max(each.tokens_per_second for each in predicted)
    return next(each for each in predicted if each.tokens_per_second >= (1 - NEAR) * best)
