"""What SGLang does with an EAGLE-3 drafter, where its releases or the families of targets differ; read up to 0.5.23.

Layers are written down as inputs of layers, as everywhere here; ids are what stands in `config.json`. How ids are read
is decided in `redraft.drafter.layers`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from redraft.drafter.layers import NEWEST, family, ids_of, last_layer, layers_of
from redraft.frame.errors import RedraftError

OLDEST = Version("0.5.5")
"""Releases from here to `NEWEST` were read for this; later ones are taken to be as the newest."""
_NUMBER = re.compile(r"v?(\d+\.\d+\.\d+)(?!\d)")
HOOKS = {
    architecture: Version(since)
    for since, architectures in {
        "0.5.5": "DeepseekV2 DeepseekV3 DeepseekV32",
        "0.5.6": "LongcatFlash MiniMaxM2 TeleFLM",
        "0.5.7": "Ministral3 MistralLarge3",
        "0.5.8": "Glm4MoeLite IQuestCoder",
        "0.5.9": "BailingMoE BailingMoe BailingMoeV2 ExaoneMoE GlmMoeDsa Qwen3Next",
        "0.5.10": "KimiK25* SarvamMoE",
        "0.5.11": "InternS1Pro* Qwen3VL* Qwen3VLMoe* Qwen3_5* Qwen3_5Moe*",
        "0.5.12": "Gemma3 Gemma3* Gemma4 Gemma4* InternS2Preview*",
        "0.5.13": "Gemma4Unified*",
        "0.5.16": "Mellum MiniMaxM3Sparse",
        "0.5.18": "InternS2Mobius* MiniMaxM3Sparse*",
        "0.5.20": "Cosmos3* Glm5Next* Qwen4Exp*",
        "0.5.22": "ExaoneMoe Qwen3_5 Qwen3_5Moe",
        "0": "Apertus Glm4Moe GptOss InternLM3 Llama Llama4 Llama4* Mistral Phi3 "
        "Qwen2 Qwen2Moe Qwen2_5_VL* Qwen3 Qwen3Moe",
    }.items()
    for name in architectures.split()
    for architecture in [
        f"{name.removesuffix('*')}{'ForConditionalGeneration' if name.endswith('*') else 'ForCausalLM'}"
    ]
}
"""Targets with `set_eagle3_layers_to_capture`, and the first release in which they have it (0: before `OLDEST`)."""


class Release(Version):
    """A release of SGLang; compares with tuples of its numbers, too: `release >= (0, 5, 12)`."""

    text = ""
    """As it was given."""
    note = ""
    """What could not be told of it, in words."""
    guessed = False
    """Whether the text was no version."""

    @classmethod
    def parse(cls, text: str) -> "Release":
        """`0.5.10.post1` and the like; `0.5.10rc0` is older than 0.5.10.

        A build without a number, as nightly images report it (`0.0.0.dev1+gf97c09dac`, `main`), is taken for the newest
        release, one with more behind its number than a version has (`0.5.10-12-gab`) for that release; `note` says so.

        Raises:
            RedraftError: nothing, or the beginning of a version.
        """
        text = text.strip()
        number = _NUMBER.match(text)
        if number is None and (not text or text.removeprefix("v")[:1].isdigit()):
            raise RedraftError(
                "This is no version of SGLang.", where="--version", expected="for example 0.5.23", found=repr(text)
            )
        known = number[1] if number and number[1] != "0.0.0" else str(NEWEST)
        try:
            release = cls(text if number and known == number[1] else known)
        except InvalidVersion:
            release = cls(known)
            release.guessed = True
        release.text = text
        release.guessed |= number is None
        if number is None or known != number[1]:
            release.note = f"no number of a release: taken for {NEWEST}, the newest that was read"
        elif release.guessed:
            release.note = f"no version: taken for {known}"
        elif not OLDEST <= Version(release.base_version) <= NEWEST:
            release.note = f"{OLDEST} to {NEWEST} were read: taken for the nearest"
        elif release.is_prerelease:
            release.note = f"a build before {release.base_version}: taken for the release before that"
        return release

    def __lt__(self, other: object) -> bool:
        return super().__lt__(_version(other))

    def __le__(self, other: object) -> bool:
        return super().__le__(_version(other))

    def __gt__(self, other: object) -> bool:
        return super().__gt__(_version(other))

    def __ge__(self, other: object) -> bool:
        return super().__ge__(_version(other))

    @property
    def many_layers(self) -> bool:
        """Takes `layers.0.*`, several draft layers, `fc_norm`, `norm_output`, and not only 3 aux layers."""
        return self >= (0, 5, 12)

    @property
    def window_flag(self) -> bool:
        """Has `--speculative-draft-window-size`; no release takes a window from the drafter's config.json."""
        return self >= (0, 5, 12)

    @property
    def norm_before_fc(self) -> bool:
        """Computes `norm_before_fc`."""
        return self >= (0, 5, 23)

    @property
    def rope_parameters(self) -> bool:
        """Runs on transformers 5, which reads `rope_parameters`; before that it is ignored."""
        return self >= (0, 5, 10)

    @property
    def graphs_forget_ids(self) -> bool:
        """The capture of CUDA graphs sets the layers again, to the default ones."""
        return OLDEST <= self < Version("0.5.11")

    @property
    def partial_sums(self) -> bool:
        """With several GPUs and a fused all-reduce, the captured states are one GPU's share of the sum."""
        return self < (0, 5, 14)


def _version(other: object) -> Version:
    return Version(".".join(map(str, other))) if isinstance(other, tuple) else other  # type: ignore[return-value]


@dataclass(frozen=True)
class Captured:
    """Layers whose inputs feed the drafter, ascending: in that order the states are joined."""

    eager: tuple[int, ...]
    """In prefill and without CUDA graphs."""
    graphs: tuple[int, ...]
    """In CUDA graphs."""


def captured(ids: Sequence[int] | None, depth: int, architecture: str, release: Release) -> Captured:
    """The layers that a release captures for the ids in `eagle_config`; None stands for no ids.

    Source: see `redraft.drafter.layers`, and `cuda_graph_runner.py` up to 0.5.10.post1.
    """
    eager = layers_of(ids, depth, architecture, release)
    default = layers_of(None, depth, architecture, release)
    return Captured(eager, default if release.graphs_forget_ids else eager)


def able_releases(layers: Sequence[int], depth: int, architecture: str) -> str | None:
    """The first and the last release that was read which captures the inputs of `layers`, in words; None: none does."""
    releases = [Release.parse(f"0.5.{patch}") for patch in range(OLDEST.micro, NEWEST.micro + 1)]
    hooked = [each for each in releases if each >= HOOKS.get(architecture, OLDEST)]
    able = [each for each in hooked if _ids(layers, depth, architecture, each)]
    return f"{able[0]} to {able[-1]}" if able else None


def ids_that_capture(layers: Sequence[int], depth: int, architecture: str, release: Release) -> list[int]:
    """The ids with which a release captures the inputs of `layers`, ascending, with and without CUDA graphs.

    Raises:
        RedraftError: there are none.
    """
    if ids := _ids(layers, depth, architecture, release):
        return ids
    able = able_releases(layers, depth, architecture)
    raise RedraftError(
        f"SGLang {release} cannot capture the layers that this drafter was trained on.",
        where="eagle_aux_hidden_state_layer_ids",
        expected=f"inputs of layers {list(layers)} of {depth}, with and without CUDA graphs",
        cause="its CUDA graphs capture the default layers, whatever the ids"
        if release.graphs_forget_ids
        else f"for such a target {family(architecture, release)}, up to "
        f"layer {last_layer(depth, architecture, release)}",
        fix=f"serve with {able}" if able else "no release that was read can: train on other aux layers",
    )


def _ids(layers: Sequence[int], depth: int, architecture: str, release: Release) -> list[int] | None:
    ids = ids_of(layers, depth, architecture, release)
    layers = tuple(layers)
    return ids if ids and captured(ids, depth, architecture, release) == Captured(layers, layers) else None
