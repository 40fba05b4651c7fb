"""A drafter made ready for a release of SGLang: a folder that passes its preflight, with a model card in it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from redraft.drafter.checkpoint import Parts, read_parts, write_parts
from redraft.drafter.config import config_json
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.preflight.facts import Finding, TargetFacts, read_object, read_target
from redraft.preflight.lint import lint, require_clean
from redraft.preflight.releases import Release, ids_that_capture


def require_layers(record: dict[str, Any], given: Sequence[int] | None, where: Path) -> tuple[int, ...]:
    """The aux layers of a drafter, as inputs of layers: those of `redraft.json`, else those given.

    Raises:
        RedraftError: neither.
    """
    layers = record.get("aux_layers") or given
    if not layers:
        raise RedraftError(
            "The drafter does not say which layers feed it.",
            where=where / "redraft.json",
            expected="aux_layers",
            fix="give --aux-layers, as inputs of layers, for example 2 30 58",
        )
    return tuple(layers)


@dataclass(frozen=True)
class _Made:
    """What a card tells of."""

    parts: Parts
    """As written."""
    target: TargetFacts
    release: Release
    layers: tuple[int, ...]
    ids: list[int]
    context: int | None
    own_positions: int
    notes: list[Finding]


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
    release, served = Release.parse(version), read_target(target)
    parts = read_parts(checkpoint)
    layers = require_layers(parts.record, aux_layers, checkpoint)
    ids = ids_that_capture(layers, served.depth, served.deepseek, release)
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
        made = _Made(written, served, release, layers, ids, context, own, notes)
        (partial / "README.md").write_text(card(made, output, metrics))
    return notes


def card(made: _Made, output: Path, metrics: Path | None) -> str:
    """The model card: front matter as the Hugging Face hub reads it, what it is, and how to serve it."""
    source = read_object(made.target.folder / "target.json")
    source = source if isinstance(source, dict) else {}
    name, folder, revision = str(source.get("source", "")), str(made.target.folder), source.get("revision")
    local = name.count("/") != 1 or not revision
    name = made.target.folder.resolve().name if local and not name.startswith(("wheel:", "fit:")) else name
    mapping, config, record = made.parts.mapping, made.parts.config, made.parts.record
    raised = config.max_position_embeddings > made.own_positions
    training = record.get("training") or {}
    longest = training.get("max_length") or training.get("row_tokens")
    probe = _read(metrics, "probe") if metrics else {}
    probe = probe if probe.get("mapping") == mapping.hash else {}
    rows = {
        "target": f"{name}, {made.target.architecture} of {made.target.depth} layers",
        "revision": revision and f"`{revision}`",
        "for": f"SGLang {made.release}",
        "draft vocabulary": f"{len(mapping):,} of {mapping.vocab_size:,} ids",
        "mapping": f"`{mapping.hash}`",
        "coverage": _coverage(made.parts, metrics),
        "aux layers": f"inputs of layers {_list(made.layers)}, written as {_list(made.ids)}",
        "positions": f"{config.max_position_embeddings:,}{f', raised from {made.own_positions:,}' if raised else ''}",
        "trained on": f"documents of at most {longest:,} tokens" if longest else None,
        "accept length, predicted": _predicted(record),
        "accept length, served": _served(probe),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items() if value)])
    warning = (
        f"\n**Positions.** The drafter was made for {made.own_positions:,} positions. `max_position_embeddings` was "
        f"raised to {config.max_position_embeddings:,} so that the server starts; how much is accepted past "
        f"{made.own_positions:,} is not known.\n"
    )
    command = _command(made, folder if local else name, output, probe)
    notes = [f"- `{each.rule}`: {each.found}; {each.effect}. What to do: {each.fix}." for each in made.notes]
    told = "\n## Notes of the preflight\n\n" + "\n".join(notes) + "\n" if notes else ""
    front = {"base_model": name, "library_name": "sglang", "pipeline_tag": "text-generation"}
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return (
        f"---\n{yaml}\ntags:\n- eagle3\n- speculative-decoding\n---\n\n# EAGLE-3 drafter for {name}\n\n"
        "Drafts tokens for its target, which verifies them: the output is the target's own.\n\n"
        f"{table}\n{warning if raised else ''}"
        f"\n## Serve\n\n```sh\n{command}\n```\n{told}"
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _read(metrics: Path, name: str) -> dict[str, Any]:
    value = read_object(metrics / f"{name}.json")
    return value if isinstance(value, dict) else {}


def _coverage(parts: Parts, metrics: Path | None) -> str | None:
    """From the metrics of the run that made this drafter: its held-out figures are in `redraft.json` too."""
    record = parts.record
    if metrics is None or not record.get("heldout") or record.get("init") == "keep_donor_vocab":
        return None  # the donor's vocabulary is not the one that the metrics tell of
    vocab = _read(metrics, "vocab")
    if _read(metrics, "train").get("heldout") != record["heldout"] or vocab.get("slots") != len(parts.mapping):
        return None
    return f"{vocab['coverage_train']:.1%} of the tokens trained on, {vocab['coverage_heldout']:.1%} of held-out ones"


def _predicted(record: dict[str, Any]) -> str | None:
    length = (record.get("heldout") or {}).get("accept_length")
    return f"{length:.2f} tokens a verify step, on held-out answers" if length else None


def _served(probe: dict[str, Any]) -> str | None:
    if not probe:
        return None
    engine = probe.get("engine") or {}
    who = " ".join(str(engine[key]) for key in ("engine", "version") if key in engine)
    return f"{probe['accept_length']:.2f} tokens a verify step, {engine.get('spec_steps')} drafted, engine {who}"


def _command(made: _Made, model: str, output: Path, probe: dict[str, Any]) -> str:
    steps = (probe.get("engine") or {}).get("spec_steps") or 3
    flags: dict[str, object] = {
        "model-path": model,
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": output,
        "speculative-num-steps": steps,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": steps + 1,
    }
    rules = {each.rule for each in made.notes}
    if made.context is not None:
        flags["context-length"] = made.context
    if "target-quantised" in rules:
        flags["speculative-draft-model-quantization"] = "unquant"
    if "dtype-config" in rules:
        flags["dtype"] = "bfloat16"
    lines = [f"--{flag} {shlex.quote(str(value))}" for flag, value in flags.items()]
    lines += ["--trust-remote-code"] if made.target.remote_code else []
    return " \\\n  ".join(["python -m sglang.launch_server", *lines])
