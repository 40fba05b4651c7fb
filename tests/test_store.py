"""The store of hidden states: killed, damaged, full, another target (B2, B3, A3 and C43)."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, extracted, llama, save_target, source_of
from test_hidden import LENGTHS, PARAMS, corpus_from, corpus_of

from redraft.corpus.corpus import Corpus
from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams
from redraft.hidden import pool, shards
from redraft.hidden.extract import extract, summary
from redraft.hidden.in_process import InProcess
from redraft.hidden.pool import FORMAT, groups
from redraft.hidden.rows import HiddenStates, read_manifest
from redraft.hidden.run import Manifest, Run
from redraft.hidden.shards import read_entry
from redraft.target.ends import target_hash
from redraft.target.model import Target, load_target
from redraft.target.sources import make_target

MANY = [random.Random(3).randint(20, 200) for _ in range(450)]
"""Tokens of documents that fill about ten shards of 1 MiB."""
BATCH = PARAMS.model_copy(update={"batch_tokens": 1000, "diagnostic_positions": 300})


def store_files(store: Path) -> dict[str, bytes]:
    """Of a store, what is in it but locks, marks and what a process that was killed left half-written."""
    kept = (path for path in store.rglob("*") if path.suffix in (".safetensors", ".json"))
    return {str(path.relative_to(store)): path.read_bytes() for path in kept if path.is_file()}


def run_extract(store: str, folder: str, begun: Any, limit: int | None = None) -> None:
    """In a process of its own: extract, with files of at most `limit` bytes."""
    os.environ["REDRAFT_STORE"] = store
    torch.set_num_threads(1)
    target = load_target(Path(folder), dtype="fp32", device="cpu")
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    begun.send(0)
    try:
        extract(source_of(target, "x", 1000), {"train": corpus_of(MANY), "heldout": corpus_of([90, 80], 1)}, BATCH)
    except RedraftError as error:
        begun.send(str(error))
        os._exit(3)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_leaves_what_the_next_one_goes_on_from(
    llama_folder: Path, tmp_path: Path
) -> None:
    """Twenty times with SIGKILL; in the end the states are bit for bit those of an undisturbed run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "redraft.hidden.extract", "test_store"])

    def begin(store: Path, limit: int | None = None) -> tuple[Any, Any]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=run_extract, args=(str(store), str(llama_folder), there, limit))
        process.start()
        assert here.poll(120)
        here.recv()
        return process, here

    start = time.monotonic()
    undisturbed, _ = begin(tmp_path / "whole")
    started = time.monotonic()
    undisturbed.join(120)
    whole = time.monotonic() - started
    assert undisturbed.exitcode == 0, start
    expected = store_files(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".safetensors")]) >= 10

    draw, killed = random.Random(1), 0
    for round_ in range(20):
        store = tmp_path / f"store-{round_ % 4}"  # each is killed five times on its way
        process, _ = begin(store)
        process.join(draw.uniform(0, whole / 2))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join(60)
        for entry in store.rglob("*.json"):  # what is there is whole
            if shard := read_entry(entry):
                shards.require_whole(entry.parent, shard)
    assert killed >= 10
    for store in sorted(tmp_path.glob("store-*")):
        process, _ = begin(store)
        process.join(120)
        assert process.exitcode == 0
        assert store_files(store) == expected, store
        assert not list(store.rglob("*.partial"))

    full, told = begin(tmp_path / "full", limit=300_000)  # as a full disk: the write fails in the middle
    full.join(120)
    said = told.recv()
    assert full.exitcode == 3
    assert "The hidden states cannot be written." in said
    assert "make room" in said
    assert not list((tmp_path / "full").rglob("*.partial"))
    again, _ = begin(tmp_path / "full")
    again.join(120)
    assert store_files(tmp_path / "full") == expected


def two(train: list[int] = MANY) -> dict[str, Corpus]:
    return {"train": corpus_of(train), "heldout": corpus_of([20, 11], seed=1)}


def files(manifest: Manifest, store: Path) -> list[Path]:
    return [store / "hidden" / manifest["states"] / f"{shard['name']}.safetensors" for shard in manifest["shards"]]


def test_whole_shards_are_reused_and_damaged_ones_redone(
    target: Target, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C43: one cut, one flipped, one missing of ten; the others are not touched, and the bits are the same."""
    manifest = extracted(target, two(), BATCH)
    paths, before = files(manifest, store), store_files(store)
    train = [path for path in paths if path.stat().st_size > 2**19]
    cut, flipped, gone = train[1], train[3], train[5]
    cut.write_bytes(cut.read_bytes()[:-100])
    flip(flipped)
    gone.unlink()
    stamps = {path: path.stat().st_mtime_ns for path in paths if path not in (cut, flipped, gone)}
    capsys.readouterr()
    assert extracted(target, two(), BATCH) == manifest
    said = capsys.readouterr().err
    assert f"reused {len(paths) - 3}, redone 3" in said
    assert all(path.name.removesuffix(".safetensors") in said for path in (cut, flipped, gone))
    assert store_files(store) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    capsys.readouterr()
    extracted(target, two(), BATCH)
    assert not capsys.readouterr().err


def flip(path: Path, times: tuple[int, int] | None = None) -> None:
    """Other bytes of the same size; the times of the file are put back."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    for place in range(len(data) - 4000, len(data)):
        data[place] ^= 0x55
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_flipped_bytes_are_found_on_first_use_and_after_a_use(target: Target, store: Path) -> None:
    corpora = two(LENGTHS)
    manifest = extracted(target, corpora, PARAMS)
    path = files(manifest, store)[0]
    flip(path)
    with pytest.raises(RedraftError, match="other bytes than were written") as told:
        HiddenStates(manifest, "train", corpora["train"])
    assert path.name in str(told.value)
    extracted(target, corpora, PARAMS)
    HiddenStates(manifest, "train", corpora["train"])
    flip(path)
    with pytest.raises(RedraftError, match="other bytes than were written"):
        HiddenStates(manifest, "train", corpora["train"])
    path.unlink()
    with pytest.raises(RedraftError, match="not in the store"):
        HiddenStates(manifest, "train", corpora["train"])


def test_checksums_are_compared_once(target: Target, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = two(LENGTHS)
    manifest = extracted(target, corpora, PARAMS)
    compared: list[Path] = []
    own = shards._sha256
    monkeypatch.setattr(shards, "_sha256", lambda path: compared.append(path) or own(path))
    for _ in range(3):
        HiddenStates(manifest, "train", corpora["train"])
        extracted(target, corpora, PARAMS)
    assert len(compared) == len(set(compared)) >= 1


def test_what_was_made_and_never_checked_is_checked_by_the_next_run(target: Target, store: Path) -> None:
    """Killed between the writing of a shard that was lost and its check: the old record counts no more."""

    class Wrong(InProcess):
        def states(self, groups: Any, layers: Any, *, around: bool = False) -> Any:
            for group, place, each in super().states(groups, layers, around=around):
                yield (
                    group,
                    place,
                    {name: 3 * state for name, state in each.items() if name != "greedy"} | {"greedy": each["greedy"]},
                )

    corpora = {"train": corpus_of(LENGTHS)}
    source = source_of(target)
    manifest = extract(source, corpora, PARAMS).manifest
    files(manifest, store)[0].unlink()
    wrong = replace(source.opening, open=lambda layers: nullcontext(Wrong(target, 40)))
    run = Run(replace(source, opening=wrong, checker=wrong), PARAMS)
    with run.pool.held():
        run.take(corpora)
        with wrong.open(()) as engine:
            run.make(engine)  # and dies here
    more = {"train": corpus_of([*LENGTHS, 9])}  # and one document is new: what is checked is not that one alone
    with pytest.raises(RedraftError, match="differs from the same sample"):
        extract(source, more, PARAMS)
    assert extract(source, corpora, PARAMS).manifest == manifest
    extract(source, more, PARAMS)


def test_no_check_is_no_difference_of_zero(target: Target, store: Path) -> None:
    corpora = {"train": corpus_of(LENGTHS)}
    unchecked = extracted(target, corpora, PARAMS.model_copy(update={"recheck": 0}))
    assert summary(unchecked)["recheck_difference"] is None
    assert summary(extracted(target, corpora, PARAMS))["recheck_difference"] is not None


def test_a_store_that_may_only_be_read_can_be_used(
    target: Target, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora = {"train": corpus_of(LENGTHS)}
    manifest = extracted(target, corpora, PARAMS)
    HiddenStates(manifest, "train", corpora["train"])
    before = store_files(store)
    monkeypatch.setattr(pool.os, "access", lambda path, mode: False)
    monkeypatch.setattr(pool, "FileLock", lambda path: pytest.fail("locked"))
    assert extracted(target, corpora, PARAMS) == manifest
    assert store_files(store) == before


def test_one_more_line_is_one_document_to_make(target: Target, store: Path) -> None:
    """A shard size, a name, a mask or a batch size decides nothing either."""
    asked: list[int] = []

    def counted(corpora: dict[str, Corpus], params: Any = PARAMS) -> Manifest:
        source = source_of(target)
        engine = source.opening.open(())

        class Counting:
            def states(self, groups: Any, layers: Any, *, around: bool = False) -> Any:
                asked.extend(0 if around else len(ids) for group in groups for ids in group)
                with engine as opened:
                    yield from opened.states(groups, layers, around=around)

        opening = replace(source.opening, open=lambda layers: nullcontext(Counting()))
        return extract(replace(source, opening=opening, checker=opening), corpora, params).manifest

    params = PARAMS.model_copy(update={"recheck": 0})
    ids = {f"s{number}": corpus_of([5 + number]).document(0)[0] for number in range(6)}
    documents = {name: (each, [0, 0]) for name, each in ids.items()}
    first = counted({"heldout": corpus_from(documents)}, params)
    assert sum(asked) == sum(range(5, 11))
    asked.clear()
    more = {**documents, "new": (corpus_of([7], 9).document(0)[0], [0, 0])}
    second = counted({"heldout": corpus_from(more)}, params.model_copy(update={"diagnostic_positions": 1}))
    assert sum(asked) == 7
    assert second["splits"]["heldout"]["fingerprint"] != first["splits"]["heldout"]["fingerprint"]
    asked.clear()
    other = {f"renamed-{name}": (each, [0, 0, 1, 0]) for name, (each, _) in documents.items()}
    sizes = {"shard_mib": 7, "batch_tokens": 11, "diagnostic_positions": 1}
    third = counted({"heldout": corpus_from(other)}, params.model_copy(update=sizes))
    assert not sum(asked)
    assert third["splits"]["heldout"]["fingerprint"] == first["splits"]["heldout"]["fingerprint"]
    states = HiddenStates(third, "heldout", corpus_from(other))
    assert states.read(2)["loss_mask"].tolist()[:4] == [0, 0, 1, 0]


def test_a_fine_tune_of_the_same_sizes_is_another_target(tmp_path: Path, store: Path) -> None:
    """A3, end to end: weights are written over in the same folder; the states are those of the new ones."""
    model = llama()
    weights = save_target(model, tmp_path / "weights")
    found = []
    for _ in range(2):
        make_target(TargetParams(source=str(weights)), tmp_path / "target")
        loaded = load_target(tmp_path / "target", dtype="fp32", device="cpu")
        identity = target_hash(tmp_path / "target")
        corpora = {"heldout": corpus_of([20, 11], seed=1)}
        manifest = extracted(loaded, corpora, PARAMS, identity)
        found.append((identity, HiddenStates(manifest, "heldout", corpora["heldout"], target=identity).read(0)["aux"]))
        sizes = {path.name: path.stat().st_size for path in weights.iterdir()}
        with torch.no_grad():  # what a merge of an adapter changes: projections, never norms
            for name, weight in model.named_parameters():
                if "proj" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
        save_target(model, weights)
        assert {path.name: path.stat().st_size for path in weights.iterdir()} == sizes
        with pytest.raises(RedraftError, match="changed after the target stage"):
            target_hash(tmp_path / "target")
    (one, before), (two, after) = found
    assert one != two
    assert float((before.float() - after.float()).norm() / after.float().norm()) > 0.1


def test_room_is_asked_for_before_the_engine_is_opened(
    target: Target, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(store.parent)
    monkeypatch.setattr(pool.shutil, "disk_usage", lambda folder: free._replace(free=1000))
    source = source_of(target)

    def fail(layers: Any) -> Any:
        pytest.fail("opened")

    shut = replace(source, opening=replace(source.opening, open=fail))
    with pytest.raises(RedraftError, match="no room") as told:
        extract(shut, {"train": corpus_of(LENGTHS)}, PARAMS)
    needed = sum(LENGTHS) * (4 * 32 * 2 + 4)
    assert f"{needed:,} bytes" in str(told.value)
    assert "1,000 bytes free" in str(told.value)


def test_the_longest_documents_come_first_and_shards_are_bounded_by_bytes() -> None:
    lengths = {f"{number:03d}": 10 + number % 7 for number in range(50)}
    found = groups(lengths, token_bytes=20, limit=1000)
    flat = [lengths[key] for group in found for key in group]
    assert flat == sorted(flat, reverse=True)
    assert all(sum(lengths[key] * 20 for key in group) <= 1000 for group in found)
    assert groups({"long": 100}, 20, 1000) == [["long"]]


def test_the_format_is_what_its_number_says(target: Target, store: Path) -> None:
    """What a shard holds of a tiny model: where this differs, raise FORMAT and write the new figures here."""
    corpus = corpus_from({"a": (torch.arange(9) * 7 % VOCAB, [0, 0])})
    states = HiddenStates(extracted(target, {"heldout": corpus}, PARAMS), "heldout", corpus).read(0)
    assert FORMAT == 1
    assert {name: (str(each.dtype), list(each.shape)) for name, each in states.items()} == {
        "input_ids": ("torch.int32", [9]),
        "loss_mask": ("torch.uint8", [9]),
        "aux": ("torch.bfloat16", [9, 96]),
        "final": ("torch.bfloat16", [9, 32]),
        "greedy": ("torch.int32", [9]),
    }
    aux, final = states["aux"].float(), states["final"].float()
    pinned = [aux[0, 0], aux[8, 40], aux[3, 95], final[0, 0], final[8, 31], aux.norm(), final.norm()]
    assert [float(each) for each in pinned] == pytest.approx(
        [0.2451, 10.75, 0.4414, -0.8672, 1.4766, 285.2592, 16.9688], rel=0.02
    )
    assert states["greedy"].tolist() == [60, 80, 7, 7, 33, 52, 55, 49, 53]


def test_a_manifest_of_another_version_says_so(tmp_path: Path) -> None:

    (tmp_path / "manifest.json").write_text(json.dumps({"fingerprint": "x", "splits": {}}))
    with pytest.raises(RedraftError, match="another version of redraft"):
        read_manifest(tmp_path / "manifest.json")
