"""The two ends of a target: its embedding, head and final norm, read from the files without the model between."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import open_tensors, read_object
from redraft.target.config import TIED, read_config, tie_flags
from redraft.target.folder import TARGET_RECORD, contents, weights_folder
from redraft.target.weights import tensor_files

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_OF_SAVING = {"_name_or_path", "transformers_version"}
_ROWS = 8192
"""Rows that are compared at once."""


@dataclass
class Ends:
    """Both ends of a target: all that remap and train read of it."""

    embed: Tensor
    """Token embedding, [V, H]."""
    head: Tensor
    """Language model head, [V, H]; the same tensor as `embed` if there is no other and the configuration ties them."""
    norm: Tensor
    """Weight of the final norm, [H]."""


def read_ends(folder: Path) -> Ends:
    """Embedding, head and final norm of a target folder, mapped from the safetensors files.

    Raises:
        RedraftError: no or several candidates for a tensor, one that is quantised or has other parts beside it, a head
            that is missing although the configuration does not tie it, or another one although it does; see also
            `weights_folder` and `weight_files`.
    """
    weights = weights_folder(folder)
    files = tensor_files(weights)
    _require_plain(files, weights)
    embed_key = _only(files, EMBED, weights)
    embed = _read(files, embed_key, weights)
    if any(_named(key, HEAD) for key in files):
        head = _read(files, _only(files, HEAD, weights), weights)
        if embed.shape != head.shape:
            raise RedraftError(
                "Embedding and head of the target do not agree.",
                where=weights,
                expected="one shape",
                found=f"embedding {list(embed.shape)}, head {list(head.shape)}",
            )
        _require_untied(folder, embed, head)
    elif _tied(folder):
        head = embed
    else:
        raise RedraftError(
            "The target has no head.",
            where=weights,
            expected=f"a tensor that ends in {HEAD}, or {TIED}: true wherever config.json names it",
            found=f"neither; {_told(tie_flags(folder))}",
        )
    return Ends(embed, head, _read(files, f"{embed_key.removesuffix(EMBED)}norm.weight", weights))


def target_hash(folder: Path) -> str:
    """Identity of a target without reading its terabyte, wherever it lies: its weights, and what else makes a forward.

    That is `config.json` without what a saving notes of itself, and the code of its own that may run, as the target
    stage recorded it. Names of files and of folders do not count.
    """
    known = contents(weights_folder(folder))
    weights = sorted(value for name, value in known.items() if name.endswith(".safetensors"))
    record = read_object(folder / TARGET_RECORD) if (folder / TARGET_RECORD).is_file() else {}
    identity = [_lasting(read_object(folder / "config.json")), record.get("code", {}), weights]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _lasting(value: Any) -> Any:
    """A configuration without the keys that every saving writes anew."""
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items() if key not in _OF_SAVING}
    return value


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, `other` in the dtype and on the device of `one`, by blocks of rows."""
    return one.shape == other.shape and all(
        torch.equal(mine, its.to(mine)) for mine, its in zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    )


def _tied(folder: Path) -> bool:
    """Whether files without a head mean the embedding; asks transformers where config.json does not tell."""
    flags = tie_flags(folder)
    if flags and len(set(flags.values())) == 1:
        return all(flags.values())
    with suppress(RedraftError):  # code of its own, which is not run here
        config = read_config(folder)
        return bool(getattr(config if flags else config.get_text_config(), TIED, False))
    return False


def _require_untied(folder: Path, embed: Tensor, head: Tensor) -> None:
    """Refuse a head of its own where the configuration ties it: transformers would take it, a server would not."""
    flags = tie_flags(folder)
    if (flags and not any(flags.values())) or same(embed, head):
        return
    if not flags:
        with suppress(RedraftError):  # a model of its own code ties nothing that it does not say
            if read_config(folder).get_text_config().tie_word_embeddings:
                flags = {f"{TIED}, by default of this model": True}
    if any(flags.values()):
        raise RedraftError(
            "The target's configuration ties the head to the embedding, and the files hold another head.",
            where=folder / "config.json",
            expected=f"{HEAD} equal to {EMBED}, or not there",
            found=f"{_told(flags)}; {HEAD} differs from {EMBED}",
            cause="a tied model was fine-tuned with a head of its own: a server ignores that, transformers does not",
            fix=f"set {TIED} to false wherever config.json names it, to serve the head that the files hold; or remove "
            f"{HEAD} from them, to serve the embedding",
        )


def _told(flags: dict[str, bool]) -> str:
    return some([f"{place}: {str(value).lower()}" for place, value in flags.items()]) or f"no {TIED} in config.json"


def _named(key: str, suffix: str) -> bool:
    # a layer of its own for multi-token prediction has an embedding too
    return f".{key}".endswith(f".{suffix}") and ".layers." not in f".{key}"


def _only(files: dict[str, Path], suffix: str, weights: Path) -> str:
    found = [key for key in files if _named(key, suffix)]
    if len(found) != 1:
        raise RedraftError(
            "A tensor of the target cannot be told." if found else "A tensor of the target is missing.",
            where=weights,
            expected=f"one name that ends in {suffix}",
            found=some(found or sorted(files)),
        )
    return found[0]


def _require_plain(files: dict[str, Path], weights: Path) -> None:
    """Refuse other parts of embedding or head: a bias, scales, packed bits."""
    stems = ("embed_tokens.", "lm_head.")
    beside = [
        key
        for key in files
        if any(f".{stem}" in f".{key}" for stem in stems)
        and ".layers." not in f".{key}"
        and not key.endswith((EMBED, HEAD))
    ]
    if beside:
        raise RedraftError(
            "The target's embedding or head is more than a matrix.",
            where=weights,
            expected=f"{EMBED} and {HEAD} alone",
            found=some(beside),
            cause="a bias, or a quantised matrix with its scales: redraft does not compute that",
            fix="serve a model whose embedding and head are plain; the layers between may be quantised",
        )


def _read(files: dict[str, Path], key: str, weights: Path) -> Tensor:
    if key not in files:
        raise RedraftError("A tensor of the target is missing.", where=weights, expected=key, found=some(sorted(files)))
    with open_tensors(files[key]) as file:
        kind = file.get_slice(key).get_dtype()
        if kind not in _FLOATS:
            raise RedraftError(
                "A tensor of the target cannot be read as numbers.",
                where=f"{files[key]}: {key}",
                expected=f"one of {', '.join(sorted(_FLOATS))}",
                found=kind,
                cause="it is quantised, and its numbers mean something only with their scales",
                fix="serve a model whose embedding and head are plain; the layers between may be quantised",
            )
        return file.get_tensor(key)
