"""Rows as people have them, in files of any kind and with any bytes in them."""

import datetime
import gzip
import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from chats import answer, fast, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_render import rows as tokenized

from redraft.corpus.build import CAUSES, tokenize_file
from redraft.corpus.files import count_rows, files_of, name_of, raw_rows, require_files
from redraft.corpus.rows import Chat, Refused, read_row, read_rows
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams

QUICK = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=150
)
GOOD = [user("2+2?"), answer("four")]


def read(row: Any, name: str = "x-1") -> Chat:
    chat = read_row(row if isinstance(row, bytes) else json.dumps(row).encode(), name)
    assert isinstance(chat, Chat), chat
    return chat


def refused(row: Any) -> str:
    chat = read_row(row if isinstance(row, bytes) else json.dumps(row).encode(), "x-1")
    assert isinstance(chat, Refused)
    return chat.reason


# no input ends in a traceback

SINGLE = [st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(["user", "assistant", "[]"])]
VALUES = st.recursive(
    st.one_of(SINGLE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "function", "developer", "human", "gpt"]) | VALUES


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


PARTS = VALUES | st.lists(objects(type=st.sampled_from(["text", "image_url"]) | VALUES, text=st.text() | VALUES))
FUNCTION = objects(name=st.text() | VALUES, arguments=VALUES | VALUES.map(json.dumps))
CALLS = VALUES | st.lists(VALUES | objects(function=FUNCTION | VALUES, id=VALUES) | FUNCTION, max_size=3)
IDS = st.lists(st.integers(0, 500), max_size=5) | st.lists(VALUES, max_size=3) | VALUES
MESSAGE = VALUES | objects(
    **{"from": ROLES, "role": ROLES, "value": PARTS, "content": PARTS, "tool_calls": CALLS, "function_call": CALLS},
    **{"reasoning_content": PARTS, "reasoning": PARTS, "thinking": PARTS, "finish": VALUES, "finish_reason": VALUES},
    **{"prompt_ids": IDS, "generated_ids": IDS, "keeps": st.integers(-1, 3) | VALUES},
)
MESSAGES = st.lists(MESSAGE, max_size=4) | VALUES
ROW = objects(
    id=VALUES, source=VALUES, system=VALUES, made=VALUES | objects(template=VALUES, tokenizer=VALUES, target=VALUES),
    messages=MESSAGES | MESSAGES.map(json.dumps), conversations=MESSAGES, input_ids=IDS, loss_mask=IDS,
    tools=VALUES | st.lists(objects(type=VALUES, function=VALUES), max_size=2) | VALUES.map(json.dumps),
)  # fmt: skip
LIKELY = st.lists(
    objects(tool_calls=CALLS, reasoning=st.text() | VALUES, name=VALUES).flatmap(
        lambda more: st.sampled_from([user("a"), answer("b"), answer(""), {"role": "tool", "content": "c"}]).map(
            lambda message: {**message, **more}
        )
    ),
    max_size=4,
).map(lambda messages: {"messages": messages})


def kind_of(reason: str) -> str:
    return reason.split(":")[0]


@pytest.mark.parametrize("name", ["plain", "qwen3"])
@settings(QUICK)
@given(row=ROW | LIKELY)
def test_no_value_ends_in_a_traceback(name: str, row: Any) -> None:
    part = tokenized(fast(name), row, {"messages": GOOD}, rows=400, target="t")
    assert set(part.told.dropped) | set(part.told.left_out) <= set(CAUSES)
    assert part.told.chats == 2
    assert part.told.dropped.total() + len(part.names) == 2
    assert part.arrays["offsets"][-1] == len(part.arrays["input_ids"]) == len(part.arrays["loss_mask"])
    chat = read_row(json.dumps(row).encode(), "x")
    json.dumps(chat.row if isinstance(chat, Chat) else chat.reason, ensure_ascii=False).encode()  # can be written


@settings(QUICK)
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), packed=st.booleans())
def test_no_bytes_end_in_a_traceback(tmp_path: Path, content: bytes, packed: bool) -> None:
    path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
    for whole in {content, gzip.compress(content, mtime=0), json.dumps({"messages": GOOD}).encode() + b"\n" + content}:
        path.write_bytes(whole)
        try:
            found = [*read_rows([path])]
        except RedraftError:
            continue
        assert {kind_of(row.reason) for row in found if isinstance(row, Refused)} <= set(CAUSES)
        assert len(found) == count_rows(path)


@settings(QUICK)
@given(data=st.data())
def test_no_damage_to_a_packed_file_or_a_table_ends_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    rows = [{"id": str(number), "messages": GOOD} for number in range(30)]
    packed, table = tmp_path / "x.jsonl.gz", tmp_path / "x.parquet"
    packed.write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in rows), mtime=0))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (packed, table):
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            whole[at] ^= data.draw(st.integers(1, 255))
        else:
            del whole[at:]
        path.write_bytes(whole)
        try:
            assert len([*read_rows([path])]) <= len(rows)
            count_rows(path)
        except RedraftError:
            pass


# what a line may be


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"[]", "unreadable: a list"),
        (b"3", "unreadable: a int"),
        (b"nonsense", "unreadable: no JSON, "),
        (b'{"id": "a", ', "unreadable: no JSON, "),
        (b'{"id": "\xe9"}', "unreadable: not UTF-8: invalid continuation byte: 0xe9"),
        (b"9" * 5000, "unreadable: no JSON, "),
        (b"[" * 100_000, "unreadable: no JSON, "),
        (b'{"messages": ' + b"[" * 150 + b"]" * 150 + b"}", "unreadable: nested deeper than 100"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "unreadable: nested deeper than 100"),
        (b"{}", "unreadable: no messages; keys: none"),
        ({"prompt": "x"}, "unreadable: no messages; keys: prompt"),
        ({"id": "a", "conversations": []}, "unreadable: no messages; keys: id, conversations"),
        ({"id": ["a"], "messages": GOOD}, "unreadable: an id that is a list"),
        ({"messages": "hello"}, "unreadable: messages: no JSON"),
        ({"messages": {"role": "user"}}, "unreadable: messages that are a dict"),
        ({"messages": ["hello"]}, 'unreadable: a message without role and content: "hello"'),
        ({"messages": [{"content": "hello"}]}, "unreadable: a message without role and content: "),
        ({"messages": [{"role": 3, "content": "a"}]}, "unknown role: 3"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "unknown role: asistant"),
        ({"messages": [{"from": "alpaca", "value": "a"}]}, "unknown role: alpaca"),
        ({"messages": [user(None)]}, "no content: a message of role user"),
        ({"messages": [{"role": "user"}]}, "no content: a message of role user"),
        ({"messages": [user({"text": "a"})]}, "no text: a content that is a dict"),
        ({"messages": [user(5)]}, "no text: a content that is a int"),
        ({"messages": [user([{"type": "image_url"}])]}, "no text: a part of type image_url in a message of role user"),
        ({"messages": [user([{"type": "text"}])]}, "no text: a part of type text"),
        ({"messages": [user([3])]}, "no text: a part of type int"),
        ({"messages": GOOD, "tools": "x"}, "unreadable: tools: no JSON"),
        ({"messages": GOOD, "tools": ["x"]}, "unreadable: tools that are no list of definitions"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "unreadable: half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\\uDE00\\uD83D"}]}', "unreadable: half of a surrogate pair"),
        (b'{"note": {"\\ud83d": 1}}', "unreadable: half of a surrogate pair"),
        ({"messages": '[{"role": "user", "content": "\\ud83d"}]'}, "unreadable: messages: half of a surrogate pair"),
        ({"input_ids": [1, 2], "loss_mask": [0]}, "ids: input_ids and loss_mask must be lists of one length"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_row_that_cannot_be_used_says_why(row: Any, reason: str) -> None:
    found = refused(row)
    assert found.startswith(reason)
    assert kind_of(found) in CAUSES
    assert len(found) < 260
    assert "\n" not in found


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [user("\ud83d\ude00")]}, [user("😀")]),
        ({"messages": json.dumps(GOOD)}, GOOD),
        ({"messages": None, "conversations": GOOD}, GOOD),
        ({"messages": [], "conversations": GOOD}, GOOD),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [user("a"), answer("b")]),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "chatgpt", "value": "b"}]},
            [{"role": "system", "content": "s"}, user("a"), answer("b")],
        ),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}]}, [{"role": "system", "content": "t"}]),
        ({"system": " ", "messages": GOOD}, GOOD),
        ({"messages": [user([{"type": "text", "text": "a"}, "b", {"text": "c", "type": None}])]}, [user("a\nb\nc")]),
        ({"messages": [answer([{"type": "output_text", "text": "a"}])]}, [answer("a")]),
        ({"messages": [{"role": "function", "content": "3"}]}, [{"role": "tool", "content": "3"}]),
        ({"messages": [answer(None)]}, [answer("")]),
        ({"messages": [{"role": "assistant"}]}, [answer("")]),
        ({"messages": [answer("a", reasoning="b")]}, [answer("a", "b")]),
        ({"messages": [{**answer("a"), "reasoning": "b", "thinking": "c"}]}, [answer("a", "b")]),
        ({"messages": [{**answer("a"), "thinking": None, "reasoning_content": ""}]}, [answer("a")]),
        ({"messages": [{**answer("a"), "thinking": True}]}, [answer("a")]),
        ({"messages": [answer("a", finish_reason="length")]}, [answer("a", finish_reason="length", finish="length")]),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_every_form_of_messages_is_the_same(row: Any, messages: list[Any]) -> None:
    assert read(row).messages == messages


@pytest.mark.parametrize(
    "message",
    [
        answer("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {"a": None, "b": "c"}}}]),
        answer("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": '{"a": null, "b": "c"}'}}]),
        answer(None, tool_calls=[{"id": "1", "name": "f", "arguments": {"a": None, "b": "c"}}]),
        answer(None, function_call={"id": "1", "name": "f", "arguments": '{"a": null, "b": "c"}'}),
        {"from": "function_call", "value": '{"id": "1", "name": "f", "arguments": {"a": null, "b": "c"}}'},
        {"from": "function_call", "value": '[{"id": "1", "name": "f", "arguments": {"a": null, "b": "c"}}]'},
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_form_of_tool_calls_is_the_same(message: Any) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": None, "b": "c"}}}
    assert read({"messages": [message]}).messages == [answer("", tool_calls=[call])]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("x", "tool_calls that are a str"),
        (["x"], 'no function with a name: "x"'),
        ([None], "no function with a name: null"),
        ([{"function": "f"}], "no function with a name: "),
        ([{"function": {"arguments": "{}"}}], "no function with a name: "),
        ([{"name": "f", "arguments": "{"}], "arguments of f: no JSON"),
        ([{"name": "f", "arguments": "[" * 5000}], "arguments of f: no JSON"),
        ([{"name": "f", "arguments": "[" * 150 + "]" * 150}], "arguments of f: nested deeper than 100"),
        ([{"name": "f", "arguments": "[3]"}], "arguments of f are a list, not an object"),
        ([{"name": "f", "arguments": '{"a": "\\ude00"}'}], "arguments of f: half of a surrogate pair"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tool_call_that_is_none_says_why(calls: Any, reason: str) -> None:
    assert refused({"messages": [answer("", tool_calls=calls)]}).startswith(f"tool call: {reason}")


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_tool_call_may_have_no_arguments(arguments: Any) -> None:
    (message,) = read({"messages": [answer("", tool_calls=[{"name": "f", "arguments": arguments}])]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_may_be_text_or_none() -> None:
    tools = [{"type": "function"}]
    assert [read({"messages": GOOD, "tools": each}).tools for each in (tools, json.dumps(tools))] == [tools, tools]
    for none in (None, [], "", " ", "[]", "null", {}):
        assert read({"messages": GOOD, "tools": none}).tools is None


@pytest.mark.parametrize(("given", "name"), [(7, "7"), ("a", "a"), (None, "x-1"), (True, "True"), ("", "")])
def test_a_row_without_an_id_gets_one(given: Any, name: str) -> None:
    assert read({"id": given, "messages": GOOD}).id == name


def test_unknown_keys_are_told() -> None:
    row = {
        "messages": [user("a"), answer("b", weight=1)],
        "lang": "en",
        "input_ids": [1],
        "loss_mask": [1],
        "nil": None,
    }
    assert read(row).unknown == ("input_ids", "lang", "loss_mask", "messages.weight")
    assert read({"input_ids": [1], "loss_mask": [1], "attention_mask": [1]}).unknown == ("attention_mask",)
    known = {**answer("b"), "finish": "stop", "reasoning": "c", "prompt_ids": [], "generated_ids": [], "name": "d"}
    assert read({"id": 1, "source": "s", "made": {}, "ended": "cut", "tools": [], "messages": [known]}).unknown == ()


# files


@pytest.mark.parametrize("content", [b"%s\n\n \n", b"\xef\xbb\xbf%s", b"%s\r\n", b"\n\n%s", b"%s"])
@pytest.mark.parametrize("packed", [False, True])
def test_blank_lines_and_a_byte_order_mark_are_no_fault(content: bytes, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
    # a line separator of Unicode ends no line
    whole = content % json.dumps({"id": "a", "messages": [user("b\u2028c\x85d")]}, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(whole, mtime=0) if packed else whole)
    (chat,) = read_rows([path])
    assert isinstance(chat, Chat)
    assert chat.messages == [user("b\u2028c\x85d")]
    assert count_rows(path) == 1


def test_names_tell_the_file_and_the_line(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "train-01.jsonl"):
        (tmp_path / name).write_bytes(b"\n".join([json.dumps({"messages": GOOD}).encode(), b"", b"oops"]))
    names = ["train-00-1", "train-00-3", "train-01-1", "train-01-3"]
    assert [row.id for row in read_rows(files_of(tmp_path, "train"))] == names


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.jsonl", json.dumps({"id": "a"}).encode("utf-16"), r"UTF-16(?s:.*)iconv"),
        ("x.jsonl.gz", gzip.compress(json.dumps({"id": "a"}).encode("utf-16"), mtime=0), r"UTF-16(?s:.*)iconv"),
        ("x.jsonl.gz", b"{}", "no .gz"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "cut short"),
        ("x.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:-8] + b"damaged!", "damaged"),
        ("x.parquet", b"{}", "Parquet file cannot be read"),
        ("x.parquet", b"", "Parquet file cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(name: str, content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RedraftError, match=named):
        [*read_rows([tmp_path / name])]
    for path in (tmp_path / "none.jsonl", tmp_path / "none.parquet"):
        with pytest.raises(RedraftError, match="none"):
            [*raw_rows(path)]
        with pytest.raises(RedraftError, match="none"):
            count_rows(path)


def test_files_of_a_split(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"train\.jsonl(?s:.*)redraft regenerate"):
        require_files(tmp_path, "train")
    assert files_of(tmp_path, "train") == []
    for name in ("train-1.jsonl.gz", "train-0.jsonl.gz", "training.jsonl", "heldout.parquet", "train.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in require_files(tmp_path, "train")] == ["train-0.jsonl.gz", "train-1.jsonl.gz"]
    assert [path.name for path in files_of(tmp_path, "heldout")] == ["heldout.parquet"]
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(RedraftError, match=r"several kinds(?s:.*)train\.jsonl, train-0\.jsonl\.gz"):
        files_of(tmp_path, "train")


# tables


def table(path: Path, rows: list[dict[str, Any]], schema: Any = None) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    return path


def test_a_table_gives_the_rows_that_were_written(tmp_path: Path) -> None:
    made = {**answer("four"), "prompt_ids": [1, 2], "generated_ids": [3, 4], "finish": "stop"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    more: dict[str, Any] = {"tools": None, "source": None, "made": None}
    rows = [
        {"id": "a", "messages": [user("2+2?"), made], **more},
        {
            "id": "b",
            "messages": [user("x"), answer(None, tool_calls=[call])],
            **more,
            "tools": '[{"type": "function"}]',
        },
        {"id": "c", "messages": [user("x"), answer("y", "z")], "source": "s", "made": {"template": {"sha256": "t"}}},
    ]

    def seen(row: Chat | Refused) -> Any:
        assert isinstance(row, Chat)
        return row.id, row.messages, row.tools, row.source, row.made

    lines = [seen(read(row)) for row in rows]
    assert [seen(row) for row in read_rows([table(tmp_path / "x.parquet", rows)])] == lines
    text = [{**row, "messages": json.dumps(row["messages"]), "made": json.dumps(row["made"])} for row in rows]
    assert [seen(row) for row in read_rows([table(tmp_path / "y.parquet", text)])] == lines


def test_values_that_json_does_not_have_are_text(tmp_path: Path) -> None:
    day = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    row = {
        "id": b"a",
        "when": day,
        "cost": Decimal("1.50"),
        "raw": b"\x01",
        "messages": [{"role": b"user", "content": b"\xc3\xa9"}],
    }
    (chat,) = read_rows([table(tmp_path / "x.parquet", [row])])
    assert isinstance(chat, Chat)
    assert (chat.id, chat.messages) == ("a", [user("é")])
    assert chat.row["cost"] == "1.50"
    assert str(chat.row["when"]).startswith("2026-01-02")
    json.dumps(chat.row)


def test_one_odd_row_of_a_table_is_left_out_alone(tmp_path: Path) -> None:
    raw = pyarrow.array([b"good", b"\xff\xfe", b"fine"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    messages = pyarrow.array([GOOD] * 3)
    pyarrow.parquet.write_table(pyarrow.table({"id": broken, "messages": messages}), tmp_path / "x.parquet")
    path = tmp_path / "x.parquet"
    one, two, three = (read_row(pickle.loads(pickle.dumps(raw)), name_of(path, at)) for at, raw in raw_rows(path))  # noqa: S301
    assert (one.id, two.id, three.id) == ("good", "x-2", "fine")
    assert isinstance(two, Refused)
    assert two.reason.startswith("unreadable: 'utf-8' codec can't decode byte 0xff")
    odd = [{"messages": [{"role": "user", "content": text}]} for text in (b"a", b"\xff")]
    found = [*read_rows([table(tmp_path / "y.parquet", odd)])]
    assert isinstance(found[0], Chat)
    assert isinstance(found[1], Refused)
    assert found[1].reason.startswith("unreadable: not UTF-8")


def test_arguments_as_a_map_are_an_object(tmp_path: Path) -> None:
    maps = pyarrow.map_(pyarrow.string(), pyarrow.string())
    call = pyarrow.struct({"name": pyarrow.string(), "arguments": maps})
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": pyarrow.list_(call)})
    schema = pyarrow.schema({"messages": pyarrow.list_(message)})
    row = {"messages": [answer("", tool_calls=[{"name": "f", "arguments": [("a", "b")]}])]}
    (chat,) = read_rows([table(tmp_path / "x.parquet", [row], schema)])
    assert isinstance(chat, Chat)
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": "b"}
    assert chat.id == "x-1"


def test_the_corpus_is_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"id": str(number), "messages": [user(f"{number}?"), answer("four", "")]} for number in range(5)]
    whole = b"\n".join(json.dumps(row).encode() for row in rows)
    (tmp_path / "a.jsonl").write_bytes(whole)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(whole, mtime=0))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", table(tmp_path / "c.parquet", rows)]
    params = CorpusParams(max_length=99, max_dropped=0)
    found = [tokenize_file(path, fast("plain"), params)[0] for path in paths]
    assert len({corpus.identity["content"] for corpus in found}) == 1
    assert [corpus.samples for corpus in found] == [[str(number) for number in range(5)]] * 3
