"""Read a mapping from wherever it lies, without its weights and without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from redraft.drafter.names import flat_config, sglang_name
from redraft.frame.errors import RedraftError
from redraft.target.checkout import DRAFTER_FILES, checkout
from redraft.vocab.build import read_vocab
from redraft.vocab.mapping import Mapping

RECORD = "redraft.json"


def read_mapping(source: str) -> Mapping:
    """Read the mapping of a vocabulary artefact, a checkpoint folder, a safetensors file or a hub id.

    Raises:
        RedraftError: nothing there, an unreadable file, what is there is no mapping, or it disagrees with the head,
            with config.json or with `redraft.json`.
    """
    path = Path(source)
    if path.is_file():
        return _from_files([path], path.parent, source)
    folder = checkout(source, None, DRAFTER_FILES)
    if (folder / "vocab.json").is_file():
        return read_vocab(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("pytorch_model*.bin")):
        from redraft.drafter.checkpoint import read_parts  # the old format needs torch

        return read_parts(folder, finite=False).mapping
    if not files:
        raise RedraftError(
            "There is no mapping here.",
            where=folder,
            expected="vocab.json, or safetensors with d2t and t2d",
            found=sorted(file.name for file in folder.iterdir())[:10],
        )
    return _from_files(files, folder, source)


def _from_files(files: list[Path], folder: Path, where: str) -> Mapping:
    found, rows = _tables(files)
    fields = _json(folder / "config.json")
    config = flat_config(fields) if fields else {}
    size = config.get("vocab_size") or (len(found["t2d"]) if "t2d" in found else None)
    slots = config.get("draft_vocab_size") or None
    if "d2t" in found and size:
        mapping = Mapping.from_offsets(found["d2t"], found.get("t2d"), size, where)
    elif not found and size and slots in (None, size):
        mapping = Mapping(np.arange(size), size)  # a full vocabulary needs no mapping
    else:
        raise RedraftError(
            "The mapping is not complete.",
            where=where,
            expected="d2t, and t2d or vocab_size in config.json; or neither with a full draft vocabulary",
            found=f"{' and '.join(found) or 'neither'}, V {size}, draft_vocab_size {slots}",
        )
    for name, number in (("draft_vocab_size in config.json", slots), ("rows of lm_head.weight", rows)):
        if number not in (None, len(mapping)):
            raise RedraftError(
                "d2t has another length.", where=where, expected=f"{number} ({name})", found=len(mapping)
            )
    mapping.require_hash(_json(folder / RECORD).get("mapping"), where)
    return mapping


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _tables(files: list[Path]) -> tuple[dict[str, np.ndarray], int | None]:
    """`d2t` and `t2d` as far as they are there, and the rows of the head by its header."""
    found: dict[str, np.ndarray] = {}
    rows = None
    for path in files:
        try:
            with safe_open(path, "np") as file:
                names = {sglang_name(name): name for name in file.keys()}  # noqa: SIM118
                found |= {name: file.get_tensor(names[name]) for name in ("d2t", "t2d") if name in names}
                if "lm_head.weight" in names:
                    rows = file.get_slice(names["lm_head.weight"]).get_shape()[0]
        except (SafetensorError, OSError) as error:
            raise RedraftError(
                "The file cannot be read.",
                where=path,
                found=error,
                cause="an incomplete download, or not a safetensors file",
            ) from error
    return found, rows
