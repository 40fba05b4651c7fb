"""A split of the corpus from its files, and the stage: what is told, refused and gone on with (cases C05, C56, C60)."""

import gzip
import json
import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import answer, fast, user
from conftest import ROOT
from safetensors.torch import save_file

from redraft.corpus import build
from redraft.corpus.build import build_split, tokenize_file
from redraft.corpus.chat import chat_template, template_hash
from redraft.corpus.corpus import read_corpus, write_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.params import load_config
from redraft.frame.profile import CorpusParams, TargetParams, TemplateParams
from redraft.target.sources import make_target
from redraft.target.tiny import TEMPLATE

LENIENT = CorpusParams(max_length=128, max_dropped=0.5)
GOOD = {f"good-{number}": [user(f"What is {number}?"), answer("It is a number.")] for number in range(3)}


def lines(chats: dict[str, Any]) -> bytes:
    return b"".join(json.dumps({"id": name, "messages": each}).encode() + b"\n" for name, each in chats.items())


def write(path: Path, chats: dict[str, Any]) -> Path:
    path.write_bytes(lines(chats))
    return path


def numbered(count: int, word: str) -> dict[str, Any]:
    return {f"{word}-{number}": [user(f"{word} {number}?"), answer("It is.")] for number in range(count)}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of profile `tiny`, hardly fitted: nothing is asked of it here."""
    folder = tmp_path_factory.mktemp("hardly") / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.target.tiny.STEPS", 2)
        make_target(TargetParams(source="fit:tiny"), folder)
    return folder


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(target_folder, tmp_path / "target")


def templates(folder: Path, given: object) -> Path:
    """The target in `folder` with another chat template."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": given}))
    return folder


# what is dropped (C56)


def test_what_is_dropped_is_counted_and_told_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {
        **{f"none-{number}": [user("a")] for number in range(5)},
        "blank": [user("a"), answer(" ")],
        "first": [answer("Hello."), user("a"), answer("b")],
    }
    path = write(tmp_path / "x.jsonl", {**GOOD, **odd})
    path.write_bytes(path.read_bytes() + b"oops\n")
    corpus, counts = tokenize_file(path, fast("plain"), CorpusParams(max_length=128, max_dropped=0.9))
    assert corpus.samples == list(GOOD)
    dropped = {"no_answer": 5, "empty_answer": 1, "template": 1, "unreadable": 1}
    assert {name: count for name, count in counts.items() if "dropped" in name} == {
        "dropped": 8,
        **{f"dropped_{kind}": count for kind, count in dropped.items()},
    }
    out = capsys.readouterr().out
    assert "x.jsonl: 8 of 11 chats are left out: none-0 (no answer), none-1 (no answer), none-2 (no answer), " in out
    for told in ("blank (empty answer)", "first (template: the chat begins with", "x-11 (unreadable: no JSON"):
        assert told in out
    with pytest.raises(RedraftError, match=r"8 of 11.*none-0") as refused:
        tokenize_file(path, fast("plain"), LENIENT)
    told = str(refused.value)
    assert "at most 50% dropped (corpus.max_dropped in the profile)" in told
    assert "cause: `no answer`: prompts without an answer: run `redraft regenerate` on them; " in told


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "no chats(?s:.*)no rows"),
        (b"\n \n", "no chats(?s:.*)no rows"),
        (b'{"prompt": "a"}\n', r"1 of 1.*x-1 \(unreadable: no messages; keys: prompt"),
        (lines({"a": [user("b" * 200), answer("c")]}), "truncated.*max_length cuts the answer off"),
        (
            lines({"a": [user("b"), answer("c", "thought")]}),
            r"rewritten.*out the reasoning.*target\.template",
        ),
    ],
)
def test_nothing_that_is_left_is_refused_with_the_cause(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(RedraftError, match=f"(?s){named}"):
        tokenize_file(tmp_path / "x.jsonl", fast("plain"), CorpusParams(max_length=128, max_dropped=1))


def test_what_nobody_would_look_for_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": "a", "messages": [user("x"), answer("y")], "tools": [{"type": "function"}], "lang": "en"},
        {"id": "a", "messages": [user("x"), answer("y", weight=0)], "lang": "en"},
        {"id": "b", "messages": [user("x"), answer("y", "z"), user("x"), answer("y")]},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus, counts = tokenize_file(tmp_path / "x.jsonl", fast("plain"), LENIENT)
    out = capsys.readouterr().out
    for told in (
        "keys that nothing reads, and how many rows have them: lang (2), messages.weight (1)",
        "1 ids stand there more than once",
        "1 chats have tools, and the chat template has no place for them",
        "1 answers of other chats are not trained on: b (rewritten: the template changes or leaves out the reasoning",
    ):
        assert told in out
    assert corpus.samples == ["a", "a~2", "b"]
    assert (counts["turns"], counts["left_out"], counts["dropped"]) == (3, 1, 0)


def test_ids_are_made_distinct_whatever_they_are(tmp_path: Path) -> None:
    names = ["a", "a", "a~2", "a", "a~2", "a~2~2", "b"]
    rows = [json.dumps({"id": name, "messages": GOOD["good-0"]}) for name in names]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    corpus, _ = tokenize_file(tmp_path / "x.jsonl", fast("plain"), LENIENT)
    assert len(set(corpus.samples)) == len(names)
    assert [name.split("~")[0] for name in corpus.samples] == [name.split("~")[0] for name in names]
    assert {"a", "a~2", "b"} <= set(corpus.samples)


def test_counts_are_those_of_the_corpus(tmp_path: Path) -> None:
    made = {"prompt_ids": [1, 2], "generated_ids": [3, 4, 5]}
    chats = {
        "one": [user("x"), answer("y")],
        "two": [user("x"), answer("y"), user("z"), answer("w", finish="length")],
        "ids": [user("x"), answer("y", **made, finish="length"), user("z"), answer("w", **made)],
    }
    corpus, counts = tokenize_file(write(tmp_path / "x.jsonl", chats), fast("plain"), LENIENT)
    assert corpus.samples == ["one", "two", "ids#1", "ids"]
    assert counts == {
        "chats": 3, "samples": 4, "turns": 5, "tokens": len(corpus.input_ids), "supervised": 2 + 2 + 1 + 3 + 3,
        "generated": 1, "cut": 2, "left_out": 0, "dropped": 0,
    }  # fmt: skip
    assert int(corpus.loss_mask.sum()) == counts["supervised"]


# how it is built


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    chats = numbered(40, "four")
    chats["four-7"], chats["four-20"] = [user("a")], [user("five"), answer("six", "no")]
    names = list(chats)
    (tmp_path / "data").mkdir()
    parts = [{name: chats[name] for name in names[start : start + 25]} for start in (0, 25)]
    return [write(tmp_path / f"data/train-{number}.jsonl", part) for number, part in enumerate(parts)]


def test_a_build_that_was_broken_off_goes_on(many: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, scratch = fast("plain"), tmp_path / "scratch"
    whole = build_split(many, tmp_path / "whole.safetensors", tokenizer, LENIENT)
    monkeypatch.setattr(build, "CHUNK_ROWS", 4)
    done: list[Path] = []
    own = build.work

    def stopping(rows: Any, path: Path) -> Path:
        if len(done) == 3:
            path.with_suffix(".partial").write_bytes(b"half")
            raise KeyboardInterrupt
        done.append(own(rows, path))
        return path

    monkeypatch.setattr(build, "work", stopping)
    again = partial(build_split, many, tmp_path / "again.safetensors", tokenizer, LENIENT, scratch=scratch)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert not (tmp_path / "again.safetensors").exists()
    times = {path: path.stat().st_mtime_ns for path in done}
    assert len(times) == 3

    def counting(rows: Any, path: Path) -> Path:
        assert {each: each.stat().st_mtime_ns for each in times} == times  # what was done is not done again
        done.append(own(rows, path))
        return path

    monkeypatch.setattr(build, "work", counting)
    split = again()
    assert len(done) == len(set(done)) == 10
    assert split.counts == whole.counts
    assert split.prompts.names == whole.prompts.names
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert list(scratch.iterdir()) == []
    # other limits, another template: nothing is taken from before
    monkeypatch.setattr(build, "work", stopping)
    done.clear()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            again()
    other = partial(build_split, many, tmp_path / "other.safetensors", tokenizer, scratch=scratch)
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        other(LENIENT.model_copy(update={"max_length": 5}))
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        other(LENIENT, how=TemplateParams(arguments={"message": 1}))


def test_several_processes_make_the_same_bytes(
    many: list[Path], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = partial(load_tokenizer, target_folder)
    tokenizer = load()
    one = build_split(many, tmp_path / "one.safetensors", tokenizer, LENIENT, target="t", rows=640)
    monkeypatch.setattr(build, "POOL_BYTES", 0)
    monkeypatch.setattr(build, "CHUNK_ROWS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pooled = build_split(many, tmp_path / "pooled.safetensors", tokenizer, LENIENT, load=load, target="t", rows=640)
    assert pooled.counts == one.counts
    assert pooled.prompts.keys.tolist() == one.prompts.keys.tolist()
    assert (tmp_path / "pooled.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    with pytest.raises(RedraftError, match="ended from outside"):
        build_split(many, tmp_path / "gone.safetensors", tokenizer, LENIENT, load=partial(os._exit, 9))


@pytest.mark.parametrize(("most", "expected"), [(1, ["0"]), (4, ["0", "10", "20", "30"]), (40, None), (None, None)])
def test_max_samples_are_evenly_spread(most: int | None, expected: Any, tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"x-{part}.jsonl", {str(number): GOOD["good-0"] for number in range(part, part + 20)})
        for part in (0, 20)
    ]
    params = CorpusParams(max_length=99, max_dropped=0, max_samples=most)
    build_split(paths, tmp_path / "x.safetensors", fast("plain"), params)
    assert read_corpus(tmp_path / "x.safetensors").samples == (expected or [str(number) for number in range(40)])


def test_a_corpus_is_read_as_it_was_written_and_knows_what_made_it(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", GOOD)
    how = TemplateParams(arguments={"thinking": False}, date="2026-01-01")
    tokenizer = fast.__wrapped__("plain")
    tokenizer.chat_template += "{# thinking #}"
    corpora = [tokenize_file(path, tokenizer, LENIENT, how=each)[0] for each in (how, TemplateParams())]
    one, two = (corpus.identity for corpus in corpora)
    assert one["content"] == two["content"]
    assert one["template"] != two["template"]
    assert (one["template_arguments"], one["template_date"]) == ({"thinking": False}, "2026-01-01")
    assert list(one["files"]) == ["x.jsonl"]
    write_corpus(tmp_path / "y.safetensors", corpora[0])
    again = read_corpus(tmp_path / "y.safetensors")
    assert again.identity == one
    for index in range(3):
        for a, b in zip(again.document(index), corpora[0].document(index), strict=True):
            assert torch.equal(a, b)
    part = again.part(range(1, 3))
    assert part.samples == ["good-1", "good-2"]
    assert torch.equal(part.document(1)[0], again.document(2)[0])


def test_a_file_that_is_no_corpus_is_told(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(RedraftError, match="no tokenised corpus"):
        read_corpus(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"")
    with pytest.raises(RedraftError, match=r"y\.safetensors"):
        read_corpus(tmp_path / "y.safetensors")


# folders of tokenizers of another kind (C60)


@pytest.mark.parametrize("as_list", [True, False])
def test_of_several_templates_the_default_is_used_and_recorded(as_list: bool, folder: Path, tmp_path: Path) -> None:
    plain = template_hash(load_tokenizer(folder))
    several = {"default": TEMPLATE, "rag": "nothing"}
    if as_list:
        templates(folder, [{"name": name, "template": text} for name, text in several.items()])
    else:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = several
        tokenizer.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert chat_template(tokenizer)[0] == "default"
    assert template_hash(tokenizer) == plain
    corpus, _ = tokenize_file(write(tmp_path / "x.jsonl", GOOD), tokenizer, LENIENT)
    assert corpus.identity["template_name"] == "default"
    assert sum(corpus.loss_mask) > 0


def test_several_templates_without_a_default_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        templates(folder, [{"name": name, "template": TEMPLATE} for name in ("tool_use", "rag")])
    )
    path = write(tmp_path / "x.jsonl", GOOD)
    with pytest.raises(RedraftError, match=r"rag, tool_use(?s:.*)target\.template\.name"):
        tokenize_file(path, tokenizer, LENIENT)
    corpus, _ = tokenize_file(path, tokenizer, LENIENT, how=TemplateParams(name="rag"))
    assert corpus.identity["template_name"] == "rag"


@pytest.mark.parametrize(
    ("code", "trust", "named"),
    [
        ("from transformers.models.gpt2.tokenization_gpt2 import no_such_name", True, "no_such_name"),
        ("import no_such_package", True, "(?s)no_such_package.*install"),
        ("raise RuntimeError('broken here')", True, "broken here"),
        ("", False, r"target\.trust_remote_code"),
    ],
)
def test_code_of_a_tokenizer_that_does_not_run_is_one_error(code: str, trust: bool, named: str, folder: Path) -> None:
    (folder / "tokenization_own.py").write_text(code + "\nclass OwnTokenizer:\n    pass\n")
    path = folder / "tokenizer_config.json"
    fields = {**json.loads(path.read_text()), "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps({**fields, "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}))
    with pytest.raises(RedraftError, match=named) as refused:
        load_tokenizer(folder, trust)
    assert "tokenization_own.py" in str(refused.value)


def test_a_folder_without_a_tokenizer_is_told_as_that(llama_folder: Path) -> None:
    with pytest.raises(RedraftError, match="has no tokenizer"):
        load_tokenizer(llama_folder)


# the stage


def project(folder: Path, target: Path, **files: dict[str, Any] | bytes) -> Path:
    """A project of profile `tiny` with a target and files of chats, by split or by name."""
    (folder / "artifacts").mkdir(parents=True)
    (folder / "artifacts/target").symlink_to(target)
    (folder / "data/tiny").mkdir(parents=True)
    (folder / "profiles").mkdir()
    shutil.copy(ROOT / "profiles/tiny.yaml", folder / "profiles")
    knobs = (ROOT / "params.yaml").read_text()
    (folder / "params.yaml").write_text(knobs.replace("profile: smollm ", "profile: tiny "))
    for name, chats in files.items():
        content = chats if isinstance(chats, bytes) else lines(chats)
        (folder / "data/tiny" / (name if "." in name else f"{name}.jsonl")).write_bytes(content)
    return folder


def stage(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A stage as DVC runs it."""
    command = [sys.executable, str(ROOT / f"stages/{name}.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_stage_tells_what_is_in_and_warns_of_few_held_out_chats(folder: Path, tmp_path: Path) -> None:
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{# thinking #}")
    train = numbered(20, "train")
    again = {
        "again": [user("TRAIN 0"), answer("It is.", finish="length")],
        "odd": [user("x"), {"role": "usr", "content": "y"}],
    }
    files = {
        "train-00.jsonl.gz": gzip.compress(lines(train)),
        "train-01.jsonl.gz": gzip.compress(lines(again)),
        "heldout": numbered(7, "heldout"),
        "donor": numbered(3, "train"),
    }
    where = project(tmp_path, folder, **files)
    profile = where / "profiles/tiny.yaml"
    template = "source: fit:tiny\n  template: {arguments: {thinking: false}, date: 2026-01-01}"
    profile.write_text(profile.read_text().replace("source: fit:tiny", template))
    done = stage("corpus", where)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics/corpus.json").read_text())
    assert metrics["leaks"] == {
        "repeated": {"donor": 0, "train": 1, "heldout": 0}, "heldout_donor": 0, "heldout_train": 0, "train_donor": 4,
    }  # fmt: skip
    counts = metrics["train"]
    assert counts == {
        "chats": 21, "samples": 21, "turns": 21, "tokens": counts["tokens"], "supervised": counts["supervised"],
        "generated": 0, "cut": 1, "left_out": 0, "dropped": 1, "dropped_unknown_role": 1,
    }  # fmt: skip
    corpus = read_corpus(tmp_path / "artifacts/corpus/train.safetensors")
    assert (len(corpus.input_ids), int(corpus.loss_mask.sum())) == (counts["tokens"], counts["supervised"])
    assert corpus.identity["template_arguments"] == {"thinking": False}
    assert corpus.identity["template_date"] == "2026-01-01"
    assert "heldout gives 7 samples" in done.stdout
    assert "odd (unknown role: usr)" in done.stdout
    assert "1 prompts stand twice in train: again is train-0" in done.stdout
    assert "+" in (tmp_path / "artifacts/corpus/sample.txt").read_text()
    assert "Traceback" not in done.stderr
    # the end marker of the answer that was cut is not trained on
    _, mask = corpus.document(20)
    assert int(mask.sum()) == int(corpus.document(0)[1].sum()) - 1


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"train": {**numbered(9, "train"), "x": [user("HELDOUT 4"), answer("y")]}}, "heldout-4 is x"),
        ({"donor": {**numbered(9, "donor"), "x": [user("heldout 4."), answer("y")]}}, "heldout-4 is x"),
        ({"train": {**numbered(4, "train"), "x": numbered(1, "train")["train-0"]}}, "x is train-0"),
        ({"train": {name: each[:1] for name, each in numbered(9, "train").items()}}, "run `redraft regenerate`"),
        ({"train": b"\xff\xfe{}"}, "UTF-16"),
        ({"train.parquet": b"PAR1", "train": b""}, "several kinds"),
        ({"train.jsonl.gz": b"x"}, "several kinds"),
    ],
)
def test_the_stage_refuses(
    files: dict[str, Any], told: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"train": numbered(9, "train"), "heldout": numbered(9, "heldout"), "donor": numbered(9, "donor")}
    monkeypatch.chdir(project(tmp_path, target_folder, **{**usual, **files}))
    with pytest.raises(RedraftError, match=told):
        runpy.run_path(str(ROOT / "stages/corpus.py"))["main"](load_config())
    assert [path.name for path in Path("artifacts").iterdir()] == ["target"]


def test_what_the_stage_refuses_is_one_message(target_folder: Path, tmp_path: Path) -> None:
    files = {"train": b"oops\n" * 9, "heldout": numbered(9, "heldout"), "donor": numbered(9, "donor")}
    done = stage("corpus", project(tmp_path, target_folder, **files))
    assert done.returncode == 1
    assert "train-1 (unreadable: no JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "metrics/corpus.json").exists()
    assert not (tmp_path / "artifacts/corpus").exists()


def test_a_token_that_the_target_has_no_row_for_is_left_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<think>"], special_tokens=True)  # id 640 of 640 rows
    tokenizer.save_pretrained(folder)
    files = {"train": numbered(9, "train"), "heldout": numbered(9, "heldout"), "donor": numbered(9, "donor")}
    files["train"]["beyond"] = [user("<think>"), answer("It is.")]
    where = project(tmp_path / "project", folder, **files)
    for name in ("corpus", "vocab"):
        done = stage(name, where)
        assert done.returncode == 0, done.stderr
        if name == "corpus":
            assert "beyond (ids: id 640, and the target has 640, from 0)" in done.stdout
    assert "left out of the vocabulary: 640 (<think>)" in done.stdout
    metrics = json.loads((where / "metrics/vocab.json").read_text())
    assert metrics["outside"] == 1
    assert f"lower vocab.slots in the profile to {400 - metrics['padded']}" in done.stdout
