"""The interface of an engine: what serves a target, with or without a drafter. Probe and bench know only this."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from redraft.serve.acceptance import Acceptance


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
    """Drafts accepted in each verify step; a last step that was cut short is left out."""
    verify_steps: int = 0
    """Verify steps, a last one that was cut short included."""


@dataclass(frozen=True)
class Margin:
    """How near two next tokens are, where two outputs part."""

    gap: float
    """Logit of the one minus logit of the other, in a forward of one token."""
    shape_noise: float
    """Largest change of any logit at that position when it is computed in a forward of several tokens."""


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

    def describe(self) -> dict[str, Any]:
        """Engine name, version, device, dtype and effective settings; recorded with every figure."""

    def stop(self) -> None:
        """End serving and give the memory back."""
