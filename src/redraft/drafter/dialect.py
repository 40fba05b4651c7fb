"""A drafter's files in every dialect: where the tensors lie, and the configuration that speculators and vLLM read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from redraft.drafter.names import sglang_name
from redraft.frame.errors import RedraftError

HEADER_LIMIT = 100_000_000
"""Bytes; safetensors refuses longer headers."""
_CAUSE = "an incomplete download, or not a file of weights"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, by its name in SGLang's form.

    Reads one safetensors file, the shards of an index, or `pytorch_model.bin` (weights only).

    Raises:
        RedraftError: no weights, old and new format side by side, a shard that is absent, a file that cannot be read,
            or two names for one tensor.
    """
    files = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _load(path).items():
            known = sglang_name(name)
            if known in tensors:
                raise RedraftError("A tensor stands twice.", where=path, found=f"{name}, as {known}")
            tensors[known] = tensor
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    new, old = sorted(folder.glob("*.safetensors")), sorted(folder.glob("pytorch_model*.bin"))
    if bool(new) == bool(old):
        raise RedraftError(
            "The drafter's weights cannot be told." if new else "The drafter has no weights.",
            where=folder,
            expected="safetensors files or pytorch_model.bin, not both",
            found=[path.name for path in (*new, *old)] or sorted(path.name for path in folder.iterdir())[:10],
            fix="move the older ones away" if new else None,
        )
    index = folder / ("model.safetensors.index.json" if new else "pytorch_model.bin.index.json")
    if not index.is_file():
        return new or old
    named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise RedraftError("A shard of the drafter is absent.", where=index, expected=absent, cause=_CAUSE)
    return [folder / name for name in named]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} stands twice in the header")
    return dict(pairs)


def _check_header(path: Path) -> None:
    """Refuse a name that stands twice, which safetensors 0.8 lets pass; all else it refuses itself."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size <= min(HEADER_LIMIT, path.stat().st_size):  # nothing is read by an unchecked length
            json.loads(file.read(size), object_pairs_hook=_once)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            _check_header(path)
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise RedraftError("The drafter's weights cannot be read.", where=path, found=error, cause=_CAUSE) from error
    except Exception as error:  # pickle's own kinds of refusal have no common ancestor
        raise RedraftError(
            "The drafter's weights hold more than tensors.",
            where=path,
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="convert it to safetensors where you trust it",
        ) from error


def speculators_form(config: dict[str, Any], layers: tuple[int, ...], verifier: str) -> dict[str, Any]:
    """The configuration of speculators and vLLM for a drafter whose `config.json` in SGLang's form is `config`.

    Aux layers are inputs of layers there too (vLLM: id k is the input of layer k), at top level. Every norm flag is
    written false: their defaults are true, and the drafter was not trained so.
    """
    top = {"architectures", "eagle_config", "rope_theta", "rope_scaling", "draft_vocab_size", "torch_dtype"}
    shape = {name: value for name, value in config.items() if name not in top}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    flags = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "embed_requires_grad")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **dict.fromkeys(flags, False),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": {**shape, "rope_parameters": rope},
    }
