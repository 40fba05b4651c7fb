"""A chat as token ids and loss mask: supervised is what the target generated, and nothing else.

Answers that carry their ids are taken as they are. Others are rendered and proven (`redraft.corpus.chat.answer_text`).
Each answer stands behind the very prompt that is served for it: where a template rewrites earlier turns, or other ids
come of their text, the turns do not continue each other and become documents of their own.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from redraft.corpus.chat import AS_IT_IS, CUT, Markers, Tools, answer_text, render
from redraft.corpus.encode import Encoder
from redraft.corpus.rows import Message, UnusableError, are_ids
from redraft.frame.profile import TemplateParams

PROMPT, GENERATED, KEEPS = "prompt_ids", "generated_ids", "keeps"
"""Of an answer by the target: the ids of its prompt without the first `keeps`, which are those of the answer before it
with its own prompt; and the ids that were generated, an end marker only if the target wrote it."""
OWN = {PROMPT, GENERATED, KEEPS, "finish"}
"""Keys of a message that are ours: no template sees them."""

Document = tuple[list[int], list[int]]
"""Ids, and a loss mask as long: 1 where the target generated the token."""


@dataclass(frozen=True)
class Turn:
    """One answer behind its prompt."""

    prompt: list[int]
    answer: list[int]
    cut: bool = False
    """Whether a token limit ended it."""


@dataclass(frozen=True)
class _Text:
    """Likewise as text that is proven, before it is encoded."""

    prompt: str
    answer: str
    cut: bool


@dataclass
class Sample:
    """One tokenised chat."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the token belongs to an answer, else 0; as long as `ids`."""
    dropped: str | None = None
    """Why nothing is supervised: a kind, and after a colon the detail; see `CAUSES` in `redraft.corpus.build`."""
    before: list[Document] = field(default_factory=list)
    """Earlier turns that these ids do not continue, as documents of their own."""
    turns: int = 0
    """Answers that are supervised."""
    cut: int = 0
    """Of these, how many were ended by a token limit."""
    left_out: list[str] = field(default_factory=list)
    """Why other answers are not, of a chat that is not dropped."""

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
    keep_cut: bool = True,
) -> list[Sample]:
    """`tokenize` for many chats, of messages and tools: their texts are encoded together.

    Without `keep_cut` answers that a token limit ended are left out.
    """
    markers = markers or Markers(tokenizer)
    found = [_turns(tokenizer, messages, tools, how, markers) for messages, tools in chats]
    encoded = iter(_encoded(tokenizer, [each for turns in found for each in turns if isinstance(each, _Text)], markers))
    samples = []
    for turns in found:
        faults, kept = [], []
        for each in turns:
            turn = next(encoded) if isinstance(each, _Text) else each
            if isinstance(turn, str):
                faults.append(turn)
            elif turn.cut and not keep_cut:
                faults.append("cut: the token limit ended the answer")
            else:
                kept.append(turn)
        sample = join(kept, max_length) if kept else Sample(dropped=faults[-1])
        sample.left_out = faults if kept else []
        samples.append(sample)
    return samples


def _turns(
    tokenizer: Any, messages: list[Message], tools: Tools, how: TemplateParams, markers: Markers
) -> list[Turn | _Text | str]:
    """Every answer of a chat, or why it cannot be trained on."""
    try:
        return [*(given_turns(messages) or _texts(tokenizer, messages, tools, how, markers))] or ["no answer"]
    except UnusableError as fault:
        return [str(fault)]


def given_turns(messages: list[Message]) -> list[Turn]:
    """The answers that carry their ids; see `GENERATED`.

    Raises:
        UnusableError: ids that are none, or that do not fit together, or an end marker alone.
    """
    turns: list[Turn] = []
    before: list[int] = []
    said = False
    for message in messages:
        if not {GENERATED, PROMPT} & message.keys():
            continue
        prompt, answer, keeps = message.get(PROMPT), message.get(GENERATED), message.get(KEEPS, 0)
        if not (are_ids(prompt) and are_ids(answer) and type(keeps) is int and 0 <= keeps <= len(before)):
            wrong = f"{PROMPT} and {GENERATED} must be lists of ids, {KEEPS} at most the {len(before)} ids before"
            raise UnusableError("ids", f"{wrong}: {message['content'][:40]!r}")
        turn = Turn([*before[:keeps], *prompt], answer, message.get("finish") == CUT)
        before = [*turn.prompt, *answer]
        said = said or len(answer) > 1 or bool(answer and (turn.cut or message["content"].strip()))
        turns.append(turn)
    if turns and not said:
        raise UnusableError("empty answer")
    return turns


def _texts(
    tokenizer: Any, messages: list[Message], tools: Tools, how: TemplateParams, markers: Markers
) -> Iterator[_Text | str]:
    """Prompt and answer of every turn that is proven, or why it is not.

    Raises:
        UnusableError: the chat begins with an answer: it is the rest of another one.
    """
    seen = plain(messages)
    if messages and messages[0]["role"] == "assistant":
        render(tokenizer, seen, header=False, tools=tools, how=how)  # the template may know better why
        raise UnusableError("template", "the chat begins with an answer: there is no prompt to render")
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                yield _prove(tokenizer, seen[: turn + 1], message, tools, how, markers)
            except UnusableError as fault:
                yield str(fault)


def _prove(
    tokenizer: Any, seen: list[Message], message: Message, tools: Tools, how: TemplateParams, markers: Markers
) -> _Text:
    content, calls = message["content"].strip(), message.get("tool_calls")
    if not (content or calls or message.get("reasoning_content", "").strip()):
        raise UnusableError("empty answer")
    prompt = render(tokenizer, seen[:-1], header=True, tools=tools, how=how)
    end = ""
    if calls or not content:
        other = [*seen[:-1], {"role": "assistant", "content": "answer"}]
        end = markers.end(render(tokenizer, other, header=False, tools=tools, how=how), "answer")
    whole = render(tokenizer, seen, header=False, tools=tools, how=how)
    answer = answer_text(markers, prompt, whole, message, end)
    if not answer:
        raise UnusableError("empty answer", "nothing stands before the token limit")
    return _Text(prompt, answer, message.get("finish") == CUT)


def _encoded(tokenizer: Any, texts: list[_Text], markers: Markers) -> Iterator[Turn | str]:
    """Each text as ids, or why it has none that are the target's."""
    encoded = _encode_each(
        markers.encode, [whole for each in texts for whole in (each.prompt, each.prompt + each.answer)]
    )
    for text, prompt, whole in zip(texts, encoded[::2], encoded[1::2], strict=True):
        fault = next((each for each in (prompt, whole) if isinstance(each, str)), None)
        if fault is not None:
            yield fault
        elif whole[: len(prompt)] != prompt:
            yield "boundary: a token holds the end of a prompt and the beginning of its answer"
        else:
            answer = whole[len(prompt) :]
            kept = markers.encode.keeps(text.answer)
            fault = None if kept else _other_text(tokenizer, answer, text.answer, markers)
            yield fault or Turn(prompt, answer, text.cut)


def _encode_each(encode: Encoder, texts: list[str]) -> list[Any]:
    """Ids of each text together; each for itself, or why not, if the tokenizer refuses one."""
    try:
        return encode(texts)
    except UnusableError as fault:
        if len(texts) == 1:
            return [str(fault)]
        return [*itertools.chain.from_iterable(_encode_each(encode, [text]) for text in texts)]


def _other_text(tokenizer: Any, ids: list[int], text: str, markers: Markers) -> str | None:
    """What the tokenizer made of an answer, if it is not its text: an unknown token, another spelling."""

    def bare(each: str) -> list[str]:
        # white space at the ends and around markers is the business of each tokenizer's decoder
        return [part.strip() for part in re.split(f"({markers.special.pattern})", each)]

    found = tokenizer.decode(ids, skip_special_tokens=False)
    if found == text or bare(found) == bare(text):
        return None
    place = next((at for at, (one, two) in enumerate(zip(found, text, strict=False)) if one != two), len(found))
    return f"other text: the tokenizer makes {found[place:][:20]!a} of {text[place:][:20]!a}"


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
    reached = [turn for turn in turns if turn.answer and len(turn.prompt) < max_length]
    return Sample(ids, mask, before=before, turns=len(reached), cut=sum(turn.cut for turn in reached))


def of_tokens(ids: list[int], mask: list[int], max_length: int) -> Sample:
    """A chat that another tool tokenised, as it is."""
    if not any(mask):
        return Sample(dropped="no answer: loss_mask is 0 everywhere")
    if not any(mask[:max_length]):
        return Sample(dropped=f"truncated: the answer begins after {max_length} tokens")
    ids, mask = ids[:max_length], mask[:max_length]
    return Sample(ids, mask, turns=sum(one > before for before, one in itertools.pairwise([0, *mask])))
