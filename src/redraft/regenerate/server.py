"""Answers by a running server: SGLang's own interface, or that of OpenAI's completions, with ids where it has them."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redraft.corpus.rows import UnusableError
from redraft.corpus.samples import plain
from redraft.engines.reply import read_answer
from redraft.frame.errors import RedraftError
from redraft.frame.http import Client, ReplyError, parsed
from redraft.regenerate.conversation import Answer, Conversation

INFO_SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
ATTEMPTS = 12
"""Of one answer, while others are answered."""
PROBED = 32
"""Tokens of the answer by which the form is found."""
_ROW_FAULTS = (400, 413, 422)
"""What a server says of one request; of the first one it means that all are like that."""
_FINAL = (401, 403)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; greedy at temperature 0."""

    temperature: float = 0.0
    seed: int = 0

    def of(self, row: int, turn: int) -> int:
        """The seed of one answer."""
        return (self.seed + row * 1009 + turn) % 2**31


def _sglang(server: "Server", asked: Conversation, seed: int) -> tuple[str, dict[str, Any]]:
    sampling: dict[str, Any] = {
        "temperature": server.sampling.temperature,
        "max_new_tokens": server.room(asked),
        "stop_token_ids": sorted(asked.asking.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if server.sampling.temperature:
        sampling["sampling_seed"] = seed
    return "/generate", {"input_ids": asked.prompt, "sampling_params": sampling}


def _completions(
    server: "Server", asked: Conversation, seed: int, *, ids: bool, prompt: bool
) -> tuple[str, dict[str, Any]]:
    given: Any = asked.prompt if prompt else asked.asking.tokenizer.decode(asked.prompt)
    body = {"model": server.model, "prompt": given, **_openai(server, asked, seed)}
    if ids:
        stop = sorted(asked.asking.stop)
        body |= {"return_token_ids": True, "skip_special_tokens": False, "stop_token_ids": stop}
    return "/v1/completions", body


def _chat(server: "Server", asked: Conversation, seed: int) -> tuple[str, dict[str, Any]]:
    messages = plain(asked.messages)
    body = {"model": server.model, "messages": messages, **_openai(server, asked, seed)}
    if asked.chat.tools:
        body["tools"] = asked.chat.tools
    if asked.asking.how.arguments:
        body["chat_template_kwargs"] = asked.asking.how.arguments
    return "/v1/chat/completions", body


def _openai(server: "Server", asked: Conversation, seed: int) -> dict[str, Any]:
    sampled = {"seed": seed} if server.sampling.temperature else {}
    return {"max_tokens": server.room(asked), "temperature": server.sampling.temperature, **sampled}


@dataclass(frozen=True)
class Form:
    """One way of asking, from the best to the poorest."""

    told: str
    request: Callable[["Server", Conversation, int], tuple[str, dict[str, Any]]]
    ids_in: bool
    ids_out: bool


SGLANG = Form("ids in, ids out", _sglang, True, True)
OPENAI = (
    Form("ids in, ids out", lambda *a: _completions(*a, ids=True, prompt=True), True, True),
    Form("ids in, text out", lambda *a: _completions(*a, ids=False, prompt=True), True, False),
    Form("text in, text out", lambda *a: _completions(*a, ids=False, prompt=False), False, False),
    Form("messages in, text out: the server's own template", _chat, False, False),
)


@dataclass
class Server:
    """A server at `url`, asked from any number of threads."""

    url: str
    sampling: Sampling
    seconds: float
    """Longest wait for one answer."""
    patience: float
    """Longest time without any answer before this gives up, seconds."""
    key: str | None = None
    model: str | None = None
    """Name that requests carry; the first that the server tells without it."""
    engine: str = "openai"
    release: str | None = None
    context: int | None = None
    form: Form = OPENAI[0]
    stopped: threading.Event = field(default_factory=threading.Event)
    _last: float = field(default_factory=time.monotonic)
    _answered: bool = False

    def __post_init__(self) -> None:
        base = self.url.rstrip("/").removesuffix("/v1")
        if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
            raise RedraftError(
                "The address is none.", where=f"--url {self.url}", expected="http://HOST:PORT or https://HOST"
            )
        self.client = Client(base, self.seconds, self.key, environment=True)

    def connect(self, first: Conversation) -> None:
        """Find out what the server is, and the best form in which it answers `first`.

        Raises:
            RedraftError: it does not answer, refuses the key, reads other tokens than it was sent, or has others.
        """
        self._identify()
        forms = (SGLANG,) if self.engine == "sglang" else OPENAI
        refused: list[str] = []
        for form in forms:
            self.form = form
            try:
                answer = self._patiently(first, 0)
            except UnusableError as fault:
                refused.append(f"{form.told}: {fault}")
                continue
            if form.ids_out and answer.ids is None:
                continue
            self._require_same_tokens(first, answer)
            self._answered = True
            return
        raise RedraftError("The server answers in no form that is known.", where=self.url, found="; ".join(refused))

    def _identify(self) -> None:
        """Engine, release, model and context, as far as the server tells them."""
        info = self._info("/server_info") or self._info("/get_server_info")
        if "version" in info and "model_path" in info:
            self.engine, self.release = "sglang", str(info["version"])
            self.model = self.model or str(info["model_path"])
            self.context = _number(info.get("context_length"))
            return
        listed = self._info("/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
        self.model = self.model or first.get("id")
        self.context = _number(first.get("max_model_len"))
        if first.get("owned_by") == "vllm":
            self.engine, self.release = "vllm", self._info("/version").get("version")
        if self.model is None:
            raise RedraftError(
                "The server does not tell what it serves.",
                where=f"{self.url}/v1/models",
                fix="start it, check the address, or name the model with --model",
            )

    def _info(self, path: str) -> dict[str, Any]:
        """The object at `path`; empty if there is none."""
        pause = FIRST_PAUSE
        while True:
            try:
                found = parsed(self.client.get(path, INFO_SECONDS), path)
                return found if isinstance(found, dict) else {}
            except ReplyError as fault:
                if fault.status in _FINAL:
                    raise self._refused_key(fault) from fault
                if fault.status is not None and fault.status < 500 and fault.status != 429:
                    return {}
                if time.monotonic() - self._last > self.patience:
                    raise self._gone(fault) from fault
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def answer(self, asked: Conversation, row: int) -> Answer:
        """Answer the prompt of a conversation; `row` is its number.

        Raises:
            UnusableError: the server refuses it, or fails on it alone.
            RedraftError: the server is gone for longer than `patience`, or the key is refused.
        """
        return self._patiently(asked, self.sampling.of(row, len(asked.answers)))

    def room(self, asked: Conversation) -> int:
        """Most tokens to ask for; of the first answer, by which the form is found, a few."""
        return asked.room if self._answered else min(asked.room, PROBED)

    def _patiently(self, asked: Conversation, seed: int) -> Answer:
        path, body = self.form.request(self, asked, seed)
        pause, attempts, began = FIRST_PAUSE, 0, time.monotonic()
        while True:
            try:
                answer = self._read(parsed(self.client.post(path, body), path), asked)
                self._last = time.monotonic()
                return answer
            except ReplyError as fault:
                attempts += 1
                if fault.status in _FINAL:
                    raise self._refused_key(fault) from fault
                final = fault.status in _ROW_FAULTS or (fault.status == 404 and not self._answered)
                if final or (attempts >= ATTEMPTS and self._last > began):  # others are answered, this one is not
                    raise UnusableError("server", f"{fault.what} {fault.found}") from fault
                if time.monotonic() - self._last > self.patience:
                    raise self._gone(fault) from fault
                # spread, so that many clients do not come back at one moment
                wait = max(fault.retry_after or 0.0, pause * random.uniform(0.5, 1.0))
                if self.stopped.wait(min(wait, LONGEST_PAUSE)):
                    raise UnusableError("server", "stopped") from fault
                pause = min(2 * pause, LONGEST_PAUSE)

    def _read(self, reply: Any, asked: Conversation) -> Answer:
        """A reply as an answer.

        Raises:
            ReplyError: it is none.
        """
        if not isinstance(reply, dict):
            raise ReplyError("The server sent what is no answer.", reply)
        if self.form is SGLANG:
            if not isinstance(reply.get("meta_info"), dict):
                raise ReplyError("The server sent an error.", reply)
            generation, meta = read_answer([reply], lambda: 0.0)
            self._require_prompt(asked, meta.get("prompt_tokens"))
            return Answer(generation.ids, generation.finish, str(reply.get("text") or ""))
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
            raise ReplyError("The reply of the server is not a whole answer.", str(reply)[:200])
        usage = reply.get("usage")
        if self.form.ids_in and isinstance(usage, dict):
            self._require_prompt(asked, usage.get("prompt_tokens"))
        return self._of_choice(choice, asked)

    def _of_choice(self, choice: dict[str, Any], asked: Conversation) -> Answer:
        finish = "length" if choice["finish_reason"] == "length" else "stop"
        message = choice.get("message")
        told = message if isinstance(message, dict) else {"content": choice.get("text")}
        text, reasoning = told.get("content"), told.get("reasoning_content") or told.get("reasoning")
        ids = choice.get("token_ids") if self.form.ids_out else None
        whole = isinstance(ids, list) and all(type(number) is int for number in ids)
        if ids is not None and not whole:
            raise ReplyError("The reply of the server is not a whole answer.", f"token_ids {str(ids)[:100]}")
        if ids is None and not isinstance(text, str):
            raise ReplyError("The reply of the server is not a whole answer.", str(choice)[:200])
        if (
            ids is not None
            and finish == "stop"
            and type(choice.get("stop_reason")) is int
            and ids[-1:] != [choice["stop_reason"]]
        ):
            ids = [*ids, choice["stop_reason"]]  # the marker that ended it, which some releases leave out
        return Answer(ids, finish, str(text or ""), str(reasoning or ""))

    def _require_prompt(self, asked: Conversation, tokens: Any) -> None:
        """The server must have read the ids that it was sent, and no others."""
        expected = len(asked.prompt or [])
        if isinstance(tokens, int) and tokens != expected:
            raise RedraftError(
                "The server read another prompt than it was sent.",
                where=self.url,
                expected=f"{expected} tokens",
                found=f"{tokens} tokens",
                cause="it puts a token of its own before prompts, or cuts them",
            )

    def _require_same_tokens(self, asked: Conversation, answer: Answer) -> None:
        """What the ids mean here must be what the server wrote."""
        if not answer.ids or not answer.text:
            return
        tokenizer = asked.asking.tokenizer

        def letters(text: str) -> str:
            for marker in tokenizer.all_special_tokens:
                text = text.replace(marker, "")
            return "".join(text.replace("\ufffd", "").split())

        here, there = letters(tokenizer.decode(answer.ids)), letters(answer.text)
        if here != there:
            raise RedraftError(
                "The server's tokens mean another text here: it serves another model than the profile's target.",
                where=f"{self.url}, {self.model}",
                expected=repr(there[:60]),
                found=repr(here[:60]),
                fix="give the address of a server of this target, or the profile of that one",
            )

    def _refused_key(self, fault: ReplyError) -> RedraftError:
        return RedraftError(
            "The server refuses the key." if self.key else "The server wants a key.",
            where=self.url,
            found=fault.found,
            fix="set the environment variable that --key-env names",
        )

    def _gone(self, fault: ReplyError) -> RedraftError:
        return RedraftError(
            "The server does not answer any more.",
            where=self.url,
            found=f"{fault.what} {fault.found}",
            cause=f"no answer for {self.patience:.0f} s (--patience)",
            fix="start it again, then run the same command: what was answered is kept",
        )


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
