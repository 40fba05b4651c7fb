"""What hidden states come from: the one interface of `transformers`, `vllm` and `import`."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

States = dict[str, Tensor]
"""Of one document of T tokens, in the dtype of the engine, on the CPU: `layer_<i>` [T, H], the residual stream that
enters decoder layer i, for every layer asked for; `unnormed` [T, H], the stream that leaves the last layer; `final`
[T, H], the same after the target's final norm; `greedy` int32 [T], the target's argmax for the next token. An engine
that cannot give `final` gives `top_ids` int32 [T, 64] and `top_logits` [T, 64], largest first, instead."""


class Engine(Protocol):
    """An opened engine."""

    def states(
        self, groups: Sequence[Sequence[Tensor]], layers: Sequence[int], *, around: bool = False
    ) -> Generator[tuple[int, int, States]]:
        """Yield (group, place in it, states) of every document, in any order within two groups that follow each other.

        Args:
            groups: documents by the shard that they will lie in, ids int32 [T] each. A batch never crosses a group,
                so that a group that is made again has the same bits.
            layers: inputs of layers.
            around: whether `unnormed` is wanted, and layers that only a diagnosis asks for. An engine that does not run
                the target (`import`) leaves out what it lacks of these; it has the aux layers always.

        Raises:
            RedraftError: states that cannot be this document's, a server that died, a dump that lacks it.
        """
        ...


@dataclass(frozen=True)
class Opening:
    """An engine that is not opened yet: the store is asked first."""

    identity: dict[str, Any]
    """What of it decides the numbers: `name`, `release`, `dtype`; part of the fingerprint of what it makes."""
    open: Callable[[Sequence[int]], AbstractContextManager[Engine]]
    """Loads the target, or starts or joins servers, and ends them when the block does. Takes all layers that will be
    asked for, since a server has to know them when it starts."""


@dataclass(frozen=True)
class Source:
    """A target, and the engine that its states come from."""

    opening: Opening
    checker: Opening | None
    """What some documents are extracted with again, usually the same; None where nothing can."""
    target: str
    """`target_hash` of its folder."""
    head: Tensor
    """[V, H]."""
    aux_layers: tuple[int, ...]
    depth: int
    """Decoder layers."""
