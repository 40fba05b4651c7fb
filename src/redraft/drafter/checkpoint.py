"""Drafters on disk: SGLang's form, read and written strictly. The only place that decides names of tensors.

SGLang drops tensors that it does not know and tolerates missing ones, then serves accept length 1.00; so here a
missing, unexpected, mis-shaped, non-finite or wrongly typed tensor is an error with its name.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from redraft import atomic
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.errors import RedraftError
from redraft.vocab.mapping import Mapping

WEIGHTS = "model.safetensors"
RECORD = "redraft.json"
ROW_SOURCE = "row_source.npy"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_IGNORED = {"embed_tokens.weight"}  # SGLang replaces it by the target's
_UNSERVED = (
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "attention_bias",
    "bias",
)


@dataclass
class Checkpoint:
    """A drafter with its mapping."""

    drafter: Drafter
    """fp32 in memory, bf16 on disk."""
    mapping: Mapping
    record: dict[str, Any] = field(default_factory=dict)
    """How it came about; written to `redraft.json`."""
    row_source: np.ndarray | None = None
    """Where each head row came from, int64 [N]: see `redraft.drafter.remap`."""


def exported_layer_ids(aux_layers: tuple[int, ...]) -> list[int]:
    """SGLang's `eagle_aux_hidden_state_layer_ids` for aux layers written as inputs of layers.

    Only a list that starts with 1 is read the same way by every release and target family: as the output of those
    layers (SGLang PR #25454; `set_eagle3_layers_to_capture`).

    Raises:
        RedraftError: the aux layers do not start at the input of layer 2.
    """
    if aux_layers[0] != 2:
        raise RedraftError(
            "These aux layers mean different tensors in different releases of SGLang.",
            where="target.aux_layers in the profile",
            expected="a first aux layer of 2",
            found=list(aux_layers),
            fix="use the default (2, L//2, L-3)",
        )
    return [layer - 1 for layer in aux_layers]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, aux_layers: tuple[int, ...]) -> None:
    """Write `checkpoint` in SGLang's form to `folder`, then read it back and compare.

    Tensors: those of `Drafter`, bf16; `d2t` int64 [N]; `t2d` bool [V]. One metadata key, so equal drafters give equal
    bytes (safetensors orders several keys at random).
    """
    config, mapping = checkpoint.drafter.config, checkpoint.mapping
    if len(mapping) != config.draft_vocab_size or mapping.vocab_size != config.vocab_size:
        raise RedraftError(
            "Head and mapping of the drafter do not agree.",
            where=folder,
            expected=f"N {config.draft_vocab_size}, V {config.vocab_size} (head)",
            found=f"N {len(mapping)}, V {mapping.vocab_size} (mapping)",
        )
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.drafter.state_dict().items()
    }
    tensors["d2t"] = torch.from_numpy(mapping.d2t)
    tensors["t2d"] = torch.from_numpy(mapping.t2d)
    record = {**checkpoint.record, "mapping": mapping.hash, "aux_layers": list(aux_layers)}
    with atomic.folder(folder) as partial:
        (partial / WEIGHTS).write_bytes(save(tensors, {"redraft": json.dumps({"mapping": mapping.hash})}))
        atomic.write_json(partial / "config.json", _config_json(config, exported_layer_ids(aux_layers)))
        atomic.write_json(partial / RECORD, record)
        if checkpoint.row_source is not None:
            np.save(partial / ROW_SOURCE, checkpoint.row_source)
        again = read_checkpoint(partial)
        for name, tensor in again.drafter.state_dict().items():
            if not torch.equal(tensor.bfloat16(), tensors[name]):
                raise RedraftError("A tensor changed between writing and reading.", where=f"{folder}: {name}")


def _config_json(config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any]:
    fields = config.to_dict()
    fields.pop("num_aux_layers")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        **fields,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layer_ids},
    }


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a drafter in SGLang's form.

    Raises:
        RedraftError: no or incomplete config.json, a flag that SGLang's class does not implement, a file that is not
            safetensors, or a tensor that is missing, unexpected, mis-shaped, wrongly typed or not finite.
    """
    config = _read_config(folder)
    tensors = _read_tensors(folder / WEIGHTS)
    where = str(folder / WEIGHTS)
    if ("d2t" in tensors) != ("t2d" in tensors) or (
        "d2t" not in tensors and config.draft_vocab_size < config.vocab_size
    ):
        raise RedraftError(
            "The mapping is not complete.",
            where=where,
            expected="d2t and t2d, or neither with a full draft vocabulary",
            found=[name for name in ("d2t", "t2d") if name in tensors] or "neither",
        )
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None or t2d is None:
        mapping = Mapping(np.arange(config.vocab_size), config.vocab_size)
    else:
        mapping = Mapping.from_offsets(d2t.numpy(), t2d.numpy(), config.vocab_size, where)
    drafter = Drafter(config)
    for name in _IGNORED & tensors.keys():
        del tensors[name]
    _check(tensors, drafter.state_dict(), where)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    if len(mapping) != config.draft_vocab_size:
        raise RedraftError(
            "Mapping and head have different numbers of slots.",
            where=where,
            expected=f"{config.draft_vocab_size} (draft_vocab_size)",
            found=len(mapping),
        )
    record = json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else {}
    if record.get("mapping", mapping.hash) != mapping.hash:
        raise RedraftError(
            "The drafter's mapping is not the one it was written with.",
            where=folder,
            expected=record["mapping"],
            found=mapping.hash,
            cause="d2t was replaced after training; the head still belongs to the old mapping",
        )
    row_source = np.load(folder / ROW_SOURCE) if (folder / ROW_SOURCE).is_file() else None
    return Checkpoint(drafter, mapping, record, row_source)


def _read_config(folder: Path) -> DrafterConfig:
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RedraftError("The drafter has no readable config.json.", where=path, found=error) from error
    if fields.get("architectures") != [ARCHITECTURE] or fields.get("num_hidden_layers", 1) != 1:
        raise RedraftError(
            "This drafter is of a kind that redraft does not know.",
            where=path,
            expected=f"architectures [{ARCHITECTURE}], num_hidden_layers 1",
            found=f"architectures {fields.get('architectures')}, num_hidden_layers {fields.get('num_hidden_layers')}",
        )
    flags = [flag for flag in _UNSERVED if fields.get(flag) or fields.get("eagle_config", {}).get(flag)]
    if flags or fields.get("tie_word_embeddings"):
        raise RedraftError(
            "The drafter was trained with a switch that SGLang's class does not compute like this.",
            where=path,
            found=", ".join(flags) or "tie_word_embeddings",
            fix="serve it where it was trained for, or choose another donor",
        )
    rope = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise RedraftError("Scaled rotary positions are not supported in a drafter.", where=path, found=kind)
    if "draft_vocab_size" not in fields:
        raise RedraftError(
            "config.json lacks draft_vocab_size: SGLang would stop with an AttributeError.",
            where=path,
            fix="add it: the number of rows of lm_head.weight (null for a full vocabulary)",
        )
    try:
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=fields["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or hidden // heads,
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields["draft_vocab_size"] or fields["vocab_size"],
            rms_norm_eps=fields["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or fields["rope_theta"]),
            max_position_embeddings=fields["max_position_embeddings"],
        )
    except KeyError as error:
        raise RedraftError("config.json of the drafter lacks a field.", where=path, expected=error.args[0]) from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RedraftError(
            "The drafter's weights cannot be read.",
            where=path,
            found=error,
            cause="an incomplete download, or not a safetensors file",
        ) from error


def _check(tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str) -> None:
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise RedraftError(
            "The tensors are not those of the drafter.",
            where=where,
            expected=f"missing here: {', '.join(missing) or 'none'}",
            found=f"not known: {', '.join(unknown) or 'none'}",
            cause="a trainer's prefix was left on the names, or the export was cut short",
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise RedraftError(
                "A tensor of the drafter has another shape.",
                where=f"{where}: {name}",
                expected=list(wanted[name].shape),
                found=list(tensor.shape),
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise RedraftError(
                "A tensor of the drafter cannot be used.",
                where=f"{where}: {name}",
                expected="finite floating-point values",
                found=tensor.dtype if not tensor.is_floating_point() else "NaN or infinity",
            )
