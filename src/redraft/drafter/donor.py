"""Does a drafter fit as donor for a target: its sizes, the layers that feed it, the embedding it was trained with?"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.drafter.files import RECORD
from redraft.drafter.layers import declared_layers, family, nested_ids, numbers
from redraft.drafter.parts import EMBEDDING, Parts
from redraft.frame.errors import RedraftError

CHUNK = 4096
"""Rows compared at once."""


def require_fit(
    parts: Parts,
    folder: Path,
    target: Any,
    aux_layers: tuple[int, ...],
    *,
    named: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Refuse a donor of another target, or one that was trained on other layers.

    Args:
        parts: the donor.
        folder: names it in errors.
        target: configuration of the target, whole or its text part.
        aux_layers: inputs of layers.
        named: whether the user chose them. Then all one above or below what the donor's ids say is no error: two
            conventions are in use, files cannot tell which one a donor follows, and the remap measures it.
        tell: takes a line about layers that are one off.

    Raises:
        RedraftError: another hidden size or V, or layer ids that do not mean these inputs for such a target.
    """
    text = target.get_text_config() if hasattr(target, "get_text_config") else target
    found = {"hidden size": parts.config.hidden_size, "V": parts.config.vocab_size}
    expected = {"hidden size": text.hidden_size, "V": text.vocab_size}
    if found != expected:
        raise RedraftError(
            "The donor was made for another target.",
            where=folder,
            expected=f"{expected} (the target, {text.model_type})",
            found=f"{found} (fc {list(parts.tensors['fc.weight'].shape)})",
            fix="choose a donor of the target's family",
        )
    architecture = (getattr(target, "architectures", None) or getattr(text, "architectures", None) or [""])[0]
    recorded, nested = numbers(parts.record.get("aux_layers"), f"aux_layers in {folder / RECORD}"), None
    layers = None if recorded is None else tuple(recorded)
    if layers is None:
        nested = nested_ids(parts.fields)
        layers = declared_layers(parts.fields, architecture, getattr(text, "num_hidden_layers", 0))
    if layers in (None, aux_layers):
        return
    read = f"ids {nested}, and for {architecture or 'a target without a name'} {family(architecture)}: "
    said = f"{read if nested else ''}inputs of layers {layers}"
    if named and one_off(layers, aux_layers):
        tell(
            f"note: {folder} says {said}; it is taken to be trained on {list(aux_layers)}, as the profile says. "
            "metrics/remap.json has the measurement (layers)"
        )
        return
    raise RedraftError(
        "The donor was trained on other layers of the target.",
        where=folder / ("config.json" if recorded is None else RECORD),
        expected=f"{list(aux_layers)}, as inputs of layers",
        found=said,
        fix=f"target.aux_layers: {list(layers)} in the profile, or choose another donor; if it was trained on "
        + f"{list(aux_layers)} all the same, "
        + (f"target.aux_layers: {list(aux_layers)}" if one_off(layers, aux_layers) else "correct what it says"),
    )


def one_off(layers: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two lists of layers are the two readings of one list of ids: inputs or outputs."""
    return {one - other for one, other in zip(layers, others, strict=False)} in ({1}, {-1})


def differing_rows(own: Tensor, its: Tensor) -> int:
    """Rows of two [N, H] that are not the same number by number, rounding to 16 bits aside."""
    return sum(
        int((~torch.isclose(one.float(), two.float(), rtol=0.02, atol=1e-5)).any(1).sum())
        for one, two in zip(own.split(CHUNK), its.split(CHUNK), strict=True)
    )


def tell_embedding(
    own: Tensor | None, its: Tensor | None, where: Path, *, refuse: bool, tell: Callable[[str], None]
) -> None:
    """Say that a drafter's own embedding is left out, unless it is the target's.

    SGLang puts the target's embedding in its place; a drafter that was trained with another one then works on inputs
    that it never saw (vllm-project/vllm#27732: accept length 1.32 in place of 2.49).

    Args:
        own: [V, H] of the drafter's file, if there is one.
        its: [V, H] of the target, if it is at hand.
        where: the drafter.
        refuse: whether a difference is an error.
        tell: takes the line.

    Raises:
        RedraftError: the two differ, and `refuse`.
    """
    if own is None:
        return
    effect = "a server puts the target's in its place"
    if its is None:
        tell(f"note: {EMBEDDING} of {where} is left out and was not compared with the target's: {effect}")
        return
    if own.shape == its.shape and not (apart := differing_rows(own, its)):
        return
    share = f"{apart:,} of {len(own):,} rows ({apart / len(own):.1%})" if own.shape == its.shape else "all rows"
    if refuse:
        raise RedraftError(
            "The donor was trained with an embedding of its own.",
            where=f"{where}: {EMBEDDING}",
            expected=f"the target's rows: {effect}",
            found=f"{share} differ, {list(own.shape)} against {list(its.shape)}",
            cause="it was made for another target, or its embedding was trained",
            fix="choose a donor without one; or donor.embedding: target in the profile takes the target's, and "
            "training has to make up for it",
        )
    tell(f"note: {EMBEDDING} of {where} is left out: {share} are not the target's, and {effect}")
