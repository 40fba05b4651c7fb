"""Predicted tokens/s of a contender: its accept length over the cycle that the bench measured, head size included."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.bench.cycle import CycleTime
from redraft.bench.machine import machine
from redraft.bench.slots import cycle_with
from redraft.frame.files import read_object

BENCH = Path("metrics/bench.json")


@dataclass(frozen=True)
class Cycles:
    """What a cycle takes with any number of drafts and slots; or why that is not known."""

    measured: Mapping[int, float]
    """ms by drafted tokens; empty: unknown."""
    slots: int | None
    """N of the drafter that was benched."""
    head_ms: Mapping[str, float] | None
    """See `redraft.bench.slots`."""
    why_not: str = ""
    """Why there are none."""

    def at(self, spec_steps: int, slots: int) -> float | None:
        """ms; None if it is not known."""
        if not self.measured or self.slots is None or (self.head_ms is None and slots != self.slots):
            return None
        cycle = self.measured.get(spec_steps)
        if cycle is None:
            if len(self.measured) < 2:
                return None
            cycle = CycleTime.fit(self.measured).at(spec_steps)
        if self.head_ms is None or slots == self.slots:
            return cycle
        return max(cycle_with(cycle, spec_steps, self.head_ms, self.slots, slots), 0.0) or None


def cycles(bench: Mapping[str, Any], engine: str, target: str, here: Mapping[str, Any]) -> Cycles:
    """Of a bench at its lowest valid concurrency, if it is of this engine, target (hash) and machine."""
    why = _not_ours(bench, engine, target, here)
    measured: dict[int, float] = {}
    for _, level in sorted(bench.get("levels", {}).items(), key=lambda each: int(each[0])):
        if why or level["word"].startswith("invalid") or measured:
            continue
        for row in level["rows"].values():
            if row["steps"] and row["topk"] == 1 and row["drafter"] is None and row.get("cycle_ms"):
                measured[row["steps"]] = row["cycle_ms"]
    if not why and not measured:
        why = "the bench has no valid chain"
    return Cycles(measured, bench.get("slots"), bench.get("head_ms"), why)


def _not_ours(bench: Mapping[str, Any], engine: str, target: str, here: Mapping[str, Any]) -> str:
    told = bench.get("engine", {})
    if told.get("engine") != engine:
        return f"the bench is of the engine {told.get('engine')}, and params.yaml says {engine}"
    if engine == "torch" and told.get("torch") != importlib.metadata.version("torch").split("+")[0]:
        return f"the bench is of torch {told.get('torch')}"
    if bench.get("target") != target:
        return "the bench is of another target"
    if bench.get("machine") != here:
        return "the bench is of another machine"
    if bench.get("slots") is None:
        return "the bench does not tell the slots of its drafter: an older redraft measured"
    return ""


def cycles_here(engine: str) -> Cycles:
    """Of `metrics/bench.json` and `artifacts/target` of this workspace."""
    target = Path("artifacts/target")
    if not BENCH.is_file() or not target.is_dir():
        return Cycles({}, None, None, "there is no bench here (`dvc repro` makes one)")
    from redraft.target.ends import target_hash  # imports torch

    return cycles(read_object(BENCH), engine, target_hash(target), machine())
