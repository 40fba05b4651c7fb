"""The interface of an engine: what serves a target, with or without a drafter. Probe and bench know only this."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

from redraft.acceptance import Acceptance, Steps


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
    steps: Steps = field(default_factory=Steps)
    """Its verify steps; none without speculation."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose states the engine had from before."""
    draft_seconds: float = 0.0
    """Of `seconds`, what drafting took; 0 if the engine does not tell."""

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.seconds - self.first_token_seconds

    @property
    def decoded(self) -> int:
        """Tokens after the first, which comes from the prefill."""
        return max(0, len(self.ids) - 1)


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
    """A started engine that is stopped whatever happens: an interrupt, SIGTERM, a terminal that closes (SIGHUP)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ends = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else started by nohup: it is to go on
        ends.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in ends}
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
