"""Who races: settings of params and profile, each with a name, on budgets that are shares of the same tokens."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from redraft.frame.errors import RedraftError

SCRATCH = "scratch"
INITS = ("remap", "keep_donor_vocab", SCRATCH)
SHARES = (0.1, 0.3, 1.0)
Settings = tuple[tuple[str, str], ...]
_ONLY = {"fill": ("remap",), "slots": ("remap", SCRATCH, "naive")}
"""Inits that a setting changes anything of: the others have it once."""


@dataclass(frozen=True)
class Contender:
    """One way to a drafter."""

    name: str
    init: str
    settings: Settings
    """For `-S`, `init` among them."""


def contenders(inits: Sequence[str], grid: Mapping[str, Sequence[str]], profile: str) -> list[Contender]:
    """Every init with every combination of the grid.

    Args:
        inits: values of `init`.
        grid: values by key: `fill`, `slots` (of the draft vocabulary), or what `-S` of DVC takes (`lr`, `loss.oov`).
        profile: whose `vocab.slots` it is.

    Raises:
        RedraftError: fewer than two, or one twice.
    """
    found: list[Contender] = []
    for init in inits:
        axes = {key: values for key, values in grid.items() if init in _ONLY.get(key, (init,))}
        for values in product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            name = "-".join([init, *(_plain(f"{key}-{value}") for key, value in chosen.items())])
            where = {"slots": f"profiles/{profile}.yaml:vocab.slots"}
            settings = [("init", init), *((where.get(key, key), value) for key, value in chosen.items())]
            found.append(Contender(name, init, tuple(settings)))
    names = [contender.name for contender in found]
    if len(set(names)) < max(2, len(names)):
        raise RedraftError(
            "A race has at least two contenders, each once.",
            where="--init, --fill, --slots, --lr, -S",
            found=", ".join(names),
        )
    return found


def _plain(text: str) -> str:
    """`text` as the name of an experiment may hold it; two texts never become one."""
    plain = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", text).strip("-.")
    if plain == text:
        return plain
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{plain}-{digest[:4]}"


def parse(settings: Sequence[str]) -> dict[str, list[str]]:
    """The grid of `KEY=V1,V2` texts.

    Raises:
        RedraftError: a text of another form, a key twice, or one that the race itself sets.
    """
    grid: dict[str, list[str]] = {}
    for text in settings:
        key, equals, values = text.partition("=")
        if not key or not equals or not all(values.split(",")) or key in grid:
            raise RedraftError("A setting is KEY=V1,V2, each key once.", where="-S", found=text)
        if key in ("init", "epochs", "patience", "profile"):
            raise RedraftError(
                "The race sets this itself.",
                where="-S",
                found=text,
                fix="--init, --shares; epochs and profile in params.yaml, for all contenders",
            )
        grid[key] = values.split(",")
    return grid


def percent(share: float) -> str:
    """10 of 0.1, for names and the page."""
    return f"{100 * share:g}"
