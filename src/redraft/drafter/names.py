"""What others call the parts of a drafter, brought to SGLang's names; without torch, so that an audit starts at once.

SGLang and SpecForge write `midlayer.*`; speculators and vLLM write `layers.0.*` with the shape nested in
`transformer_layer_config`; both may stand behind a `model.` prefix. Nothing is dropped here: what is not known keeps
its name, and the strict reader refuses it.
"""

from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
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
    parts = (fields.get("transformer_layer_config"), fields.get("text_config"))
    nested = next((part for part in parts if part and isinstance(part, dict)), {})
    flat = {**nested, **{name: value for name, value in fields.items() if not isinstance(value, dict) or name in _KEPT}}
    named = fields.get("architectures") or []
    if "transformer_layer_config" in fields and isinstance(named, list) and all(name in _SPECULATORS for name in named):
        flat["architectures"] = [ARCHITECTURE]
    return flat
