"""A chunk of rows, tokenised: the work of one process on a corpus, and its file until the whole is written."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from redraft.corpus.chat import Markers, has_tools
from redraft.corpus.files import Raw
from redraft.corpus.prompts import prompt_keys, tokens_key
from redraft.corpus.rows import Chat, Refused, read_row
from redraft.corpus.samples import GENERATED, Sample, of_tokens, tokenize_all
from redraft.frame.files import open_tensors
from redraft.frame.profile import CorpusParams, TemplateParams

Arrays = dict[str, NDArray[Any]]
SHOWN = 3
"""Rows that are named of those that were left out."""
_COUNTERS = ("dropped", "left_out", "unknown")
_STATE: dict[str, Any] = {}


@dataclass
class Settings:
    """What a chunk is tokenised with, besides the tokenizer."""

    params: CorpusParams
    how: TemplateParams
    tokenizer: str
    """Hash of the tokenizer."""
    template: str
    """Hash of the chat template."""
    target: str | None = None
    """Hash of the target, if answers by another one are to be counted."""
    rows: int | None = None
    """V, if ids beyond it are to be left out."""


@dataclass
class Told:
    """What is told of the rows of a chunk, or of all."""

    chats: int = 0
    turns: int = 0
    cut: int = 0
    generated: int = 0
    """Chats whose answers carry their ids."""
    other_target: int = 0
    no_place_for_tools: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers that are not trained on, of chats that are."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Keys that nothing reads."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """By kind the first rows with something dropped or left out, each with its reason."""

    def drop(self, name: str, reason: str) -> None:
        """Count a row that is left out."""
        self.dropped[self._kind(name, reason)] += 1

    def leave_out(self, name: str, reason: str) -> None:
        """Count an answer that is left out."""
        self.left_out[self._kind(name, reason)] += 1

    def _kind(self, name: str, reason: str) -> str:
        kind = reason.split(":")[0]
        self._show(kind, [f"{name} ({reason})"])
        return kind

    def _show(self, kind: str, examples: list[str]) -> None:
        self.examples[kind] = [*self.examples.get(kind, []), *examples][:SHOWN]

    def shown(self, counts: Counter[str]) -> str:
        """The first rows of every kind in `counts`, the most frequent kind first."""
        return ", ".join(each for kind, _ in counts.most_common() for each in self.examples[kind])

    def add(self, other: "Told") -> None:
        """Add what a later chunk tells."""
        for name in ("chats", "turns", "cut", "generated", "other_target", "no_place_for_tools"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for kind, examples in other.examples.items():
            self._show(kind, examples)


@dataclass
class Part:
    """A tokenised chunk."""

    arrays: Arrays
    """`input_ids`, `loss_mask` and `offsets` of its documents; `keys` and `chats`, the prompts of its chats."""
    documents: list[tuple[int, str]]
    """Of each document its chat, as an index in `names`, and its source."""
    names: list[str]
    """Ids of the chats that are in."""
    told: Told


def _sample(chat: Chat, settings: Settings, told: Told) -> Sample | None:
    """What needs no rendering: None if `chat` is to be rendered. A reason if it cannot be used."""
    made = chat.made or {}
    given = any(GENERATED in message for message in chat.messages)
    if (chat.tokens or given) and made.get("tokenizer", settings.tokenizer) != settings.tokenizer:
        return Sample(dropped="other tokenizer: the answers are ids of another one; regenerate them")
    template = made.get("template")
    if isinstance(template, dict) and template.get("sha256", settings.template) != settings.template:
        arguments = json.dumps(template.get("arguments", {}))
        return Sample(dropped=f"other template: the answers were made with another text or arguments, {arguments}")
    told.generated += given
    told.other_target += bool(settings.target) and made.get("target") not in (None, settings.target)
    return of_tokens(*chat.tokens, settings.params.max_length) if chat.tokens else None


def tokenize_rows(rows: Iterable[tuple[str, Raw]], tokenizer: Any, settings: Settings, markers: Markers) -> Part:
    """Tokenise rows, each with the id that it gets if it has none."""
    told = Told()
    chats: list[Chat] = []
    samples: list[Sample | None] = []
    for name, raw in rows:
        told.chats += 1
        chat = read_row(raw, name)
        if isinstance(chat, Refused):
            told.drop(chat.id, chat.reason)
            continue
        told.unknown.update(chat.unknown)
        chats.append(chat)
        samples.append(_sample(chat, settings, told))
    tools = [chat for chat in chats if chat.tools]
    if tools and not has_tools(tokenizer, settings.how):
        told.no_place_for_tools = len(tools)
    waiting = [chat for chat, sample in zip(chats, samples, strict=True) if sample is None]
    given = [(chat.messages, chat.tools) for chat in waiting]
    params, how = settings.params, settings.how
    tokenized = tokenize_all(
        tokenizer, given, params.max_length, how=how, markers=markers, keep_cut=params.cut == "keep"
    )
    rendered = iter(tokenized)
    found = [sample or next(rendered) for sample in samples]
    if settings.rows is not None:
        found = [_within(sample, settings.rows) for sample in found]
    return _part(chats, found, told)


def _within(sample: Sample, rows: int) -> Sample:
    """The sample, or why not if the target has no row for one of its ids."""
    most = max((max(ids) for ids, _ in sample.documents), default=0)
    return sample if most < rows else Sample(dropped=f"ids: id {most}, and the target has {rows:,}, from 0")


def _part(chats: list[Chat], samples: list[Sample], told: Told) -> Part:
    names: list[str] = []
    documents: list[tuple[int, str]] = []
    ids: list[list[int]] = []
    mask: list[list[int]] = []
    keys: list[list[int]] = []
    for chat, sample in zip(chats, samples, strict=True):
        if sample.dropped is not None:
            told.drop(chat.id, sample.dropped)
            continue
        told.turns += sample.turns
        told.cut += sample.cut
        for reason in sample.left_out:
            told.leave_out(chat.id, reason)
        for one, flags in sample.documents:
            ids.append(one)
            mask.append(flags)
            documents.append((len(names), chat.source))
        keys.append([tokens_key(*chat.tokens)] if chat.tokens else prompt_keys(chat.messages))
        names.append(chat.id)
    flat = itertools.chain.from_iterable
    arrays: Arrays = {
        "input_ids": np.fromiter(flat(ids), np.int32),
        "loss_mask": np.fromiter(flat(mask), np.uint8),
        "offsets": np.cumsum([0, *map(len, ids)], dtype=np.int64),
        "keys": np.fromiter(flat(keys), np.uint64).view(np.int64),
        "chats": np.repeat(np.arange(len(names)), np.array(list(map(len, keys)), np.int64)),
    }
    return Part(arrays, documents, names, told)


def save_part(part: Part, path: Path) -> None:
    """Write a part; the file is there only when it is whole."""
    told = {**asdict(part.told), **{name: dict(getattr(part.told, name)) for name in _COUNTERS}}
    record = json.dumps({"documents": part.documents, "names": part.names, "told": told})
    partial = path.with_suffix(".partial")
    partial.write_bytes(save(part.arrays, {"redraft": record}))
    partial.replace(path)


def read_part(path: Path) -> Part:
    """Read a part; its arrays are memory-mapped."""
    with open_tensors(path) as file:
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (no mapping)
        record = json.loads(file.metadata()["redraft"])
    counts = {name: Counter(record["told"][name]) for name in _COUNTERS}
    documents = [(chat, source) for chat, source in record["documents"]]
    return Part(arrays, documents, record["names"], Told(**{**record["told"], **counts}))


def begin(load: Callable[[], Any], settings: Settings) -> None:
    """Make ready a process for `work`."""
    tokenizer = load()
    _STATE.update(tokenizer=tokenizer, settings=settings, markers=Markers(tokenizer))


def work(rows: list[tuple[str, Raw]], path: Path) -> Path:
    """Tokenise rows into a file."""
    save_part(tokenize_rows(rows, _STATE["tokenizer"], _STATE["settings"], _STATE["markers"]), path)
    return path
