"""Answers by a running server: SGLang's own interface, or that of OpenAI's completions. It may fail at any time."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redraft.corpus.rows import UnusableError
from redraft.frame.errors import RedraftError
from redraft.frame.http import Client, ReplyError, parsed
from redraft.frame.progress import note
from redraft.regenerate.conversation import Answer, Conversation
from redraft.regenerate.forms import OPENAI, SGLANG, Form, read

INFO_SECONDS = 30.0
LONGEST_PAUSE = 30.0
FIRST_PAUSE = 0.5
ATTEMPTS, TRIALS = 12, 5
"""Of one request that the server fails on while it answers others; of one by which the form is found. It may be too
busy for eight times as many."""
PROBED = 32
"""Tokens of the answer by which the form is found."""
NOTED_SECONDS = 5.0
"""Without an answer, until that is told."""
_OK = 200
_REFUSED = (400, 413, 422)
"""What a server says of one request."""
_KEY = (401, 403)
_BUSY = (408, 425, 429, 502, 503, 504)
"""What a server or its gateway says of any request, for a while."""
_Found = TypeVar("_Found")


@dataclass
class Server:
    """A server at `url`, asked from any number of threads."""

    url: str
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
    notes: list[str] = field(default_factory=list)
    """What a user should know of this server."""
    stopped: threading.Event = field(default_factory=threading.Event)
    _last: float = field(default_factory=time.monotonic)
    _noted: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _trial: Callable[[], Answer] | None = None
    """Asks what was answered once."""
    _denied: ReplyError | None = None

    def __post_init__(self) -> None:
        base = self.url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
            sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
            self.shown = base.replace(f"{parts.netloc.rpartition('@')[0]}@", "")
        except ValueError:
            sound = False
        if not sound or parts.query or parts.fragment:
            raise RedraftError(
                "This is no address of a server.",
                where=f"--url {self.url}",
                expected="http://HOST:PORT or https://HOST",
            )
        self.key = (self.key or "").strip() or None
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise RedraftError("The key cannot be sent.", found="characters that no key has")
        self.client = Client(base, self.seconds, self.key, environment=True)

    def connect(self, firsts: Sequence[Conversation]) -> None:
        """Find out what the server is, and the best form in which it answers one of `firsts`.

        Raises:
            RedraftError: it does not answer, refuses the key, reads other tokens than it was sent, or has others.
        """
        self._identify(bool(firsts[0].asking.sampling.temperature))
        self._denied, refused = None, []
        for form in (SGLANG,) if self.engine == "sglang" else OPENAI:
            for first in firsts:  # one may be refused for itself
                trial = partial(self._ask, form, self._body(form, first, min(first.room, PROBED), 0), first)
                try:
                    answer = self._patiently(trial)
                except UnusableError as fault:
                    told = f"{form.told}: {fault.detail}"
                    continue
                self._require_same_tokens(first, answer)
                self.form, self._trial = form, trial
                self._note_prompt(len(first.prompt or []), answer.prompt_tokens)
                return
            refused.append(told)
        if self._denied:
            raise self._refused_key(self._denied)
        raise RedraftError("The server gives no answer that can be used.", where=self.shown, found="; ".join(refused))

    def _note_prompt(self, expected: int, found: int | None) -> None:
        if found not in (None, expected):
            self.notes.append(
                f"the server makes {found} tokens of the first prompt, the target's template {expected}: "
                "its answers are to other prompts than the drafter will see"
            )

    def _identify(self, sampled: bool) -> None:
        """Engine, release, model and context, as far as the server tells them."""
        info = self._info("/server_info") or self._info("/get_server_info")
        listed = self._info("/v1/models").get("data")
        models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        card = next((each for each in models if self.model in (None, each.get("id"))), {})
        self.context = _number(info.get("context_length")) or _number(card.get("max_model_len"))
        owner = card.get("owned_by")
        if "version" in info and "model_path" in info:
            self.engine, self.release = "sglang", str(info["version"])
            names = (info.get("served_model_name"), info["model_path"])
            if self.model not in (None, *names):
                raise RedraftError(
                    "The server serves another model.", where=self.shown, expected=self.model, found=names
                )
            self.model = str(info["model_path"])
            if sampled and not info.get("enable_deterministic_inference"):
                self.notes.append("the server draws without seeds, unless it has --enable-deterministic-inference")
            return
        self.model = self.model or card.get("id")
        if owner in ("vllm", "tensorrt_llm"):
            self.engine, self.release = str(owner), self._info("/version").get("version")
        if self.model is None:
            if self._denied:
                raise self._refused_key(self._denied)
            raise RedraftError(
                "The server does not tell what it serves.",
                where=f"{self.shown}/v1/models",
                fix="check the address, or name the model with --model",
            )

    def _info(self, path: str) -> dict[str, Any]:
        """The object at `path`; empty if there is none."""

        def ask() -> dict[str, Any]:
            try:
                found = self._parsed(self.client.get(path, INFO_SECONDS), path)
            except ReplyError as fault:
                if fault.status not in _KEY:  # a gateway may keep this path to itself, and give answers
                    raise
                self._denied = fault
                return {}
            if not isinstance(found, dict) or "error" in (*found, found.get("object")):
                raise ReplyError("The server tells nothing of itself.", f"{path}: {found}", _OK)
            return found

        try:
            return self._patiently(ask)
        except UnusableError:
            return {}

    def request(self, asked: Conversation, row: int) -> Callable[[], Answer]:
        """What any thread may call to have the prompt of a conversation answered; `row` is its place.

        Raises:
            UnusableError: by the call: the server refuses it, or fails on it alone.
            RedraftError: by the call: the server is gone for longer than `patience`, or the key is refused.
        """
        body = self._body(self.form, asked, asked.room, asked.asking.sampling.of(row, len(asked.answers)))
        return lambda: self._patiently(lambda: self._ask(self.form, body, asked))

    def _body(self, form: Form, asked: Conversation, most: int, seed: int) -> dict[str, Any]:
        model = {} if form is SGLANG else {"model": self.model}
        return {**model, **form.body(asked, most, seed)}

    def _ask(self, form: Form, body: dict[str, Any], asked: Conversation) -> Answer:
        reply = self._parsed(self.client.post(form.path, body), form.path)
        try:
            return read(form, reply, asked)
        except ReplyError as fault:
            fault.status = _OK
            raise

    def _parsed(self, body: bytes, path: str) -> Any:
        try:
            return parsed(body, path)
        except ReplyError as fault:
            fault.status = _OK
            raise

    def _patiently(self, ask: Callable[[], _Found]) -> _Found:
        """What `ask` gives, however often it takes.

        Raises:
            UnusableError, RedraftError: see `request`.
        """
        longest = min(LONGEST_PAUSE, self.patience / 20)
        pause, since, blame = min(FIRST_PAUSE, longest), 0.0, 0.0
        while not self.stopped.is_set():
            began = time.monotonic()
            try:
                found = ask()
                self._last = time.monotonic()
                return found
            except ReplyError as fault:
                since = since or time.monotonic()
                self._require_hope(fault, since)
                if self._works(fault, began):
                    blame += 1 / 8 if fault.status in _BUSY else 1
                if blame >= (TRIALS if self._trial is None else ATTEMPTS):
                    raise UnusableError("server", self._told(fault)) from fault
                # spread, so that many clients do not come back at one moment
                wait = max(fault.retry_after or 0.0, pause * random.uniform(0.5, 1.0))
                self.stopped.wait(min(wait, longest))
                pause = min(2 * pause, longest)
        raise UnusableError("server", "stopped")

    def _require_hope(self, fault: ReplyError, since: float) -> None:
        """Give up what cannot get better, and a server that gives no answer any more; `since` is the first fault."""
        status, first = fault.status or 0, self._trial is None
        if any(word in str(fault.__cause__) for word in ("CERTIFICATE_VERIFY_FAILED", "CA certificate bundle")):
            raise RedraftError(
                "The server's certificate is not trusted here.",
                where=self.shown,
                found=self._hidden(fault),
                fix="name the file of its authority: REQUESTS_CA_BUNDLE=FILE",
            ) from fault
        # SGLang is there by now: if it is not found, that is a gateway's word
        refused = 400 <= status < 500 and status not in _BUSY and (status, self.engine) != (404, "sglang")
        if status in _KEY:
            self._denied = fault
            if status == 401 or not (first or self._works(fault, time.monotonic())):
                raise self._refused_key(fault) from fault
            raise UnusableError("server", self._told(fault)) from fault  # a gateway that refuses this one alone
        if status in _REFUSED or (first and refused):
            raise UnusableError("server", self._told(fault)) from fault
        if time.monotonic() - max(self._last, since) > self.patience:
            raise self._gone(fault) from fault
        with self._lock:
            silent = time.monotonic() - since > min(NOTED_SECONDS, self.patience / 2)
            if silent and self._noted <= self._last < since:
                self._noted = time.monotonic()
                note(f"waiting for {self.shown}, {self.patience:.0f} s at most: {self._told(fault)}")

    def _works(self, fault: ReplyError, began: float) -> bool:
        """Whether the server answers others, so that it failed from `began` on because of what it was asked."""
        if self._last > began:
            return True
        if self._trial is None:
            return fault.status in (_OK, 404, 500, 501)
        try:
            self._trial()
            self._last = time.monotonic()
            return True
        except ReplyError:
            return False

    def _require_same_tokens(self, asked: Conversation, answer: Answer) -> None:
        """What the ids mean here must be what the server wrote."""
        if not answer.ids or not answer.text:
            return

        def letters(text: str) -> str:
            text = asked.asking.markers.special.sub("", text)
            return "".join(text.replace("\ufffd", "").split())

        ways, there = (answer.ids, answer.ids[:-1]), letters(answer.text)  # with its end, and without
        here = [letters(asked.asking.text(ids)) for ids in ways]
        if there not in here:
            raise RedraftError(
                "The server's tokens mean another text here: it serves another model than the profile's target.",
                where=f"{self.shown}, {self.model}",
                expected=repr(there[:60]),
                found=repr(here[0][:60]),
                fix="give the address of a server of this target, or the profile of that one",
            )

    def _told(self, fault: ReplyError) -> str:
        return f"{fault.what} {self._hidden(fault)}"

    def _hidden(self, fault: ReplyError) -> str:
        """What was found, without the key: a server may repeat it."""
        return fault.found.replace(self.key, "(the key)") if self.key else fault.found

    def _refused_key(self, fault: ReplyError) -> RedraftError:
        return RedraftError(
            "The server refuses the key." if self.key else "The server wants a key.",
            where=self.shown,
            found=self._hidden(fault),
            fix="set the environment variable that --key-env names (OPENAI_API_KEY)",
        )

    def _gone(self, fault: ReplyError) -> RedraftError:
        return RedraftError(
            "The server does not answer.",
            where=self.shown,
            found=self._told(fault),
            cause=f"no answer for {self.patience:.0f} s (--patience)",
            fix="start it, then run the same command: what was answered is kept",
        )


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
