"""A tokenizer that is Python code around tiktoken, as Kimi's: made by its own class, its ids, its chats."""

import base64
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kimi.folder import MARKERS, RANKS, VOCAB, WRITTEN, kimi_folder

from redraft.corpus.chat import prompt_ids, render, template_hash
from redraft.corpus.tokenizer import (
    byte_ids,
    decodable_ids,
    differing_ids,
    forced_ids,
    load_tokenizer,
    require_markers,
    special_ids,
    special_tokens,
    stop_ids,
    tokenizer_hash,
)
from redraft.frame.errors import RedraftError
from redraft.target.code import own_class

ADDED = {RANKS + place: name for place, name in (MARKERS | WRITTEN).items()}
IDS = {name: number for number, name in ADDED.items()}
CODE, WORDS, CONFIG = "tokenization_small.py", "tool_words.py", "tokenizer_config.json"
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from([*ADDED.values(), "👩‍💻🏽", "世界\n", "  \t"]))).map("".join)
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi_folder(tmp_path_factory.mktemp("kimi") / "target")


@pytest.fixture(scope="module")
def kimi(made: Path) -> Any:
    return load_tokenizer(made, trust_remote_code=True)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "target")


# How it fails to load: each way has a sentence of its own.

MISSING_PACKAGE = "Packages that the tokenizer needs are not installed"
MOVED = "Code of the tokenizer imports from"
NOT_TRUSTED = "The tokenizer is Python code of its own"
WRONG_CLASS = "The tokenizer's class is not the one"
MISSING_FILE = "A file of the tokenizer's own code is missing"
UNREADABLE = "The name of the tokenizer's class cannot be read"
RAISED = "transformers cannot make the tokenizer"


def code(line: str, name: str = CODE, after: str = "") -> Callable[[Path], None]:
    """Put a line into the folder's code: at its top, or after another."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert after in text
        (folder / name).write_text(text.replace(after, f"{after}\n{line}", 1) if after else f"{line}\n{text}")

    return change


def config(**fields: object) -> Callable[[Path], None]:
    """Set fields of tokenizer_config.json, or take those out that are None."""

    def change(folder: Path) -> None:
        all_of = {**json.loads((folder / CONFIG).read_text()), **fields}
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in all_of.items() if value is not None}))

    return change


def named(reference: object) -> Callable[[Path], None]:
    return config(auto_map={"AutoTokenizer": reference})


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


IN_INIT = ") -> None:"
OTHERS = "    @classmethod\n    def from_pretrained(cls, folder, **_):\n        return {0}\n"


@pytest.mark.parametrize(
    ("change", "sentence", "told"),
    [
        (code("import no_such_package"), MISSING_PACKAGE, ["no_such_package", "pip install no_such_package"]),
        (code("from no_such_package.part import a"), MISSING_PACKAGE, ["pip install no_such_package"]),
        (code("import no_such_package", WORDS), MISSING_PACKAGE, ["pip install no_such_package"]),
        (code("        import no_such_package", after=IN_INIT), MISSING_PACKAGE, ["pip install no_such_package"]),
        (code("import no_a, no_b"), MISSING_PACKAGE, ["no_a, no_b", "pip install no_a no_b"]),
        # as revisions of Kimi-K2 and K2.5 do that were written for transformers 4
        (
            code("from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode"),
            MOVED,
            ["bytes_to_unicode", "another revision of the model", "release of transformers"],
        ),
        (code("import transformers.no_such_module"), MOVED, ["transformers.no_such_module", "another revision"]),
        (code("from tiktoken import no_such_name", WORDS), MOVED, ["no_such_name", "another release of tiktoken"]),
        (named("tokenization_small.OtherTokenizer"), WRONG_CLASS, ["OtherTokenizer in tokenization_small.py"]),
        (named("tokenization_small.load_tiktoken_bpe"), WRONG_CLASS, ["no tokenizer"]),
        (named("tool_words.Any"), WRONG_CLASS, ["no tokenizer"]),
        (code(OTHERS.format("object()"), after='reserved_token_ID|>`."""'), WRONG_CLASS, ["found: object"]),
        (config(auto_map=None), WRONG_CLASS, ["TikTokenTokenizer", "TokenizersBackend of transformers"]),
        (config(auto_map={"AutoConfig": "a.B"}), WRONG_CLASS, ["TokenizersBackend of transformers"]),
        (without(CODE), MISSING_FILE, [CODE, "found: tool_words.py"]),
        (without(WORDS), MISSING_FILE, [WORDS, "import of tokenization_small.py", f"found: {CODE}"]),
        (named("ORG/NAME--elsewhere.Tokenizer"), MISSING_FILE, ["elsewhere.py", "ORG/NAME--elsewhere.Tokenizer"]),
        (named("TikTokenTokenizer"), UNREADABLE, ["module.Class"]),
        (named(7), UNREADABLE, ["found: 7"]),
        (code("raise RuntimeError('broken here')"), RAISED, ["RuntimeError: broken here", CODE]),
        (code("        raise KeyError('pad')", after=IN_INIT), RAISED, ["KeyError: 'pad'", CODE]),
        (code("def"), RAISED, ["SyntaxError"]),
        (code("open('no_such_file.txt')"), RAISED, ["no_such_file.txt"]),
        (without("tiktoken.model"), RAISED, [CODE]),
    ],
)
def test_each_way_to_fail_has_its_own_error(
    change: Callable[[Path], None], sentence: str, told: list[str], folder: Path
) -> None:
    change(folder)
    with pytest.raises(RedraftError) as refused:
        load_tokenizer(folder, trust_remote_code=True)
    assert refused.value.what.startswith(sentence)
    assert [word for word in [*told, str(folder)] if word not in str(refused.value)] == []


def test_without_tiktoken_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code("# not loaded before")(folder)
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # as if it were not installed
    with pytest.raises(RedraftError, match=rf"^{MISSING_PACKAGE}: tiktoken") as refused:
        load_tokenizer(folder, trust_remote_code=True)
    assert "pip install 'redraft[kimi]'" in str(refused.value)


@pytest.mark.parametrize(
    "reference", ["tokenization_small.TikTokenTokenizer", ["tokenization_small.TikTokenTokenizer", None]]
)
def test_code_that_is_not_trusted_does_not_run(reference: object, folder: Path) -> None:
    code(f"open({str(folder / 'ran')!r}, 'w')")(folder)
    named(reference)(folder)
    with pytest.raises(RedraftError, match=NOT_TRUSTED) as refused:
        load_tokenizer(folder)
    assert "target.trust_remote_code" in str(refused.value)
    assert CODE in str(refused.value)
    assert not (folder / "ran").exists()
    load_tokenizer(folder, trust_remote_code=True)
    assert (folder / "ran").exists()


ANY = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda some: st.lists(some))


@MANY
@given(auto_map=ANY | st.dictionaries(st.just("AutoTokenizer") | st.text(), ANY), trust=st.booleans())
def test_any_auto_map_is_none_or_one_error(auto_map: object, trust: bool, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"auto_map": auto_map}))
    with suppress(RedraftError):
        assert own_class(tmp_path, trust) is None


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoTokenizer": "tokenization_small.TikTokenTokenizer"},
        {"AutoTokenizer": ["tokenization_small.TikTokenTokenizer", None]},
        {"AutoTokenizer": [None, "tokenization_small.TikTokenTokenizer"]},
        {"AutoTokenizer": "ORG/NAME--tokenization_small.TikTokenTokenizer"},
        ["tokenization_small.TikTokenTokenizer", None],
    ],
)
def test_the_forms_of_auto_map(auto_map: object, folder: Path, kimi: Any) -> None:
    config(auto_map=auto_map)(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert type(tokenizer).__name__ == "TikTokenTokenizer"
    assert tokenizer_hash(tokenizer) == tokenizer_hash(kimi)


# Folders that are alike in their names


def test_two_folders_of_one_name_keep_their_own_code(made: Path, tmp_path: Path) -> None:
    plain, module, beside = (Path(shutil.copytree(made, tmp_path / letter / "target")) for letter in "abc")
    (module / CODE).write_text((module / CODE).read_text().replace("RESERVED = 32", "RESERVED = 40"))
    (beside / WORDS).write_text((beside / WORDS).read_text().replace("# Tools", "# Implements"))
    tokenizers = [load_tokenizer(each, trust_remote_code=True) for each in (plain, module, beside, plain)]
    assert [len(tokenizer) for tokenizer in tokenizers] == [VOCAB, VOCAB + 8, VOCAB, VOCAB]
    told = [tokenizer.apply_chat_template([USER], tools=TOOLS) for tokenizer in tokenizers]
    assert ["# Implements" in each for each in told] == [False, False, True, False]


@pytest.mark.parametrize("name", ["Kimi-K2.5", "0f3c", "a folder", "class", "../linked"])
def test_a_folder_of_any_name(
    name: str, made: Path, tmp_path: Path, kimi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(name).symlink_to(made) if "linked" in name else shutil.copytree(made, name)
    assert tokenizer_hash(load_tokenizer(Path(name), trust_remote_code=True)) == tokenizer_hash(kimi)


def test_a_folder_whose_code_or_ranks_change_is_read_anew(folder: Path) -> None:
    first = load_tokenizer(folder, trust_remote_code=True)
    kimi_folder(folder, text="".join(map(chr, range(40, 900))))
    second = load_tokenizer(folder, trust_remote_code=True)
    assert tokenizer_hash(second) != tokenizer_hash(first)
    assert set(differing_ids(first, second)) == set(range(256, RANKS))
    (folder / WORDS).write_text((folder / WORDS).read_text().replace("# Tools", "# Implements"))
    assert "# Implements" in load_tokenizer(folder, trust_remote_code=True).apply_chat_template([USER], tools=TOOLS)


ELSEWHERE = """
import json, socket, sys
from pathlib import Path

def refuse(*_):
    raise OSError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refuse
from redraft.corpus.tokenizer import load_tokenizer, tokenizer_hash
tokenizer = load_tokenizer(Path("target"), trust_remote_code=True)
print(json.dumps([tokenizer_hash(tokenizer), tokenizer(sys.argv[1], add_special_tokens=False)["input_ids"]]))
"""


def test_another_process_without_a_network_makes_the_same(folder: Path, kimi: Any, tmp_path: Path) -> None:
    text = "Grüße <think> 👩‍💻"
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", ELSEWHERE, text]
    done = subprocess.run(command, cwd=tmp_path, env=online, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [tokenizer_hash(kimi), ids(kimi, text)]


def test_a_copy_by_pickle_is_the_same(kimi: Any) -> None:
    again = pickle.loads(pickle.dumps(kimi))  # noqa: S301
    assert tokenizer_hash(again) == tokenizer_hash(kimi)
    assert ids(again, "Grüße <think>") == ids(kimi, "Grüße <think>")


# Ids


def ids(tokenizer: Any, text: Any) -> Any:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@MANY
@given(text=TEXTS)
def test_any_text_comes_back(text: str, kimi: Any) -> None:
    given_ids = ids(kimi, text)
    assert given_ids == kimi.encode(text) == kimi(text)["input_ids"]
    assert kimi.decode(given_ids) == kimi.decode(given_ids, skip_special_tokens=False) == text
    assert kimi.convert_tokens_to_ids(kimi.convert_ids_to_tokens(given_ids)) == given_ids
    assert set(given_ids) <= decodable_ids(kimi)


@MANY
@given(parts=st.lists(st.text(alphabet="ab c\né世👍") | st.sampled_from([*ADDED.values()])))
def test_special_tokens_are_skipped_and_the_others_stay(parts: list[str], kimi: Any) -> None:
    kept = "".join(part for part in parts if part not in MARKERS.values())
    assert kimi.decode(ids(kimi, "".join(parts)), skip_special_tokens=True) == kept


@MANY
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_a_batch_is_its_texts_one_by_one(texts: list[str], kimi: Any) -> None:
    assert ids(kimi, texts) == [ids(kimi, text) for text in texts]


def test_special_tokens_are_the_added_ones_and_not_the_reserved(kimi: Any) -> None:
    require_markers(kimi)
    assert special_tokens(kimi) == ADDED
    assert special_ids(kimi) == set(ADDED)
    assert set(kimi.all_special_ids) == {RANKS + place for place in MARKERS}
    reserved = set(range(RANKS, VOCAB)) - set(ADDED)
    assert reserved
    for number in reserved:  # one token each, though no marker
        assert ids(kimi, f"<|reserved_token_{number}|>") == [number]


def test_single_bytes_are_those_of_the_ranks(made: Path, kimi: Any) -> None:
    lines = [line.split() for line in (made / "tiktoken.model").read_text().splitlines()]
    ranks = {int(rank): base64.b64decode(token) for token, rank in lines}
    assert byte_ids(kimi) == {rank for rank, token in ranks.items() if len(token) == 1}
    assert len(byte_ids(kimi)) == 256
    assert {kimi.model.decode_single_token_bytes(number) for number in byte_ids(kimi)} == {
        bytes([byte]) for byte in range(256)
    }


def test_forced_and_decodable_ids(kimi: Any) -> None:
    assert decodable_ids(kimi) == set(range(VOCAB))
    assert len(kimi) == kimi.vocab_size == VOCAB
    assert forced_ids(kimi, special=True, single_bytes=True) == set(ADDED) | byte_ids(kimi)
    assert forced_ids(kimi, special=True, single_bytes=False) == set(ADDED)
    assert forced_ids(kimi, special=False, single_bytes=True) == byte_ids(kimi)


def test_end_of_turn_and_end_of_text_stop(made: Path, kimi: Any) -> None:
    assert stop_ids(made, kimi) == {IDS["[EOS]"], IDS["<|im_end|>"]}


def test_another_marker_is_another_tokenizer(folder: Path, kimi: Any) -> None:
    fields = json.loads((folder / CONFIG).read_text())
    place = str(RANKS + 5)
    fields["added_tokens_decoder"][place] = {**fields["added_tokens_decoder"][str(RANKS + 22)], "content": "<plan>"}
    config(**fields)(folder)
    other = load_tokenizer(folder, trust_remote_code=True)
    assert differing_ids(kimi, other) == {int(place): (f"<|reserved_token_{place}|>", "<plan>")}
    assert differing_ids(kimi, kimi) == {}
    assert tokenizer_hash(other) != tokenizer_hash(kimi)
    assert special_ids(other) == special_ids(kimi) | {int(place)}
    require_markers(other)


def test_markers_that_are_cut_are_refused(folder: Path) -> None:
    text = (folder / CODE).read_text()
    (folder / CODE).write_text(text.replace("allow_special_tokens: bool = True", "allow_special_tokens: bool = False"))
    config(split_special_tokens=True)(folder)
    with pytest.raises(RedraftError, match=r"\[BOS\]"):
        require_markers(load_tokenizer(folder, trust_remote_code=True))


# Chats

USER = {"role": "user", "content": "What is a saw?"}
ASKED = "<|im_user|>user<|im_middle|>What is a saw?<|im_end|>"
ANSWER = {"role": "assistant", "content": "A tool.", "reasoning_content": "Short."}
WHERE = {"role": "user", "content": "Where?"}
HEADER = "<|im_assistant|>assistant<|im_middle|>"
TWO_TURNS = ASKED + HEADER + "<think></think>A tool.<|im_end|><|im_user|>user<|im_middle|>Where?<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a thing.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "It may be in the box.",
    "tool_calls": [
        {"id": "functions.find:0", "type": "function", "function": {"name": "find", "arguments": '{"what": "saw"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "functions.find:0", "name": "find", "content": "In the box."}
CALLED = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"what": "saw"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
RETURNED = "<|im_system|>find<|im_middle|>## Return of functions.find:0\nIn the box.<|im_end|>"


def rendered(tokenizer: Any, messages: list[Any], header: bool = True, **how: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header, **how)


def test_two_turns_with_thinking_by_default(kimi: Any) -> None:
    assert render(kimi, [USER, ANSWER, WHERE], header=True) == TWO_TURNS + HEADER + "<think>"
    assert render(kimi, [USER, ANSWER, WHERE], header=False) == TWO_TURNS
    assert kimi.apply_chat_template([USER]).endswith("<think>")  # what it does when it is not told


def test_two_turns_instant(kimi: Any) -> None:
    assert rendered(kimi, [USER, ANSWER, WHERE], thinking=False) == TWO_TURNS + HEADER + "<think></think>"
    assert rendered(kimi, [USER, ANSWER, WHERE], header=False, thinking=False) == TWO_TURNS


def test_the_prompt_is_markers_around_text(kimi: Any) -> None:
    prompt = prompt_ids(kimi, [USER])
    assert prompt == [
        *(IDS["<|im_user|>"], *ids(kimi, "user"), IDS["<|im_middle|>"]),
        *(*ids(kimi, "What is a saw?"), IDS["<|im_end|>"]),
        *(IDS["<|im_assistant|>"], *ids(kimi, "assistant"), IDS["<|im_middle|>"], IDS["<think>"]),
    ]


def test_thinking_is_kept_in_a_chain_of_tool_calls_and_dropped_behind_the_answer(kimi: Any) -> None:
    thought = HEADER + "<think>It may be in the box.</think>I look." + CALLED + RETURNED
    silent = thought.replace("It may be in the box.", "", 1)
    assert rendered(kimi, [USER, CALL, RESULT]) == ASKED + thought + HEADER + "<think>"
    assert rendered(kimi, [USER, CALL, RESULT], thinking=False) == ASKED + silent + HEADER + "<think></think>"
    assert rendered(kimi, [USER, ANSWER, WHERE, CALL, RESULT], header=False) == TWO_TURNS + thought
    closed = HEADER + "<think></think>A tool.<|im_end|>"
    assert rendered(kimi, [USER, CALL, RESULT, ANSWER], header=False) == ASKED + silent + closed


def test_tools_are_declared_first_and_in_words(kimi: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    words = "# Tools\nnamespace functions {\n// Find a thing.\ntype find = (_: {what: string}) => any;\n}"
    told = f"<|im_system|>tool_declare<|im_middle|>{words}<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|>"
    assert rendered(kimi, [system, USER], header=False, tools=TOOLS) == told + ASKED
    turned = [{key: tool[key] for key in reversed(tool)} for tool in TOOLS]
    assert rendered(kimi, [system, USER], tools=turned) == rendered(kimi, [system, USER], tools=TOOLS)


@MANY
@given(contents=st.lists(TEXTS, min_size=1, max_size=6), thinking=st.booleans())
def test_a_prompt_begins_the_chat_that_answers_it(contents: list[str], thinking: bool, kimi: Any) -> None:
    chat = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]
    whole = ids(kimi, rendered(kimi, chat, header=False, thinking=thinking))
    for turn in range(1, len(chat), 2):
        prompt = ids(kimi, rendered(kimi, chat[:turn], thinking=thinking))
        assert whole[: len(prompt)] == prompt


def test_the_template_is_the_folders_file(made: Path, kimi: Any) -> None:
    assert kimi.chat_template == (made / "chat_template.jinja").read_text()
    assert len(template_hash(kimi)) == 64
