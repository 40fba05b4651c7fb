"""The model card of a drafter: what it is, which figures were measured with it, and how to serve it."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from redraft.drafter.checkpoint import Parts, weights_sha256
from redraft.preflight.facts import Finding, object_or_reason, positive
from redraft.preflight.releases import Release
from redraft.preflight.source import Source
from redraft.target.facts import TargetFacts

CHAIN = 3
"""Drafts of the serve command where nothing was measured."""


@dataclass(frozen=True)
class Made:
    """What a card tells of."""

    parts: Parts
    """As written."""
    target: TargetFacts
    source: Source
    """The target by its names."""
    release: Release
    layers: tuple[int, ...]
    ids: list[int]
    context: int | None
    own_positions: int
    notes: list[Finding]


@dataclass(frozen=True)
class Figures:
    """The metrics of a run of the pipeline, as far as they are those of one drafter."""

    folder: Path | None
    """With `train.json`, `vocab.json`, `probe.json`, `bench.json`; None for no metrics."""
    drafter: Path
    record: dict[str, Any]
    """Its `redraft.json`."""

    def read(self, name: str) -> dict[str, Any]:
        """One file; empty if there is none."""
        value = object_or_reason(self.folder / f"{name}.json") if self.folder else {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def trained_here(self) -> bool:
        """Whether `train.json` is of this drafter: its held-out figures are in `redraft.json` too."""
        return bool(self.record.get("heldout")) and self.read("train").get("heldout") == self.record["heldout"]

    def served(self, name: str) -> dict[str, Any]:
        """`probe` or `bench`, if this drafter was measured: by the hash of its weights, else by its training."""
        found = self.read(name)
        if "drafter" in found:
            return found if found["drafter"] == self.hash else {}
        return found if self.trained_here and found.get("mapping", self.mapping) == self.mapping else {}

    @cached_property
    def hash(self) -> str:
        """See `weights_sha256`."""
        return weights_sha256(self.drafter)

    @property
    def mapping(self) -> object:
        """Hash of the mapping that it was written with."""
        return self.record.get("mapping")


def card(made: Made, drafter: Path, output: Path, metrics: Path | None) -> str:
    """The model card: front matter as the Hugging Face hub reads it, what the drafter is, and how to serve it.

    Args:
        made: what was written.
        drafter: what it was made of.
        output: the folder that is served.
        metrics: folder with the metrics of the pipeline; what belongs to this drafter is told.
    """
    source, config, record = made.source, made.parts.config, made.parts.record
    figures = Figures(metrics, drafter, record)
    raised = config.max_position_embeddings > made.own_positions
    rows = _rows(made, figures, raised)
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items() if value)])
    warning = (
        f"\n**Positions.** The drafter was made for {made.own_positions:,} positions. `max_position_embeddings` was "
        f"raised to {config.max_position_embeddings:,} so that the server starts; how much is accepted past "
        f"{made.own_positions:,} is not known.\n"
    )
    notes = [f"- `{each.rule}`: {each.found}; {each.effect}. What to do: {each.fix}." for each in made.notes]
    told = "\n## Notes of the preflight\n\n" + "\n".join(notes) + "\n" if notes else ""
    front = ModelCardData(
        base_model=_hub_name(source.name),
        library_name="sglang",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding"],
    )
    text = ModelCard(
        f"---\n{front.to_yaml()}\n---\n\n# EAGLE-3 drafter for {source.name}\n\n"
        "Drafts tokens for its target, which verifies them: the output is the target's own.\n"
        "The embedding is the target's too: it is not in these weights, a server puts it in its place.\n\n"
        f"{table}\n{warning if raised else ''}"
        f"\n## Serve\n\n```sh\n{_command(made, output, _drafts(figures))}\n```\n{told}"
    )
    return f"{str(text).rstrip()}\n"


def _hub_name(name: str) -> str | None:
    """A name that the hub takes for a model; a wheel or a folder of another form has none."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _rows(made: Made, figures: Figures, raised: bool) -> dict[str, str | None]:
    mapping, config, training = made.parts.mapping, made.parts.config, figures.record.get("training")
    longest = (training.get("max_length") or training.get("row_tokens")) if isinstance(training, dict) else None
    return {
        "target": f"{made.source.name}, {made.target.architecture} of {made.target.depth} layers",
        "revision": f"`{made.source.revision}`" if made.source.revision else None,
        "for": f"SGLang {made.release}",
        "draft vocabulary": f"{len(mapping):,} of {mapping.vocab_size:,} ids",
        "mapping": f"`{mapping.hash}`",
        "coverage": _coverage(figures, len(mapping)),
        "aux layers": f"inputs of layers {_list(made.layers)}, written as {_list(made.ids)}",
        "positions": f"{config.max_position_embeddings:,}{f', raised from {made.own_positions:,}' if raised else ''}",
        "trained on": f"documents of at most {longest:,} tokens" if isinstance(longest, int) else None,
        "accept length, predicted": _predicted(figures.record),
        **_measured(figures.served("probe")),
    }


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _coverage(figures: Figures, slots: int) -> str | None:
    if not figures.trained_here or figures.record.get("init") == "keep_donor_vocab":
        return None  # the donor's vocabulary is not the one that the metrics tell of
    vocab = figures.read("vocab")
    shares = [positive(vocab.get(f"coverage_{split}")) for split in ("train", "heldout")]
    if vocab.get("slots") != slots or None in shares:
        return None
    return f"{shares[0]:.1%} of the tokens trained on, {shares[1]:.1%} of held-out ones"


def _predicted(record: dict[str, Any]) -> str | None:
    heldout = record.get("heldout")
    length = positive(heldout.get("accept_length")) if isinstance(heldout, dict) else None
    return f"{length:.2f} tokens a verify step, on held-out answers" if length else None


def _measured(probe: dict[str, Any]) -> dict[str, str]:
    """The probe's row: `served` only by a server, not by the engine in this process."""
    length, engine = positive(probe.get("accept_length")), probe.get("engine")
    if not length or not isinstance(engine, dict):
        return {}
    who = " ".join(str(engine[key]) for key in ("engine", "version") if key in engine)
    here = engine.get("engine") == "torch"
    drafted = f"{length:.2f} tokens a verify step, {engine.get('spec_steps')} drafted"
    return {f"accept length, {'computed in one process' if here else 'served'}": f"{drafted}, engine {who}"}


def _drafts(figures: Figures) -> tuple[int, int, int]:
    """Steps, topk and draft tokens of the serve command: what the bench found best, else what the probe served."""
    levels = figures.served("bench").get("levels")
    levels = levels if isinstance(levels, dict) else {}
    for _, level in sorted(levels.items(), key=lambda item: (len(item[0]), item[0])):  # the fewest clients first
        if not isinstance(level, dict) or level.get("word") == "invalid":
            continue
        best = re.fullmatch(r"(\d+)(?:x(\d+)x(\d+))?", str(level.get("best")))
        if best and int(best[1]):
            steps, topk = int(best[1]), int(best[2] or 1)
            return steps, topk, int(best[3] or steps + 1)
    engine = figures.served("probe").get("engine")
    served = engine.get("spec_steps") if isinstance(engine, dict) else None
    steps = served if isinstance(served, int) and served > 0 else CHAIN
    return steps, 1, steps + 1


def _command(made: Made, output: Path, drafts: tuple[int, int, int]) -> str:
    flags: dict[str, object] = {"model-path": made.source.model}
    if made.source.revision:
        flags["revision"] = made.source.revision
    flags |= {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": output,
        "speculative-num-steps": drafts[0],
        "speculative-eagle-topk": drafts[1],
        "speculative-num-draft-tokens": drafts[2],
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
