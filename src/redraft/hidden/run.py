"""One extraction: what is wanted of the hidden states, what is there, what is made."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redraft.corpus.corpus import Corpus
from redraft.frame.errors import RedraftError
from redraft.frame.profile import ExtractParams
from redraft.frame.progress import counter, note
from redraft.frame.store import fingerprint
from redraft.hidden.alike import apart
from redraft.hidden.diagnostic import chosen_documents, layers_around, measurable, pack_diagnostic
from redraft.hidden.engine import Engine, Source, States
from redraft.hidden.formats import packed, unpacked
from redraft.hidden.pool import (
    DIAGNOSTIC,
    FORMAT,
    Place,
    Pool,
    document_key,
    documents_of,
    groups,
    split_fingerprint,
)  # fmt: skip
from redraft.hidden.reading import ShardFile
from redraft.hidden.shards import Shard, remove_shard, shard_name, write_shard
from redraft.hidden.sizes import token_bytes

Corpora = Mapping[str, Corpus]
Manifest = dict[str, Any]


@dataclass
class _Split:
    """A split, its documents by key, and the fingerprint of them all."""

    name: str
    corpus: Corpus
    keys: list[str]
    fingerprint: str


class Run:
    """What `redraft.hidden.extract.extract` does, in its order."""

    def __init__(self, source: Source, params: ExtractParams) -> None:
        self.source, self.params = source, params
        self.pool = Pool(
            {
                "redraft": FORMAT,
                "target": source.target,
                "aux_layers": list(source.aux_layers),
                "kept": params.format,
                "law": params.law,
                "engine": source.opening.identity,
            }
        )
        self.splits: list[_Split] = []
        self.documents: dict[str, Tensor] = {}
        self.scored: dict[str, Tensor] = {}
        self.places: dict[str, Place] = {}
        self.missing: list[list[str]] = []
        """Keys of the documents of every shard to make."""
        self.diagnostic: list[int] = []
        """Documents of `heldout`."""
        self.made: list[str] = []
        self.made_tokens, self.seconds = 0, 0.0

    # what is there

    def take(self, corpora: Corpora, like: Manifest | None = None) -> None:
        """Find out what is there of `corpora` and plan the rest."""
        for name, corpus in corpora.items():
            listed = documents_of(corpus, self.params.law)
            for index, (key, scored) in enumerate(listed):
                self.documents[key] = corpus.document(index)[0]
                if scored is not None:
                    self.scored[key] = scored
            keys = [key for key, _ in listed]
            self.splits.append(_Split(name, corpus, keys, split_fingerprint(self.pool.name, keys)))
        named = [shard["name"] for shard in like["shards"]] if like else []
        self.places, broken = self.pool.places(self.documents, named)
        again = [list(shard.documents) for shard in broken if self.documents.keys() >= set(shard.documents)]
        again += self._groups_of(like) if like else []
        again = list({shard_name(group): group for group in again}.values())
        planned = {key for group in again for key in group}
        lengths = {
            key: len(ids) for key, ids in self.documents.items() if key not in self.places and key not in planned
        }
        self.missing = again + groups(lengths, self._token_bytes(), self.params.shard_mib * 2**20)
        if "heldout" in corpora:
            self.diagnostic = chosen_documents(corpora["heldout"], self.params.diagnostic_positions)
        reused = len({name for name, _ in self.places.values()})
        if self.missing and reused:
            note(f"hidden states: shards: reused {reused}, redone {len(self.missing)}")

    def _groups_of(self, like: Manifest) -> list[list[str]]:
        """Keys of the documents of every shard of a manifest that lacks none of them and is not there."""
        found: dict[int, dict[int, str]] = {}
        for split in self.splits:
            told = like["splits"].get(split.name, {})
            if told.get("fingerprint") == split.fingerprint:
                for key, (shard, place) in zip(split.keys, told["places"], strict=True):
                    found.setdefault(shard, {})[place] = key
        groups_ = [[group[place] for place in sorted(group)] for group in found.values()]
        there = {name for name, _ in self.places.values()}
        named = {shard["name"] for shard in like["shards"]}
        return [group for group in groups_ if shard_name(group) in named - there]

    @property
    def unchecked(self) -> list[_Split]:
        """Splits of which no sample was extracted again yet, or of which something was made since."""
        return [split for split in self.splits if self._needs_check(split)]

    def _needs_check(self, split: _Split) -> bool:
        record = self.pool.record(split.fingerprint)
        if not record or any(self.places[key][0] in self.made for key in split.keys):
            return True
        return record["recheck_difference"] is None and bool(self.params.recheck and self.source.checker)

    def _token_bytes(self) -> int:
        greedy = 4
        hidden, aux = self.source.head.shape[1], len(self.source.aux_layers)
        return token_bytes(hidden, aux, self.params.format, self.params.law) + greedy

    def bytes_needed(self) -> int:
        """Bytes that are to be written."""
        tokens = sum(len(self.documents[key]) for group in self.missing for key in group)
        needed = tokens * self._token_bytes()
        if self.diagnostic_missing:
            states = len(self._layers_around()) + 2
            needed += sum(len(ids) for ids in self._diagnostic_ids()) * states * 2 * self.source.head.shape[1]
        return needed

    # what is made

    def layers(self) -> list[int]:
        """All layers that an engine is asked for."""
        around = self._layers_around() if self.diagnostic_missing else []
        return sorted({*self.source.aux_layers, *around})

    def make(self, engine: Engine) -> None:
        """Make what is missing."""
        self._fill(engine)
        if self.diagnostic_missing:
            self._make_diagnostic(engine)

    def check(self, engine: Engine) -> None:
        """Extract some samples of every split again."""
        for split in self.unchecked:
            worst = round(self._recheck(engine, split), 6) if self.params.recheck else None
            self.pool.keep(split.fingerprint, {"recheck_difference": worst})
            if self.params.recheck:
                self.pool.checked(self._doubtful(split))

    def leave_unchecked(self) -> None:
        """Say that no sample was extracted again."""
        for split in self.unchecked:
            self.pool.keep(split.fingerprint, {"recheck_difference": None})

    def _fill(self, engine: Engine) -> None:
        """Write every missing shard as soon as its documents are there, in a thread: the target does not wait."""
        if not self.missing:
            return
        coming = {key for group in self.missing for key in group}
        for split in self.splits:
            if not coming.isdisjoint(split.keys):  # a process that is killed before the check leaves no word of one
                self.pool.forget(split.fingerprint)
        total, began = sum(len(self.documents[key]) for group in self.missing for key in group), time.perf_counter()
        waiting: dict[int, dict[int, dict[str, Tensor]]] = {}
        writing: Future[Shard] | None = None
        ids = [[self.documents[key] for key in group] for group in self.missing]
        with ThreadPoolExecutor(1) as writer, counter(total, "hidden states", "token") as bar:
            with closing(engine.states(ids, self.source.aux_layers)) as states:
                for group, place, each in states:
                    keys = self.missing[group]
                    waiting.setdefault(group, {})[place] = self._kept(keys[place], each)
                    bar.update(len(ids[group][place]))
                    if len(waiting[group]) < len(keys):
                        continue
                    if writing:  # at most one shard waits for the disk while the next one is made
                        self._wrote(writing.result())
                    found = waiting.pop(group)
                    ordered = [found[number] for number in range(len(keys))]
                    writing = writer.submit(write_shard, self.pool.folder, shard_name(keys), keys, ordered)
                    del found, ordered
            if writing:
                self._wrote(writing.result())
        self.made_tokens, self.seconds = total, time.perf_counter() - began
        if waiting or any(key not in self.places for key in self.documents):
            raise RedraftError(
                "The engine did not give the states of every document.",
                where=self.source.opening.identity["name"],
                found=f"{sum(key not in self.places for key in self.documents)} documents without states",
            )

    def _wrote(self, shard: Shard) -> None:
        self.made.append(shard.name)
        self.places |= {key: (shard.name, place) for place, key in enumerate(shard.documents)}

    def _kept(self, key: str, states: States) -> dict[str, Tensor]:
        """The states of a document as they are kept."""
        joined = {name: each for name, each in states.items() if not name.startswith("layer_")}
        joined["aux"] = torch.cat([states[f"layer_{layer}"] for layer in self.source.aux_layers], dim=-1)
        lengths = {name: len(each) for name, each in joined.items()}
        if set(lengths.values()) != {len(self.documents[key])}:
            raise RedraftError(
                "The states of a document differ from it in length.",
                where=f"document {key}",
                expected=f"{len(self.documents[key])} tokens",
                found=lengths,
            )
        return packed(
            joined,
            self.params.format,
            self.params.law,
            self.source.head,
            self.scored.get(key),
            len(self.source.aux_layers),
        )

    # the diagnostic shard

    def _heldout(self) -> _Split:
        return next(split for split in self.splits if split.name == "heldout")

    def _layers_around(self) -> list[int]:
        return layers_around(self.source.aux_layers, self.source.depth) if self.diagnostic else []

    def _diagnostic_ids(self) -> list[Tensor]:
        return [self._heldout().corpus.document(index)[0] for index in self.diagnostic]

    def _diagnostic_name(self) -> str:
        keys = [document_key(ids) for ids in self._diagnostic_ids()]
        return DIAGNOSTIC + fingerprint({"documents": keys, "layers": self._layers_around()})

    @property
    def diagnostic_missing(self) -> bool:
        """Whether it is to be made."""
        if not self.diagnostic:
            return False
        entry = self.pool.shards().get(self._diagnostic_name())
        return entry is None or not self.pool.is_whole(entry)

    def _make_diagnostic(self, engine: Engine) -> None:
        ids, layers = self._diagnostic_ids(), self._layers_around()
        found: dict[int, States] = {}
        for group, _, states in engine.states([[each] for each in ids], layers, around=True):
            found[group] = pack_diagnostic(states)
        name = self._diagnostic_name()
        write_shard(self.pool.folder, name, [document_key(each) for each in ids], [found[n] for n in range(len(ids))])
        self.made.append(name)

    # the check

    def _doubtful(self, split: _Split) -> set[str]:
        """Shards of a split that no check has passed: made just now, or by a process that was killed before its own."""
        return {name for name in (self.places[key][0] for key in split.keys) if not self.pool.is_checked(name)}

    def _recheck(self, engine: Engine, split: _Split) -> float:
        """Extract some samples again, alone; the largest relative difference to what was written.

        Catches states of another sample (vllm-project/speculators#279) and padding that leaks into attention.
        """
        doubtful = self._doubtful(split)
        fresh = [key for key in split.keys if self.places[key][0] in doubtful] or split.keys
        by_length = sorted(dict.fromkeys(fresh), key=lambda key: (len(self.documents[key]), key))
        spread = max(1, len(by_length) // self.params.recheck)  # over all lengths, so over all amounts of padding
        keys = by_length[spread // 2 :: spread][: self.params.recheck]
        shards, worst = self.pool.shards(), 0.0
        ids = [[self.documents[key]] for key in keys]
        for group, _, states in engine.states(ids, self.source.aux_layers):
            key = keys[group]
            name, place = self.places[key]
            alone = unpacked(self._kept(key, states))
            written = unpacked(ShardFile(shards[name].file(self.pool.folder)).read(place))
            for kind in (kind for kind, each in written.items() if each.is_floating_point()):
                layers = len(self.source.aux_layers) if kind == "aux" else 1
                difference = apart(*(each[kind].unflatten(1, (layers, -1)) for each in (written, alone)))
                worst = max(worst, difference)
                if not difference <= self.params.tolerance:
                    sample = split.corpus.samples[split.keys.index(key)]
                    for made in {*self.made, *doubtful, name, self._diagnostic_name()}:  # none of it can be trusted
                        remove_shard(self.pool.folder, made)
                    raise _differs(f"{split.name}: {sample}, {kind}", self.params.tolerance, difference)
        return worst

    # what is told

    def manifest(self) -> Manifest:
        """Of all splits, and of the diagnostic shard."""
        shards = self.pool.shards()
        used = list(dict.fromkeys(self.places[key][0] for split in self.splits for key in split.keys))
        number = {name: index for index, name in enumerate(used)}
        manifest: Manifest = {
            "states": self.pool.name,
            **self.pool.facts,
            "hidden_size": self.source.head.shape[1],
            "vocab_size": self.source.head.shape[0],
            "shards": [_told(shards[name]) for name in used],
            "splits": {
                split.name: {
                    "fingerprint": split.fingerprint,
                    "tokens": len(split.corpus.input_ids),
                    **self.pool.record(split.fingerprint),
                    "places": [[number[self.places[key][0]], self.places[key][1]] for key in split.keys],
                }
                for split in self.splits
            },
        }
        entry = shards.get(self._diagnostic_name()) if self.diagnostic else None
        if entry:
            masks = [self._heldout().corpus.document(index)[1] for index in self.diagnostic]
            positions = sum(map(measurable, masks))
            manifest["diagnostic"] = {**_told(entry), "documents": self.diagnostic, "positions": positions}
        return manifest


def _differs(where: str, tolerance: float, found: float) -> RedraftError:
    return RedraftError(
        "A sample extracted alone differs from the same sample in a batch.",
        where=where,
        expected=f"relative difference at most {tolerance}",
        found=f"{found:.3g}",
        cause="states of another sample, or padding that leaks into attention",
    )


def _told(shard: Shard) -> dict[str, Any]:
    return {"name": shard.name, "tokens": shard.tokens, "bytes": shard.bytes, "sha256": shard.sha256}
