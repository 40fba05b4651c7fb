"""An arm of a bench: what is served in it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arm:
    """The target alone (`PLAIN`), or with a drafter that guesses in one shape."""

    drafter: Path | None = None
    """Folder of another drafter than the one under test; None for that one, and for the target alone."""
    steps: int = 0
    """Draft steps before each verify forward; 0 for the target alone."""
    topk: int = 1
    """Branches of each draft step; 1 is a chain."""
    tokens: int = 1
    """Tokens of one verify forward."""
    again: bool = False
    """The target alone, a second time: by how much the machine drifted."""

    @property
    def chain(self) -> bool:
        """Whether the drafter under test drafts one token after the other, as the model of a cycle has it."""
        return self.drafter is None and self.steps > 0 and self.topk == 1

    @property
    def key(self) -> str:
        """The key in metrics: `plain`, `3`, `3x4x8` (steps, topk, tokens), `artifacts/initial 3`."""
        if not self.steps:
            return "plain again" if self.again else "plain"
        shape = str(self.steps) if self.topk == 1 else f"{self.steps}x{self.topk}x{self.tokens}"
        return f"{self.drafter} {shape}" if self.drafter else shape

    @property
    def label(self) -> str:
        """In words."""
        if not self.steps:
            return self.key
        tree = f"tree of {self.tokens} ({self.steps} steps, topk {self.topk})"
        shape = f"{self.steps} drafted" if self.topk == 1 else tree
        return f"{self.drafter}, {shape}" if self.drafter else shape

    def told(self) -> dict[str, Any]:
        """What its row in `metrics/bench.json` says of it."""
        fields = asdict(self) | {"drafter": str(self.drafter) if self.drafter else None}
        del fields["again"]
        return {"label": self.label, **fields}


def chain(steps: int, drafter: Path | None = None) -> Arm:
    """A chain of `steps` drafts; of none, the target alone."""
    return Arm(drafter, steps, tokens=steps + 1)


PLAIN = chain(0)
AGAIN = Arm(again=True)
