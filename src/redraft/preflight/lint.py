"""Preflight of a drafter for SGLang: what a release would make of its files, before a server is started.

SGLang starts happily with half a drafter and serves accept length 1.00. Unlike the strict reader
(`redraft.drafter.checkpoint`), which stops at the first fault, this reads headers and tells everything it finds.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redraft.drafter.files import RECORD
from redraft.frame.errors import RedraftError
from redraft.preflight import rope, rules_config, rules_layers, rules_mapping, rules_server, rules_weights
from redraft.preflight.facts import Facts, Finding, Findings, Rule, error, note, object_or_reason, trained_layers
from redraft.preflight.releases import Release
from redraft.preflight.weights import read_weights
from redraft.target.facts import read_facts
from redraft.target.folder import weights_folder

MODULES = (rules_server, rules_config, rope, rules_layers, rules_weights, rules_mapping)
FOREIGN = (rules_server.server, rules_config.architecture, rules_weights.embedding)
"""For drafters of another class."""


def lint(
    checkpoint: Path | str,
    target: Path,
    version: str,
    *,
    context: int | None = None,
    algorithm: str = "EAGLE3",
    trained: Sequence[int] | None = None,
    tp: int | None = None,
) -> list[Finding]:
    """Everything that a release of SGLang would do wrong with a drafter, errors first.

    Args:
        checkpoint: the drafter's folder, as `--speculative-draft-model-path` names it.
        target: target folder.
        version: of SGLang, for example `0.5.10.post1`, or what a server says of itself.
        context: tokens that the server is started for; default what a server derives from the target's `config.json`.
        algorithm: of `--speculative-algorithm`.
        trained: aux layers that the drafter was trained on, as inputs of layers; default those of `redraft.json`.
        tp: of `--tp-size`; without it nothing is said of what tensor parallelism divides.

    Raises:
        RedraftError: a version that is none, or a target without a readable config.json.
    """
    release, served = Release.parse(version), read_facts(target)
    if (context is not None and context < 1) or (tp is not None and tp < 1):
        raise RedraftError(
            f"No server has {context or 'such a'} context on {tp or 'some'} GPUs.", where="--context-length, --tp-size"
        )
    fault = _path_fault(checkpoint, target)
    if fault:
        return [fault]
    folder = Path(checkpoint)
    fields, record = object_or_reason(folder / "config.json"), object_or_reason(folder / RECORD)
    own = record if isinstance(record, dict) else {}
    facts = Facts(
        folder=folder,
        fields=fields if isinstance(fields, dict) else {},
        weights=read_weights(folder),
        record=own,
        target=served,
        release=release,
        context=context,
        algorithm=algorithm,
        trained=trained_layers(own, trained),
        tp=tp,
    )
    found = list(_unreadable(fields, record if (folder / RECORD).exists() else {}))
    rules: list[Rule] = list(rules_weights.FILES)
    if isinstance(fields, dict):
        foreign = rules_config.foreign(facts)
        rules += FOREIGN if foreign else [rule for module in MODULES for rule in module.RULES]
    found += [finding for rule in rules for finding in rule(facts)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _unreadable(fields: dict[str, Any] | str, record: dict[str, Any] | str) -> Findings:
    if isinstance(record, str):
        effect = "none in the server; what training knew is not compared"
        yield note("record-unreadable", found=f"{RECORD}: {record}", effect=effect, fix="bring the file again")
    if isinstance(fields, str):
        fix = "bring the checkpoint again"
        yield error("config-unreadable", found=f"config.json: {fields}", effect="refuses to start", fix=fix)


def _path_fault(checkpoint: Path | str, target: Path) -> Finding | None:
    weights = target
    with suppress(
        RedraftError, OSError, ValueError, KeyError, TypeError
    ):  # weights that are not on this machine cannot be the draft path
        weights = weights_folder(target)
    if not str(checkpoint).strip():
        found, effect = "no draft path", "the target itself is loaded as drafter, or a bare AssertionError"
    elif not Path(checkpoint).is_dir():
        found, effect = f"{checkpoint} is no folder", "the hub is asked for it, then it refuses to start"
    elif Path(checkpoint).resolve() in (target.resolve(), weights.resolve()):
        found, effect = "the draft path is the target's", "the target is loaded a second time, as drafter"
    else:
        return None
    return Finding("draft-path", "error", found, effect, "give the drafter's folder")


def require_clean(findings: Sequence[Finding], where: object = "drafter") -> None:
    """Refuse a drafter with an error finding; notes pass.

    Raises:
        RedraftError: naming every error.
    """
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise RedraftError(
            f"SGLang would not serve this drafter as it was trained: {', '.join(each.rule for each in errors)}.",
            where=where,
            found="".join(f"\n    {each.rule}: {each.found}. {each.effect}" for each in errors),
            fix="".join(f"\n    {each.rule}: {each.fix}" for each in errors),
        )


def describe(findings: Sequence[Finding]) -> str:
    """One block a finding, and a last line that counts."""
    blocks = [
        f"{each.level}: {each.rule}\n  found: {each.found}\n  effect: {each.effect}\n  what to do: {each.fix}\n"
        for each in findings
    ]
    numbers = {level: sum(each.level == level for each in findings) for level in ("error", "note")}
    counted = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in numbers.items())
    return "\n".join([*blocks, counted if findings else "nothing found"])
