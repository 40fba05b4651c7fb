"""From chats to ids: what other tools write, templates and tokenizers of other kinds (cases C05, C56, C60)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from redraft.corpus.jsonl import conversations, read_chats, require_apart
from redraft.corpus.regenerate import regenerate
from safetensors.torch import save_file

from redraft.corpus.chat import RenderError, chat_template, prompt_ids, template_hash, tokenize
from redraft.corpus.corpus import read_corpus, tokenize_file
from redraft.corpus.tokenizer import load_tokenizer, stop_ids
from redraft.engines.torch import TorchEngine
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams
from redraft.target.model import load_target
from redraft.target.tiny import TEMPLATE

STRICT = TEMPLATE.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
)
JOINING = TEMPLATE.replace("{{ message['content'] }}<|end|>", "{{ message['content'] + '<|end|>' }}")
LENIENT = CorpusParams(max_length=128, max_dropped=0.5)


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def answer(text: object) -> dict[str, object]:
    return {"role": "assistant", "content": text}


GOOD = {f"good-{number}": [user(f"What is {number}?"), answer("It is a number.")] for number in range(3)}


def write(path: Path, chats: dict[str, Any]) -> Path:
    lines = [json.dumps({"id": name, "messages": messages}) for name, messages in chats.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "target")


def templates(folder: Path, given: object) -> Path:
    """The target in `folder` with another chat template."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": given}))
    return folder


# C56


@pytest.mark.parametrize(
    ("template", "odd", "reason"),
    [
        (STRICT, [answer("Hello."), user("What is 1?"), answer("It is.")], "template: roles must alternate"),
        (TEMPLATE, [answer("Hello."), user("What is 1?"), answer("It is.")], "template: "),
        (JOINING, [user(None), answer("It is.")], "template: "),
        (JOINING, [user([{"type": "text"}]), answer("It is.")], "template: "),
        (TEMPLATE, [], "template: "),
        (TEMPLATE, [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}], "no answer"),
    ],
)
def test_a_chat_that_the_template_refuses_is_left_out_and_told(
    template: str, odd: list[Any], reason: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(templates(folder, template))
    path = write(tmp_path / "x.jsonl", {**GOOD, "odd": odd})
    corpus, counts = tokenize_file(path, tokenizer, LENIENT)
    assert corpus.samples == list(GOOD)
    kind = reason.split(":")[0].replace(" ", "_")
    assert {name: count for name, count in counts.items() if "dropped" in name} == {"dropped": 1, f"dropped_{kind}": 1}
    assert f"1 of 4 chats are left out: odd ({reason}" in capsys.readouterr().out
    with pytest.raises(RedraftError, match=rf"odd \({reason}"):
        tokenize_file(path, tokenizer, CorpusParams(max_length=128, max_dropped=0.1))


def test_a_template_that_is_broken_is_told_and_no_traceback(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(templates(folder, "{% for message in %}"))
    with pytest.raises(RedraftError, match=r"3 of 3.*good-0 \(template"):
        tokenize_file(write(tmp_path / "x.jsonl", GOOD), tokenizer, LENIENT)
    with pytest.raises(RenderError):
        prompt_ids(tokenizer, [user("a")])


def test_regenerate_names_the_prompt_that_the_template_refuses_before_it_generates(folder: Path) -> None:
    target, tokenizer = load_target(folder, dtype="fp32", device="cpu"), load_tokenizer(folder)
    chats = [{"id": "good", "messages": GOOD["good-0"]}, {"id": "odd", "messages": [answer("Hello.")]}]
    with pytest.raises(RedraftError, match="chat odd"):
        next(regenerate(target, tokenizer, chats, stop=frozenset([2]), max_new_tokens=4, batch=2))


def test_the_header_is_asked_for_and_never_left_to_the_tokenizer(tiny_folder: Path) -> None:
    class Other(type(load_tokenizer(tiny_folder))):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **given: Any) -> Any:
            return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **given)

    plain, other = load_tokenizer(tiny_folder), Other.from_pretrained(tiny_folder)
    messages = [*GOOD["good-0"], *GOOD["good-1"]]
    assert tokenize(other, messages, 200) == tokenize(plain, messages, 200)


# C60


@pytest.mark.parametrize("as_list", [True, False])
def test_of_several_templates_the_default_is_used_and_recorded(as_list: bool, folder: Path, tmp_path: Path) -> None:
    plain = template_hash(load_tokenizer(folder))
    several = {"default": TEMPLATE, "tool_use": "nothing"}
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


def test_several_templates_without_a_default_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(RedraftError, match="rag, tool_use"):
        load_tokenizer(templates(folder, [{"name": name, "template": TEMPLATE} for name in ("tool_use", "rag")]))


def test_a_target_without_a_pad_token_answers_the_same(folder: Path) -> None:
    target, tokenizer = load_target(folder, dtype="fp32", device="cpu"), load_tokenizer(folder)
    chats = read_chats(ROOT / "data/tiny/train.jsonl")[:5]
    stop = stop_ids(folder, tokenizer)
    with_pad = list(regenerate(target, tokenizer, chats, stop=stop, max_new_tokens=20, batch=3))
    tokenizer.pad_token = None
    without = list(regenerate(target, tokenizer, chats, stop=stop, max_new_tokens=20, batch=3))
    assert without == with_pad
    own = TorchEngine(target, None, 0, stop).generate(prompt_ids(tokenizer, chats[0]["messages"][:1]), 20).ids
    assert (
        without[0]["messages"][-1]["content"] == tokenizer.decode([token for token in own if token not in stop]).strip()
    )


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


# what other tools write


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (json.dumps({"id": "a"}).encode("utf-16"), r"UTF-16(?s:.*)iconv"),
        (b'{"id": "a"}\n{"id": "\xe9"}', "line 2(?s:.*)0xe9"),
        (b"", "empty line"),
        (b"\n\n", "empty line"),
        (b'{"id": "a", "messages": []}\n\n{"id": "b", "messages": []}\n', "line 2(?s:.*)empty line"),
        (b'{"prompt": "x"}', "no id and no messages; keys: prompt"),
        (b'{"id": "a", "conversations": []}', "no messages; keys: id, conversations"),
        (b'{"id": "a", "messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a surrogate pair"),
        (b"[]", "a list"),
        (b"3", "a int"),
        (b'{"id": ["a"], "messages": []}', "an id that is a list"),
        (b'{"id": "a", "messages": "hello"}', "messages that are a str"),
        (b'{"id": "a", "messages": ["hello"]}', 'without role and content: "hello"'),
        (b'{"id": "a", "messages": [{"role": "user"}]}', "without role and content"),
        (b'{"id": "a", "messages": []}\n{"id": "a", "messages": []}', "more than once: a"),
    ],
)
def test_a_line_that_is_no_chat_is_told_with_what_it_is(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(RedraftError, match=named):
        read_chats(tmp_path / "x.jsonl")


@pytest.mark.parametrize("content", [b"%s\n\n \n", b"\xef\xbb\xbf%s", b"%s\r\n"])
def test_blank_lines_at_the_end_and_a_byte_order_mark_are_no_fault(content: bytes, tmp_path: Path) -> None:
    chat = {"id": "a", "messages": [user("b")]}
    (tmp_path / "x.jsonl").write_bytes(content % json.dumps(chat).encode())
    assert read_chats(tmp_path / "x.jsonl") == [chat]


@given(st.binary(max_size=60))
def test_no_bytes_end_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(RedraftError):
        read_chats(path)


def test_a_file_that_is_no_corpus_is_told(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(RedraftError, match="no tokenised corpus"):
        read_corpus(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"")
    with pytest.raises(RedraftError, match=r"y\.safetensors"):
        read_corpus(tmp_path / "y.safetensors")


# the stage


def test_the_same_conversation_is_the_same_text_whatever_its_id(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {**GOOD, "again": GOOD["good-1"]})
    one, two = GOOD["good-1"][0], GOOD["good-2"][1]
    other = {"new": [one, answer("Another.")], "roles": [answer(one["content"]), two]}
    require_apart(conversations(write(tmp_path / "a.jsonl", other)), conversations(train), "here")
    for held in ({"x": GOOD["good-1"]}, {**other, "x": GOOD["good-1"]}):
        with pytest.raises(RedraftError, match="x is good-1"):
            require_apart(conversations(write(tmp_path / "b.jsonl", held)), conversations(train), "here")


def project(folder: Path, target: Path, **files: dict[str, Any]) -> Path:
    """A project of profile `tiny` with a target and files of chats."""
    (folder / "artifacts").mkdir(parents=True)
    (folder / "artifacts/target").symlink_to(target)
    (folder / "data/tiny").mkdir(parents=True)
    (folder / "profiles").mkdir()
    shutil.copy(ROOT / "profiles/tiny.yaml", folder / "profiles")
    knobs = (ROOT / "params.yaml").read_text()
    (folder / "params.yaml").write_text(knobs.replace("profile: smollm ", "profile: tiny "))
    for split, chats in files.items():
        write(folder / f"data/tiny/{split}.jsonl", chats)
    return folder


def stage(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A stage as DVC runs it."""
    command = [sys.executable, str(ROOT / f"stages/{name}.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def numbered(count: int, word: str) -> dict[str, Any]:
    return {f"{word}-{number}": [user(f"{word} {number}?"), answer("It is.")] for number in range(count)}


def test_the_stage_counts_duplicates_and_warns_of_few_held_out_chats(tiny_folder: Path, tmp_path: Path) -> None:
    train = {**numbered(5, "train"), "again": numbered(1, "train")["train-0"]}
    files = {"train": train, "heldout": numbered(7, "heldout"), "donor": numbered(3, "train")}
    done = stage("corpus", project(tmp_path, tiny_folder, **files))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics/corpus.json").read_text())
    assert {split: each["duplicates"] for split, each in metrics.items()} == {"train": 1, "heldout": 0, "donor": 0}
    assert "heldout.jsonl gives 7 samples" in done.stdout


@pytest.mark.parametrize("split", ["train", "donor"])
def test_the_stage_refuses_a_held_out_chat_that_is_trained_on(split: str, tiny_folder: Path, tmp_path: Path) -> None:
    files = {"train": numbered(9, "train"), "heldout": numbered(9, "heldout"), "donor": numbered(9, "donor")}
    files[split] = {**files[split], "x": files["heldout"]["heldout-4"]}
    done = stage("corpus", project(tmp_path, tiny_folder, **files))
    assert (done.returncode, "heldout-4 is x" in done.stderr, "Traceback" in done.stderr) == (1, True, False)
    assert not (tmp_path / "artifacts/corpus").exists()


def test_a_token_that_the_target_has_no_row_for_is_left_out_of_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<think>"], special_tokens=True)  # id 640 of 640 rows
    tokenizer.save_pretrained(folder)
    files = {"train": numbered(9, "train"), "heldout": numbered(9, "heldout"), "donor": numbered(9, "donor")}
    where = project(tmp_path / "project", folder, **files)
    for name in ("corpus", "vocab"):
        done = stage(name, where)
        assert done.returncode == 0, done.stderr
    assert "left out of the vocabulary: 640 (<think>)" in done.stdout
    metrics = json.loads((where / "metrics/vocab.json").read_text())
    assert metrics["outside"] == 1
    assert f"lower vocab.slots in the profile to {400 - metrics['padded']}" in done.stdout
