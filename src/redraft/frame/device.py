"""Where to compute, and in which precision it is fast there."""

import torch


def compute_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve(precision: str) -> str:
    """`bf16` or `fp32`; `auto` is bf16 where the hardware multiplies it: on GPUs, and on CPUs with AMX or AVX512-BF16.

    A CPU without them emulates bf16: 5 times slower than fp32 for the shapes of training.
    """
    if precision != "auto":
        return precision
    return "bf16" if torch.cuda.is_available() or _cpu_has_bf16() else "fp32"


def _cpu_has_bf16() -> bool:
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
