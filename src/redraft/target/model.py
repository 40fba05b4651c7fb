"""Load a target, run it, and capture the hidden states that feed a drafter.

Legend of shapes: B batch, S tokens, H hidden size, V vocabulary, L decoder layers.
Aux layers are written down as *inputs of layers*: state `i` is the residual stream that enters decoder layer `i`
(0-based), which is `hidden_states[i]` in transformers and the output of layer `i - 1`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redraft.frame.device import compute_device
from redraft.frame.errors import RedraftError, some
from redraft.target.code import Trust, allows, make_class, own_class
from redraft.target.config import aux_layers_of, library_class, read_config
from redraft.target.ends import read_ends
from redraft.target.folder import weights_folder
from redraft.target.head import first_device, require_ends, require_plain_head, weight_of
from redraft.target.hf import asking_transformers, offline_transformers
from redraft.target.weights import tensor_files

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Captured:
    """What one forward left behind; every tensor [B, S, H] in the target's dtype."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Residual stream at the input of a decoder layer, by its id."""
    unnormed: Tensor | None = None
    """Final state before the final norm."""


@dataclass
class Target:
    """A loaded target: the decoder without its head, and the head."""

    model: nn.Module
    config: Any
    """The text configuration of transformers."""
    aux_layers: tuple[int, ...]

    @property
    def decoder(self) -> Any:
        """The module with `layers`, `norm` and `embed_tokens`."""
        return self.model.get_decoder()  # type: ignore[operator]

    @property
    def head(self) -> Tensor:
        """Rows of the language model head, [V, H]."""
        return weight_of(self.model.get_output_embeddings())  # type: ignore[operator]

    @property
    def embed(self) -> Tensor:
        """Rows of the token embedding, [V, H]."""
        return weight_of(self.model.get_input_embeddings())  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Where ids are wanted; a target that is spread computes its embedding somewhere else than it lies."""
        return first_device(self.model)

    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H] after the final norm, wherever the head lies."""
        return self.model.get_output_embeddings()(final)  # type: ignore[operator]

    @contextmanager
    def capture(self, layers: Sequence[int]) -> Iterator[Captured]:
        """Collect the inputs of `layers` and the un-normed final state of every forward inside the block."""
        captured = Captured()

        def at_layer(number: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured.inputs[number] = args[0] if args else kwargs["hidden_states"]

            return hook

        def at_norm(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured.unnormed = args[0] if args else kwargs["hidden_states"]

        handles = [
            self.decoder.layers[number].register_forward_pre_hook(at_layer(number), with_kwargs=True)
            for number in layers
        ]
        handles.append(self.decoder.norm.register_forward_pre_hook(at_norm, with_kwargs=True))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def aux(self, captured: Captured) -> Tensor:
        """The aux states, low to high, joined on the feature axis: [B, S, 3H]."""
        return torch.cat([captured.inputs[number] for number in self.aux_layers], dim=-1)


def model_class(folder: Path, trust_remote_code: Trust = False) -> Any:
    """The class of the target in `folder`: that of transformers, else the folder's own, if it may run.

    Raises:
        RedraftError: code of its own that may not run, or that lacks the class.
    """
    transformers = offline_transformers()
    if library := library_class(folder):
        return getattr(transformers, library)
    named = own_class(folder, trust_remote_code, "model")
    if named is None:
        return transformers.AutoModelForCausalLM
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    return add_generation_mixin_to_remote_model(make_class(folder, named, "model"))


def load_target(
    folder: Path,
    *,
    dtype: str = "bf16",
    aux_layers: tuple[int, ...] | None = None,
    trust_remote_code: Trust = False,
    device: str | None = None,
    device_map: Any = None,
) -> Target:
    """Load the target of `folder` for inference, and hold one forward of it against its two ends.

    Args:
        folder: target folder as the `target` stage writes it.
        dtype: `bf16` or `fp32`.
        aux_layers: inputs of layers; default (2, L//2, L-3).
        trust_remote_code: parts whose code in the folder may run, where transformers has none.
        device: a torch device; default `cuda` where there is one.
        device_map: of Accelerate, in place of a device: `auto` spreads over all GPUs and the machine's memory.

    Raises:
        RedraftError: files, configuration or aux layers that cannot be used, weights that the files lack, a head that
            is more than a matrix, or ends that are not those of `read_ends`.
    """
    config = read_config(folder, trust_remote_code)
    layers, weights = aux_layers_of(config, aux_layers), weights_folder(folder)
    tensor_files(weights)  # or transformers could take others than a server
    with asking_transformers("target", weights, allows(trust_remote_code, "model")):
        # the folder's own configuration, which identifies it, not a second reading of it beside the weights
        given = {"config": config, "dtype": DTYPES[dtype]}
        given |= {"device_map": device_map} if device_map else {}
        model, report = model_class(folder, trust_remote_code).from_pretrained(
            weights, output_loading_info=True, **given
        )
    if report["missing_keys"]:
        raise RedraftError(
            "The files do not hold all of the target's weights.",
            where=weights,
            expected=some(sorted(report["missing_keys"])),
            found="nothing: transformers would fill them with random numbers",
            cause=f"the weights of another model than {type(model).__name__}, which config.json names",
        )
    model = model.eval().requires_grad_(False)
    if not device_map:
        model = model.to(device or compute_device())
    with asking_transformers("forward of 16 tokens", weights, allows(trust_remote_code, "model")):
        require_plain_head(model)
    target = Target(model, config.get_text_config(), layers)
    require_ends(target.embed, target.head, weight_of(target.decoder.norm), read_ends(folder))
    return target
