"""A chat that is answered turn by turn, each turn on those made so far, with its ids."""

from dataclasses import dataclass, field
from typing import Any

from redraft.corpus.chat import CUT, Markers, prompt_ids
from redraft.corpus.rows import Chat, Message, UnusableError
from redraft.corpus.samples import GENERATED, KEEPS, OWN, PROMPT, plain
from redraft.frame.profile import TemplateParams

_THINKING = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""What begins and ends reasoning, by family."""


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    ids: list[int] | None
    """Generated tokens, an end marker only if the target wrote it; None of a server that gives text alone."""
    finish: str
    """`stop` or `length`."""
    text: str = ""
    """Of a server that gives no ids."""
    reasoning: str = ""
    """Likewise, if the server takes it apart."""


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


class Conversation:
    """One chat on its way. Ask for `prompt` until it is None, and give every answer to `take`."""

    def __init__(self, chat: Chat, asking: Asking) -> None:
        """Find the first prompt.

        Raises:
            UnusableError: the template refuses it, or it is beyond the context.
        """
        self.chat, self.asking = chat, asking
        self.messages: list[Message] = []
        self.ended: str | None = None
        """Why later turns were not answered."""
        self.answers: list[Answer] = []
        self._rest = [{key: value for key, value in each.items() if key not in OWN} for each in chat.messages]
        self._sequence: list[int] = []
        self._markers = Markers(asking.tokenizer).special
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
        answers = [place for place, message in enumerate(self._rest) if message["role"] == "assistant"]
        said = [place for place, message in enumerate(self._rest) if message["role"] in ("user", "tool")]
        if self.asking.last_only:
            end = said[-1] + 1 if said else len(self._rest)
            after = len(self._rest)
        else:
            end = next((place for place in answers if any(each < place for each in said)), len(self._rest))
            after = next((place for place in range(end, len(self._rest)) if place not in answers), len(self._rest))
        self.messages += self._rest[:end]
        self._rest = self._rest[after:]
        prompt = prompt_ids(self.asking.tokenizer, plain(self.messages), self.chat.tools, self.asking.how)
        if len(prompt) >= self.asking.context:
            raise UnusableError(
                "context", f"a prompt of {len(prompt):,} tokens, the target takes {self.asking.context:,}"
            )
        return prompt

    def take(self, answer: Answer) -> None:
        """Add the answer to `prompt`, and find the next one."""
        assert self.prompt is not None
        message = self._message(answer)
        if answer.ids is not None:
            both = zip(self._sequence, self.prompt, strict=False)
            keeps = next((place for place, (one, other) in enumerate(both) if one != other), len(self._sequence))
            message |= {KEEPS: keeps} if keeps else {}
            message |= {PROMPT: self.prompt[keeps:], GENERATED: answer.ids}
            self._sequence = [*self.prompt, *answer.ids]
        self.messages.append(message)
        self.answers.append(answer)
        self.prompt = None
        if not any(each["role"] != "assistant" for each in self._rest):
            return
        if answer.finish == CUT:
            self.ended = "cut"
        elif self._rest[0]["role"] == "tool":
            self.ended = "tool"  # it answers a call that was not made here
        elif self._markers.search(message["content"]):
            self.ended = "markers"  # a call, or channels: rendered again they would stand there twice
        else:
            try:
                self.prompt = self._next()
            except UnusableError as fault:
                self.ended = str(fault)

    def _message(self, answer: Answer) -> Message:
        """The answer for people, and for the prompts of later turns: without its end marker, reasoning by itself."""
        text, reasoning = answer.text, answer.reasoning
        if answer.ids is not None:
            ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.asking.stop else answer.ids
            # a character that is cut, or bytes that are none, have no text; the ids keep them
            text = self.asking.tokenizer.decode(ids, skip_special_tokens=False).replace("\ufffd", "")
        for begin, end in _THINKING:
            if not reasoning and self._thinks(begin, text):
                reasoning, _, text = text.partition(end)
                reasoning, text = reasoning.removeprefix(begin).strip(), text.strip()
        message: Message = {"role": "assistant", "content": text}
        return {**message, **({"reasoning_content": reasoning} if reasoning else {}), "finish": answer.finish}

    def _thinks(self, begin: str, text: str) -> bool:
        """Whether the answer begins with reasoning: in its own text, or because the prompt opened it."""
        tail = self.asking.tokenizer.decode((self.prompt or [])[-8:], skip_special_tokens=False)
        return text.lstrip().startswith(begin) or tail.rstrip().endswith(begin)

    def row(self) -> dict[str, Any]:
        """The row to write: what it was, with the messages made."""
        beside = ("id", "messages", "conversations", "system", "tools", "made", "ended")
        kept = {key: value for key, value in self.chat.row.items() if key not in beside}
        tools = {"tools": self.chat.tools} if self.chat.tools else {}
        ended = {"ended": self.ended} if self.ended else {}
        return {"id": self.chat.id, **kept, **tools, "messages": self.messages, "made": self.asking.made, **ended}
