"""Chats as people and other tools write them: OpenAI messages, ShareGPT, or ids with their mask."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from redraft.corpus.files import Raw, name_of, raw_rows
from redraft.frame.errors import some

Message: TypeAlias = dict[str, Any]

FORM = '{"id": "...", "messages": [{"role": "user", "content": "..."}, ...]}'
KNOWN = {"id", "source", "messages", "conversations", "system", "tools", "made", "ended"}
READ = {
    "role", "content", "name", "from", "value", "reasoning_content", "reasoning", "thinking", "tool_calls",
    "function_call", "tool_call_id", "finish", "finish_reason", "prompt_ids", "generated_ids", "keeps",
}  # fmt: skip
"""Likewise of a message; what else it has is there for the template alone."""
ROLES = {"system", "developer", "user", "assistant", "tool"}
_SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "observation": "tool", "function_response": "tool", **{role: role for role in ROLES},
}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers and data sets give the reasoning of an answer; the first is what templates read."""
_DEEPEST = 100
_HALF = re.compile("[\ud800-\udfff]")
_TEXT_PARTS = ("text", "input_text", "output_text")
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


def _object(raw: Raw) -> dict[str, Any]:
    if isinstance(raw, Exception):
        raise UnusableError("unreadable", str(raw)) from raw
    try:
        text = raw.decode() if isinstance(raw, bytes) else json.dumps(_without_null(raw), default=_as_text)
    except UnicodeDecodeError as error:
        raise UnusableError("unreadable", f"not UTF-8: {error.reason}: 0x{error.object[error.start]:02x}") from error
    except (TypeError, ValueError) as error:
        raise UnusableError("unreadable", str(error)) from error
    row = _loads(text, "unreadable", "")
    if not isinstance(row, dict):
        raise UnusableError("unreadable", f"a {type(row).__name__}")
    return {key: value for key, value in row.items() if value is not None}


def _as_text(value: Any) -> str:
    """A value of a table that JSON does not have: bytes that hold text, a time, a number of many digits."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _loads(text: str, kind: str, what: str) -> Any:
    """The value of a JSON text that can be worked with: rendered, encoded, written again.

    Raises:
        UnusableError: of `kind`; it cannot.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableError(kind, f"{what}no JSON, {error}") from error
    if text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise UnusableError(kind, f"{what}nested deeper than {_DEEPEST}")
    if "\\ud" in text.lower() and _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise UnusableError(kind, f"{what}half of a surrogate pair, which no tokenizer takes")
    return value


def _depth(value: Any) -> int:
    """How deep lists and objects are nested in each other."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return depth


def _without_null(value: Any) -> Any:
    """`value` without the keys that are null: a table writes them wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _chat(row: dict[str, Any], name: str) -> Chat:
    given = _parsed(row.get("messages") or row.get("conversations"), "messages")
    source, made = row.get("source"), _parsed(row.get("made"), "made")
    tokens = {"input_ids", "loss_mask"}
    rest: dict[str, Any] = {
        "source": source if isinstance(source, str) else "",
        "made": made if isinstance(made, dict) else None,
        "unknown": tuple(sorted(row.keys() - KNOWN - (tokens if given is None else set()))),
        "row": row,
    }
    if given is None and tokens <= row.keys():
        return Chat(name, [], tokens=_tokens(row["input_ids"], row["loss_mask"]), **rest)
    if given is None:
        raise UnusableError("unreadable", f"no messages; keys: {some(list(row)) or 'none'}")
    if not isinstance(given, list):
        raise UnusableError("unreadable", f"messages that are a {type(given).__name__}")
    odd = {key for message in given if isinstance(message, dict) for key in message} - READ
    rest["unknown"] += tuple(f"messages.{key}" for key in sorted(odd))
    messages = [_message(message) for message in given]
    if isinstance(row.get("system"), str) and row["system"].strip() and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return Chat(name, messages, tools=_tools(row.get("tools")), **rest)


def _tokens(ids: Any, mask: Any) -> tuple[list[int], list[int]]:
    if not (are_ids(ids) and isinstance(mask, list) and len(mask) == len(ids) and all(flag in (0, 1) for flag in mask)):
        raise UnusableError("ids", "input_ids and loss_mask must be lists of one length, of ids and of 0 and 1")
    return ids, [int(flag) for flag in mask]


def are_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether a value of a row is a list of token ids, of any vocabulary."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**31 for number in value)


def _parsed(value: Any, name: str) -> Any:
    """A value of a row, None if it is empty; a flat table keeps lists as JSON."""
    if isinstance(value, str):
        value = _loads(value, "unreadable", f"{name}: ") if value.strip() else None
    return value or None


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
    calls = _calls(message.pop("tool_calls", None) or message.pop("function_call", None))
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
        if not isinstance(text, str) or (isinstance(part, dict) and (part.get("type") or "text") not in _TEXT_PARTS):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableError("no text", f"a part of type {kind} in a message of role {role}")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls, their arguments as objects: servers parse them before they render."""
    if not calls:
        return []
    calls = [calls] if isinstance(calls, dict) else calls  # `function_call` of OpenAI's first form
    if not isinstance(calls, list):
        raise UnusableError("tool call", f"tool_calls that are a {type(calls).__name__}")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    beside = dict(call) if isinstance(call, dict) else {}
    function = beside.pop("function", None)
    if function is None:
        function = {key: beside.pop(key) for key in ("name", "arguments") if key in beside}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableError("tool call", f"no function with a name: {_short(call)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _loads(arguments, "tool call", f"arguments of {function['name']}: ") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise UnusableError(
            "tool call", f"arguments of {function['name']} are a {type(arguments).__name__}, not an object"
        )
    return {"type": "function", **beside, "function": {**function, "arguments": arguments}}


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:_TEXT_WIDTH]
