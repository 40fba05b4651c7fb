"""Layer ids in a drafter's config.json: which layers of its target they mean, by family and release of SGLang.

Layers are written down as inputs of layers, as everywhere here; an id is what stands in `eagle_config`. Without torch.
Source: `set_eagle3_layers_to_capture` in the model files of every release from 0.5.5 to 0.5.23 (SGLang PR #25454 and
#32334), looked up for each architecture; those that are not named here add one to every id.
"""

from collections.abc import Sequence
from typing import Any

from packaging.version import Version

from redraft.frame.errors import RedraftError

NEWEST = Version("0.5.23")
_KEY = "eagle_aux_hidden_state_layer_ids"
_FIRST_SINCE, _FIRST = (
    Version("0.5.13"),
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",  # delegates to its inner DeepSeek model
        "MistralLarge3ForCausalLM",
    },
)
"""Ids are inputs, unless the first one is 1: then outputs."""
_LARGEST_SINCE, _LARGEST = Version("0.5.17"), {"GptOssForCausalLM"}
"""Ids are inputs if the largest is the depth: the output of the last layer, as the input of one that would follow."""
_LAST_SINCE = {
    "GptOssForCausalLM": _LARGEST_SINCE,
    "MiniMaxM3SparseForCausalLM": NEWEST,
    "MiniMaxM3SparseForConditionalGeneration": NEWEST,
}
"""Can capture the output of the last layer, from this release on."""
_SHIFTED = {"MiniMaxM3SparseForConditionalGeneration"}
"""Adds one to the default layers, too."""


def reads_first(architecture: str, release: Version = NEWEST) -> bool:
    """Whether the first id decides: inputs, unless it is 1."""
    return architecture in _FIRST and release >= _FIRST_SINCE


def family(architecture: str, release: Version = NEWEST) -> str:
    """How a release reads the ids of such a target, in words."""
    if reads_first(architecture, release):
        return "ids are inputs unless the first is 1"
    if architecture in _LARGEST and release >= _LARGEST_SINCE:
        return "ids are outputs unless the largest is the depth"
    return "ids are outputs"


def layers_of(ids: Sequence[int] | None, depth: int, architecture: str, release: Version = NEWEST) -> tuple[int, ...]:
    """The layers, ascending as their states are joined, whose inputs a release captures for `ids`; None: no ids.

    Args:
        ids: as they stand in `eagle_config`.
        depth: layers of the target.
        architecture: of the target, as its `config.json` names it.
        release: of SGLang.
    """
    if ids is None:
        return tuple(layer + (architecture in _SHIFTED) for layer in (2, depth // 2, depth - 3))
    inputs = reads_first(architecture, release) and list(ids[:1]) != [1]
    if architecture in _LARGEST and release >= _LARGEST_SINCE:
        inputs = max(ids, default=0) == depth
    return tuple(sorted(number + (not inputs) for number in ids))


def last_layer(depth: int, architecture: str, release: Version = NEWEST) -> int:
    """The largest of `layers_of` that can be captured: `depth` stands for the output of the last layer."""
    since = _LAST_SINCE.get(architecture)
    return depth if since is not None and release >= since else depth - 1


def ids_of(layers: Sequence[int], depth: int, architecture: str, release: Version = NEWEST) -> list[int] | None:
    """The ids for which a release captures the inputs of `layers`, outputs where both would do; None if none do.

    Args:
        layers: ascending.
        depth: layers of the target.
        architecture: see `layers_of`.
        release: of SGLang.
    """
    able = layers[-1] <= last_layer(depth, architecture, release)
    for ids in ([layer - 1 for layer in layers], list(layers)) if able else ():
        if ids[0] >= 0 and layers_of(ids, depth, architecture, release) == tuple(layers):
            return ids
    return None


def nested_ids(fields: dict[str, Any]) -> list[int] | None:
    """The ids in `eagle_config`, which SGLang reads; None if there are none, or an empty list.

    Raises:
        RedraftError: no list of whole numbers.
    """
    part = fields.get("eagle_config")
    return numbers(part.get(_KEY) if isinstance(part, dict) else None, f"{_KEY} in config.json")


def numbers(value: object, where: str) -> list[int] | None:
    """A list of layers or their ids; None for nothing, or an empty list.

    Raises:
        RedraftError: no list of whole numbers.
    """
    if value is None or value == []:
        return None
    if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
        raise RedraftError(
            "The layers that feed the drafter cannot be read.",
            where=where,
            expected="a list of whole numbers from 0 on",
            found=repr(value)[:80],
        )
    return value


def declared_layers(fields: dict[str, Any], architecture: str, depth: int) -> tuple[int, ...] | None:
    """The layers of a target that feed a drafter, by its flat configuration; None if it names none.

    Nested in `eagle_config` ids are read as SGLang reads them for this target; at top level (speculators, vLLM) they
    are inputs of layers.

    Raises:
        RedraftError: ids that are no list of whole numbers.
    """
    nested = nested_ids(fields)
    if nested is not None:
        return layers_of(nested, depth, architecture)
    top = numbers(fields.get(_KEY), f"{_KEY} in config.json")
    return None if top is None else tuple(top)
