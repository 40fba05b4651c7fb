"""What a preflight knows of a drafter, its target and the server: read leniently, and judged in `lint.py`."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.errors import RedraftError
from redraft.preflight.releases import DEEPSEEK, KIMI, Captured, Release, captured
from redraft.target.config import read_config

RECORD = "redraft.json"
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


@dataclass(frozen=True)
class Entry:
    """A tensor by the header of its file."""

    file: Path
    name: str
    shape: list[int]
    dtype: str
    """As safetensors writes it: `BF16`, `I64`, ..."""

    def read(self) -> Tensor:
        """The tensor itself, mapped."""
        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name)


@dataclass
class Weights:
    """The files of a drafter as far as they can be read."""

    entries: list[Entry] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Shards that the index names."""
    broken: dict[str, str] = field(default_factory=dict)
    """File to what is wrong with it."""
    hashes: list[str] = field(default_factory=list)
    """Of the mapping, from the metadata that redraft writes."""

    @property
    def whole(self) -> bool:
        """Whether what is not among the entries is not there."""
        return bool(self.files) and not self.absent and not self.broken


@dataclass(frozen=True)
class TargetFacts:
    """A target by its `config.json`."""

    folder: Path
    architecture: str
    hidden: int
    vocab: int
    """V."""
    depth: int
    positions: int | None
    """Tokens."""
    dtype: str | None
    quantised: bool
    remote_code: bool

    @property
    def deepseek(self) -> bool:
        """Whether layer ids are read as DeepSeek's models do."""
        return self.architecture in DEEPSEEK or self.architecture == KIMI


def read_target(folder: Path) -> TargetFacts:
    """The facts of a target folder; asks transformers only for what its `config.json` leaves to a default.

    Raises:
        RedraftError: no readable config.json.
    """
    path = folder / "config.json"
    try:
        top = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RedraftError("The target has no readable config.json.", where=path, found=error) from error
    fields = {**top, **(top.get("text_config") or {})}
    if not {"hidden_size", "vocab_size", "num_hidden_layers"} <= fields.keys():
        fields = {**read_config(folder).get_text_config().to_dict(), **fields}
    return TargetFacts(
        folder,
        (top.get("architectures") or fields.get("architectures") or [""])[0],
        fields["hidden_size"],
        fields["vocab_size"],
        fields["num_hidden_layers"],
        fields.get("max_position_embeddings"),
        fields.get("dtype") or fields.get("torch_dtype"),
        bool(fields.get("quantization_config")),
        "auto_map" in top,
    )


def read_weights(folder: Path) -> Weights:
    """The headers of the safetensors files that SGLang would load, and what it would not."""
    weights = Weights(pickles=sorted(path.name for path in folder.glob("pytorch_model*.bin")))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            weights.broken[index.name] = f"{type(error).__name__}: {error}"
    for name in names:
        path = folder / name
        if not path.is_file():
            weights.absent.append(name)
            continue
        weights.files.append(name)
        try:
            with safe_open(path, "pt") as file:
                parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                own = (file.metadata() or {}).get("redraft")
        except (SafetensorError, OSError) as error:
            weights.broken[name] = f"{type(error).__name__}: {error}"
            continue
        weights.entries += [Entry(path, key, list(p.get_shape()), str(p.get_dtype())) for key, p in parts.items()]
        with suppress(ValueError, KeyError, TypeError):  # metadata of another writer
            weights.hashes += [str(json.loads(own)["mapping"])] if own else []
    return weights


def read_object(path: Path) -> dict[str, Any] | str:
    """The object in a JSON file, or why there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, dict) else f"a {type(value).__name__} in place of an object"


@dataclass
class Facts:
    """All that the rules look at."""

    fields: dict[str, Any]
    """The drafter's `config.json` as SGLang reads it: nothing is laid flat."""
    weights: Weights
    record: dict[str, Any]
    """`redraft.json`; empty for a drafter that redraft did not write."""
    target: TargetFacts
    release: Release
    context: int | None
    """Tokens that the server is started for."""
    algorithm: str
    trained: tuple[int, ...] | None
    """Aux layers of training, as inputs of layers, if anything tells."""

    def number(self, name: str) -> int | None:
        """A positive whole number of `config.json`."""
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def part(self, name: str) -> dict[str, Any]:
        """A nested object of `config.json`; empty if it is none."""
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def flag(self, name: str) -> bool:
        """A switch, at top level or in `eagle_config`."""
        return bool(self.fields.get(name) or self.part("eagle_config").get(name))

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
        return captured(self.ids, self.target.depth, self.target.deepseek, self.release)

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
        hidden, inner, heads, vocab = (self.number(name) or 1 for name in SHAPE)
        config = DrafterConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=self.number("num_key_value_heads") or heads,
            head_dim=self.number("head_dim") or max(1, hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=self.number("draft_vocab_size") or vocab,
            rms_norm_eps=1e-6,
            rope_theta=1.0,
            max_position_embeddings=1,
            num_aux_layers=1,
        )
        with torch.device("meta"):
            shapes = {name: list(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
        shapes["fc.weight"] = [hidden, self.fan_in]
        for name in ("fc", "midlayer.self_attn.o_proj"):
            if self.flag("bias" if name == "fc" else "attention_bias"):
                shapes[f"{name}.bias"] = [hidden]
        if self.release.many_layers and (self.flag("fc_norm") or self.flag("use_aux_norm")):
            shapes |= {f"fc_norm.{number}.weight": [self.aux_width] for number in range(self.fan_in // self.aux_width)}
        if self.release.norm_before_fc and self.flag("norm_before_fc"):
            shapes["input_norm.weight"] = [self.fan_in]
        return shapes

    @property
    def shaped(self) -> bool:
        """Whether `config.json` has all that shapes are made of."""
        return all(self.number(name) for name in SHAPE)

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


def trained_layers(record: dict[str, Any], given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The aux layers that `redraft.json` or the caller names; None if neither does."""
    layers = given or record.get("aux_layers")
    return tuple(layers) if layers else None
