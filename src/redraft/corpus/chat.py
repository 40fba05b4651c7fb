"""Chats to token ids and loss mask, by the target's own tokenizer and template.

Only assistant answers are supervised: the content and the end-of-turn token, not the header before it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from redraft.frame.errors import RedraftError, some

Message = dict[str, str]
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "tiktoken*")


class RenderError(RedraftError):
    """A chat that the chat template does not render."""

    def __init__(self, error: Exception) -> None:
        self.reason = " ".join(str(error).split())[:200] or type(error).__name__
        super().__init__(
            "The chat template does not render a chat.",
            found=f"{type(error).__name__}: {self.reason}",
            cause="roles that do not alternate, a content that is no text, or a chat without a prompt",
        )


def chat_template(tokenizer: Any) -> tuple[str | None, str]:
    """Name and text of the chat template that is used: of several `default`; None if there is one without a name.

    Raises:
        RedraftError: several, none of which is called `default`.
    """
    given = tokenizer.chat_template
    if not isinstance(given, dict):
        return None, given
    if "default" not in given:
        raise RedraftError(
            "The target has several chat templates, and none is the default.",
            where="chat_template of the tokenizer",
            expected="one that is called default",
            found=some(sorted(given)),
            fix="name the one that you serve with default, or leave it alone in the target's folder",
        )
    return "default", given["default"]


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template's text."""
    return hashlib.sha256(chat_template(tokenizer)[1].encode()).hexdigest()


def render(tokenizer: Any, messages: list[Message], *, header: bool) -> str:
    """`messages` as text by the chat template; with `header` up to where the answer begins.

    Raises:
        RenderError: the template, which is a program of others, raises on them.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)
    except Exception as error:
        raise RenderError(error) from error


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Ids of `messages` with the header of the answer that is to be generated; see `render`."""
    return tokenizer(render(tokenizer, messages, header=True), add_special_tokens=False)["input_ids"]


@dataclass
class Sample:
    """One tokenised chat."""

    ids: list[int]
    mask: list[int]
    """1 where the token belongs to an answer, else 0; as long as `ids`."""
    dropped: str | None = None
    """Why nothing is supervised: `no answer`, `boundary` (a token crosses it), `truncated` or `template: ` and why."""
    source: str = ""
    """Where the chat came from, as the corpus file says."""


def tokenize(tokenizer: Any, messages: list[Message], max_length: int) -> Sample:
    """Tokenise one chat of `role` and `content`, cut to `max_length` tokens.

    An answer is what `messages[:i + 1]` adds to `messages[:i]` with its generation prompt, without trailing white
    space. Where the ids of that prefix are not a prefix of the ids of the whole, a token crosses the boundary and
    the sample is dropped rather than shifted by one; so it is where the template refuses a prefix.
    """
    try:
        return _tokenize(tokenizer, messages, max_length)
    except RenderError as refusal:
        return Sample([], [], f"template: {refusal.reason}")


def _tokenize(tokenizer: Any, messages: list[Message], max_length: int) -> Sample:
    ids = tokenizer(render(tokenizer, messages, header=False), add_special_tokens=False)["input_ids"]
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = prompt_ids(tokenizer, messages[:turn])
        answered = render(tokenizer, messages[: turn + 1], header=False).rstrip()
        end = tokenizer(answered, add_special_tokens=False)["input_ids"]
        if ids[: len(start)] != start or ids[: len(end)] != end:
            return Sample(ids[:max_length], [0] * min(len(ids), max_length), "boundary")
        mask[len(start) : len(end)] = [1] * (len(end) - len(start))
    reason = None if any(mask) else "no answer"
    if reason is None and not any(mask[:max_length]):
        reason = "truncated"
    return Sample(ids[:max_length], mask[:max_length], reason)


def show_sample(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """A tokenised chat as text, one line a token: `+` where it is supervised, id, and the token in quotes."""
    pairs = zip(ids, mask, strict=True)
    return "".join(f"{'+' if flag else ' '} {number:>7} {tokenizer.decode([number])!r}\n" for number, flag in pairs)
