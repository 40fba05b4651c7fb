"""Load a target, run it, and capture the hidden states that feed a drafter.

Legend of shapes: B batch, S tokens, H hidden size, V vocabulary, L decoder layers.
Aux layers are written down as *inputs of layers*: state `i` is the residual stream that enters decoder layer `i`
(0-based), which is `hidden_states[i]` in transformers and the output of layer `i - 1`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from redraft.device import compute_device
from redraft.errors import RedraftError
from redraft.target.hf import offline_transformers
from redraft.target.sources import RECORD, weights_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """SGLang's default capture points for a target of `layers` decoder layers: inputs of layers (2, L//2, L-3).

    Raises:
        RedraftError: the three are not distinct and ascending (fewer than 7 layers).
    """
    chosen = (2, layers // 2, layers - 3)
    if not chosen[0] < chosen[1] < chosen[2]:
        raise RedraftError(
            "The target is too shallow for the default aux layers.",
            where="target.aux_layers in the profile",
            expected="at least 7 layers, or aux_layers written in the profile",
            found=f"{layers} layers, which give {chosen}",
        )
    return chosen


@dataclass
class Captured:
    """What one forward left behind; every tensor [B, S, H] in the target's dtype."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Residual stream at the input of a decoder layer, by its id."""
    unnormed: Tensor | None = None
    """Final state before the final norm."""


@dataclass
class Target:
    """A loaded target: the decoder without its head, and the head."""

    model: nn.Module
    config: Any
    """The text configuration of transformers."""
    aux_layers: tuple[int, ...]

    @property
    def decoder(self) -> Any:
        """The module with `layers`, `norm` and `embed_tokens`."""
        return self.model.get_decoder()  # type: ignore[operator]

    @property
    def head(self) -> Tensor:
        """Rows of the language model head, [V, H]."""
        return self.model.get_output_embeddings().weight  # type: ignore[operator]

    @property
    def embed(self) -> Tensor:
        """Rows of the token embedding, [V, H]."""
        return self.model.get_input_embeddings().weight  # type: ignore[operator]

    @contextmanager
    def capture(self, layers: Sequence[int]) -> Iterator[Captured]:
        """Collect the inputs of `layers` and the un-normed final state of every forward inside the block."""
        captured = Captured()

        def at_layer(number: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured.inputs[number] = args[0] if args else kwargs["hidden_states"]

            return hook

        def at_norm(_: nn.Module, args: tuple[Any, ...]) -> None:
            captured.unnormed = args[0]

        handles = [
            self.decoder.layers[number].register_forward_pre_hook(at_layer(number), with_kwargs=True)
            for number in layers
        ]
        handles.append(self.decoder.norm.register_forward_pre_hook(at_norm))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def aux(self, captured: Captured) -> Tensor:
        """The aux states, low to high, joined on the feature axis: [B, S, 3H]."""
        return torch.cat([captured.inputs[number] for number in self.aux_layers], dim=-1)


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers configuration in `folder`; nested text configurations are left in place."""
    if not (folder / "config.json").is_file():
        raise RedraftError("The target folder has no config.json.", where=folder, fix="rerun the target stage")
    return offline_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def aux_layers_of(config: Any, chosen: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Aux layers as inputs of layers: `chosen`, checked against the depth, or the default of the depth."""
    depth = config.get_text_config().num_hidden_layers
    if chosen is None:
        return default_aux_layers(depth)
    if list(chosen) != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < depth:
        raise RedraftError(
            "The aux layers do not fit the target.",
            where="target.aux_layers in the profile",
            expected=f"ascending, distinct, from 0 to {depth - 1}",
            found=list(chosen),
        )
    return tuple(chosen)


def load_target(
    folder: Path,
    *,
    dtype: str = "bf16",
    aux_layers: tuple[int, ...] | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
) -> Target:
    """Load the target of `folder` for inference.

    Args:
        folder: target folder as the `target` stage writes it.
        dtype: `bf16` or `fp32`.
        aux_layers: inputs of layers; default (2, L//2, L-3).
        trust_remote_code: let code in the folder run.
        device: a torch device; default `cuda` where there is one.
    """
    config = read_config(folder, trust_remote_code)
    transformers = offline_transformers()
    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, transformers.AutoModelForCausalLM)
    model = known.from_pretrained(weights_folder(folder), dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    _require_plain_head(model, config.get_text_config())
    place = device or compute_device()
    return Target(
        model.eval().requires_grad_(False).to(place), config.get_text_config(), aux_layers_of(config, aux_layers)
    )


def _require_plain_head(model: Any, config: Any) -> None:
    """Refuse a head that is more than a matrix: targets of training are computed as states times rows."""
    scales = {
        name: getattr(config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
    }
    extra = [f"{name} {value}" for name, value in scales.items() if value not in (None, 1, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        extra.append("a bias")
    if extra:
        raise RedraftError(
            "The target's head is more than a matrix.",
            where="target",
            expected="logits = states @ rows",
            found=", ".join(extra),
            cause="a model family whose logits are scaled or capped: redraft does not compute that yet",
        )


@dataclass
class Ends:
    """Both ends of a target: all that remap and train read of it."""

    embed: Tensor
    """Token embedding, [V, H]."""
    head: Tensor
    """Language model head, [V, H]; the same tensor as `embed` if tied."""
    norm: Tensor
    """Weight of the final norm, [H]."""


def read_ends(folder: Path) -> Ends:
    """Read embedding, head and final norm from the safetensors files of a target folder; opens only their shards.

    Raises:
        RedraftError: no safetensors, a shard of the index is absent, no or several candidates for a tensor, or a
            missing head although the configuration does not tie it.
    """
    weights = weights_folder(folder)
    shards = _shards(weights)
    embed_key = _only(shards, "embed_tokens.weight", weights)
    stem = embed_key.removesuffix("embed_tokens.weight")
    embed = _read(weights, shards, embed_key)
    if any(key.endswith("lm_head.weight") for key in shards):
        head = _read(weights, shards, _only(shards, "lm_head.weight", weights))
    elif _tied(folder):
        head = embed
    else:
        raise RedraftError(
            "The target has no head.",
            where=weights,
            expected="a tensor that ends in lm_head.weight, or tie_word_embeddings: true",
            found="neither",
        )
    if embed.shape != head.shape:
        raise RedraftError(
            "Embedding and head of the target do not agree.",
            where=weights,
            expected="one shape",
            found=f"embedding {list(embed.shape)}, head {list(head.shape)}",
        )
    return Ends(embed, head, _read(weights, shards, f"{stem}norm.weight"))


def target_hash(folder: Path) -> str:
    """Identity of a target without reading its terabyte: source, configuration, file sizes and final norm."""
    record = json.loads((folder / RECORD).read_text())
    record = {name: record[name] for name in ("source", "revision")}
    sizes = sorted((file.name, file.stat().st_size) for file in weights_folder(folder).glob("*.safetensors"))
    norm = read_ends(folder).norm.float().numpy().tobytes()
    identity = [record, (folder / "config.json").read_text(), sizes, hashlib.sha256(norm).hexdigest()]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _tied(folder: Path) -> bool:
    """Whether the configuration ties the head to the embedding; asks transformers only for a default."""
    fields = json.loads((folder / "config.json").read_text())
    flags = [
        part["tie_word_embeddings"]
        for part in (fields, fields.get("text_config") or {})
        if "tie_word_embeddings" in part
    ]
    return any(flags) if flags else bool(read_config(folder).get_text_config().tie_word_embeddings)


def _shards(weights: Path) -> dict[str, str]:
    """Tensor name to file name, from the index or from the one file."""
    index = weights / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    single = weights / "model.safetensors"
    if not single.is_file():
        raise RedraftError(
            "The target has no safetensors weights.",
            where=weights,
            expected="model.safetensors or model.safetensors.index.json",
            found=sorted(file.name for file in weights.iterdir())[:10],
        )
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single.name)


def _only(shards: dict[str, str], suffix: str, weights: Path) -> str:
    # a layer of its own for multi-token prediction has an embedding too
    found = [key for key in shards if f".{key}".endswith(f".{suffix}") and ".layers." not in f".{key}"]
    if len(found) != 1:
        raise RedraftError(
            "A tensor of the target cannot be told." if found else "A tensor of the target is missing.",
            where=weights,
            expected=f"one name that ends in {suffix}",
            found=found or sorted(shards)[:5],
        )
    return found[0]


def _read(weights: Path, shards: dict[str, str], key: str) -> Tensor:
    path = weights / shards.get(key, "")
    if key not in shards or not path.is_file():
        raise RedraftError("A tensor of the target is missing.", where=weights, expected=key, found=f"no {path.name}")
    with safe_open(path, "pt") as file:
        return file.get_tensor(key)
