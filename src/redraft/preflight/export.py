"""A drafter made ready for a server: for one release of SGLang and one target, or in the form of speculators."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redraft.drafter.checkpoint import export_speculators, read_checkpoint, read_parts, write_parts
from redraft.drafter.config import config_json, part, written_ids
from redraft.drafter.donor import tell_embedding
from redraft.drafter.files import RECORD
from redraft.drafter.layers import ids_of, nested_ids, numbers
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.store import fingerprint
from redraft.preflight.card import Made, card
from redraft.preflight.facts import Finding, object_or_reason, trained_layers
from redraft.preflight.lint import lint, require_clean
from redraft.preflight.releases import Release, ids_that_capture
from redraft.preflight.rules_server import target_of_training
from redraft.preflight.source import source_of
from redraft.target.ends import read_ends
from redraft.target.facts import read_facts


def require_layers(record: dict[str, Any], given: Sequence[int] | None, where: Path) -> tuple[int, ...]:
    """The aux layers of a drafter, as inputs of layers: those of `redraft.json`, else those given.

    Raises:
        RedraftError: neither.
    """
    layers = numbers(record.get("aux_layers"), f"aux_layers in {where / RECORD}") or given
    if not layers:
        raise RedraftError(
            "The drafter does not say which layers feed it.",
            where=where / RECORD,
            expected="aux_layers",
            fix="give --aux-layers, as inputs of layers, for example 2 30 58",
        )
    return tuple(layers)


def export_sglang(
    checkpoint: Path,
    target: Path,
    version: str,
    output: Path,
    *,
    context: int | None = None,
    aux_layers: Sequence[int] | None = None,
    metrics: Path | None = None,
) -> list[Finding]:
    """Write a drafter for one release of SGLang and one target, look it over again, and write its model card.

    Args:
        checkpoint: a drafter in any dialect.
        target: target folder.
        version: of SGLang.
        output: folder to write.
        context: tokens to serve; a shorter `max_position_embeddings` is raised to it, which the card says.
        aux_layers: inputs of layers, if `redraft.json` does not name them.
        metrics: folder with the metrics of the pipeline; what belongs to this drafter goes into the card.

    Returns:
        The notes of the preflight.

    Raises:
        RedraftError: a drafter that cannot be read, layers that the release cannot capture, or an error finding.
    """
    release, served = Release.parse(version), read_facts(target)
    if release.guessed:
        raise RedraftError(
            "A drafter is written for one release of SGLang: this is no version.",
            where="--for",
            expected="for example sglang==0.5.23",
            found=version,
        )
    parts = read_parts(checkpoint)
    layers = require_layers(parts.record, aux_layers, checkpoint)
    ids = ids_that_capture(layers, served.depth, served.architecture, release)
    before = lint(checkpoint, target, version, context=context)
    require_clean([each for each in before if each.rule == "embed-differs"], checkpoint)  # it is left out below
    own = parts.config.max_position_embeddings
    config = replace(parts.config, max_position_embeddings=max(own, context or 0))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in parts.tensors.items()}
    written = replace(parts, config=config, fields=config_json(config, ids), tensors=tensors)
    exported = {"sglang": str(release), "layer_ids": ids, "positions_before": own}
    with atomic.folder(output) as partial:
        write_parts(partial, written, {**parts.record, "aux_layers": list(layers), "exported": exported}, None)
        notes = lint(partial, target, version, context=context)
        require_clean(notes, checkpoint)
        made = Made(written, served, source_of(target), release, layers, ids, context, own, notes)
        (partial / "README.md").write_text(card(made, checkpoint, output, metrics))
    return notes


def for_release(drafter: Path, target: Path, version: str, folder: Path) -> Path:
    """A drafter of redraft as a release reads it: itself, or a copy of `config.json` with the release's layer ids.

    Files name layers that do not start with 2 by the ids of the newest release, and older ones read them otherwise.
    What else is wrong with them is for the preflight.

    Args:
        drafter: its folder.
        target: target folder.
        version: of SGLang.
        folder: where copies lie, by release and drafter; their other files are links.
    """
    config, record = (object_or_reason(drafter / name) for name in ("config.json", RECORD))
    layers = trained_layers(record, None) if isinstance(record, dict) else None
    release, served = Release.parse(version), read_facts(target)
    if layers is None or isinstance(config, str) or nested_ids(config) != written_ids(layers, target):
        return drafter
    ids = ids_of(layers, served.depth, served.architecture, release)
    if ids in (None, nested_ids(config)):
        return drafter
    out = folder / fingerprint({"drafter": str(drafter.absolute()), "release": str(release)})
    with atomic.folder(out) as partial:
        for file in drafter.iterdir():
            (partial / file.name).symlink_to(file.absolute())
        (partial / "config.json").unlink()
        own = {**part(config, "eagle_config"), "eagle_aux_hidden_state_layer_ids": ids}
        atomic.write_json(partial / "config.json", {**config, "eagle_config": own})
    return out


def export_for_speculators(
    checkpoint: Path,
    target: str,
    output: Path,
    *,
    aux_layers: Sequence[int] | None = None,
    tell: Callable[[str], None] = print,
) -> tuple[int, ...]:
    """Write a drafter for speculators and vLLM; its aux layers, as inputs of layers.

    Args:
        checkpoint: a drafter in any dialect.
        target: name of the target, or its folder: then it has to be the one of training, and its real name is written.
        output: folder to write.
        aux_layers: inputs of layers, if `redraft.json` does not name them.
        tell: takes a line about what was not compared, or is left out.

    Raises:
        RedraftError: a drafter that cannot be read, or of another target.
    """
    drafter, parts = read_checkpoint(checkpoint), read_parts(checkpoint, finite=False)
    layers = require_layers(drafter.record, aux_layers, checkpoint)
    folder, verifier, embed = Path(target), target, None
    if folder.is_dir():
        same = target_of_training(drafter.record, folder)
        if same is False:
            raise RedraftError(
                "The drafter was trained for another target.",
                where=checkpoint / RECORD,
                expected=f"the target of training, not {target}",
                fix="give the target that it was trained for, or train it for this one",
            )
        if isinstance(same, str):
            tell(f"note: whether {target} is the target of training was not compared: {same}")
        verifier = source_of(folder).model
        embed = read_ends(folder).embed if parts.embedding is not None else None
    tell_embedding(parts.embedding, embed, checkpoint, refuse=folder.is_dir(), tell=tell)
    export_speculators(output, drafter, layers, verifier)
    return layers
