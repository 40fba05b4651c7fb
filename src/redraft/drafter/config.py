"""`config.json` of a drafter: what SGLang reads of it, and what is refused because SGLang would compute otherwise."""

import json
from pathlib import Path
from typing import Any

from redraft.drafter.model import DrafterConfig
from redraft.drafter.names import ARCHITECTURE, flat_config
from redraft.frame.errors import RedraftError

_UNSERVED = (
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "attention_bias",
    "bias",
)


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


def config_json(config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any]:
    """The `config.json` of a drafter in SGLang's form."""
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


def read_config(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """The shape of the drafter in `folder`, and its configuration laid flat in SGLang's form.

    Raises:
        RedraftError: no readable file, another kind of drafter, a switch that SGLang's class computes otherwise, or a
            field that is missing.
    """
    path = folder / "config.json"
    try:
        fields = flat_config(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise RedraftError("The drafter has no readable config.json.", where=path, found=error) from error
    if fields.get("architectures") != [ARCHITECTURE] or fields.get("num_hidden_layers", 1) != 1:
        raise RedraftError(
            "This drafter is of a kind that redraft does not know.",
            where=path,
            expected=f"architectures [{ARCHITECTURE}], num_hidden_layers 1",
            found=f"architectures {fields.get('architectures')}, num_hidden_layers {fields.get('num_hidden_layers')}",
        )
    flags = [flag for flag in _UNSERVED if fields.get(flag) or (fields.get("eagle_config") or {}).get(flag)]
    if "sliding_attention" in (fields.get("layer_types") or []):
        flags.append("layer_types: sliding_attention")
    if fields.get("tie_word_embeddings") and fields.get("draft_vocab_size") not in (None, fields.get("vocab_size")):
        flags.append("tie_word_embeddings with a reduced vocabulary")
    if flags:
        raise RedraftError(
            "The drafter was trained with a switch that SGLang's class does not compute like this.",
            where=path,
            found=", ".join(flags),
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
        config = DrafterConfig(
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
    return config, fields
