"""What a stage takes of the machine while it runs, under the names that MLflow's page "System metrics" shows."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

EVERY = 10.0
"""Seconds between two samples: shorter stages have none."""
CURVE = "system"


@contextmanager
def sampled(log: Callable[[str, dict[str, float]], None] | None) -> Iterator[None]:
    """Sample while the block runs; `log` gets a row of the curve `system`, its step in seconds. None: no sampling."""
    if log is None:
        yield
        return
    ended, began = threading.Event(), time.monotonic()

    def watch() -> None:
        psutil.cpu_percent()  # counts from here on
        while not ended.wait(EVERY):
            log(CURVE, {"step": float(round(time.monotonic() - began)), **load()})

    thread = threading.Thread(target=watch, name="load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def load() -> dict[str, float]:
    """Of the whole machine: processor and memory, and the GPUs that this process uses."""
    memory = psutil.virtual_memory()
    found = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": round(memory.used / 1e6),
        "system_memory_usage_percentage": memory.percent,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            found[f"gpu_{number}_memory_usage_megabytes"] = round((total - free) / 1e6)
            found[f"gpu_{number}_memory_usage_percentage"] = round(100 * (1 - free / total), 1)
    return found
