"""The corpus of a target with Kimi's kind of tokenizer: thinking and instant mode, two turns, tools, many processes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kimi.folder import RANKS, kimi_folder

from redraft.corpus import build
from redraft.corpus.build import build_split, tokenize_file
from redraft.corpus.corpus import Corpus, read_corpus
from redraft.corpus.rows import Chat, read_row
from redraft.corpus.tokenizer import load_tokenizer, stop_ids, tokenizer_hash
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams, TemplateParams
from redraft.regenerate.conversation import Answer, Asking, Conversation

PARAMS = CorpusParams(max_length=2000, max_dropped=0.0)
INSTANT = TemplateParams(arguments={"thinking": False})
END = RANKS + 2
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi_folder(tmp_path_factory.mktemp("kimi") / "target")


@pytest.fixture(scope="module")
def kimi(folder: Path) -> Any:
    return load_tokenizer(folder, trust_remote_code=True)


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(tokenizer: Any, corpus: Corpus) -> list[tuple[str, str]]:
    """Of every document all of its text, and what is supervised."""
    found = []
    for index in range(len(corpus)):
        ids, mask = corpus.document(index)
        found.append((tokenizer.decode(ids.tolist()), tokenizer.decode(ids[mask.bool()].tolist())))
    return found


def answered(tokenizer: Any, folder: Path, how: TemplateParams, *texts: str) -> tuple[dict[str, Any], list[list[int]]]:
    """A chat of as many turns as `texts`, answered with them and an end marker; and the ids that were generated."""
    asking = Asking(
        tokenizer, stop_ids(folder, tokenizer), 4000, how=how, made={"tokenizer": tokenizer_hash(tokenizer)}
    )
    pairs = [(said("user", f"{number}?"), said("assistant", "")) for number in range(len(texts))]
    turns = [message for pair in pairs for message in pair]
    chat = read_row(json.dumps({"id": "a", "messages": turns}).encode(), "a")
    assert isinstance(chat, Chat)
    conversation, given = Conversation(chat, asking), []
    for text in texts:
        given.append([*tokenizer(text, add_special_tokens=False)["input_ids"], END])
        conversation.take(Answer(given[-1], "stop"))
    assert conversation.prompt is None
    return conversation.row(), given


def test_thinking_is_trained_on_as_it_was_generated(kimi: Any, folder: Path, tmp_path: Path) -> None:
    """Kimi's template rewrites every earlier answer, so each turn stands behind the prompt that was served for it."""
    row, given = answered(kimi, folder, TemplateParams(), "two and two</think>Four.", "three</think>Six.")
    assert [each["content"] for each in row["messages"][1::2]] == ["Four.", "Six."]
    assert [each["reasoning_content"] for each in row["messages"][1::2]] == ["two and two", "three"]
    corpus, told = tokenize_file(written(tmp_path / "x.jsonl", row), kimi, PARAMS)
    (one, first), (two, second) = trained(kimi, corpus)
    assert [first, second] == ["two and two</think>Four.<|im_end|>", "three</think>Six.<|im_end|>"]
    assert one.endswith("<think>two and two</think>Four.<|im_end|>")
    assert "<think></think>Four.<|im_end|>" in two  # served so, with the next question
    assert (told["turns"], told["generated"], corpus.samples) == (2, 1, ["a#1", "a"])
    for index, ids in enumerate(given):
        every, mask = corpus.document(index)
        assert every[mask.bool()].tolist() == ids


def test_instant_answers_continue_each_other(kimi: Any, folder: Path, tmp_path: Path) -> None:
    row, given = answered(kimi, folder, INSTANT, "Four.", "Six.")
    corpus, _ = tokenize_file(written(tmp_path / "x.jsonl", row), kimi, PARAMS, how=INSTANT)
    ((text, supervised),) = trained(kimi, corpus)
    assert supervised == "Four.<|im_end|>Six.<|im_end|>"
    assert text.count("<think></think>") == 2
    ids, mask = corpus.document(0)
    assert ids[mask.bool()].tolist() == [*given[0], *given[1]]


@pytest.mark.parametrize("how", [TemplateParams(), INSTANT], ids=["thinking", "instant"])
def test_text_is_proven_or_dropped(how: TemplateParams, kimi: Any, tmp_path: Path) -> None:
    call = {"id": "functions.weather:0", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = [said("user", "weather?"), said("assistant", "", tool_calls=[call])]
    rows = [
        {"id": "plain", "messages": [said("user", "2+2?"), said("assistant", "Four.")]},
        {"id": "thought", "messages": [said("user", "3+3?"), said("assistant", "Six.", reasoning_content="hm")]},
        {"id": "within", "messages": [said("user", "1+1?"), said("assistant", "hm</think>Two.")]},
        {"id": "tool", "tools": TOOLS, "messages": [*asked, said("tool", "sunny"), said("assistant", "Sunny.")]},
    ]
    params = PARAMS.model_copy(update={"max_dropped": 1.0})
    path = written(tmp_path / "x.jsonl", *rows, {"messages": [said("user", "a"), said("assistant", "b", made="x")]})
    if how is INSTANT:
        corpus, told = tokenize_file(path, kimi, params, how=how)
        supervised = dict(zip(corpus.samples, (text for _, text in trained(kimi, corpus)), strict=True))
        assert supervised["plain"] == "Four.<|im_end|>"
        assert supervised["tool"].endswith(
            '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>Sunny.<|im_end|>'
        )
        assert not supervised["tool"].startswith("</think>")
        assert told["dropped_rewritten"] == 1  # the reasoning is left out
    else:
        with pytest.raises(RedraftError, match=r"(?s)rewritten.*writes '</think>' before"):
            tokenize_file(path, kimi, params, how=how)


def test_several_processes_load_the_folders_own_code(
    kimi: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": [said("user", f"{n}?"), said("assistant", f"It is {n}.")]} for n in range(40)]
    path, load = written(tmp_path / "x.jsonl", *rows), partial(load_tokenizer, folder, True)
    monkeypatch.setattr(build, "CHUNK_ROWS", 8)
    build_split([path], tmp_path / "one.safetensors", kimi, PARAMS, how=INSTANT)
    monkeypatch.setattr(build, "POOL_BYTES", 1)
    build_split([path], tmp_path / "two.safetensors", kimi, PARAMS, how=INSTANT, load=load)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    assert len(read_corpus(tmp_path / "two.safetensors")) == 40
