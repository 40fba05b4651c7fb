"""Drafters on disk: SGLang's form, read and written strictly. The only place that decides names of tensors.

SGLang drops tensors that it does not know and tolerates missing ones, then serves accept length 1.00; so here a
missing, unexpected, mis-shaped, non-finite or wrongly typed tensor is an error with its name.
"""

import hashlib
import json
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.drafter.config import config_json, exported_layer_ids, read_config
from redraft.drafter.dialect import read_tensors, speculators_form
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.drafter.names import declared_layers, sglang_name, speculators_name
from redraft.drafter.stream import write_safetensors
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.vocab.mapping import Mapping

WEIGHTS = "model.safetensors"
RECORD = "redraft.json"
ROW_SOURCE = "row_source.npy"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_IGNORED = {"embed_tokens.weight"}  # SGLang replaces it by the target's


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


@dataclass
class Checkpoint:
    """A drafter with its mapping."""

    drafter: Drafter
    """fp32 in memory, bf16 on disk."""
    mapping: Mapping
    record: dict[str, Any] = field(default_factory=dict)
    """How it came about; written to `redraft.json`."""
    row_source: np.ndarray | None = None
    """Where each head row came from, int64 [N]: see `redraft.remap.remap`."""

    @property
    def foreign(self) -> dict[int, tuple[str | None, str | None]]:
        """Ids that mean another token to the drafter's own target, with both tokens: a head row is not moved there."""
        return {int(number): (one, two) for number, (one, two) in self.record.get("foreign", {}).items()}


def write_checkpoint(folder: Path, checkpoint: Checkpoint, aux_layers: tuple[int, ...]) -> None:
    """Write `checkpoint` in SGLang's form to `folder`, then read it back and compare.

    Tensors: those of `Drafter`, bf16; `d2t` int64 [N]; `t2d` bool [V].
    """
    shape = checkpoint.drafter.config.to_dict()  # told again, so that a later edit of config.json shows
    record = {**checkpoint.record, "aux_layers": list(aux_layers), "shape": shape}
    write_parts(folder, _parts(checkpoint, exported_layer_ids(aux_layers)), record, checkpoint.row_source)


def export_speculators(folder: Path, checkpoint: Checkpoint, aux_layers: tuple[int, ...], verifier: str) -> None:
    """Write `checkpoint` in the form of speculators and vLLM to `folder`, then read it back and compare.

    Args:
        folder: to write.
        checkpoint: the drafter.
        aux_layers: inputs of layers.
        verifier: name or path of the target.
    """
    parts = _parts(checkpoint, [])
    form = speculators_form(parts.fields, aux_layers, verifier)
    with atomic.folder(folder) as partial:
        atomic.write_json(partial / "config.json", form)
        _write_tensors(partial, {speculators_name(name): t for name, t in _with_mapping(parts).items()}, parts.mapping)


def _parts(checkpoint: Checkpoint, layer_ids: list[int]) -> Parts:
    """Float tensors in bf16, each a copy of its own, so that no view drags its whole storage along."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.drafter.state_dict().items()
    }
    config = checkpoint.drafter.config
    return Parts(config, config_json(config, layer_ids), tensors, checkpoint.mapping)


def write_parts(
    folder: Path,
    parts: Parts,
    record: dict[str, Any],
    row_source: np.ndarray | None,
    *,
    before: Callable[[], object] = lambda: None,
    made: Container[str] | None = None,
) -> None:
    """Write a drafter in SGLang's form to `folder`, then read it back and compare tensor by tensor.

    Args:
        folder: to write.
        parts: the drafter; `draft_vocab_size` is written from its mapping.
        record: how it came about, for `redraft.json`.
        row_source: where each head row came from, int64 [N].
        before: called before the folder appears; an error there leaves nothing.
        made: tensors that are new, if the others are copies of a file: then only these are compared, and nothing waits
            for the disk, since the copy can be made again.

    Raises:
        RedraftError: head and mapping do not agree.
    """
    rows, mapping = len(parts.tensors["lm_head.weight"]), parts.mapping
    if len(mapping) != rows or mapping.vocab_size != parts.config.vocab_size:
        raise RedraftError(
            "Head and mapping of the drafter do not agree.",
            where=folder,
            expected=f"N {rows}, V {parts.config.vocab_size} (head)",
            found=f"N {len(mapping)}, V {mapping.vocab_size} (mapping)",
        )
    with atomic.folder(folder, sync=made is None) as partial:
        own = {"draft_vocab_size": rows, "tie_word_embeddings": False}  # a tied head is written as a tensor of its own
        atomic.write_json(partial / "config.json", {**parts.fields, **own})
        atomic.write_json(partial / RECORD, {**record, "mapping": mapping.hash})
        if row_source is not None:
            np.save(partial / ROW_SOURCE, row_source)
        _write_tensors(partial, _with_mapping(parts), mapping, made)
        before()


def _with_mapping(parts: Parts) -> dict[str, Tensor]:
    d2t, t2d = torch.from_numpy(parts.mapping.d2t), torch.from_numpy(parts.mapping.t2d)
    return {**parts.tensors, "d2t": d2t, "t2d": t2d}


def _write_tensors(
    folder: Path, tensors: dict[str, Tensor], mapping: Mapping, made: Container[str] | None = None
) -> None:
    """Write the weights and compare what is read back: all of it, or the tensors `made` and every name and shape."""
    write_safetensors(folder / WEIGHTS, tensors, json.dumps({"mapping": mapping.hash}))
    again = _with_mapping(read_parts(folder, finite=False))
    for name, tensor in tensors.items():
        if (made is None or name in made) and not torch.equal(again[sglang_name(name)], tensor):
            raise RedraftError("A tensor changed between writing and reading.", where=f"{folder}: {name}")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a drafter in any dialect that `redraft.drafter.dialect` knows.

    Raises:
        RedraftError: as `read_parts`; or the mapping is not the one that the drafter was written with.
    """
    return _checkpoint(folder, read_parts(folder))


def _checkpoint(folder: Path, parts: Parts) -> Checkpoint:
    drafter = Drafter(parts.config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in parts.tensors.items()})
    row_source = np.load(folder / ROW_SOURCE) if (folder / ROW_SOURCE).is_file() else None
    return Checkpoint(drafter, parts.mapping, parts.record, row_source)


def read_donor(folder: Path, target: Any, aux_layers: tuple[int, ...], target_head: Tensor | None = None) -> Checkpoint:
    """Read a drafter as donor for a target: `read_checkpoint`, and it must fit.

    Args:
        folder: the donor's.
        target: text configuration of the target: `hidden_size`, `vocab_size`, `model_type`.
        aux_layers: inputs of layers.
        target_head: [V, H], whose rows a donor without a head of its own borrows; None refuses such a donor.

    Raises:
        RedraftError: another hidden size or V, or layer ids that are neither these inputs nor these outputs.
    """
    parts = read_parts(folder, target_head=target_head)
    found = {"hidden size": parts.config.hidden_size, "V": parts.config.vocab_size}
    expected = {"hidden size": target.hidden_size, "V": target.vocab_size}
    if found != expected:
        raise RedraftError(
            "The donor was made for another target.",
            where=folder,
            expected=f"{expected} (the target, {target.model_type})",
            found=f"{found} (fc {list(parts.tensors['fc.weight'].shape)})",
            fix="choose a donor of the target's family",
        )
    layers = declared_layers(parts.fields)
    if layers not in (None, aux_layers):
        raise RedraftError(
            "The donor was trained on other layers of the target.",
            where=folder / "config.json",
            expected=f"{list(aux_layers)}, as inputs of layers",
            found=list(layers or ()),
            fix="write the donor's layers, as inputs of layers, to target.aux_layers in the profile",
        )
    return _checkpoint(folder, parts)


def read_parts(folder: Path, *, finite: bool = True, target_head: Tensor | None = None) -> Parts:
    """Read a drafter's configuration, mapping and mapped tensors, checked; without `finite` no value is read.

    A head that is missing is taken from `target_head` [V, H] if that is given.

    Raises:
        RedraftError: no or incomplete config.json, a flag that SGLang's class does not implement, files that cannot be
            read, or a tensor that is missing, unexpected, mis-shaped, wrongly typed or not finite.
    """
    config, fields = read_config(folder)
    tensors, where = read_tensors(folder), str(folder)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    full = config.draft_vocab_size == config.vocab_size
    if d2t is None and (t2d is not None or not full):
        raise RedraftError(
            "The mapping is not complete.",
            where=where,
            expected="d2t and t2d, d2t alone, or neither with a full draft vocabulary",
            found="t2d" if t2d is not None else "neither",
        )
    if d2t is None:
        mapping = Mapping(np.arange(config.vocab_size), config.vocab_size)
    else:
        mapping = Mapping.from_offsets(d2t.numpy(), None if t2d is None else t2d.numpy(), config.vocab_size, where)
    if target_head is not None and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target_head[torch.from_numpy(mapping.ids)]
    with torch.device("meta"):
        wanted = Drafter(config).state_dict()
    if fields.pop("tie_word_embeddings", False) and full and "embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _IGNORED}
    _check(tensors, wanted, where)
    if finite:
        require_finite(tensors, where)
    if len(mapping) != config.draft_vocab_size:
        raise RedraftError(
            "Mapping and head have different numbers of slots.",
            where=where,
            expected=f"{config.draft_vocab_size} (draft_vocab_size)",
            found=len(mapping),
        )
    record = json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else {}
    mapping.require_hash(record.get("mapping"), folder)
    return Parts(config, fields, tensors, mapping, record)


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
    """SHA-256 of a drafter's weights: of every tensor, by name, its name, dtype, shape and bytes.

    Raises:
        RedraftError: see `redraft.drafter.dialect.read_tensors`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
