"""Which machine and engine a figure belongs to: speeds of two are never divided by each other."""

import hashlib
import os
import platform
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError

_DIFFERS = {"spec_steps", "command", "model_path", "speculative_draft_model_path", "mem_fraction_static"}
"""Of an engine's description, what two runs of one engine may differ in; the target is compared by its hash."""
TASK = ("target", "prompts")
"""Of a bench, what it measured with besides what was asked for: the target's hash, and how many prompts there were."""
DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/kfd"))
"""Where the drivers of NVIDIA and AMD show."""


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, GPUs, and `host`, a digest that names this machine.

    The same from run to run: nothing in it is free, used or loaded.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpus": _gpus(),
        "host": _host(),
    }


def _gpus() -> list[str]:
    """Names of the GPUs that this process sees; torch, slow to import, is asked only where there is a driver."""
    if not any(path.exists() for path in DRIVERS) and not shutil.which("nvidia-smi"):
        return []
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _host() -> str:
    """A digest of the machine's name, without the domain, which a network gives, and of its id where it has one."""
    identity = Path("/etc/machine-id")
    own = platform.node().split(".")[0] + (identity.read_text().strip() if identity.exists() else "")
    return hashlib.sha256(own.encode()).hexdigest()[:12]


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """Refuse to compare the speeds of two benches (`metrics/bench.json`) of different machines, engines or tasks.

    Raises:
        RedraftError: naming what differs.
    """
    kinds = {
        "run both benches on one machine": _apart(one["machine"], other["machine"], "machine."),
        "run both with one engine and the same settings": _apart(one["engine"], other["engine"], "engine.", _DIFFERS),
        "run both on one target, with the same bench.prompts and bench.max_new_tokens and as many held-out samples": {
            **_apart(one["asked"], other["asked"], "asked."),
            **_apart({name: one.get(name) for name in TASK}, {name: other.get(name) for name in TASK}),
        },
    }
    apart = {name: pair for found in kinds.values() for name, pair in found.items()}
    if apart:
        raise RedraftError(
            "Speeds of two machines, engines or tasks are not divided by each other.",
            where=where,
            expected="the same machine, engine and task",
            found="; ".join(f"{name} {first} and {second}" for name, (first, second) in apart.items()),
            fix="; ".join(fix for fix, found in kinds.items() if found),
        )


def _apart(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "", ignored: Container[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Both values of every name whose values differ."""
    names = sorted(name for name in one.keys() | other.keys() if name not in ignored)
    return {f"{prefix}{name}": (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
