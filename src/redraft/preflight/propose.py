"""A profile for a target and a donor of one's own: what their files say, and sizes to begin with."""

import datetime
import os
import re
from pathlib import Path
from typing import Any

from redraft.drafter.layers import declared_layers
from redraft.drafter.names import flat_config
from redraft.frame.files import read_object
from redraft.target.config import default_aux_layers
from redraft.target.facts import TargetFacts, read_facts

LARGE = 2048
"""Hidden size from which a target wants GPUs and a server."""
MOST_SLOTS = 32_000
"""Slots of the published drafters."""
_CORPUS = {"max_dropped": 0.05, "max_samples": None, "cut": "keep", "max_leaks": 0.0, "max_repeated": 0.1}
_EXTRACT = {
    "engine": "transformers",
    "format": "bf16",
    "law": "states",
    "shard_mib": 64,
    "recheck": 4,
    "tolerance": 0.05,
    "diagnostic_positions": 2000,
}
_PROBE = {"prompts": 12, "bf16_prompts": 4, "min_accept_length": 1.05, "parity": "torch"}
_BENCH = {"prompts": 8, "concurrency": [1], "spec_steps": [1, 2, 3], "trees": [], "compare": [], "min_ratio": {}}


def propose(target: str, revision: str | None, donor: str, donor_revision: str | None, gpus: int) -> dict[str, Any]:
    """Values of a profile by section, see `redraft.frame.profile`.

    Args:
        target: folder, or hub id (then its sizes are guessed, and the check tells what does not fit).
        revision: of a hub id.
        donor: folder, hub id, or `train`.
        donor_revision: of a hub id.
        gpus: of this machine.

    Raises:
        RedraftError: a folder without a config.json that can be read.
    """
    folder = Path(target).expanduser()
    facts = read_facts(folder).fields if folder.is_dir() else {}
    hidden, vocab = facts.get("hidden_size", 7168), facts.get("vocab_size", 163_840)
    positions = int(facts.get("max_position_embeddings") or 4096)
    large = hidden >= LARGE
    length = min(positions, 4096 if large else 512)
    row = {"row_tokens": length, "micro_tokens": length * (4 if large else 2)}
    batch = row["micro_tokens"] * max(1, gpus) * (1 if not large else 2)
    sizes = {"batch_tokens": batch, **row, "precision": "bf16" if gpus else "auto", "save_steps": 200 if large else 50}
    trained = donor == "train"
    lr = 3e-5 if large and not trained else 1e-4 if large else 1e-3
    knobs = {"lr": lr, "epochs": 3, "ttt_steps": 3, "evals": 3, "patience": 2}
    slots, layers = _of_donor(Path(donor).expanduser(), read_facts(folder) if folder.is_dir() else None)
    slots = min(slots or MOST_SLOTS, vocab)
    answers = {"max_new_tokens": 512 if large else 64}
    source: dict[str, Any] = {"source": donor, "revision": donor_revision}
    if trained:
        loss = {"mask": "served", "oov": "drop", "denominator": "trained", "l2": 0.0, "freeze": []}
        knobs_of_donor = {**knobs, "seed": 0, "step_weight": 0.8, "warmup": 0.05, "clip": 0.5, "loss": loss, "evals": 1}
        source |= {"slots": slots, "shape": _shape(facts, hidden, positions), "train": {**sizes, **knobs_of_donor}}
    else:
        source |= {"head": "own", "embedding": "own", "prefix_vocabulary": False, "tokenizer": None}
    return {
        "target": {
            "source": target,
            "revision": revision,
            "trust_remote_code": False,
            "aux_layers": layers,
            "template": _template(folder),
        },
        "corpus": {"max_length": length, **_CORPUS},
        "donor": source,
        "vocab": {"slots": slots, "force_special": True, "force_bytes": True},
        "extract": {"batch_tokens": 8 * length, **_EXTRACT, "shard_mib": 4096 if large else 64},
        "knobs": {**knobs, "engine": "sglang" if large else "torch", "spec_steps": 3},
        "train": {**sizes, "processes": max(1, gpus), "launcher": "torchrun"},
        "engine": _engine(gpus, large),
        "probe": _PROBE | ({"prompts": 100, "bf16_prompts": 0, "parity": "walk"} if large else {}) | answers,
        "bench": _BENCH | ({"prompts": 200, "concurrency": [1, 4, 16]} if large else {}) | answers,
    }


def _template(target: Path) -> dict[str, Any]:
    """How chats are rendered: what the target's template asks for, said on purpose; a day, if it prints one."""
    files = [target / "tokenizer_config.json", *target.glob("*.jinja")]
    text = " ".join(file.read_text(errors="replace") for file in files if file.is_file())
    switches = [name for name in ("enable_thinking", "thinking") if re.search(rf"(?<![.\w]){name} is ", text)]
    today = datetime.date.today().isoformat() if "strftime_now" in text else None
    return {"name": None, "arguments": dict.fromkeys(switches[:1], True), "date": today}


def _engine(gpus: int, large: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {"disable-radix-cache": True}
    if gpus:
        flags["tp-size"] = gpus
    else:
        flags |= {"device": "cpu", "attention-backend": "intel_amx", "max-total-tokens": 4096}
    return {
        "python": ".engines/sglang/bin/python",
        "url": None,
        "baseline_url": None,
        "port": None,
        "max_running": 32 if large else 4,
        "topk": 1,
        "draft_tokens": None,
        "ready_seconds": 3600 if large else 300,
        "request_seconds": 600 if large else 120,
        "flags": flags,
        "speculative": {},
        "env": {} if gpus else {"OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    }


def _shape(facts: dict[str, Any], hidden: int, positions: int) -> dict[str, Any]:
    """A drafter like one layer of the target."""
    heads = int(facts.get("num_attention_heads") or max(1, hidden // 64))
    rope = facts.get("rope_parameters") or {}
    return {
        "intermediate_size": int(facts.get("intermediate_size") or 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts.get("num_key_value_heads") or heads),
        "head_dim": int(facts.get("head_dim") or hidden // heads),
        "rope_theta": float(rope.get("rope_theta") or facts.get("rope_theta") or 10_000.0),
        "max_position_embeddings": positions,
    }


def _of_donor(folder: Path, target: TargetFacts | None) -> tuple[int | None, list[int] | None]:
    """Slots of a donor's folder, and the layers that feed it where they are not the default ones."""
    if not folder.is_dir():
        return None, None
    fields = flat_config(read_object(folder / "config.json"))
    layers = declared_layers(fields, target.architecture, target.depth) if target else None
    default = layers is None or (target is not None and layers == default_aux_layers(target.depth))
    return fields.get("draft_vocab_size"), None if default or layers is None else list(layers)
