"""What others call the parts of a drafter, brought to SGLang's names; without torch, so that an audit starts at once.

SGLang and SpecForge write `midlayer.*`; speculators and vLLM write `layers.0.*` with the shape nested in
`transformer_layer_config`; both may stand behind a `model.` prefix. Nothing is dropped here: what is not known keeps
its name, and the strict reader refuses it.
"""

from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATORS = {"Eagle3DraftModel", "Eagle3Speculator"}
_KEPT = {"eagle_config", "rope_scaling", "rope_parameters"}


def sglang_name(name: str) -> str:
    """The name of a tensor in SGLang's form (`llama_eagle3.py:load_weights`)."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return "d2t" if name == "draft_id_to_target_id" else name


def speculators_name(name: str) -> str:
    """The name of a tensor in the form of speculators, from SGLang's."""
    return name.replace("midlayer.", "layers.0.")


def flat_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A drafter's `config.json` with nested parts laid flat and the architecture named as SGLang does."""
    nested = fields.get("transformer_layer_config") or fields.get("text_config") or {}
    flat = {**nested, **{name: value for name, value in fields.items() if not isinstance(value, dict) or name in _KEPT}}
    if set(fields.get("architectures") or []) <= _SPECULATORS and "transformer_layer_config" in fields:
        flat["architectures"] = [ARCHITECTURE]
    return flat


def declared_layers(fields: dict[str, Any]) -> tuple[int, ...] | None:
    """The layers that feed a drafter, as inputs of layers, by its flat configuration; None if it names none.

    Nested in `eagle_config` (SGLang) a list that starts with 1 names outputs, any other inputs, as SGLang 0.5.13 and
    later read it for DeepSeek targets; at top level (speculators, vLLM) ids are inputs.
    """
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested:
        return tuple(layer + 1 for layer in nested) if nested[0] == 1 else tuple(nested)
    top = fields.get("eagle_aux_hidden_state_layer_ids")
    return tuple(top) if top else None
