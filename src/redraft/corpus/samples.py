"""A chat as token ids and loss mask: supervised is what the target generated, and nothing else.

Answers that carry their ids are taken as they are. Others are rendered and proven (`redraft.corpus.chat.answer_text`).
Each answer stands behind the very prompt that is served for it: where a template rewrites earlier turns, or other ids
come of their text, the turns do not continue each other and become documents of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.corpus.chat import AS_IT_IS, CUT, Markers, Tools, answer_text, render
from redraft.corpus.rows import Message, UnusableError
from redraft.frame.profile import TemplateParams

PROMPT, GENERATED, KEEPS = "prompt_ids", "generated_ids", "keeps"
"""Of an answer by the target: the ids of its prompt without the first `keeps`, which are those of the answer before it
with its own prompt; and the ids that were generated, an end marker only if the target wrote it."""
OWN = {PROMPT, GENERATED, KEEPS, "finish"}
"""Keys of a message that are ours: no template sees them."""

CROSSES = "boundary: a token holds the end of a prompt and the beginning of its answer"

Document = tuple[list[int], list[int]]
"""Ids, and a loss mask as long: 1 where the target generated the token."""


@dataclass(frozen=True)
class Turn:
    """One answer behind its prompt."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Sample:
    """One tokenised chat."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the token belongs to an answer, else 0; as long as `ids`."""
    dropped: str | None = None
    """Why nothing is supervised: a kind, and after a colon the detail; see `KINDS` in docs/corpus.md."""
    source: str = ""
    """Where the chat came from, as the corpus file says."""
    before: list[Document] = field(default_factory=list)
    """Earlier turns that these ids do not continue, as documents of their own."""
    turns: int = 0
    """Answers that are supervised."""
    cut: int = 0
    """Of these, how many were ended by a token limit."""

    @property
    def documents(self) -> list[Document]:
        """What is trained on, in the order of the turns."""
        return [*self.before, *([(self.ids, self.mask)] if self.ids else [])]


def plain(messages: Iterable[Message]) -> list[Message]:
    """Messages as a template sees them."""
    return [{key: value for key, value in message.items() if key not in OWN} for message in messages]


def tokenize(
    tokenizer: Any,
    messages: list[Message],
    max_length: int,
    *,
    tools: Tools = None,
    how: TemplateParams = AS_IT_IS,
    markers: Markers | None = None,
) -> Sample:
    """Tokenise one chat, every document cut to `max_length` tokens.

    An answer with `generated_ids` is taken as it is; then one without is somebody else's, and only read. Without any,
    the text of each answer is proven; one that is not is left out, and the chat is dropped if none is left.
    """
    (sample,) = tokenize_all(tokenizer, [(messages, tools)], max_length, how=how, markers=markers)
    return sample


def tokenize_all(
    tokenizer: Any,
    chats: list[tuple[list[Message], Tools]],
    max_length: int,
    *,
    how: TemplateParams = AS_IT_IS,
    markers: Markers | None = None,
) -> list[Sample]:
    """`tokenize` for many chats, of messages and tools: their texts are encoded together."""
    markers = markers or Markers(tokenizer)
    found: list[Sequence[Turn | tuple[str, str]] | str] = []
    for messages, tools in chats:
        try:
            given = given_turns(messages)
            found.append(given or _texts(tokenizer, messages, tools, how, markers))
        except UnusableError as fault:
            found.append(str(fault))
    pairs = [pair for each in found if not isinstance(each, str) for pair in each if isinstance(pair, tuple)]
    encoded = markers.encode([text for prompt, answer in pairs for text in (prompt, prompt + answer)])
    wholes = zip(encoded[::2], encoded[1::2], strict=True)
    samples = []
    for each, (messages, _) in zip(found, chats, strict=True):
        if isinstance(each, str):
            samples.append(Sample(dropped=each))
            continue
        turns = [turn if isinstance(turn, Turn) else _turn(next(wholes)) for turn in each]
        kept = [turn for turn in turns if turn is not None]
        if not kept:
            samples.append(
                Sample(dropped="boundary: a token holds the end of a prompt and the beginning of its answer")
            )
            continue
        sample = join(kept, max_length)
        sample.cut = sum(message.get("finish") == CUT for message in messages)
        samples.append(sample)
    return samples


def _turn(encoded: tuple[list[int], list[int]]) -> Turn | None:
    """Of the ids of a prompt, and of it with its answer; None where a token crosses the boundary."""
    prompt, whole = encoded
    return Turn(prompt, whole[len(prompt) :]) if whole[: len(prompt)] == prompt else None


def given_turns(messages: list[Message]) -> list[Turn]:
    """The answers that carry their ids; see `GENERATED`.

    Raises:
        UnusableError: ids that are none, or that do not fit together.
    """
    turns: list[Turn] = []
    before: list[int] = []
    for message in messages:
        if GENERATED not in message:
            continue
        prompt, answer, keeps = message.get(PROMPT, ()), message[GENERATED], message.get(KEEPS, 0)
        if not (_ids(prompt) and _ids(answer) and type(keeps) is int and 0 <= keeps <= len(before)):
            raise UnusableError("ids", f"{PROMPT}, {GENERATED} or {KEEPS} cannot be used: {message['content'][:40]!r}")
        turn = Turn([*before[:keeps], *prompt], answer)
        before = [*turn.prompt, *answer]
        if len(answer) > 1 or message["content"].strip():  # else it is an end marker alone
            turns.append(turn)
    if not turns and any(GENERATED in message for message in messages):
        raise UnusableError("empty answer")
    return turns


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**31 for number in value)


def _texts(
    tokenizer: Any, messages: list[Message], tools: Tools, how: TemplateParams, markers: Markers
) -> list[tuple[str, str]]:
    """Prompt and answer of every turn that is proven.

    Raises:
        UnusableError: no answer, or none that is proven; of several reasons the last answer's.
    """
    proven, fault = [], UnusableError("no answer")
    seen = plain(messages)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            proven.append(_prove(tokenizer, seen[: turn + 1], message, tools, how, markers))
        except UnusableError as reason:
            fault = reason
    if not proven:
        raise fault
    return proven


def _prove(
    tokenizer: Any, seen: list[Message], message: Message, tools: Tools, how: TemplateParams, markers: Markers
) -> tuple[str, str]:
    if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content", "").strip()):
        raise UnusableError("empty answer")
    prompt = render(tokenizer, seen[:-1], header=True, tools=tools, how=how)
    end = ""
    if message.get("tool_calls"):
        other = [*seen[:-1], {"role": "assistant", "content": "answer"}]
        end = markers.end(render(tokenizer, other, header=False, tools=tools, how=how), "answer")
    whole = render(tokenizer, seen, header=False, tools=tools, how=how)
    return prompt, answer_text(markers, prompt, whole, message, end)


def join(turns: list[Turn], max_length: int) -> Sample:
    """Turns as documents: a turn whose prompt begins with all of the document before it continues that one."""
    documents: list[Document] = []
    for turn in turns:
        added = [*turn.prompt, *turn.answer]
        ids, mask = documents[-1] if documents else ([], [])
        if turn.prompt[: len(ids)] == ids:
            documents[-1:] = [(added, [*mask, *[0] * (len(turn.prompt) - len(ids)), *[1] * len(turn.answer)])]
        else:
            documents.append((added, [0] * len(turn.prompt) + [1] * len(turn.answer)))
    short = [(ids[:max_length], mask[:max_length]) for ids, mask in documents]
    kept = [(ids, mask) for ids, mask in short if any(mask)]
    if not kept:
        return Sample(dropped=f"truncated: the answer begins after {max_length} tokens")
    *before, (ids, mask) = kept
    return Sample(ids, mask, before=before, turns=sum(len(turn.prompt) < max_length for turn in turns))
