"""Drafters on disk, whole: written in SGLang's form and read back, or read from any dialect (see `parts`)."""

import json
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from redraft.drafter.config import config_json, written_ids
from redraft.drafter.dialect import speculators_form
from redraft.drafter.donor import require_fit, tell_embedding
from redraft.drafter.files import RECORD, WEIGHTS
from redraft.drafter.model import Drafter
from redraft.drafter.names import sglang_name, speculators_name
from redraft.drafter.parts import Parts, read_parts, weights_sha256
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.vocab.mapping import Mapping

__all__ = [
    "Checkpoint", "export_speculators", "read_checkpoint", "read_donor", "read_parts", "weights_sha256",
    "write_checkpoint", "write_parts",
]  # fmt: skip
ROW_SOURCE = "row_source.npy"


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
    def compared(self) -> bool:
        """Whether what its ids mean is known: it was made for the target, or two tokenizers were compared."""
        return self.record.get("source") == "train" or "foreign" in self.record

    @property
    def foreign(self) -> dict[int, tuple[str | None, str | None]]:
        """Ids that mean another token to the drafter's own target, with both tokens: a head row is not moved there."""
        return {int(number): (one, two) for number, (one, two) in self.record.get("foreign", {}).items()}


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, aux_layers: tuple[int, ...], target: Path | None = None
) -> None:
    """Write `checkpoint` in SGLang's form to `folder`, then read it back and compare.

    Tensors: those of `Drafter`, bf16; `d2t` int64 [N]; `t2d` bool [V]. `target` is the target's folder: layers that do
    not start with 2 have other ids for another family, see `written_ids`.
    """
    shape = checkpoint.drafter.config.to_dict()  # told again, so that a later edit of config.json shows
    record = {**checkpoint.record, "aux_layers": list(aux_layers), "shape": shape}
    write_parts(folder, _parts(checkpoint, written_ids(aux_layers, target)), record, checkpoint.row_source)


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


def _parts(checkpoint: Checkpoint, layer_ids: list[int] | None) -> Parts:
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
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, {"redraft": json.dumps({"mapping": mapping.hash})})
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


def read_donor(
    folder: Path,
    target: Any,
    aux_layers: tuple[int, ...],
    target_head: Tensor | None = None,
    *,
    target_embed: Tensor | None = None,
    embedding: str = "own",
    prefix: bool = False,
    named: bool = False,
    tell: Callable[[str], None] = print,
) -> Checkpoint:
    """Read a drafter as donor for a target: `read_checkpoint`, and it must fit.

    Args:
        folder: the donor's.
        target: configuration of the target, whole or its text part: `hidden_size`, `vocab_size`, `model_type`,
            `architectures`, `num_hidden_layers`.
        aux_layers: inputs of layers.
        target_head: [V, H], whose rows a donor without a head of its own borrows; None refuses such a donor.
        target_embed: [V, H], with which an embedding in the donor's file is compared, if it is at hand.
        embedding: `own` refuses a donor whose embedding is not the target's, `target` takes the target's and says so.
        prefix: see `read_parts`.
        named: see `require_fit`.
        tell: takes a line about an embedding that is left out, or layers that are one off.

    Raises:
        RedraftError: another hidden size or V, layer ids that do not mean these inputs for such a target, or another
            embedding.
    """
    parts = read_parts(folder, target_head=target_head, prefix=prefix)
    require_fit(parts, folder, target, aux_layers, named=named, tell=tell)
    tell_embedding(parts.embedding, target_embed, folder, refuse=embedding == "own", tell=tell)
    return _checkpoint(folder, parts)
