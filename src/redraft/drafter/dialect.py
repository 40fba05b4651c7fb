"""A drafter's files in every dialect: where the tensors lie, and the configuration that speculators and vLLM read."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from redraft.drafter.files import CAUSE, check_header, weight_files
from redraft.drafter.names import sglang_name
from redraft.frame.errors import RedraftError


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, by its name in SGLang's form.

    Reads one safetensors file, the shards of an index, or `pytorch_model.bin` (weights only).

    Raises:
        RedraftError: no weights, old and new format side by side, a shard that is absent, a file that cannot be read,
            or two names for one tensor.
    """
    files = weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _load(path).items():
            known = sglang_name(name)
            if known in tensors:
                raise RedraftError("A tensor stands twice.", where=path, found=f"{name}, as {known}")
            tensors[known] = tensor
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            check_header(path)
            return load_file(path)
        loaded = torch.load(path, "cpu", weights_only=True)
        if not isinstance(loaded, dict) or not all(isinstance(each, Tensor) for each in loaded.values()):
            raise ValueError(f"a {type(loaded).__name__} that is no table of tensors")
        return loaded
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, RecursionError) as error:
        raise RedraftError("The drafter's weights cannot be read.", where=path, found=error, cause=CAUSE) from error
    except Exception as error:  # pickle's own kinds of refusal have no common ancestor
        raise RedraftError(
            "The drafter's weights hold more than tensors.",
            where=path,
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="convert it to safetensors where you trust it",
        ) from error


def speculators_form(config: dict[str, Any], layers: tuple[int, ...], verifier: str) -> dict[str, Any]:
    """The configuration of speculators and vLLM for a drafter whose `config.json` in SGLang's form is `config`.

    Aux layers are inputs of layers there too (vLLM: id k is the input of layer k), at top level. Every norm flag is
    written false: their defaults are true, and the drafter was not trained so.
    """
    top = {"architectures", "eagle_config", "rope_theta", "rope_scaling", "draft_vocab_size", "torch_dtype"}
    shape = {name: value for name, value in config.items() if name not in top}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    flags = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "embed_requires_grad")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **dict.fromkeys(flags, False),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": {**shape, "rope_parameters": rope},
    }
