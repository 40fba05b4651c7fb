"""Which layers feed a drafter that is remapped: what it named is carried over, what it did not name stays not named."""

from collections.abc import Callable, Sequence
from pathlib import Path

from redraft.drafter.config import written_ids
from redraft.drafter.donor import one_off
from redraft.drafter.files import RECORD
from redraft.drafter.layers import declared_layers, nested_ids, numbers
from redraft.drafter.parts import Parts
from redraft.frame.errors import RedraftError
from redraft.target.facts import read_facts


def carried_layers(
    parts: Parts, donor: Path, target: Path | None, given: Sequence[int] | None, tell: Callable[[str], None]
) -> tuple[tuple[int, ...] | None, list[int] | None]:
    """The aux layers of a donor, as inputs of layers, and the ids for config.json; None for what is not known.

    Args:
        parts: the donor.
        donor: its folder.
        target: target folder: ids that do not start with 1 mean other layers for another family.
        given: aux layers from the caller.
        tell: takes a line about what could not be told.

    Raises:
        RedraftError: `given` are not the layers that the donor names, nor these all one above or below.
    """
    nested, recorded = nested_ids(parts.fields), numbers(parts.record.get("aux_layers"), f"aux_layers in {RECORD}")
    known = None if recorded is None else tuple(recorded)
    if given is not None and (len(given) != parts.config.num_aux_layers or list(given) != sorted(set(given))):
        raise RedraftError(
            "These cannot be the layers that feed the drafter.",
            where="--aux-layers",
            expected=f"{parts.config.num_aux_layers} inputs of layers, ascending",
            found=list(given),
        )
    if known is None and (target is not None or nested is None or nested[0] == 1):  # 1 first is the same to everyone
        facts = read_facts(target) if target is not None else None
        known = declared_layers(parts.fields, facts.architecture if facts else "", facts.depth if facts else 0)
    off = given is not None and known is not None and one_off(known, given)
    if off:
        tell(f"note: {donor} names inputs of layers {list(known or ())}: {list(given or ())} are written, as given")
    elif given is not None and known not in (None, tuple(given)):
        raise RedraftError(
            "The donor names other layers than those given.",
            where=donor / "config.json",
            expected=f"{list(given)} (--aux-layers)",
            found=f"inputs of layers {list(known or ())}",
        )
    layers = tuple(given) if given is not None else known
    ids = written_ids(layers, target) if layers and (layers[0] == 2 or off or nested is None) else nested
    if layers is None and nested is not None:
        tell(
            f"note: which layers the ids {nested} of {donor} mean depends on its target: they are kept as they are. "
            "--target or --aux-layers tells"
        )
    elif layers is None:
        tell(
            f"note: {donor} does not name the layers that feed it, so the remapped drafter does not either: a server "
            "takes its default ones, inputs of (2, L//2, L-3). --aux-layers names them"
        )
    elif ids is None:
        tell(
            f"note: which ids stand for inputs of layers {list(layers)} depends on release and target: config.json "
            "names none. redraft export --for sglang==VERSION writes them"
        )
    return layers, ids
