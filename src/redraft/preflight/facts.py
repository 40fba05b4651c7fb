"""What a preflight knows of a drafter, its target and the server: read leniently, and judged in `lint.py`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from redraft.drafter.config import MOST
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.preflight.releases import Captured, Release, captured
from redraft.preflight.weights import Entry, Weights, reason
from redraft.target.facts import TargetFacts

SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a drafter, or worth knowing."""

    rule: str
    """Short name, see docs/preflight.md."""
    level: str
    """`error`: served wrong or not at all; `note`: worth knowing."""
    found: str
    effect: str
    """What the server would do."""
    fix: str


error, note = partial(Finding, level="error"), partial(Finding, level="note")
Findings = Iterator[Finding]


def object_or_reason(path: Path) -> dict[str, Any] | str:
    """The object in a JSON file, or why there is none."""
    try:
        return read_object(path)
    except RedraftError as fault:
        return reason(fault)


@dataclass
class Facts:
    """All that the rules look at."""

    folder: Path
    """The drafter's."""
    fields: dict[str, Any]
    """The drafter's `config.json` as SGLang reads it: nothing is laid flat."""
    weights: Weights
    record: dict[str, Any]
    """`redraft.json`; empty for a drafter that redraft did not write."""
    target: TargetFacts
    release: Release
    context: int | None = None
    """Tokens that the server is started for."""
    algorithm: str = "EAGLE3"
    trained: tuple[int, ...] | None = None
    """Aux layers of training, as inputs of layers, if anything tells."""
    tp: int | None = None
    """GPUs of tensor parallelism, if the caller tells."""

    def number(self, name: str) -> int | None:
        """A positive whole number of `config.json`."""
        value = self.fields.get(name)
        return value if type(value) is int and 0 < value <= MOST else None

    def real(self, name: str) -> float | None:
        """A positive number of `config.json`."""
        return positive(self.fields.get(name))

    def part(self, name: str) -> dict[str, Any]:
        """A nested object of `config.json`; empty if it is none."""
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def flag(self, name: str) -> bool:
        """A switch, at top level or in `eagle_config`."""
        return bool(self.fields.get(name) or self.part("eagle_config").get(name))

    def remembered(self, name: str) -> dict[str, Any]:
        """A nested object of `redraft.json`; empty if there is none."""
        value = self.record.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def ids(self) -> list[int] | None:
        """The layer ids that decide what is captured: those in `eagle_config`."""
        ids: list[int] | None = self.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
        return ids

    @property
    def ids_are_numbers(self) -> bool:
        """Whether the ids are a list of whole numbers, or there are none."""
        return self.ids is None or (isinstance(self.ids, list) and all(type(number) is int for number in self.ids))

    @cached_property
    def captured(self) -> Captured:
        """The layers that the server captures."""
        return captured(self.ids, self.target.depth, self.target.architecture, self.release)

    @property
    def aux_width(self) -> int:
        """Width of one aux state as the drafter expects it."""
        return self.number("target_hidden_size") or self.number("hidden_size") or self.target.hidden

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.fields.get("tie_word_embeddings"))

    @property
    def own_head(self) -> bool:
        """Whether the server reads a head from the drafter."""
        return not self.tied and self.fields.get("draft_vocab_size", 0) is not None

    def loaded_name(self, name: str) -> str:
        """The name, in the form `midlayer.*`, under which this release looks a tensor up."""
        for table in ("d2t", "t2d"):
            if table in name:
                return table
        bare = name.removeprefix("model.")
        if not self.release.many_layers:
            return bare
        for number, part in enumerate(("low", "mid", "high")):
            bare = bare.replace(f"aux_norm_{part}", f"fc_norm.{number}")
        return "midlayer." + bare.removeprefix("layers.0.") if bare.startswith("layers.0.") else bare

    @cached_property
    def named(self) -> dict[str, Entry]:
        """Tensors by the name under which this release looks them up."""
        return {self.loaded_name(entry.name): entry for entry in self.weights.entries}

    @cached_property
    def wanted(self) -> dict[str, list[int]]:
        """Tensors that the server makes room for, and their shapes; see `shaped`."""
        shapes = dict(self._plain_shapes[0])
        hidden = self.number("hidden_size") or 1
        shapes["fc.weight"] = [hidden, self.fan_in]
        for name in ("fc", "midlayer.self_attn.o_proj"):
            if self.flag("bias" if name == "fc" else "attention_bias"):
                shapes[f"{name}.bias"] = [hidden]
        if self.release.many_layers and (self.flag("fc_norm") or self.flag("use_aux_norm")):
            shapes |= {f"fc_norm.{number}.weight": [self.aux_width] for number in range(self.fan_in // self.aux_width)}
        if self.release.norm_before_fc and self.flag("norm_before_fc"):
            shapes["input_norm.weight"] = [self.fan_in]
        return shapes

    @cached_property
    def _plain_shapes(self) -> tuple[dict[str, list[int]], bool]:
        """Shapes of the tensors that every drafter has; False: no tensors can be made of these sizes."""
        sizes = [self.number(name) or 1 for name in SHAPE]
        hidden, _, heads, vocab = sizes
        heads_too = [self.number("num_key_value_heads") or heads, self.number("head_dim") or max(1, hidden // heads)]
        sizes += [*heads_too, self.number("draft_vocab_size") or vocab]
        try:
            return _shapes(*sizes), True
        except (RuntimeError, TypeError, OverflowError):
            return _shapes(*[1] * len(sizes)), False

    @property
    def shaped(self) -> bool:
        """Whether `config.json` has all that shapes are made of."""
        return all(self.number(name) for name in SHAPE) and self._plain_shapes[1]

    @property
    def states(self) -> int:
        """Aux states that the server makes `fc` for."""
        ids = len(self.ids) if self.ids and self.ids_are_numbers else 3
        return (self.number("num_aux_hidden_states") or ids) if self.release.many_layers else 3

    @property
    def fan_in(self) -> int:
        """Width that `fc` takes by its file, else by `config.json`."""
        entry = self.named.get("fc.weight")
        return entry.shape[1] if entry and len(entry.shape) == 2 else self.states * self.aux_width

    @property
    def slots(self) -> int | None:
        """N: the rows of the drafter's own head, else what `config.json` says."""
        head = self.named.get("lm_head.weight") if self.own_head else None
        return head.shape[0] if head and head.shape else self.number("draft_vocab_size") or self.number("vocab_size")


def _shapes(
    hidden: int, inner: int, heads: int, vocab: int, kv_heads: int, head_dim: int, slots: int
) -> dict[str, list[int]]:
    """Shapes of a drafter's tensors with one aux layer, by name."""
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=slots,
        rms_norm_eps=1e-6,
        rope_theta=1.0,
        max_position_embeddings=1,
        num_aux_layers=1,
    )
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def positive(value: object) -> float | None:
    """A positive, finite number; None for anything else."""
    if type(value) is int:
        return float(value) if 0 < value < 1 << 63 else None
    return value if isinstance(value, float) and 0 < value < math.inf else None


def trained_layers(record: dict[str, Any], given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The aux layers that `redraft.json` or the caller names; None if neither does."""
    layers = given or record.get("aux_layers")
    good = isinstance(layers, list | tuple) and layers and all(type(layer) is int for layer in layers)
    return tuple(layers) if good and layers else None


def export(facts: Facts) -> str:
    """What writes a drafter's files anew."""
    return f"redraft export --for sglang=={facts.release} writes it anew"


Rule = Callable[[Facts], Findings]
