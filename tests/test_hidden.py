"""Extraction and the shard store (cases C03, C11, C13, C15, C17, C28)."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HIDDEN, VOCAB, extracted, source_of
from hypothesis import given
from hypothesis import strategies as st

from redraft.corpus.build import tokenize_file
from redraft.corpus.corpus import Corpus, read_corpus, write_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams, ExtractParams
from redraft.hidden.alike import apart
from redraft.hidden.diagnostic import chosen_documents, measurable, read_diagnostic
from redraft.hidden.extract import extract, summary
from redraft.hidden.in_process import InProcess, forward
from redraft.hidden.rows import HiddenStates, PackedRows, pack
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


PARAMS = ExtractParams(
    engine="transformers", format="bf16", law="states", batch_tokens=40, shard_mib=1, diagnostic_positions=20,
    recheck=4, tolerance=0.05,
)  # fmt: skip


def test_every_document_reads_back_as_extracted_alone(target: Target, store: Path) -> None:
    corpora = {"train": corpus_of(LENGTHS), "heldout": corpus_of([20, 11], seed=1)}
    manifest = extracted(target, corpora, PARAMS)
    for split, corpus in corpora.items():
        states = HiddenStates(manifest, split, corpus)
        assert len(states) == len(corpus)
        for place in range(len(corpus)):
            ids, mask = corpus.document(place)
            alone, read = forward(target, [ids], target.aux_layers)[0], states.read(place)
            aux = torch.cat([alone[f"layer_{layer}"] for layer in target.aux_layers], -1)
            assert torch.equal(read["input_ids"], ids)
            assert torch.equal(read["loss_mask"], mask)
            for kind, own in (("aux", aux), ("final", alone["final"])):
                assert torch.allclose(read[kind].float(), own.float(), rtol=2e-2, atol=2e-2), (place, kind)
            assert torch.equal(read["greedy"], alone["greedy"])
    assert summary(manifest)["recheck_difference"] < 0.01
    assert summary(manifest)["train"]["tokens"] == sum(LENGTHS)


def test_the_diagnostic_shard_has_the_layers_around(target: Target, store: Path) -> None:
    corpora = {"train": corpus_of([5]), "heldout": corpus_of([9, 8, 7, 12, 6, 30, 16], seed=1)}
    manifest = extracted(target, corpora, PARAMS)
    shard = read_diagnostic(manifest, corpora["heldout"])
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
    chosen = chosen_documents(corpus, positions)
    assert chosen == chosen_documents(corpus, positions) == sorted(set(chosen))
    counts = [int(counted_positions(mask[None], torch.ones(1, len(mask)), 1).sum()) for mask in masks]
    assert [measurable(mask) for mask in masks] == counts
    assert sum(counts[index] for index in chosen) >= positions or len(chosen) == len(masks)
    assert sum(sorted(counts[index] for index in chosen)[:-1]) < positions  # one that is needed came last
    taken = {source: sum(sources[index] == source for index in chosen) for source in set(sources)}
    for source, count in taken.items():  # a source has fewer only where it has no more
        assert count >= max(taken.values()) - 1 or count == sources.count(source)


def test_the_diagnostic_shard_is_not_the_first_documents() -> None:
    corpus = corpus_of([10] * 50)
    chosen = chosen_documents(corpus, 60)
    assert len(chosen) == 10  # six measurable positions each
    assert max(chosen) > 30


def test_a_split_is_known_by_its_documents_and_its_target(target: Target, store: Path) -> None:
    one, two = (corpus_of([9], seed) for seed in (1, 2))
    made = extracted(target, {"heldout": one}, PARAMS)
    with pytest.raises(RedraftError, match=r"something else(.|\n)*splits.heldout.fingerprint"):
        HiddenStates(made, "heldout", two)
    with pytest.raises(RedraftError, match=r"something else(.|\n)*target"):
        HiddenStates(made, "heldout", one, target="another")


class Swapping(InProcess):
    """Gives the states of one document for another, where it has several."""

    def states(self, groups: Any, layers: Any, *, around: bool = False) -> Any:
        last = None
        for group, place, each in super().states(groups, layers, around=around):
            states = last if last is not None and len(last["greedy"]) == len(each["greedy"]) else each
            last = each if len(groups[group]) > 1 else None
            yield group, place, states


def test_states_of_another_sample_are_caught_and_not_kept(target: Target, store: Path) -> None:
    source = source_of(target)
    opening = replace(source.opening, open=lambda layers: nullcontext(Swapping(target, 40)))
    with pytest.raises(RedraftError, match="differs from the same sample in a batch"):
        extract(replace(source, opening=opening, checker=opening), {"heldout": corpus_of([8, 8, 8], 1)}, PARAMS)
    assert not list(store.rglob("*.safetensors"))


@pytest.mark.parametrize("fault", ["short", "nan", "lost"])
def test_an_engine_that_fails_in_silence_is_caught(target: Target, store: Path, fault: str) -> None:
    class Failing(InProcess):
        def states(self, groups: Any, layers: Any, *, around: bool = False) -> Any:
            for number, (group, place, each) in enumerate(super().states(groups, layers, around=around)):
                states = dict(each)
                if number == 1 and fault == "short":
                    states["final"] = states["final"][:-1]
                if number == 1 and fault == "nan":
                    states["layer_2"] = torch.full_like(states["layer_2"], torch.nan)
                if not (number == 1 and fault == "lost"):
                    yield group, place, states

    source = source_of(target)
    opening = replace(source.opening, open=lambda layers: nullcontext(Failing(target, 40)))
    told = {"short": "differ from it in length", "nan": "not finite", "lost": "states of every document"}[fault]
    with pytest.raises(RedraftError, match=told):
        extract(replace(source, opening=opening, checker=opening), {"heldout": corpus_of([8, 8, 8], 1)}, PARAMS)


@given(st.lists(st.integers(1, 50)), st.integers(50, 80))
def test_packing_keeps_every_document_whole(lengths: list[int], size: int) -> None:
    rows = pack(lengths, size)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= size for row in rows)


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(RedraftError, match="row_tokens"):
        pack([5, 51], 50)


def test_a_packed_row_holds_its_documents(target: Target, store: Path) -> None:
    corpus = corpus_of(LENGTHS, 1)
    manifest = extracted(target, {"heldout": corpus}, PARAMS)
    states = HiddenStates(manifest, "heldout", corpus)
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


def test_another_layer_is_apart_although_the_first_token_is_a_hundred_times_as_loud() -> None:
    """By the norm of all tokens a neighbour of the right layer differs by a hundredth where attention has a sink."""
    torch.manual_seed(0)
    states, noise = torch.randn(60, 3, HIDDEN), 0.02 * torch.randn(60, 3, HIDDEN)
    states[0] *= 200
    wrong = states.clone()
    wrong[1:, 1] += 0.3 * torch.randn(59, HIDDEN)
    assert float((wrong - states).norm() / states.norm()) < 0.05
    assert apart(states, wrong) > 0.2
    assert apart(states, states + noise) < 0.05
    assert apart(states, states) == 0
    assert not apart(states, states * torch.nan) <= 9
