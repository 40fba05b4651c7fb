"""Which machine and engine a figure belongs to: speeds of two are never divided by each other."""

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from redraft.frame.errors import RedraftError

_DIFFERS = {"spec_steps", "command", "model_path", "speculative_draft_model_path", "mem_fraction_static"}
"""Of an engine's description, what two runs of one engine may differ in; the target is compared by its hash."""


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, GPUs, and `host`, a digest that names this machine."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    identity = Path("/etc/machine-id")
    own = platform.node() + (identity.read_text().strip() if identity.exists() else "")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "host": hashlib.sha256(own.encode()).hexdigest()[:12],
    }


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """Refuse to compare the speeds of two benches (`metrics/bench.json`) of different machines, engines or tasks.

    Raises:
        RedraftError: naming what differs.
    """
    pairs = {f"machine.{name}": (one["machine"].get(name), other["machine"].get(name)) for name in one["machine"]}
    engines = one["engine"], other["engine"]
    names = sorted(name for name in engines[0].keys() | engines[1].keys() if name not in _DIFFERS)
    pairs |= {f"engine.{name}": (engines[0].get(name), engines[1].get(name)) for name in names}
    pairs |= {name: (one.get(name), other.get(name)) for name in ("target", "asked")}
    apart = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if apart:
        raise RedraftError(
            "Speeds of two machines or engines are not divided by each other.",
            where=where,
            expected="the same machine and engine",
            found="; ".join(f"{name} {first} and {second}" for name, (first, second) in apart.items()),
            fix="run both benches on one machine with one engine",
        )
