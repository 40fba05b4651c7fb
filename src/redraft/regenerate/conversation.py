"""A chat that is answered turn by turn, each turn on those made so far, with its ids."""

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from redraft.corpus.chat import CUT, Markers, prompt_ids
from redraft.corpus.rows import Chat, Message, UnusableError
from redraft.corpus.samples import GENERATED, KEEPS, OWN, PROMPT, plain
from redraft.frame.profile import TemplateParams

_THINKING = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""What begins and ends reasoning, by family."""
_ASKS = ("user", "tool")


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    ids: list[int] | None
    """Generated tokens, an end marker only if the target wrote it; None of a server that gives text alone."""
    finish: str
    """`stop` or `length`."""
    text: str = ""
    """Of a server; the ids count where there are some."""
    reasoning: str = ""
    """Of a server that takes it apart."""
    calls: list[Any] | None = None
    """Tool calls, likewise."""
    tokens: int = 0
    """Generated."""
    prompt_tokens: int | None = None
    """Of the prompt, as the server counted them."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; greedy at temperature 0."""

    temperature: float = 0.0
    seed: int = 0

    def of(self, row: int, turn: int) -> int:
        """The seed of one answer, 31 bits: of another row, turn or `seed` another one."""
        return random.Random(f"{self.seed} {row} {turn}").getrandbits(31)


@dataclass(frozen=True)
class Asking:
    """How chats are answered, the same for all."""

    tokenizer: Any
    stop: frozenset[int]
    """Ids that end an answer."""
    context: int
    """Tokens of prompt and answer that the target takes."""
    limit: int | None = None
    """Tokens of an answer; what the context leaves without it."""
    how: TemplateParams = field(default_factory=TemplateParams)
    last_only: bool = False
    """Answer the last turn alone, on the row's own earlier answers, which are then not trained on."""
    made: dict[str, Any] = field(default_factory=dict)
    """Written into every row: what made its answers."""
    sampling: Sampling = field(default_factory=Sampling)

    @cached_property
    def markers(self) -> Markers:
        """Of the tokenizer."""
        return Markers(self.tokenizer)

    @cached_property
    def _known(self) -> int:
        return len(self.tokenizer)

    def text(self, ids: list[int]) -> str:
        """What `ids` say, markers included; a row of the head that pads it says nothing."""
        known = [number for number in ids if number < self._known]
        return self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Conversation:
    """One chat on its way. Ask for `prompt` until it is None, and give every answer to `take`."""

    def __init__(self, chat: Chat, asking: Asking) -> None:
        """Find the first prompt.

        Raises:
            UnusableError: there is none, the template refuses it, or it is beyond the context.
        """
        self.chat, self.asking = chat, asking
        self.messages: list[Message] = []
        self.ended: str | None = None
        """Why later turns were not answered."""
        self.answers: list[Answer] = []
        self._rest = [{key: value for key, value in each.items() if key not in OWN} for each in chat.messages]
        self._sequence: list[int] = []
        self.prompt: list[int] | None = self._next()

    @property
    def room(self) -> int:
        """Most tokens of the next answer."""
        assert self.prompt is not None
        left = self.asking.context - len(self.prompt)
        return left if self.asking.limit is None else min(left, self.asking.limit)

    def _next(self) -> list[int]:
        """The next prompt: messages up to an answer, which is left out.

        Raises:
            UnusableError: as `__init__`.
        """
        roles = [message["role"] for message in self._rest]
        asked = [place for place, role in enumerate(roles) if role in _ASKS]
        asked = asked or [place for place, role in enumerate(roles) if role != "assistant"]
        if not asked:
            raise UnusableError("no prompt", "no message but answers" if roles else "no messages")
        first = asked[-1 if self.asking.last_only else 0]
        end = next((place for place in range(first, len(roles)) if roles[place] == "assistant"), len(roles))
        after = next((place for place in range(end, len(roles)) if roles[place] != "assistant"), len(roles))
        messages = [*self.messages, *self._rest[:end]]
        prompt = prompt_ids(self.asking.tokenizer, plain(messages), self.chat.tools, self.asking.how)
        if len(prompt) >= self.asking.context:
            raise UnusableError(
                "context", f"a prompt of {len(prompt):,} tokens, the target takes {self.asking.context:,}"
            )
        self.messages, self._rest = messages, self._rest[after:]
        return prompt

    def take(self, answer: Answer) -> None:
        """Add the answer to `prompt`, and find the next one."""
        assert self.prompt is not None
        message = self._message(answer)
        if answer.ids is not None:
            both = zip(self._sequence, self.prompt, strict=False)
            same = min(len(self._sequence), len(self.prompt))
            keeps = next((place for place, (one, other) in enumerate(both) if one != other), same)
            message |= {KEEPS: keeps} if keeps else {}
            message |= {PROMPT: self.prompt[keeps:], GENERATED: answer.ids}
            self._sequence = [*self.prompt, *answer.ids]
        self.messages.append(message)
        self.answers.append(answer)
        self.prompt = None
        if not any(each["role"] in _ASKS for each in self._rest):
            return
        if answer.finish == CUT:
            self.ended = "cut"
        elif self._rest[0]["role"] == "tool":
            self.ended = "tool"  # it answers a call that was not made here
        elif answer.calls or self.asking.markers.special.search(message["content"]):
            self.ended = "markers"  # a call, or channels: rendered again they would stand there twice
        else:
            try:
                self.prompt = self._next()
            except UnusableError as fault:
                self.ended = str(fault)

    def end(self, why: str) -> None:
        """Answer no later turn; what was asked after the last answer is left out."""
        self.prompt, self.ended = None, why
        while "finish" not in self.messages[-1]:
            self.messages.pop()

    def _message(self, answer: Answer) -> Message:
        """The answer for people, and for the prompts of later turns: without its end marker, reasoning by itself."""
        text, reasoning = answer.text, answer.reasoning
        if answer.ids is not None:
            ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.asking.stop else answer.ids
            # a character that is cut, or bytes that are none, have no text; the ids keep them
            text = self.asking.text(ids).replace("\ufffd", "")
        for begin, end in _THINKING:
            if not reasoning and self._thinks(begin, text):
                reasoning, _, text = text.partition(end)
                reasoning, text = reasoning.strip().removeprefix(begin).strip(), text.strip()
        message: Message = {"role": "assistant", "content": text}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": answer.calls} if answer.calls else {}
        return {**message, "finish": answer.finish}

    def _thinks(self, begin: str, text: str) -> bool:
        """Whether the answer begins with reasoning: in its own text, or because the prompt opened it."""
        return text.lstrip().startswith(begin) or self.asking.text((self.prompt or [])[-8:]).rstrip().endswith(begin)

    def row(self) -> dict[str, Any]:
        """The row to write: what it was, with the messages made."""
        beside = ("id", "messages", "conversations", "system", "tools", "made", "ended")
        kept = {key: value for key, value in self.chat.row.items() if key not in beside}
        tools = {"tools": self.chat.tools} if self.chat.tools else {}
        ended = {"ended": self.ended} if self.ended else {}
        return {"id": self.chat.id, **kept, **tools, "messages": self.messages, "made": self.asking.made, **ended}
