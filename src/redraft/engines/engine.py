"""The interface of an engine: what serves a target, with or without a drafter. Probe and bench know only this."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

from redraft.acceptance import Acceptance


@dataclass
class Generation:
    """One greedy answer."""

    ids: list[int]
    """New tokens, the end-of-turn token included."""
    seconds: float
    """From the request to the last token."""
    first_token_seconds: float
    """From the request to the first token."""
    finish: str
    """`stop` (end of turn) or `length`."""
    accepted: list[int] = field(default_factory=list)
    """Drafts accepted in each verify step, a last one that was cut short left out if the engine tells which it was.

    In ascending order if the engine does not tell their order, empty if it tells only their sum.
    """
    verify_steps: int = 0
    """Verify steps, a last one that was cut short included."""
    right: int = 0
    """Drafts that were right in all `verify_steps`; in a step that was cut short, what the cut left out as well."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose states the engine had from before."""
    draft_seconds: float = 0.0
    """Of `seconds`, what drafting took; 0 if the engine does not tell."""

    def every_step(self) -> list[int]:
        """Drafts right in each verify step, the one that was cut short included: what SGLang counts."""
        missing = self.verify_steps - len(self.accepted)
        return [*self.accepted, self.right - sum(self.accepted)] if missing == 1 else self.accepted


@dataclass(frozen=True)
class Margin:
    """How near two next tokens are, where two outputs part."""

    gap: float
    """Logit of the one minus logit of the other, in a forward of one token."""
    shape_noise: float
    """Change of a logit (torch: the largest one, a server: of the gap) in a forward of several tokens."""


class Engine(Protocol):
    """Serves one target. Greedy decoding only."""

    spec_steps: int
    """Tokens drafted per verify step; 0 without a drafter."""

    def start(self) -> None:
        """Start serving, or join a server, and return when it can generate."""

    def ready(self) -> bool:
        """Whether `generate` can be called."""

    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Answer the token ids of `prompt` with at most `max_new_tokens` tokens."""

    def margin(self, prefix: list[int], first: int, second: int, width: int) -> Margin:
        """Compare the tokens `first` and `second` after `prefix`; noise against a forward of `width` tokens."""

    def acceptance(self) -> Acceptance:
        """Counters over every `generate` since `start`."""

    def flush(self) -> None:
        """Forget the states of prompts answered before."""

    def fingerprint(self) -> str:
        """What tells the running server from another: it changes if it was restarted or set otherwise."""

    def memory_gib(self) -> float | None:
        """Memory that serving takes, GiB; None if the engine does not tell."""

    def describe(self) -> dict[str, Any]:
        """Engine name, version, device, dtype and effective settings; recorded with every figure."""

    def stop(self) -> None:
        """End serving and give the memory back."""


_Engine = TypeVar("_Engine", bound=Engine)


@contextmanager
def serving(engine: _Engine) -> Iterator[_Engine]:
    """A started engine that is stopped whatever happens, an interrupt or SIGTERM included."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
        signal.signal(signal.SIGTERM, before)
