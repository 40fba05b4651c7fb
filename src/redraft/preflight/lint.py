"""Preflight of a drafter for SGLang: what a release would make of its files, before a server is started.

SGLang starts happily with half a drafter and serves accept length 1.00. Unlike the strict reader
(`redraft.drafter.checkpoint`), which stops at the first fault, this reads headers and tells everything it finds.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from redraft.frame.errors import RedraftError
from redraft.preflight import rules_config, rules_weights
from redraft.preflight.facts import RECORD, Facts, Finding, read_object, read_target, read_weights, trained_layers
from redraft.preflight.releases import Release
from redraft.target.folder import weights_folder

RULES = (*rules_weights.FILES, *rules_config.RULES, *rules_weights.RULES)
FOREIGN = (*rules_weights.FILES, rules_config.server, rules_config.architecture, rules_weights.embedding)
"""For drafters of another class."""


def lint(
    checkpoint: Path | str,
    target: Path,
    version: str,
    *,
    context: int | None = None,
    algorithm: str = "EAGLE3",
    trained: Sequence[int] | None = None,
) -> list[Finding]:
    """Everything that a release of SGLang would do wrong with a drafter, errors first.

    Args:
        checkpoint: the drafter's folder, as `--speculative-draft-model-path` names it.
        target: target folder.
        version: of SGLang, for example `0.5.10.post1`.
        context: tokens that the server is started for; default what the target's `config.json` says.
        algorithm: of `--speculative-algorithm`.
        trained: aux layers that the drafter was trained on, as inputs of layers; default those of `redraft.json`.

    Raises:
        RedraftError: a version that is none, or a target without a readable config.json.
    """
    release, served = Release.parse(version), read_target(target)
    fault = _path_fault(checkpoint, target)
    if fault:
        return [fault]
    folder = Path(checkpoint)
    fields, record = read_object(folder / "config.json"), read_object(folder / RECORD)
    own = record if isinstance(record, dict) else {}
    facts = Facts(
        fields if isinstance(fields, dict) else {},
        read_weights(folder),
        own,
        served,
        release,
        context,
        algorithm,
        trained_layers(own, trained),
    )
    found: list[Finding] = []
    if isinstance(fields, str):
        fix = "bring the checkpoint again"
        found.append(Finding("config-unreadable", "error", f"config.json: {fields}", "refuses to start", fix))
        rules: Sequence[rules_config.Rule] = rules_weights.FILES
    else:
        rules = FOREIGN if rules_config.foreign(facts) else RULES
    found += [finding for rule in rules for finding in rule(facts)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _path_fault(checkpoint: Path | str, target: Path) -> Finding | None:
    weights = target
    with suppress(RedraftError):  # weights that are not on this machine cannot be the draft path
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
