"""What else changed between two revisions: params, pictures, and whether a gate lets it through."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redraft.diff.figures import Figure, Side, State
from redraft.diff.revision import Revision
from redraft.frame.params import flatten

PICTURES = ("report", "race")
GATED = {"accept_length": "served_accept_length", "ratio_low": "ratio_low", "coverage": "coverage"}
"""Figures of the summary by key of `gates` in `params.yaml`."""


def params(base: Side, head: Side) -> dict[str, tuple[Any, Any]]:
    """Both values of every parameter that differs, by dotted name; those of one profile with `profiles/<name>:` before.

    Profiles of two names are not compared: all of it differs.
    """
    sides = [flatten(dict(side.params)) for side in (base, head)]
    name = head.params.get("profile")
    if name == base.params.get("profile"):
        for side, values in zip((base, head), sides, strict=True):
            values |= {f"profiles/{name}:{key}": value for key, value in flatten(dict(side.profile)).items()}
    names = sorted(
        dict.fromkeys([*sides[1], *sides[0]]), key=lambda name: not name.startswith("gates.")
    )  # never unseen
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} if base.params else {}


def pictures(base: Revision | None, head: Revision) -> list[str]:
    """Paths of pictures that are new or drawn otherwise."""
    paths = [path for folder in PICTURES for path in head.files(folder, ".svg")]
    return [path for path in paths if base is None or base.read(path) != head.read(path)]


@dataclass(frozen=True)
class Judged:
    """What a gate says of one figure."""

    name: str
    failed: bool
    told: str


def judge(figures: list[Figure], gates: Mapping[str, float]) -> list[Judged]:
    """One line a gate.

    A fall that is within noise fails as well if it is larger than the gate allows: then the metrics cannot show that it
    is not real. What cannot be compared is not judged, and said.

    Args:
        figures: of both revisions.
        gates: the largest fall allowed, by key of `gates`.
    """
    by_name = {figure.name: figure for figure in figures}
    found = []
    for key, most in gates.items():
        figure = by_name.get(GATED[key])
        if figure is None or figure.state is State.NEW or (figure.state is State.SAME and figure.head is None):
            found.append(Judged(key, False, "not judged: nothing to compare with"))
        elif figure.state is State.APART:
            found.append(Judged(key, False, f"not judged: {figure.why}"))
        elif figure.state is State.GONE or figure.change is None:
            found.append(Judged(key, True, f"fails: {figure.base} before, not measured now"))
        else:
            failed = -figure.change > most + 1e-12
            word = "fails" if failed else "holds"
            found.append(Judged(key, failed, f"{word}: {figure.change:+.4g}, may fall by {most:g}"))
    return found
