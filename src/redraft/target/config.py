"""The target's configuration, and the layers whose input feeds a drafter.

Aux layers are written down as *inputs of layers*: state `i` is the residual stream that enters decoder layer `i`
(0-based), which is `hidden_states[i]` in transformers and the output of layer `i - 1`.
"""

from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.target.hf import offline_transformers


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
    """The transformers configuration in `folder`; nested text configurations are left in place."""
    if not (folder / "config.json").is_file():
        raise RedraftError("The target folder has no config.json.", where=folder, fix="rerun the target stage")
    return offline_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def aux_layers_of(config: Any, chosen: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Aux layers as inputs of layers: `chosen`, checked against the depth, or the default of the depth."""
    depth = config.get_text_config().num_hidden_layers
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
