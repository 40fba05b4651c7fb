"""Chats as people and other tools write them: JSONL, and what two files of them have in common."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_text

FORM = '{"id": "...", "messages": [{"role": "user", "content": "..."}, ...]}'


def read_chats(path: Path) -> list[dict[str, Any]]:
    """Read JSONL lines of `{"id": str, "messages": [{"role": str, "content": str}, ...]}`; blank lines may end it.

    Raises:
        RedraftError: no file, no lines, bytes that are not UTF-8, a line that is not JSON or lacks a key, an id that
            stands twice.
    """
    if not path.is_file():
        raise RedraftError("A corpus file is missing.", where=path, fix="make it with `redraft regenerate PROMPTS`")
    # not splitlines: a line separator of Unicode may stand inside a JSON string
    lines = read_text(path).rstrip().split("\n")
    chats = [_chat(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    ids = [chat["id"] for chat in chats]
    twice = sorted({str(name) for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise RedraftError(
            "The corpus needs lines, each with an id of its own.",
            where=path,
            found=f"{len(ids)} lines, {len(set(ids))} ids; more than once: {some(twice)}",
        )
    return chats


def _chat(line: str, where: str) -> dict[str, Any]:
    try:
        chat = json.loads(line)
    except json.JSONDecodeError as error:
        found = f"no JSON, {error}" if line.strip() else "an empty line"
        raise RedraftError("A line of the corpus cannot be read.", where=where, expected=FORM, found=found) from error
    if fault := _fault(chat):
        raise RedraftError("A line of the corpus cannot be read.", where=where, expected=FORM, found=fault)
    return chat


def _fault(chat: Any) -> str | None:
    """What a chat lacks."""
    if re.search("[\ud800-\udfff]", json.dumps(chat, ensure_ascii=False)):
        return "half of a surrogate pair, which no tokenizer takes"
    if not isinstance(chat, dict):
        return f"a {type(chat).__name__}"
    lacking = [name for name in ("id", "messages") if name not in chat]
    if lacking:
        return f"no {' and no '.join(lacking)}; keys: {some(list(chat)) or 'none'}"
    if not isinstance(chat["id"], str | int):
        return f"an id that is a {type(chat['id']).__name__}"
    if not isinstance(chat["messages"], list):
        return f"messages that are a {type(chat['messages']).__name__}"
    for message in chat["messages"]:
        if not (isinstance(message, dict) and {"role", "content"} <= message.keys()):
            return f"a message without role and content: {json.dumps(message, ensure_ascii=False)[:80]}"
    return None


def conversations(path: Path) -> dict[str, list[str]]:
    """Ids of the chats of a file by the text of their messages: roles and contents, and nothing else."""
    found: dict[str, list[str]] = defaultdict(list)
    for chat in read_chats(path):
        told = [[message["role"], message["content"]] for message in chat["messages"]]
        found[json.dumps(told, ensure_ascii=False)].append(str(chat["id"]))
    return found


def require_apart(heldout: dict[str, list[str]], trained: dict[str, list[str]], where: object) -> None:
    """Refuse held-out `conversations` that are also trained on: what is measured on them would be memory.

    Raises:
        RedraftError: naming chats of both files.
    """
    both = [f"{heldout[text][0]} is {trained[text][0]}" for text in heldout if text in trained]
    if both:
        raise RedraftError(
            "The same conversation is held out and trained on.",
            where=where,
            expected="no conversation in both files",
            found=f"{len(both)} of {len(heldout)}: {some(both)}",
            fix="remove them from one of the two: figures of held-out chats must be of new ones",
        )
