"""Read a mapping from wherever it lies, without its weights and without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from redraft.errors import RedraftError
from redraft.target.sources import checkout
from redraft.vocab.build import read_vocab
from redraft.vocab.mapping import Mapping


def read_mapping(source: str, revision: str | None = None) -> Mapping:
    """Read the mapping of a vocabulary artefact, a checkpoint folder, a safetensors file or a hub id.

    Raises:
        RedraftError: nothing there, an unreadable file, or what is there is no mapping.
    """
    path = Path(source)
    if path.is_file():
        return _from_files([path], _config(path.parent), source)
    folder = checkout(source, revision)
    if (folder / "vocab.json").is_file():
        return read_vocab(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RedraftError(
            "There is no mapping here.",
            where=folder,
            expected="vocab.json, or safetensors with d2t and t2d",
            found=sorted(file.name for file in folder.iterdir())[:10],
        )
    return _from_files(files, _config(folder), source)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _from_files(files: list[Path], config: dict[str, Any], where: str) -> Mapping:
    found: dict[str, np.ndarray] = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                found |= {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise RedraftError(
                "The file cannot be read.",
                where=path,
                found=error,
                cause="an incomplete download, or not a safetensors file",
            ) from error
    size = len(found["t2d"]) if "t2d" in found else config.get("vocab_size")
    if "d2t" in found and size:
        return Mapping.from_offsets(found["d2t"], found.get("t2d"), size, where)
    if not found and size and config.get("draft_vocab_size") in (None, size):
        return Mapping(np.arange(size), size)  # a full vocabulary needs no mapping
    raise RedraftError(
        "The mapping is not complete.",
        where=where,
        expected="d2t, and t2d or vocab_size in config.json; or neither with a full draft vocabulary",
        found=f"{' and '.join(found) or 'neither'}, V {size}, draft_vocab_size {config.get('draft_vocab_size')}",
    )
