"""The target's configuration, and the layers whose input feeds a drafter.

Aux layers are written down as *inputs of layers*: state `i` is the residual stream that enters decoder layer `i`
(0-based), which is `hidden_states[i]` in transformers and the output of layer `i - 1`.
"""

from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.code import Trust, allows, make_class, named_class, own_class
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


def read_config(folder: Path, trust_remote_code: Trust = False) -> Any:
    """The transformers configuration in `folder`; nested text configurations are left in place.

    The folder's own code runs only where transformers has no class for the model (`library_class`).

    Raises:
        RedraftError: no config.json, no JSON object, a model that transformers does not know, code of its own that may
            not run, or that fails.
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
    with asking_transformers("target's configuration", folder, allows(trust_remote_code, "configuration")):
        transformers = offline_transformers()
        foreign = named_class(folder, "model") is not None and library_class(folder) is None
        if foreign or fields["model_type"] not in transformers.CONFIG_MAPPING:
            named = own_class(folder, trust_remote_code, "configuration")
            if named is not None:
                return make_class(folder, named, "configuration").from_pretrained(folder)
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def library_class(folder: Path) -> str | None:
    """The class of transformers for the model in `folder`; None if it has none, or the folder means another.

    By model_type. A name in `architectures` that differs in more than letter case and underscores
    (`KimiK25ForConditionalGeneration` is `Kimi_K25ForConditionalGeneration`) is another class: of transformers too, or
    the folder's own.
    """
    transformers = offline_transformers()
    from transformers.models.auto import modeling_auto as auto

    fields = _fields(folder)
    kind = fields.get("model_type")
    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    given = fields.get("architectures")
    known = [table[kind] for table in tables if kind in table]
    named = str(given[0]) if isinstance(given, list) and given else next(iter(known), "")
    same = (name for name in known if _plain(name) == _plain(named))
    elsewhere = named if kind in transformers.CONFIG_MAPPING and hasattr(transformers, named) else None
    return next(same, elsewhere)


def _plain(name: str) -> str:
    return name.replace("_", "").casefold()


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
