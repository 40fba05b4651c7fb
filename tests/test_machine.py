"""Which machine a figure belongs to: the same from run to run, quick, and without torch where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from redraft.bench import machine as module
from redraft.bench.machine import machine
from redraft.engines import torch as engine
from redraft.target.model import Target


def test_the_machine_is_the_same_from_run_to_run() -> None:
    script = "import json, sys; from redraft.bench.machine import machine; "
    script += "print(json.dumps([machine(), 'torch' in sys.modules]))"
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    found, slow = runs[0]
    assert found == machine()
    assert set(found) == {"processor", "cores", "memory_gib", "gpus", "host"}
    assert found["processor"]
    assert found["cores"] >= 1
    assert not slow or found["gpus"]


def test_gpus_are_asked_for_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "DRIVERS", (tmp_path,))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"GPU {number}")
    assert machine()["gpus"] == ["GPU 0", "GPU 1"]
    monkeypatch.setattr(module, "DRIVERS", (tmp_path / "none",))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert machine()["gpus"] == []


def test_another_name_is_another_machine_and_another_network_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []
    for name in ("box.lan", "box.office.example", "other.lan"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        hosts.append(machine()["host"])
    assert hosts[0] == hosts[1] != hosts[2]


def test_memory_is_told_in_the_unit_of_the_platform(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ru_maxrss` is in KiB on Linux and in bytes on macOS."""
    served = engine.TorchEngine(target, None, 0, frozenset())
    for unit, told in ((1024, 3 << 20), (1, 3 << 30)):
        monkeypatch.setattr(engine, "RSS_UNIT", unit)
        monkeypatch.setattr("resource.getrusage", lambda _, told=told: SimpleNamespace(ru_maxrss=told))
        assert served.memory_gib() == 3
    monkeypatch.setattr(sys, "platform", "darwin")
    assert __import__("runpy").run_path(engine.__file__)["RSS_UNIT"] == 1
