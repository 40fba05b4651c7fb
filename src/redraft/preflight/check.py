"""Do parameters, data, target and donor go together? Asked in seconds, before a stage costs anything.

Every stage checks its own input again, whole; this looks at what can be told from headers and first lines.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redraft.frame.errors import RedraftError, explained, some
from redraft.frame.files import read_object
from redraft.frame.params import Config
from redraft.preflight.look import require_described, require_memory
from redraft.target.checkout import locate, require_used
from redraft.target.config import aux_layers_at, require_served
from redraft.target.facts import TargetFacts, read_facts
from redraft.target.folder import TARGET_RECORD
from redraft.target.weights import weight_files

WHOLE_MIB = 32
"""Corpus files up to this size are read whole; of larger ones the stage tells."""
HIGH_LR = 2e-4
"""Peak learning rate that no public recipe for a published donor passes; they take 2e-5 to 5e-5."""
LARGE = 2048
"""Hidden size from which a drafter is no toy."""


@dataclass
class Checked:
    """What was looked at."""

    lines: list[str] = field(default_factory=list)
    """One a part: what it is."""
    notes: list[str] = field(default_factory=list)
    """Worth knowing."""
    faults: list[RedraftError] = field(default_factory=list)
    """A run would stop there."""

    def look(self, part: str, body: Callable[[], str]) -> None:
        """Add what `body` tells of a part, or its fault."""
        try:
            self.lines.append(f"{part}: {body()}")
        except (RedraftError, OSError) as error:
            self.faults.append(explained(error))


def check(config: Config, root: Path, *, deep: bool = False) -> Checked:
    """Look at everything that the profile names, under the project's `root`; `deep` also compares whole tokenizers."""
    found = Checked(notes=[*left_over(config), *_outside_git(config, root)])
    target = _target_folder(config, root)
    found.look("data", lambda: _data(config, root))
    found.look("target", lambda: _target(config, target, found.notes))
    found.look("donor", lambda: _donor(config, target, found.notes))
    found.look("tokenizer", lambda: _tokenizers(config, target, found.notes, deep))
    if deep and target and not found.faults:
        found.look("draft vocabulary", lambda: _vocabulary(config, target))
    donor, params = config.profile.donor, config.params
    if donor.source != "train" and params.lr > HIGH_LR and _hidden(target) >= LARGE:
        found.notes.append(f"lr {params.lr:g} is high for a donor that was trained before: 2e-5 to 5e-5 is usual")
    return found


def require_sound(found: Checked) -> None:
    """Refuse what has a fault.

    Raises:
        RedraftError: the fault, or all of them.
    """
    if len(found.faults) == 1:
        raise found.faults[0]
    if found.faults:
        told = "".join(f"\n\n{fault}" for fault in found.faults)
        raise RedraftError(f"{len(found.faults)} faults would stop this run.", tail=told)


def left_over(config: Config) -> list[str]:
    """Keys that have no effect beside the others, and that do no harm."""
    donor, engine = config.profile.donor, config.profile.engine
    brought = donor.source != "train"
    idle = {
        "donor.slots": (donor.slots, brought, "the donor brings its own"),
        "donor.shape": (donor.shape, brought, "the donor brings its own"),
        "donor.train": (donor.train, brought, "donor.source is not `train`"),
        "donor.tokenizer": (donor.tokenizer, not brought, "a donor that is trained here has the target's"),
        "engine.draft_tokens": (engine.draft_tokens, engine.topk == 1, "a chain verifies its drafts and one more"),
    }
    return [
        f"{key} in the profile has no effect: {why}"
        for key, (value, without, why) in idle.items()
        if value is not None and without
    ]


def _outside_git(config: Config, root: Path) -> list[str]:
    """What this run reads and git has not: a queued or temporary run would not find it."""
    name = config.params.profile
    paths = [f"profiles/{name}.yaml", f"profiles/{name}.lock", f"data/{name}"]
    there = [path for path in paths if (root / path).exists()]
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "--", *there],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = sorted({path for path in there for name in listed.stdout.split("\n") if name.startswith(path)})
    if not names:
        return []
    return [
        f"{' and '.join(names)}: not in git, so `dvc exp run --queue` and `--temp` would not see it: "
        f"git add {' '.join(names)} && git commit"
    ]


def _data(config: Config, root: Path) -> str:
    from redraft.corpus.files import require_files
    from redraft.corpus.rows import FORM, Chat, read_rows

    folder = root / "data" / config.params.profile
    splits = ["train", "heldout", *(["donor"] if config.profile.donor.source == "train" else [])]
    told = []
    for split in splits:
        paths = require_files(folder, split)
        size = sum(path.stat().st_size for path in paths)
        if size > WHOLE_MIB << 20:
            told.append(f"{size >> 20} MiB {split}")
            continue
        rows = list(read_rows(paths))
        chats = [row for row in rows if isinstance(row, Chat)]
        if not chats:
            raise RedraftError(
                "No row can be read." if rows else "The file has no rows.",
                where=some(paths),
                expected=FORM,
                found=some([f"{row.id} ({row.reason})" for row in rows if not isinstance(row, Chat)], 3) or None,
            )
        if not any(chat.tokens or any(each["role"] == "assistant" for each in chat.messages) for chat in chats):
            raise RedraftError(
                "No chat has an answer.",
                where=some(paths),
                cause="prompts that the target has not answered yet",
                fix=f"redraft regenerate PROMPTS --profile {config.params.profile} --output {paths[0]} --overwrite",
            )
        told.append(f"{len(chats)} {split}")
    return ", ".join(told)


def _target_folder(config: Config, root: Path) -> Path | None:
    """The target's folder, if it is on this machine: its source, or what the target stage made of this source."""
    source, made = config.profile.target.source, root / "artifacts/target"
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    try:
        return made if read_object(made / TARGET_RECORD).get("source") == source else None
    except RedraftError:
        return None


def _hidden(target: Path | None) -> int:
    try:
        return read_facts(target).hidden if target else 0
    except RedraftError:
        return 0


def _target(config: Config, folder: Path | None, notes: list[str]) -> str:
    params, source = config.profile.target, config.profile.target.source
    require_used(params)
    made = source.startswith(("wheel:", "fit:"))
    if folder is None:
        if not made:
            locate(source, params.revision)
        return source if made else f"{source}, from the hub"
    if not made and locate(source, params.revision) == folder:
        require_served(folder)
        weight_files(folder)
    facts = require_described(folder, config)
    notes += _unserved(aux_layers_at(facts.depth, params.aux_layers), facts)
    require_memory(folder, _bytes(folder), config)
    return f"{facts.architecture or '?'}, {facts.depth} layers, hidden {facts.hidden}, V {facts.vocab}"


def _bytes(folder: Path) -> int:
    """Of the weights in `folder`, or of those that its record names elsewhere."""
    record = read_object(folder / TARGET_RECORD) if (folder / TARGET_RECORD).is_file() else {}
    recorded = sum(known[0] for name, known in record.get("files", {}).items() if name.endswith(".safetensors"))
    return recorded or sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _unserved(layers: tuple[int, ...], facts: TargetFacts) -> list[str]:
    """What is to be known of layers that not even the newest release captures: an export alone is refused."""
    from redraft.preflight.releases import NEWEST, able_releases

    able = able_releases(layers, facts.depth, facts.architecture)
    if able is not None and able.endswith(str(NEWEST)):
        return []
    return [
        f"target.aux_layers {list(layers)}: "
        + (f"SGLang {able} alone captures" if able else "no release of SGLang that was read captures")
        + " inputs of these layers of such a target; the engine torch and vLLM do"
    ]


def _donor(config: Config, target: Path | None, notes: list[str]) -> str:
    donor = config.profile.donor
    if donor.source == "train":
        return f"trained here on data/{config.params.profile}/donor.jsonl"
    folder = locate(donor.source, donor.revision)
    if not isinstance(folder, Path):
        return f"{donor.source}, from the hub"
    from redraft.drafter.donor import require_fit  # torch
    from redraft.drafter.parts import read_parts

    parts = read_parts(folder, finite=False, prefix=donor.prefix_vocabulary, target_head=_stand_in(donor.head, target))
    if target is not None:
        facts = read_facts(target)
        fields = SimpleNamespace(**{"model_type": "?", **facts.fields, "architectures": [facts.architecture]})
        chosen = config.profile.target.aux_layers
        layers = aux_layers_at(facts.depth, chosen)
        require_fit(parts, folder, fields, layers, named=chosen is not None, tell=notes.append)
    return f"{len(parts.mapping)} slots, {parts.mapping.order}"


def _stand_in(head: str, target: Path | None) -> Any:
    """Rows in place of a head that the donor will borrow: their shape is all that is asked here."""
    if head == "own" or target is None:
        return None
    import torch

    facts = read_facts(target)
    return torch.empty(1, facts.hidden).expand(facts.vocab, -1)


def _tokenizers(config: Config, target: Path | None, notes: list[str], deep: bool) -> str:
    donor = config.profile.donor
    if donor.source == "train":
        return "the target's own"
    if donor.tokenizer is None:
        notes.append("the donor's tokenizer is not compared with the target's: donor.tokenizer in the profile")
        return "not compared"
    own = Path(donor.tokenizer).expanduser()
    if not own.is_dir() or target is None:
        return "compared by the donor stage"
    one, two = (folder / "tokenizer.json" for folder in (own, target))
    if one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes():
        return "the donor's is the target's"
    if not deep:
        return "another file than the donor's: the donor stage compares"
    from redraft.corpus.tokenizer import differing_ids, load_tokenizer

    trust = config.profile.target.trust_remote_code
    apart = differing_ids(load_tokenizer(own, trust), load_tokenizer(target, trust))
    return f"{len(apart)} ids mean another token to the donor"


def _vocabulary(config: Config, target: Path) -> str:
    from redraft.corpus.tokenizer import forced_ids, load_tokenizer

    params = config.profile.vocab
    tokenizer = load_tokenizer(target, config.profile.target.trust_remote_code)
    forced = len(forced_ids(tokenizer, special=params.force_special, single_bytes=params.force_bytes))
    if forced > params.slots:
        raise RedraftError(
            "The draft vocabulary is smaller than what is forced in.",
            where="vocab.slots in the profile",
            expected=f"at least {forced}: the special tokens and single bytes",
            found=params.slots,
        )
    return f"{params.slots} slots, {forced} of them forced in"
