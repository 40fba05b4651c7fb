"""Two runs of one commit: what must be the same, what may be off by a little, and what says nothing."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from redraft.frame.params import flatten

TIMED = ("metrics/bench.json", "metrics/summary.json", "report.md", "report", "artifacts/machine.json")
"""Made of times, or of which machine it is; `metrics/summary.json` is made of the other metrics."""
WHOLE = ("artifacts/corpus", "artifacts/vocab", "metrics/corpus.json", "artifacts/checked.json", "artifacts/gate.json")
"""No arithmetic that a processor rounds: the same on every machine."""
RELATIVE, ABSOLUTE = 0.05, 0.05
"""What a number of the metrics may be off by on another machine: either."""


@dataclass(frozen=True)
class Compared:
    """One output."""

    path: str
    stage: str
    how: str
    """`same`, `within tolerance`, `not compared`, or what is wrong."""
    failed: bool


def compare(committed: Path, again: Path, until: str | None = None) -> list[Compared]:
    """Every output of the stages that ran, by the `dvc.lock` of two folders.

    Args:
        committed: a checkout with the files that git has; it needs no cache.
        again: the same after `dvc repro`.
        until: the stages up to this one ran; None for all.
    """
    one, two = (yaml.safe_load((folder / "dvc.lock").read_text())["stages"] for folder in (committed, again))
    same_machine = _hash(one, "machine", "artifacts/machine.json") == _hash(two, "machine", "artifacts/machine.json")
    stages = yaml.safe_load((committed / "dvc.yaml").read_text())["stages"]
    found = [
        Compared("dvc.lock", stage, "lacks this stage: it never ran", True) for stage in stages if stage not in one
    ]
    for stage in one:
        outs = {out["path"]: out["md5"] for out in two.get(stage, {}).get("outs", [])}
        for out in one[stage]["outs"]:
            if stage in two or until is None:
                path = out["path"]
                found.append(_compared(path, stage, out["md5"], outs.get(path), (committed, again), same_machine))
    return found


def _compared(
    path: str, stage: str, one: str, two: str | None, folders: tuple[Path, Path], same_machine: bool
) -> Compared:
    if wrong := _unlike_lock(folders[0] / path, path, one):  # also of times: nobody may have edited them
        return Compared(path, stage, wrong, True)
    if path in TIMED or path.endswith("_timing.json"):
        return Compared(path, stage, "not compared", False)
    if two is None:
        return Compared(path, stage, "did not come out", True)
    if one == two:
        return Compared(path, stage, "same", False)
    if same_machine or path.startswith(WHOLE):
        told = _first_difference(path, *folders) if path.endswith(".json") and (folders[0] / path).is_file() else ""
        return Compared(path, stage, f"other bytes{told}", True)
    if not path.startswith("metrics/"):
        return Compared(path, stage, "not compared: another machine rounds otherwise", False)
    far = next(_far(*(json.loads((folder / path).read_text()) for folder in folders)), None)
    return Compared(path, stage, far or "within tolerance", far is not None)


def _unlike_lock(file: Path, path: str, locked: str) -> str:
    """What is wrong with a committed output that git keeps; its hash in `dvc.lock` is that of the run which made it."""
    if path.startswith("artifacts/"):
        return ""
    if not file.exists():
        return "in dvc.lock, but not committed"
    return "" if _md5(file) == locked else "edited after the run: dvc.lock has another hash"


def _md5(path: Path) -> str:
    """As DVC hashes a file, or a folder of files."""
    if not path.is_dir():
        return hashlib.md5(path.read_bytes()).hexdigest()
    names = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    listing = [{"md5": _md5(file), "relpath": name} for name, file in names]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def _far(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    """Figures that are further apart than another machine explains."""
    first, second = flatten(dict(one), lists=True), flatten(dict(two), lists=True)
    for name in sorted(first.keys() | second.keys()):
        before, now = first.get(name), second.get(name)
        if isinstance(before, int | float) and isinstance(now, int | float):
            if not math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                yield f"{name} is {now}, committed is {before}"
        elif name not in first or name not in second:
            yield f"{name} is there once only"


def _first_difference(path: str, committed: Path, again: Path) -> str:
    first, second = (flatten(json.loads((folder / path).read_text())) for folder in (committed, again))
    name = next((name for name in first if first[name] != second.get(name)), None)
    return f": {name} is {second.get(name)}, committed is {first[name]}" if name else ""


def _hash(stages: Mapping[str, Any], stage: str, path: str) -> str | None:
    return next((out["md5"] for out in stages.get(stage, {}).get("outs", []) if out["path"] == path), None)
