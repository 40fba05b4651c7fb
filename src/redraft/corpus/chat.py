"""Chats as the target is served with them: the chat template with its arguments, and which of its text is an answer.

Text is taken for an answer only where that is proven: what the template adds to the generation prompt must be the
content (after its reasoning) and an end marker, and nothing else.
"""

import datetime
import hashlib
import inspect
import json
import re
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any

from redraft.corpus.encode import Encoder, whole
from redraft.corpus.rows import Message, UnusableError
from redraft.corpus.tokenizer import special_tokens
from redraft.frame.errors import RedraftError, some
from redraft.frame.profile import TemplateParams

AS_IT_IS = TemplateParams()
CUT = "length"
"""`finish` of an answer that the token limit ended; `stop` is one that the target ended."""
Tools = list[dict[str, Any]] | None
_SHOWN = 60


class RenderError(UnusableError):
    """A chat that the chat template does not render."""

    def __init__(self, error: Exception) -> None:
        super().__init__("template", str(error) or type(error).__name__)


def chat_template(tokenizer: Any, how: TemplateParams = AS_IT_IS) -> tuple[str | None, str]:
    """Name and text of the chat template that is used: of several `how.name` or `default`; None if it has no name.

    Raises:
        RedraftError: there is none of that name.
    """
    given = tokenizer.chat_template
    if not isinstance(given, dict):
        if how.name is not None:
            raise _no_template(how.name, ["one template without a name"])
        return None, given
    name = how.name or "default"
    if name not in given:
        raise _no_template(name, sorted(given))
    return name, given[name]


def _no_template(name: str, there: list[str]) -> RedraftError:
    return RedraftError(
        f"The target has no chat template of the name {name}.",
        where="chat_template of the tokenizer",
        expected=f"one that is called {name}",
        found=some(there),
        fix="set target.template.name in the profile to the one that you serve with",
    )


def require_arguments(tokenizer: Any, how: TemplateParams) -> None:
    """Refuse an argument that neither the template nor the tokenizer's own class reads: it would change nothing.

    Raises:
        RedraftError: with the nearest word of the template.
    """
    given = tokenizer.chat_template
    text = " ".join(given.values()) if isinstance(given, dict) else given
    words = {*re.findall(r"\w+", text), *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in how.arguments.keys() - words:
        near = get_close_matches(name, words, 1)
        raise RedraftError(
            "The chat template has no such argument.",
            where=f"target.template.arguments in the profile: {name}",
            fix=f"did you mean {near[0]}?" if near else "remove it, or take the template that you serve with",
        )


def template_record(tokenizer: Any, how: TemplateParams = AS_IT_IS) -> dict[str, Any]:
    """What decides how chats are rendered: hash, and name, arguments and date where they are given."""
    require_arguments(tokenizer, how)
    name, _ = chat_template(tokenizer, how)
    more = {"name": name, "arguments": how.arguments or None, "date": how.date}
    return {"sha256": template_hash(tokenizer, how), **{key: each for key, each in more.items() if each is not None}}


def template_hash(tokenizer: Any, how: TemplateParams = AS_IT_IS) -> str:
    """SHA-256 of the chat template's text and arguments.

    The date is no part of it: an answer of yesterday is still the target's own, to its own prompt.
    """
    parts = [chat_template(tokenizer, how)[1]]
    if isinstance(tokenizer.chat_template, dict) and how.name is None and "tool_use" in tokenizer.chat_template:
        parts.append(tokenizer.chat_template["tool_use"])
    if how.arguments:
        parts.append(json.dumps(how.arguments, sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def has_tools(tokenizer: Any, how: TemplateParams = AS_IT_IS) -> bool:
    """Whether the template has a place for function definitions."""
    given = tokenizer.chat_template
    return "tool" in (" ".join(given.values()) if isinstance(given, dict) else chat_template(tokenizer, how)[1])


def render(
    tokenizer: Any, messages: list[Message], *, header: bool, tools: Tools = None, how: TemplateParams = AS_IT_IS
) -> str:
    """`messages` as text by the chat template; with `header` up to where the answer begins.

    Raises:
        RenderError: the template, which is a program of others, raises on them.
    """
    given: dict[str, Any] = {"tools": tools} if tools else {}
    if how.name is not None:
        given["chat_template"] = how.name
    try:
        if "strftime_now" in str(tokenizer.chat_template):
            given["chat_template"] = _dated(tokenizer.get_chat_template(how.name, tools), how.date)
        # always told: the tokenizer's own class may have another default
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=header, **given, **how.arguments
        )
    except Exception as error:
        raise RenderError(error) from error
    if not isinstance(text, str):
        raise RenderError(TypeError(f"it gives a {type(text).__name__}, not a text"))
    return text


@lru_cache
def _dated(template: str, date: str | None) -> str:
    """The template with a `strftime_now` of its own, of a day that does not change.

    transformers lets no function through to a template.
    """
    forms = {form for pair in re.findall(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')""", template) for form in pair}
    known = {form: datetime.date.fromisoformat(date).strftime(form) for form in sorted(forms)} if date else {}
    texts = json.dumps(known, ensure_ascii=False)
    fault = json.dumps("it writes a date in a form that it makes itself" if date else _NO_DATE)
    found = f"{{{{ {texts}[form] if form in {texts} else raise_exception({fault}) }}}}"
    # the line end is taken away with the tag, and the template begins a line as before
    return f"{{% macro strftime_now(form) %}}{found}{{% endmacro %}}\n{template}"


_NO_DATE = "it prints today's date: set target.template.date in the profile"


def prompt_ids(
    tokenizer: Any, messages: list[Message], tools: Tools = None, how: TemplateParams = AS_IT_IS
) -> list[int]:
    """Ids of `messages` with the header of the answer that is to be generated; see `render` and `Encoder`."""
    (ids,) = whole(tokenizer, [render(tokenizer, messages, header=True, tools=tools, how=how)])
    return ids


class Markers:
    """The special tokens of a tokenizer, as they are looked for in text; and its `Encoder`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # runs of white space, which some tokenizers add, mark nothing
        texts = sorted(filter(str.strip, special_tokens(tokenizer).values()), key=len, reverse=True)
        any_of = "|".join(map(re.escape, texts)) or r"(?!)"
        opens = "|".join(re.escape(text) for text in texts if "/" not in text) or r"(?!)"
        self.special = re.compile(any_of)
        self.closing = re.compile(rf"(?:({any_of})(?:{any_of}|\s)*+|\s*+)\Z")
        """What may follow an answer; group 1 is its end marker."""
        # a channel's name between two markers (gpt-oss) is markup as well
        named = rf"(?:[a-z]++(?={any_of}))?"
        self.markup = re.compile(rf"(?:(?:{any_of}){named}|</?[\w:|-]+>|\[/?[A-Z_]+\]|\s)*+")
        """What may stand around reasoning: no words."""
        self.opening = re.compile(rf"(?:(?:{opens}){named}|<[\w:|-]+>|\[[A-Z_]+\]|\s)*+")
        """What may stand before it: nothing that closes."""

    @cached_property
    def encode(self) -> Encoder:
        """Encodes many texts at once; made when it is first needed."""
        return Encoder(self._tokenizer)

    def end(self, text: str, answer: str) -> str:
        """The marker behind `answer`, which ends `text`; the empty text if there is none."""
        found = self.closing.match(text, text.rindex(answer) + len(answer)) if answer in text else None
        return (found[1] or "") if found else ""

    def words(self, text: str) -> set[str]:
        """Words that are no markup."""
        return set(re.findall(r"\w+", re.sub(rf"{self.special.pattern}|</?[\w:|-]+>|\[/?[A-Z_]+\]", " ", text)))


def answer_text(markers: Markers, prompt: str, whole: str, message: Message, end: str = "") -> str:
    """What the target would have generated for `message`: what `whole` adds to `prompt`, up to its end marker.

    Args:
        markers: of the target's tokenizer.
        prompt: the turns before, with the header of the answer.
        whole: the turns before and `message`.
        message: an answer.
        end: the marker that ends an answer; needed for one with tool calls, or with reasoning alone.

    Raises:
        UnusableError: it is something else than reasoning, content, tool calls and an end marker, and what it is.
    """
    content, reasoning = message["content"], message.get("reasoning_content", "").strip()
    calls = message.get("tool_calls", [])
    if not whole.startswith(prompt):
        at = next((at for at, pair in enumerate(zip(whole, prompt, strict=False)) if len(set(pair)) > 1), len(whole))
        found = f"the template writes {whole[at:][:_SHOWN]!r} where the prompt has {prompt[at:][:_SHOWN]!r}"
        raise UnusableError("rewritten", found)
    text = whole[len(prompt) :]
    at = 0
    if reasoning:
        at = _after(text, 0, reasoning, markers.opening, "reasoning")
        content = content.lstrip()  # white space between the two is the template's
    at = _after(text, at, content, markers.markup if reasoning and content else None, "answer")
    rest = text[at:]
    if calls:
        _require_calls(markers, rest, calls, thought=bool(reasoning))
    if content and not calls:
        closed = markers.closing.fullmatch(rest)
        end = (closed[1] or "") if closed else ""
        answer, known = text[:at] + end, closed is not None
    else:  # no content, behind which the end marker would be the next one
        answer = text.rstrip()
        known = answer.endswith(end) and (bool(calls) or markers.markup.fullmatch(rest) is not None)
    if not known:
        raise UnusableError("rewritten", f"the template writes {rest[:_SHOWN]!r} after the answer")
    if end and end in answer[: -len(end)]:
        raise UnusableError("rewritten", f"the answer holds the end marker {end}")
    return text[:at] if message.get("finish") == CUT else answer


def _after(text: str, start: int, wanted: str, between: re.Pattern[str] | None, name: str) -> int:
    """Where `wanted` ends, which must stand in `text` at `start`, after nothing but what `between` allows."""
    first = at = text.find(wanted, start)
    if at < 0:
        raise UnusableError("rewritten", f"the template changes or leaves out the {name}: {text[start:][:_SHOWN]!r}")
    allowed = between.match(text, start) if between else None
    reach = allowed.end() if allowed else start
    while start <= at <= reach:  # it may stand within a marker as well: the reasoning `think`
        if at == start or (between and between.fullmatch(text, start, at)):
            return at + len(wanted)
        at = text.find(wanted, at + 1)
    raise UnusableError("rewritten", f"the template writes {text[start:first][:_SHOWN]!r} before the {name}")


_GLUE = {
    "name", "arguments", "args", "parameters", "parameter", "function", "functions", "tool", "tool_call", "tool_calls",
    "id", "type", "json", "to", "commentary", "true", "false", "null", "True", "False", "None",
}  # fmt: skip
"""Words of the forms in which templates write tool calls."""


def _require_calls(markers: Markers, text: str, calls: list[dict[str, Any]], *, thought: bool) -> None:
    """All of `calls` must stand in `text`, and nothing else; without reasoning not even an empty place for it."""
    said = " ".join([json.dumps(calls), json.dumps(calls, ensure_ascii=False), *_leaves(calls)])
    for call in calls:
        function = call["function"]
        for wanted in (function["name"], *_leaves(function["arguments"])):
            forms = (wanted, json.dumps(wanted)[1:-1], json.dumps(wanted, ensure_ascii=False)[1:-1])
            if not any(form in text for form in forms):
                raise UnusableError("rewritten", f"the template leaves {wanted[:_SHOWN]!r} of a tool call out")
    before = text[: max(0, text.find(calls[0]["function"]["name"]))]
    if not thought and re.search(r"think\w*[>\]]", before, re.IGNORECASE):
        raise UnusableError("rewritten", f"the template writes {before[:_SHOWN]!r} before a tool call")
    other = {word for word in markers.words(text) - markers.words(said) - _GLUE if not re.fullmatch(r"\d\d?", word)}
    if other:
        shown = next(word for word in re.findall(r"\w+", text) if word in other)
        raise UnusableError("rewritten", f"the template writes {shown!r} beside a tool call")


def _leaves(value: Any) -> list[str]:
    """Every text in a nested value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value] if isinstance(value, str) else []


def show_sample(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """A tokenised chat as text, one line a token: `+` where it is supervised, id, and the token in quotes."""
    pairs = zip(ids, mask, strict=True)
    return "".join(f"{'+' if flag else ' '} {number:>7} {tokenizer.decode([number])!r}\n" for number, flag in pairs)
