"""Rules of the preflight on files and tensors. docs/preflight.md has the table."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from redraft.drafter.donor import differing_rows
from redraft.frame.errors import RedraftError
from redraft.preflight.facts import Facts, Findings, error, export, note
from redraft.preflight.weights import reason
from redraft.target.ends import read_ends

HEAD = "lm_head.weight"
SAMPLE = 64
"""Rows of the embedding that are compared."""
_FLOATS = {"BF16", "F16", "F32"}
_OPTIONAL = {"d2t", "t2d", "embed_tokens.weight"}
_SILENT = "silent: dropped without a message, its place keeps random values, accept length 1.00"


def files(facts: Facts) -> Findings:
    """What lies in the folder."""
    weights = facts.weights
    if weights.absent or not (weights.files or weights.pickles):
        yield error(
            "weights-missing",
            found=f"absent: {', '.join(weights.absent) or 'safetensors files'}",
            effect="refuses to start, or leaves what stood there at random values",
            fix="bring the checkpoint again",
        )
    if weights.pickles:
        both = "; the safetensors files are loaded, these are ignored" if weights.files else ""
        yield error(
            "weights-format",
            found=", ".join(weights.pickles) + both,
            effect="which weights are served cannot be told from headers",
            fix="move them away" if weights.files else export(facts),
        )
    for name, fault in weights.broken.items():
        yield error("weights-unreadable", found=f"{name}: {fault}", effect="refuses to start", fix="bring it again")


def names(facts: Facts) -> Findings:
    """The exact set of names: SGLang drops what it does not know, and misses nothing."""
    if not facts.weights.whole:
        return
    wanted, entries = facts.wanted, facts.weights.entries
    twice = [name for name, times in Counter(facts.loaded_name(e.name) for e in entries).items() if times > 1]
    if twice:
        effect = "the last one read wins"
        yield error("name-twice", found=", ".join(twice), effect=effect, fix="keep one of each")
    unknown = [name for name in facts.named if name not in wanted and name not in _OPTIONAL]
    meant = {name: _meant(name, wanted) for name in sorted(unknown)}
    yield from _unknown(meant)
    biases = {name for name in wanted if name.endswith(".bias")}  # a rule of config.json reports these
    missing = sorted(wanted.keys() - facts.named.keys() - set(meant.values()) - biases)
    if HEAD in missing and facts.own_head:
        yield error(
            "lm-head-missing",
            found=f"no {HEAD}, draft_vocab_size {facts.fields.get('draft_vocab_size')}",
            effect="silent: the head stays random, the server is healthy and serves accept length 1.00",
            fix="donor.head: target in the profile borrows the target's rows",
        )
    missing = [name for name in missing if name != HEAD]
    if missing:
        effect = "silent: they stay random, accept length 1.00"
        yield error("name-missing", found=", ".join(missing), effect=effect, fix="bring the checkpoint again")


def _meant(name: str, wanted: Iterable[str]) -> str | None:
    """The tensor that was meant, if the name is one with something before it, or the layer's other name."""
    plain = name.replace("layers.0.", "midlayer.")
    known = (*wanted, "embed_tokens.weight")
    return next((each for each in known if plain == each or plain.endswith(f".{each}")), None)


_DROPPED = {
    "name-layers0": (f"before 0.5.12 {_SILENT}", "rename it to midlayer.*, which every release reads"),
    "name-prefix": (_SILENT, "a trainer's prefix: take it off the names"),
    "qkv-bias": ("silent: dropped, the class has no such bias whatever attention_bias says", "choose another donor"),
    "name-unknown": ("silent: dropped, so the server computes without it", "leave it out only if training did without"),
}


def _unknown(meant: dict[str, str | None]) -> Findings:
    """Names that are not known, with the tensor that was meant."""
    dropped = defaultdict(list)
    for name, own in meant.items():
        if name.endswith("rotary_emb.inv_freq") or own == "embed_tokens.weight":
            continue  # computed or replaced anyway
        if name.startswith("layers.") and own is None:
            continue  # a layer after the first: not checked
        if own is not None:
            dropped["name-layers0" if name.startswith("layers.0.") else "name-prefix"].append(name)
        else:
            biases = tuple(f"{part}_proj.bias" for part in "qkv")
            dropped["qkv-bias" if name.endswith(biases) else "name-unknown"].append(name)
    for rule, all_names in dropped.items():
        more = f" and {len(all_names) - 5} more" if len(all_names) > 5 else ""
        effect, fix = _DROPPED[rule]
        yield error(rule, found=", ".join(all_names[:5]) + more, effect=effect, fix=fix)


def shapes(facts: Facts) -> Findings:
    """Shapes against `config.json`, and the head against `draft_vocab_size`."""
    if not facts.shaped:
        return
    embed = [facts.number(name) for name in ("vocab_size", "hidden_size")]
    wanted: dict[str, Sequence[int | None]] = {**facts.wanted, "embed_tokens.weight": embed}
    for name, entry in facts.named.items():
        if name not in wanted or entry.shape == wanted[name] or (name == HEAD and not facts.own_head):
            continue
        if name == HEAD and entry.shape[1:] == wanted[name][1:]:
            if facts.number("draft_vocab_size") is None:
                continue
            yield error(
                "head-rows",
                found=f"{entry.shape[0]} rows, draft_vocab_size {facts.fields.get('draft_vocab_size')}",
                effect="refuses to start: AssertionError, self.org_vocab_size=... loaded_weight.shape[output_dim]=...",
                fix=f'"draft_vocab_size": {entry.shape[0]}',
            )
        else:
            yield error(
                "shape",
                found=f"{name} {entry.shape}, by config.json {wanted[name]}",
                effect="refuses to start: AssertionError, Attempted to load weight (...) into parameter (...)",
                fix="config.json and weights belong to different drafters",
            )
    if facts.fan_in % facts.aux_width:
        effect = "refuses to start: AssertionError, Attempted to load weight (...) into parameter (...)"
        found = f"fc takes {facts.fan_in} numbers, no multiple of {facts.aux_width}"
        yield error("shape", found=found, effect=effect, fix="the drafter belongs to another target")


def head(facts: Facts) -> Findings:
    """Whose head is served."""
    own, value = HEAD in facts.named, facts.fields.get("draft_vocab_size")
    if "draft_vocab_size" not in facts.fields:
        yield error(
            "draft-vocab-size",
            found="no draft_vocab_size",
            effect="refuses to start: AttributeError, no attribute draft_vocab_size",
            fix=f'"draft_vocab_size": {facts.slots}',
        )
    elif value is None and own and not facts.tied:
        yield error(
            "draft-vocab-size",
            found=f"draft_vocab_size null, and {HEAD} in the file",
            effect="silent: the target's head replaces the drafter's own",
            fix=f'"draft_vocab_size": {facts.named[HEAD].shape[0]}',
        )
    if facts.tied and (own or value not in (None, facts.target.vocab)):
        yield error(
            "tied-head",
            found=f"tie_word_embeddings true, draft_vocab_size {value}" + (f", {HEAD} in the file" if own else ""),
            effect="silent: the head is the target's embedding, and the drafter's own is ignored",
            fix='"tie_word_embeddings": false',
        )


def values(facts: Facts) -> Findings:
    """Dtypes and, read one tensor at a time, NaN and infinity."""
    floats = {name: e for name, e in facts.named.items() if name in facts.wanted or name == "embed_tokens.weight"}
    for name, entry in floats.items():
        if entry.dtype not in _FLOATS:
            effect = "refuses to start, or casts the numbers as they are: garbage drafts"
            yield error("dtype", found=f"{name} {entry.dtype}", effect=effect, fix="dequantise or cast it to bf16")
    wide = sorted({entry.dtype for entry in floats.values()} & (_FLOATS - {"BF16"}))
    if wide:
        effect = "cast to the drafter's dtype at load"
        yield note("dtype", found=f"tensors of {', '.join(wide)}", effect=effect, fix="write bf16")
    bad = [name for name, entry in floats.items() if entry.dtype in _FLOATS and not _finite(entry.read())]
    if bad:
        effect, fix = "every draft is garbage: accept length 1.00", "take an earlier checkpoint"
        yield error("not-finite", found=f"NaN or infinity in {', '.join(bad)}", effect=effect, fix=fix)


def _finite(tensor: Tensor) -> bool:
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def embedding(facts: Facts) -> Findings:
    """An embedding in the checkpoint against the target's, which replaces it: a sample of rows."""
    entry, hidden = facts.named.get("embed_tokens.weight"), facts.fields.get("hidden_size")
    if entry is None or facts.fields.get("target_hidden_size", hidden) != hidden:
        return
    try:
        its = read_ends(facts.target.folder).embed
    except (RedraftError, OSError, ValueError, KeyError, TypeError) as fault:
        yield note(
            "embed-unread", found=reason(fault), effect="embed_tokens.weight was not compared", fix="give the weights"
        )
        return
    say = partial(error, "embed-differs", fix="the drafter was trained for another target")
    effect = "silent: the target's embedding replaces it, and the drafter was trained with another"
    if list(its.shape) != entry.shape:
        yield say(found=f"embed_tokens.weight {entry.shape}, the target's {list(its.shape)}", effect=effect)
        return
    rows = torch.linspace(0, len(its) - 1, min(SAMPLE, len(its))).long()
    apart = differing_rows(entry.read()[rows], its[rows])
    if apart:
        yield say(found=f"{apart} of {len(rows)} rows of embed_tokens.weight are not the target's", effect=effect)


FILES = (files,)
RULES = (names, shapes, head, values, embedding)
