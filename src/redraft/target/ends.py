"""The two ends of a target: its embedding, head and final norm, read from the files without the model between."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.target.config import read_config
from redraft.target.sources import weights_folder


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
    """Identity of a target without reading its terabyte, wherever it lies: configuration, file sizes, final norm."""
    sizes = sorted((file.name, file.stat().st_size) for file in weights_folder(folder).glob("*.safetensors"))
    norm = read_ends(folder).norm.float().numpy().tobytes()
    identity = [(folder / "config.json").read_text(), sizes, hashlib.sha256(norm).hexdigest()]
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
