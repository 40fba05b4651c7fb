"""Chats as people and other tools write them: JSONL, plain or .gz, and Parquet; OpenAI messages and ShareGPT."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from redraft.frame.errors import RedraftError, some

Message: TypeAlias = dict[str, Any]
Raw: TypeAlias = "bytes | dict[str, Any]"

FORM = '{"id": "...", "messages": [{"role": "user", "content": "..."}, ...]}'
KINDS = (".jsonl", ".jsonl.gz", ".parquet")
KNOWN = {"id", "source", "messages", "conversations", "system", "tools", "made", "ended", "input_ids", "loss_mask"}
ROLES = {"system", "developer", "user", "assistant", "tool"}
_SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "observation": "tool", "function_response": "tool", **{role: role for role in ROLES},
}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers and data sets give the reasoning of an answer; the first is what templates read."""
_BATCH = 1024
_TEXT_WIDTH = 60


@dataclass(frozen=True)
class Chat:
    """One row that can be read."""

    id: str
    messages: list[Message]
    """`role`, `content` (a text, never None) and what else the row has; answers by the target carry their ids."""
    tools: list[dict[str, Any]] | None = None
    """Function definitions, for the template."""
    source: str = ""
    made: dict[str, Any] | None = None
    """What made the answers, as `redraft regenerate` writes it."""
    tokens: tuple[list[int], list[int]] | None = None
    """Ids and loss mask, of a row that another tool tokenised."""
    unknown: tuple[str, ...] = ()
    """Keys of the row that nothing reads."""
    row: dict[str, Any] = field(default_factory=dict, repr=False)
    """The row as it was."""


@dataclass(frozen=True)
class Refused:
    """One row that cannot be used, and why: a kind, and after a colon the detail."""

    id: str
    reason: str


class UnusableError(Exception):
    """Why a chat cannot be used: a kind, by which it is counted, and after a colon what was found."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.detail = " ".join(detail.split())[:200]
        super().__init__(f"{kind}: {self.detail}" if detail else kind)


def files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split: `train.jsonl`, `train.jsonl.gz` or `train.parquet`, or several of a kind, `train-*`.

    Raises:
        RedraftError: files of two kinds, so that it is not told which one counts.
    """
    found = {kind: sorted([*folder.glob(f"{split}{kind}"), *folder.glob(f"{split}-*{kind}")]) for kind in KINDS}
    there = {kind: paths for kind, paths in found.items() if paths}
    if len(there) > 1:
        raise RedraftError(
            "A split of the corpus has files of several kinds.",
            where=folder,
            expected=f"{split} as one of {', '.join(KINDS)}",
            found=some([path.name for paths in there.values() for path in paths]),
            fix="remove what is not meant",
        )
    return next(iter(there.values()), [])


def require_files(folder: Path, split: str) -> list[Path]:
    """`files_of`, and at least one.

    Raises:
        RedraftError: none.
    """
    found = files_of(folder, split)
    if not found:
        raise RedraftError(
            "A corpus file is missing.",
            where=folder / f"{split}.jsonl",
            fix="make it with `redraft regenerate PROMPTS`",
        )
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file, or an unpacked stream.

    Raises:
        RedraftError: no such file, no permission, or a damaged archive, also while it is read.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RedraftError("A packed file cannot be read.", where=path, found=error, cause="it is cut short") from error
    except OSError as error:
        raise RedraftError("A file cannot be read.", where=path, found=error.strerror or error) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, its bytes) of lines that are not blank; a byte order mark is no part of the first."""
    with _opened(path) as file:
        head = file.read(4)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RedraftError(
                "A file is not UTF-8.",
                where=path,
                found="UTF-16, by its first bytes",
                fix=f"convert it, for example: iconv -f UTF-16 -t UTF-8 {path}",
            )
        file.seek(3 if head.startswith(b"\xef\xbb\xbf") else 0)
        # not splitlines: a line separator of Unicode may stand inside a JSON string
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _table(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RedraftError("A Parquet file cannot be read.", where=path, found=error) from error


def _table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow

    number = 0
    try:
        for batch in _table(path).iter_batches(_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise RedraftError(
            "A Parquet file cannot be read.", where=f"{path}, after row {number}", found=error
        ) from error


def raw_rows(path: Path) -> Iterator[tuple[int, Raw]]:
    """(number from 1, row as it stands) of a file of one of `KINDS`; blank lines are none.

    Raises:
        RedraftError: the file cannot be read.
    """
    yield from _table_rows(path) if path.suffix == ".parquet" else _lines(path)


def count_rows(path: Path) -> int:
    """Rows of a file; see `raw_rows`."""
    return _table(path).metadata.num_rows if path.suffix == ".parquet" else sum(1 for _ in _lines(path))


def read_row(raw: Raw, name: str) -> Chat | Refused:
    """A row as a chat; `name` is the id of a row that has none."""
    try:
        row = _object(raw)
        if not isinstance(row.get("id", 0), str | int):
            raise UnusableError("unreadable", f"an id that is a {type(row['id']).__name__}")
        name = str(row.get("id", name))
        return _chat(row, name)
    except UnusableError as fault:
        return Refused(name, str(fault))


def read_rows(paths: Iterable[Path]) -> Iterator[Chat | Refused]:
    """Every row of `paths`, in order. See `raw_rows` and `read_row`."""
    for path in paths:
        for number, raw in raw_rows(path):
            yield read_row(raw, name_of(path, number))


def name_of(path: Path, number: int) -> str:
    """The id of a row that has none."""
    return f"{path.name.split('.')[0]}-{number}"


def _object(raw: Raw) -> dict[str, Any]:
    if isinstance(raw, bytes):
        try:
            row = json.loads(raw.decode())
        except UnicodeDecodeError as error:
            raise UnusableError("unreadable", f"not UTF-8: {error.reason}: 0x{raw[error.start]:02x}") from error
        except (ValueError, RecursionError) as error:
            raise UnusableError("unreadable", f"no JSON, {error}") from error
        if not isinstance(row, dict):
            raise UnusableError("unreadable", f"a {type(row).__name__}")
        row = {key: value for key, value in row.items() if value is not None}
    else:
        row = _without_null(raw)
    if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False, default=str)):
        raise UnusableError("unreadable", "half of a surrogate pair, which no tokenizer takes")
    return row


def _without_null(value: Any) -> Any:
    """`value` without the keys that are null: a table writes them wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _chat(row: dict[str, Any], name: str) -> Chat:
    given = _parsed(row.get("messages", row.get("conversations")), "messages")
    source, made, tools = (row.get(key) for key in ("source", "made", "tools"))
    rest: dict[str, Any] = {
        "source": source if isinstance(source, str) else "",
        "made": made if isinstance(made, dict) else None,
        "unknown": tuple(sorted(row.keys() - KNOWN)),
        "row": row,
    }
    if given is None and {"input_ids", "loss_mask"} <= row.keys():
        return Chat(name, [], tokens=_tokens(row["input_ids"], row["loss_mask"]), **rest)
    if given is None:
        raise UnusableError("unreadable", f"no messages; keys: {some(list(row)) or 'none'}")
    if not isinstance(given, list):
        raise UnusableError("unreadable", f"messages that are a {type(given).__name__}")
    messages = [_message(message) for message in given]
    if isinstance(row.get("system"), str) and row["system"].strip() and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return Chat(name, messages, tools=_tools(tools), **rest)


def _tokens(ids: Any, mask: Any) -> tuple[list[int], list[int]]:
    if not (_whole(ids) and isinstance(mask, list) and len(mask) == len(ids) and all(flag in (0, 1) for flag in mask)):
        raise UnusableError("ids", "input_ids and loss_mask must be lists of one length, of ids and of 0 and 1")
    return ids, [int(flag) for flag in mask]


def _whole(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(number) is int and 0 <= number < 2**31 for number in ids)


def _parsed(value: Any, name: str) -> Any:
    """A value of a row; a flat table keeps lists as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError) as error:
        raise UnusableError("unreadable", f"{name}: no JSON, {error}") from error


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(tools, "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnusableError("unreadable", "tools that are no list of definitions")
    return tools or None


def _message(message: Any) -> Message:
    """A message with a known `role` and a text as `content`; what else it has is kept."""
    if not isinstance(message, dict):
        raise UnusableError("unreadable", f"a message without role and content: {_short(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message)
    role = message.get("role")
    if role is None:
        raise UnusableError("unreadable", f"a message without role and content: {_short(message)}")
    role = "tool" if role == "function" else role
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableError("unknown role", str(role))
    reasoning = next((message.pop(name) for name in REASONING if isinstance(message.get(name), str)), "")
    for name in REASONING:
        message.pop(name, None)
    calls = _calls(message.pop("tool_calls", None))
    content = _text(message.get("content"), role)
    if content is None and role != "assistant":
        raise UnusableError("no content", f"a message of role {role}")
    more = {"reasoning_content": reasoning} if reasoning else {}
    if message.get("finish_reason") == "length":  # as servers tell it
        more["finish"] = "length"
    return {**message, "role": role, "content": content or "", **more, **({"tool_calls": calls} if calls else {})}


def _of_sharegpt(message: Message) -> Message:
    sender, value = message["from"], message.get("value")
    beside = {key: each for key, each in message.items() if key not in ("from", "value")}
    if sender == "function_call":
        calls = _parsed(value, "function_call")
        return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls], **beside}
    role = _SHAREGPT.get(sender) if isinstance(sender, str) else None
    return {"role": role or sender, **({} if value is None else {"content": value}), **beside}


def _text(content: Any, role: str) -> str | None:
    """A content as one text: its parts are joined by line ends, as vLLM does."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableError("no text", f"a content that is a {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableError("no text", f"a part of type {kind} in a message of role {role}")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls, their arguments as objects: servers parse them before they render."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise UnusableError("tool call", f"tool_calls that are a {type(calls).__name__}")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableError("tool call", f"no function with a name: {_short(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise UnusableError("tool call", f"arguments of {function['name']} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise UnusableError(
            "tool call", f"arguments of {function['name']} are a {type(arguments).__name__}, not an object"
        )
    beside = {key: value for key, value in call.items() if key not in ("name", "arguments", "function")}
    return {"type": "function", **beside, "function": {**function, "arguments": arguments}}


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:_TEXT_WIDTH]
