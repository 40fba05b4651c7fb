"""`config.json` of a drafter: what SGLang reads of it, and what is refused because SGLang would compute otherwise."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.drafter.layers import ids_of
from redraft.drafter.model import DrafterConfig
from redraft.drafter.names import ARCHITECTURE, flat_config
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.target.facts import read_facts

MOST = 1 << 24
"""No size of a drafter is above this."""

_UNSERVED = (
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "attention_bias",
    "bias",
)


def written_ids(aux_layers: Sequence[int], target: Path | None) -> list[int] | None:
    """`eagle_aux_hidden_state_layer_ids` for aux layers as inputs of layers; None where no ids are known to mean them.

    Ids that start with 1 mean the same to every release and family: outputs. Others mean other layers to another family
    (see `redraft.drafter.layers`): they are the newest release's for `target`. For an older one `redraft export` writes
    them anew; without a target, or where no ids mean these layers, config.json names none and `redraft.json` alone
    tells, so that the preflight does.
    """
    if aux_layers[0] == 2:
        return [layer - 1 for layer in aux_layers]
    if target is None:
        return None
    facts = read_facts(target)
    return ids_of(aux_layers, facts.depth, facts.architecture)


def config_json(config: DrafterConfig, layer_ids: list[int] | None) -> dict[str, Any]:
    """The `config.json` of a drafter in SGLang's form; without layer ids a server takes its default layers."""
    fields = config.to_dict()
    fields.pop("num_aux_layers")
    ids = {} if layer_ids is None else {"eagle_aux_hidden_state_layer_ids": layer_ids}
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
        "eagle_config": {"use_aux_hidden_state": True, **ids},
    }


def part(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A nested object of a configuration; empty if it is none."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def window(fields: dict[str, Any]) -> str | None:
    """What says that attention is windowed, in any of its spellings; None if nothing does."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        return f"layer_types {kinds}"
    if fields.get("use_sliding_window") is False:
        return None
    sizes = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size")
    told = [f"{name} {fields[name]}" for name in (*sizes, "use_sliding_window") if fields.get(name)]
    return ", ".join(told) or None


def read_config(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """The shape of the drafter in `folder`, and its configuration laid flat in SGLang's form.

    Raises:
        RedraftError: no readable file, another kind of drafter, a switch that SGLang's class computes otherwise, or a
            field that is missing or no number.
    """
    path = folder / "config.json"
    fields = flat_config(read_object(path))
    if fields.get("architectures") != [ARCHITECTURE] or fields.get("num_hidden_layers", 1) != 1:
        raise RedraftError(
            "This drafter is of a kind that redraft does not know.",
            where=path,
            expected=f"architectures [{ARCHITECTURE}], num_hidden_layers 1",
            found=f"architectures {fields.get('architectures')}, num_hidden_layers {fields.get('num_hidden_layers')}",
        )
    _require_served(fields, path)
    if "draft_vocab_size" not in fields:
        raise RedraftError(
            "config.json lacks draft_vocab_size: SGLang would stop with an AttributeError.",
            where=path,
            fix="add it: the number of rows of lm_head.weight (null for a full vocabulary)",
        )

    def whole(name: str, default: int | None = None) -> int:
        return int(_number(fields, name, path, default, whole=True))

    hidden, heads, vocab = whole("hidden_size"), whole("num_attention_heads"), whole("vocab_size")
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=whole("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(1, hidden // heads)),
        vocab_size=vocab,
        draft_vocab_size=whole("draft_vocab_size", vocab),
        rms_norm_eps=_number(fields, "rms_norm_eps", path),
        rope_theta=_rope_theta(fields, path),
        max_position_embeddings=whole("max_position_embeddings"),
    )
    if config.head_dim % 2 or heads % config.num_key_value_heads:
        raise RedraftError(
            "The heads of the drafter cannot be.",
            where=path,
            expected="an even head_dim, and num_key_value_heads that divides num_attention_heads",
            found=f"head_dim {config.head_dim}, {heads} heads, {config.num_key_value_heads} key and value heads",
        )
    return config, fields


def _require_served(fields: dict[str, Any], path: Path) -> None:
    """Refuse what SGLang's class, or redraft, does not compute as the configuration says."""
    nested = part(fields, "eagle_config")
    flags = [flag for flag in _UNSERVED if fields.get(flag) or nested.get(flag)]
    if windowed := window(fields):
        flags.append(f"a window: {windowed}")
    if fields.get("tie_word_embeddings") and fields.get("draft_vocab_size") not in (None, fields.get("vocab_size")):
        flags.append("tie_word_embeddings with a reduced vocabulary")
    if flags:
        raise RedraftError(
            "The drafter was trained with a switch that SGLang's class does not compute like this.",
            where=path,
            found=", ".join(flags),
            fix="serve it where it was trained for, or choose another donor",
        )
    rope, scaling = part(fields, "rope_parameters"), part(fields, "rope_scaling")
    kinds = {str(each.get("rope_type") or each.get("type") or "default") for each in (rope, scaling)} - {"default"}
    if kinds:
        raise RedraftError(
            "Scaled rotary positions are not supported in a drafter.", where=path, found=", ".join(sorted(kinds))
        )
    odd = {name: fields.get(name, rope.get(name)) for name in ("partial_rotary_factor", "rope_is_neox_style")}
    if odd["partial_rotary_factor"] not in (None, 1) or odd["rope_is_neox_style"] not in (None, True):
        raise RedraftError(
            "The drafter turns positions otherwise than redraft.",
            where=path,
            expected="whole heads, in NeoX style",
            found=", ".join(f"{name} {value}" for name, value in odd.items() if value is not None),
        )


def _rope_theta(fields: dict[str, Any], path: Path) -> float:
    """The base of the rotary positions; where two places name it they have to agree, since releases differ."""
    places = [fields, part(fields, "rope_parameters"), part(fields, "rope_scaling")]
    named = {_number(each, "rope_theta", path) for each in places if each.get("rope_theta") is not None}
    if len(named) > 1:
        raise RedraftError(
            "config.json of the drafter names two bases of rotary positions.",
            where=f"{path}: rope_theta, rope_parameters",
            expected="one value",
            found=sorted(named),
            fix="write the one that it was trained with in both places",
        )
    return named.pop() if named else _number(fields, "rope_theta", path)


def _number(
    fields: dict[str, Any], name: str, path: Path, default: float | None = None, *, whole: bool = False
) -> float:
    """A positive number of config.json; null and absent give `default`.

    Raises:
        RedraftError: absent without a default, or no positive number.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise RedraftError("config.json of the drafter lacks a field.", where=path, expected=name)
    good = type(value) is int or (not whole and isinstance(value, float) and math.isfinite(value))
    if not good or not 0 < value <= (MOST if whole else 1e12):
        raise RedraftError(
            "config.json of the drafter holds no number that can be.",
            where=f"{path}: {name}",
            expected=f"a positive {'whole ' * whole}number" + (f", at most {MOST}" if whole else ""),
            found=repr(value)[:80],
        )
    return float(value) if not whole else value
