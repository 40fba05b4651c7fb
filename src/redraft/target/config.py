"""The target's configuration, and the layers whose input feeds a drafter.

Aux layers are written down as *inputs of layers*: state `i` is the residual stream that enters decoder layer `i`
(0-based), which is `hidden_states[i]` in transformers and the output of layer `i - 1`.
"""

from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.hf import asking_transformers, offline_transformers

TIED = "tie_word_embeddings"
_NESTED = ("text_config", "llm_config", "language_config")


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


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers configuration in `folder`; nested text configurations are left in place.

    Raises:
        RedraftError: no config.json, no JSON object, a model that transformers does not know, or code that fails.
    """
    fields = _fields(folder)
    if not fields.get("model_type"):
        raise RedraftError(
            "config.json does not name the model.",
            where=folder / "config.json",
            expected="model_type",
            found=some(sorted(fields)),
            fix="give a folder as save_pretrained of transformers writes it",
        )
    with asking_transformers("target's configuration", folder, trust_remote_code):
        return offline_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def require_served(folder: Path) -> None:
    """Refuse a drafter in place of a target.

    Raises:
        RedraftError: naming what tells.
    """
    fields = _fields(folder)
    architectures = fields.get("architectures") or []
    tells = [f"architectures {architectures}"] if "eagle" in str(architectures).lower() else []
    tells += [name for name in ("draft_vocab_size", "eagle_config", "speculators_config") if name in fields]
    if tells:
        raise RedraftError(
            "target.source is a drafter, not the model that is served.",
            where=folder,
            expected="the model that the drafter drafts for",
            found=some(tells),
            fix="name the served model in target.source, and this folder in donor.source",
        )


def tie_flags(folder: Path) -> dict[str, bool]:
    """What config.json says of tying the head to the embedding, by the place where it stands."""
    fields = _fields(folder)
    parts = {"": fields, **{f"{name}.": fields[name] for name in _NESTED if isinstance(fields.get(name), dict)}}
    return {f"{place}{TIED}": bool(part[TIED]) for place, part in parts.items() if part.get(TIED) is not None}


def _fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise RedraftError(
            "The target's folder has no config.json.", where=folder, fix="give the model's folder as target.source"
        )
    return read_object(path)


def aux_layers_of(config: Any, chosen: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Aux layers as inputs of layers: `chosen`, checked against the depth, or the default of the depth."""
    return aux_layers_at(config.get_text_config().num_hidden_layers, chosen)


def aux_layers_at(depth: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """The same for a target of `depth` decoder layers."""
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
