"""What SGLang does with an EAGLE-3 drafter, where its releases or the families of targets differ; read up to 0.5.23.

Layers are written down as inputs of layers, as everywhere here; ids are what stands in `config.json`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redraft.frame.errors import RedraftError

OLDEST, NEWEST = (0, 5, 5), (0, 5, 23)
"""Releases whose code was read for this; later ones are taken to be as the newest."""
DEEPSEEK = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"}
KIMI = "KimiK25ForConditionalGeneration"
"""Delegates to its inner DeepSeek model."""
_TEXT = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?(?:(?:rc|\.dev|\+).*)?")


class Release(NamedTuple):
    """A release of SGLang; compares with tuples, and a post-release comes after its release."""

    major: int
    minor: int
    patch: int
    post: int = 0

    @classmethod
    def parse(cls, text: str) -> "Release":
        """`0.5.10.post1` and the like; a release candidate or a development build counts as its release.

        Raises:
            RedraftError: no version.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise RedraftError(
                "This is no version of SGLang.", where="--version", expected="for example 0.5.23", found=repr(text)
            )
        return cls(*(int(number or 0) for number in found.groups()))

    def __str__(self) -> str:
        return ".".join(map(str, self[:3])) + (f".post{self.post}" if self.post else "")

    @property
    def many_layers(self) -> bool:
        """Takes `layers.0.*`, several draft layers, `fc_norm`, `norm_output`, and not only 3 aux layers."""
        return self >= (0, 5, 12)

    @property
    def norm_before_fc(self) -> bool:
        """Computes `norm_before_fc`."""
        return self >= (0, 5, 23)

    @property
    def graphs_forget_ids(self) -> bool:
        """The capture of CUDA graphs sets the layers again, to the default ones."""
        return OLDEST <= self < (0, 5, 11)

    @property
    def partial_sums(self) -> bool:
        """With several GPUs and a fused all-reduce, the captured states are one GPU's share of the sum."""
        return self < (0, 5, 14)


@dataclass(frozen=True)
class Captured:
    """Layers whose inputs feed the drafter, ascending: in that order the states are joined."""

    eager: tuple[int, ...]
    """In prefill and without CUDA graphs."""
    graphs: tuple[int, ...]
    """In CUDA graphs."""


def captured(ids: Sequence[int] | None, depth: int, deepseek: bool, release: Release) -> Captured:
    """The layers that a release captures for the ids in `eagle_config`; None stands for no ids.

    Source: `set_eagle3_layers_to_capture` of `deepseek_v2.py` (SGLang PR #25454) and of the other models, and
    `cuda_graph_runner.py` up to 0.5.10.post1.
    """
    default = (2, depth // 2, depth - 3)
    if ids is None:
        return Captured(default, default)
    outputs = not deepseek or release < (0, 5, 13) or list(ids[:1]) == [1]
    eager = tuple(sorted(number + outputs for number in ids))
    return Captured(eager, default if release.graphs_forget_ids else eager)


def ids_that_capture(layers: Sequence[int], depth: int, deepseek: bool, release: Release) -> list[int]:
    """The ids with which a release captures the inputs of `layers`, ascending, with and without CUDA graphs.

    Raises:
        RedraftError: there are none.
    """
    wanted = Captured(tuple(layers), tuple(layers))
    for ids in ([layer - 1 for layer in layers], list(layers)):
        if ids[0] >= 0 and layers[-1] < depth and captured(ids, depth, deepseek, release) == wanted:
            return ids
    raise RedraftError(
        f"SGLang {release} cannot capture the layers that this drafter was trained on.",
        where="eagle_aux_hidden_state_layer_ids",
        expected=f"inputs of layers {list(layers)} of {depth}, with and without CUDA graphs",
        cause="its CUDA graphs capture the default layers, whatever the ids"
        if release.graphs_forget_ids
        else "a first layer below 2, or a last one that is no layer's input",
        fix="serve with 0.5.11 or later" if release.graphs_forget_ids else "train on other aux layers",
    )
