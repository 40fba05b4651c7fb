"""Extraction and the shard store (cases C03, C11, C13, C15, C17, C28)."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HIDDEN, VOCAB
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from redraft.corpus.build import tokenize_file
from redraft.corpus.corpus import Corpus, read_corpus, write_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams, ExtractParams
from redraft.hidden import extract as extraction
from redraft.hidden.extract import diagnostic_documents, extract, forward, summary
from redraft.hidden.rows import HiddenStates, PackedRows, pack
from redraft.hidden.shards import ShardWriter
from redraft.target.ends import target_hash
from redraft.target.model import Target
from redraft.train.step import counted_positions

LENGTHS = [7, 3, 12, 5, 9, 30, 1, 4]


def corpus_of(lengths: list[int], seed: int = 0) -> Corpus:
    torch.manual_seed(seed)
    ids = [torch.randint(VOCAB, (length,)) for length in lengths]
    return corpus_from({f"s{n}": (each, [0] * (len(each) // 3)) for n, each in enumerate(ids)}, seed=seed)


def corpus_from(documents: dict[str, tuple[Any, list[int]]], **identity: object) -> Corpus:
    """Documents by name: ids, and the beginning of a loss mask that goes on with 1."""
    ids = [torch.as_tensor(each, dtype=torch.int32) for each, _ in documents.values()]
    masks = [torch.tensor([*mask, *[1] * (len(each) - len(mask))]) for each, mask in documents.values()]
    lengths = torch.tensor([0, *map(len, ids)]).cumsum(0)
    named = {**identity, "content": [each.tolist() for each in ids]}
    return Corpus(torch.cat(ids), torch.cat(masks).byte(), lengths, list(documents), [""] * len(ids), named)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


PARAMS = ExtractParams(
    engine="transformers", format="bf16", law="states", batch_tokens=40, shard_mib=1, diagnostic_positions=20,
    recheck=4, tolerance=0.05,
)  # fmt: skip


def test_every_document_reads_back_as_extracted_alone(target: Target, llama_folder: Path, store: Path) -> None:
    corpora = {"train": corpus_of(LENGTHS), "heldout": corpus_of([20, 11], seed=1)}
    manifest = extract(target, target_hash(llama_folder), corpora, PARAMS)
    record = json.loads(manifest.read_text())
    for split, corpus in corpora.items():
        states = HiddenStates(manifest, split)
        names = [name for shard in record["splits"][split] for name in shard["samples"]]
        assert sorted(names) == sorted(corpus.samples)
        for place, name in enumerate(names):
            ids, mask = corpus.document(corpus.samples.index(name))
            alone, read = forward(target, [(ids, mask)])[0], states.read(place)
            assert torch.equal(read["input_ids"], ids)
            assert torch.equal(read["loss_mask"], mask)
            for kind in ("aux", "final"):
                assert torch.allclose(read[kind].float(), alone[kind].float(), rtol=2e-2, atol=2e-2), (name, kind)
            assert torch.equal(read["greedy"], alone["greedy"])
    assert record["recheck_difference"] < 0.01
    assert summary(manifest)["train"]["tokens"] == sum(LENGTHS)


def test_the_diagnostic_shard_has_the_layers_around(target: Target, llama_folder: Path, store: Path) -> None:
    corpora = {"train": corpus_of([5]), "heldout": corpus_of([9, 8, 7, 12, 6, 30, 16], seed=1)}
    manifest = extract(target, target_hash(llama_folder), corpora, PARAMS)
    shard = load_file(manifest.parent / "diagnostic.safetensors")
    layers = {int(name.removeprefix("layer_")) for name in shard if name.startswith("layer_")}
    assert layers == {1, 2, 3, 4, 5, 6}
    final = target.decoder.norm(shard["unnormed"].float())
    assert torch.allclose(final, shard["final"].float(), rtol=5e-2, atol=5e-2)
    documents = torch.arange(1, len(shard["offsets"])).repeat_interleave(shard["offsets"].diff())
    counted = counted_positions(shard["loss_mask"][None], documents[None], 1)
    assert int(counted.sum()) == summary(manifest)["diagnostic_positions"] >= 20


@given(
    documents=st.lists(
        st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.booleans(), min_size=3, max_size=12)), min_size=1
    ),
    positions=st.integers(1, 40),
)
def test_the_diagnostic_shard_counts_what_training_counts_and_takes_all_sources_in_turn(
    documents: list[tuple[str, list[bool]]], positions: int
) -> None:
    masks = [torch.tensor(mask, dtype=torch.uint8) for _, mask in documents]
    lengths = torch.tensor([0, *map(len, masks)])
    names, sources = [f"s{number}" for number in range(len(masks))], [source for source, _ in documents]
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    corpus = Corpus(ids, torch.cat(masks), lengths.cumsum(0), names, sources, {})
    chosen = diagnostic_documents(corpus, positions)
    assert chosen == diagnostic_documents(corpus, positions) == sorted(set(chosen))
    counts = [int(counted_positions(mask[None], torch.ones(1, len(mask)), 1).sum()) for mask in masks]
    assert [extraction._measurable(mask) for mask in masks] == counts
    assert sum(counts[index] for index in chosen) >= positions or len(chosen) == len(masks)
    assert sum(sorted(counts[index] for index in chosen)[:-1]) < positions  # one that is needed came last
    taken = {source: sum(sources[index] == source for index in chosen) for source in set(sources)}
    for source, count in taken.items():  # a source has fewer only where it has no more
        assert count >= max(taken.values()) - 1 or count == sources.count(source)


def test_the_diagnostic_shard_is_not_the_first_documents() -> None:
    corpus = corpus_of([10] * 50)
    chosen = diagnostic_documents(corpus, 60)
    assert len(chosen) == 10  # six measurable positions each
    assert max(chosen) > 30


def test_states_are_copies_that_do_not_keep_their_batch(target: Target) -> None:
    documents = [corpus_of([length]).document(0) for length in (40, 2)]
    for result in forward(target, documents):
        for name in ("aux", "final"):
            assert result[name].untyped_storage().nbytes() == result[name].nbytes


def test_a_second_run_finds_the_shards_and_a_lost_shard_is_told(
    target: Target, llama_folder: Path, store: Path
) -> None:
    corpora = {"train": corpus_of(LENGTHS), "heldout": corpus_of([20], seed=1)}
    manifest = extract(target, target_hash(llama_folder), corpora, PARAMS)
    shard = next(manifest.parent.glob("train-*"))
    stamp = shard.stat().st_mtime_ns
    assert extract(target, target_hash(llama_folder), corpora, PARAMS) == manifest
    assert shard.stat().st_mtime_ns == stamp
    shard.unlink()
    with pytest.raises(RedraftError, match="not in the store"):
        HiddenStates(manifest, "train")
    extract(target, target_hash(llama_folder), corpora, PARAMS)
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(RedraftError, match=shard.name):
        HiddenStates(manifest, "train")
    shard.unlink()
    extract(target, target_hash(llama_folder), corpora, PARAMS)
    assert HiddenStates(manifest, "train").tokens == sum(LENGTHS)


def test_another_corpus_is_another_fingerprint(target: Target, llama_folder: Path, store: Path) -> None:
    made = [
        extract(target, target_hash(llama_folder), {"heldout": corpus_of([9], seed)}, PARAMS).parent for seed in (1, 2)
    ]
    assert made[0] != made[1]
    with pytest.raises(RedraftError, match="something else"):
        HiddenStates(made[0] / "manifest.json", "heldout", target="another")


def test_states_of_another_sample_are_caught(
    target: Target, llama_folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(target: Target, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        results = forward(target, documents)
        if len(results) > 1:
            results[0]["aux"], results[1]["aux"] = results[1]["aux"][: len(results[0]["aux"])], results[1]["aux"]
        return results

    monkeypatch.setattr(extraction, "forward", swapped)
    with pytest.raises(RedraftError, match="differs from the same sample in a batch"):
        extract(target, target_hash(llama_folder), {"heldout": corpus_of([8, 8, 8], 1)}, PARAMS)
    assert [path.suffix for path in store.rglob("*") if path.is_file()] == [".lock"]


def test_lengths_that_differ_and_nan_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "x", 10**6)
    with pytest.raises(RedraftError, match="differ in length"):
        writer.add("s", {"input_ids": torch.ones(9), "aux": torch.ones(8, 2)})
    with pytest.raises(RedraftError, match="not finite"):
        writer.add("s", {"input_ids": torch.ones(1), "aux": torch.full((1, 2), float("nan"))})


def test_shards_are_bounded_by_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "x", 1000)
    for number in range(50):
        writer.add(f"s{number}", {"input_ids": torch.ones(10, dtype=torch.int32), "aux": torch.ones(10, 4)})
    writer.flush()
    assert len(writer.shards) == 10  # five documents of 200 bytes each
    assert all(shard["bytes"] < 1000 + 600 for shard in writer.shards)


@given(st.lists(st.integers(1, 50)), st.integers(50, 80))
def test_packing_keeps_every_document_whole(lengths: list[int], size: int) -> None:
    rows = pack(lengths, size)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= size for row in rows)


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(RedraftError, match="row_tokens"):
        pack([5, 51], 50)


def test_a_packed_row_holds_its_documents(target: Target, llama_folder: Path, store: Path) -> None:
    corpus = corpus_of(LENGTHS, 1)
    manifest = extract(target, target_hash(llama_folder), {"heldout": corpus}, PARAMS)
    states = HiddenStates(manifest, "heldout")
    rows = PackedRows(states, 32)
    for number, members in enumerate(rows.rows):
        row = rows[number]
        assert row.aux.shape == (1, 32, 3 * HIDDEN)
        for place, (member, sample) in enumerate(zip(members, rows.samples(number), strict=True), 1):
            own = row.documents == place
            assert row.input_ids[own].tolist() == corpus.document(corpus.samples.index(sample))[0].tolist()
            for name, tensor in states.read(member).items():
                assert torch.equal(getattr(row, name)[own], tensor)
            assert row.positions[own].tolist() == list(range(states.length(member)))
        assert not row.loss_mask[row.documents == 0].any()


def test_a_corpus_is_read_as_written_and_knows_what_it_was_made_of(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    source = Path(__file__).parent.parent / "data" / "tiny" / "heldout.jsonl"
    corpus, counts = tokenize_file(source, tokenizer, CorpusParams(max_length=128, max_dropped=0.2))
    write_corpus(tmp_path / "c.safetensors", corpus)
    again = read_corpus(tmp_path / "c.safetensors")
    assert again.identity == corpus.identity
    assert again.sources == corpus.sources == ["tools"] * 8
    assert again.by_source() == {"tools": list(range(8))}
    assert again.identity.keys() == {"files", "tokenizer", "template", "max_length", "max_samples", "cut", "content"}
    told = {"tokens": len(again.input_ids), "supervised": int(again.loss_mask.sum()), "dropped": 0}
    assert {name: counts[name] for name in told} == told
    assert counts["samples"] == counts["chats"] == 8
    assert tokenizer.decode(again.prompt(0)).endswith("<|start|>assistant\n")
    part = again.part(range(2, 4))
    assert part.samples == again.samples[2:4]
    assert torch.equal(part.document(1)[0], again.document(3)[0])


def test_a_share_of_the_samples_is_spread_over_the_file(tiny_folder: Path) -> None:
    source, tokenizer = Path(__file__).parent.parent / "data" / "tiny" / "train.jsonl", load_tokenizer(tiny_folder)
    whole, _ = tokenize_file(source, tokenizer, CorpusParams(max_length=128, max_dropped=0.2))
    part, counts = tokenize_file(source, tokenizer, CorpusParams(max_length=128, max_dropped=0.2, max_samples=7))
    assert counts["samples"] == len(part) == 7
    places = [whole.samples.index(sample) for sample in part.samples]
    assert places == sorted(places)
    assert max(b - a for a, b in itertools.pairwise(places)) <= len(whole) // 7 + 1
