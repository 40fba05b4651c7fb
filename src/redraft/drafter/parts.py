"""A drafter as it lies on disk, read strictly: the only place that decides which tensors it has to have.

SGLang drops tensors that it does not know and tolerates missing ones, then serves accept length 1.00; so here a
missing, unexpected, mis-shaped, non-finite or wrongly typed tensor is an error with its name.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.drafter.config import read_config
from redraft.drafter.dialect import read_tensors
from redraft.drafter.files import mapping_hashes, read_record, weight_files
from redraft.drafter.mapping_of import decode
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.errors import RedraftError
from redraft.vocab.mapping import Mapping

EMBEDDING = "embed_tokens.weight"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Parts:
    """A drafter as it lies on disk; tensors stay mapped files until they are used."""

    config: DrafterConfig
    fields: dict[str, Any]
    """`config.json` in SGLang's form."""
    tensors: dict[str, Tensor]
    """Weights by their names in `Drafter`, in the dtype of the file."""
    mapping: Mapping
    record: dict[str, Any] = field(default_factory=dict)
    """`redraft.json`, if there is one."""
    embedding: Tensor | None = None
    """An embedding in the file, [V, H]: no part of the drafter, since SGLang puts the target's in its place."""


def read_parts(folder: Path, *, finite: bool = True, target_head: Tensor | None = None, prefix: bool = False) -> Parts:
    """Read a drafter's configuration, mapping and mapped tensors, checked; without `finite` no value is read.

    Args:
        folder: the drafter's.
        finite: look for NaN and infinity.
        target_head: [V, H], of which a head that is missing is taken.
        prefix: take zero offsets of another tool's drafter at their word, see `Mapping.require_meant`.

    Raises:
        RedraftError: no or incomplete config.json, a flag that SGLang's class does not implement, files that cannot be
            read, a mapping that cannot be, or a tensor that is missing, unexpected, mis-shaped, wrongly typed or not
            finite.
    """
    config, fields = read_config(folder)
    tensors, where = read_tensors(folder), str(folder)
    d2t, t2d = (
        None if table is None else _numpy(table) for table in (tensors.pop("d2t", None), tensors.pop("t2d", None))
    )
    full = config.draft_vocab_size == config.vocab_size
    hashes = mapping_hashes(folder, weight_files(folder))
    mapping = decode(d2t, t2d, config.vocab_size, config.draft_vocab_size, hashes, where)
    embedding = tensors.pop(EMBEDDING, None)
    if target_head is not None and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target_head[torch.from_numpy(mapping.ids)]
    if fields.pop("tie_word_embeddings", False) and full and embedding is not None:
        tensors.setdefault("lm_head.weight", embedding)
    _check(tensors, _wanted(config, folder), where)
    if finite:
        require_finite(tensors, where)
    if len(mapping) != config.draft_vocab_size:
        raise RedraftError(
            "Mapping and head have different numbers of slots.",
            where=where,
            expected=f"{config.draft_vocab_size} (draft_vocab_size)",
            found=len(mapping),
        )
    if not prefix:
        mapping.require_meant(hashes, where)
    return Parts(config, fields, tensors, mapping, read_record(folder), embedding)


def _numpy(table: Tensor) -> np.ndarray:
    """numpy has no bf16; a table of floats is refused by its dtype, whichever."""
    return (table.float() if table.is_floating_point() else table).numpy()


def _wanted(config: DrafterConfig, folder: Path) -> dict[str, Tensor]:
    try:
        with torch.device("meta"):
            return Drafter(config).state_dict()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise RedraftError(
            "The sizes in config.json make no drafter.", where=folder / "config.json", found=str(error).splitlines()[0]
        ) from error


def _check(tensors: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise RedraftError(
            "The tensors are not those of the drafter.",
            where=where,
            expected=f"missing here: {', '.join(missing) or 'none'}",
            found=f"not known: {', '.join(unknown) or 'none'}",
            cause="a trainer's prefix was left on the names, or the export was cut short",
            fix="donor.head: target in the profile borrows the target's rows"
            if missing == ["lm_head.weight"]
            else None,
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise RedraftError(
                "A tensor of the drafter has another shape.",
                where=f"{where}: {name}",
                expected=list(wanted[name].shape),
                found=list(tensor.shape),
            )
        if tensor.dtype not in FLOATS:
            raise RedraftError(
                "A tensor of the drafter cannot be used.",
                where=f"{where}: {name}",
                expected="one of " + ", ".join(map(str, FLOATS)),
                found=tensor.dtype,
                fix="a quantised drafter has to be dequantised first" if tensor.itemsize == 1 else None,
            )


def require_finite(tensors: dict[str, Tensor], where: str) -> None:
    """Refuse NaN and infinity; the least and the largest value tell in one pass, since NaN is both.

    Raises:
        RedraftError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if not bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):
            raise RedraftError(
                "A tensor of the drafter cannot be used.",
                where=f"{where}: {name}",
                expected="finite values",
                found="NaN or infinity",
            )


def weights_sha256(folder: Path) -> str:
    """SHA-256 of what a drafter computes with: the same for two drafters only if they draft alike.

    Over the tensors in the order of their names in SGLang's form: a line `NAME DTYPE SHAPE` and their bytes. Metadata,
    the split into files, `t2d` and an embedding, which SGLang reads as little, do not count; so a drafter that
    `redraft export` wrote has the hash of the one that it was made of.

    Raises:
        RedraftError: files that cannot be read.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(folder).items()):
        if name not in ("t2d", EMBEDDING):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
