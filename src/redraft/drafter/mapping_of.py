"""Read a mapping from wherever it lies, without its weights and without torch. The only place that decides what a
drafter's `d2t` and `t2d` stand for: the strict reader and the preflight ask it, too.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from redraft.drafter.files import CAUSE, VOCAB_RECORD, mapping_hashes, weight_files
from redraft.drafter.names import ARCHITECTURE, flat_config, sglang_name
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.target.checkout import DRAFTER_FILES, checkout
from redraft.vocab.build import read_vocab
from redraft.vocab.mapping import Mapping


def decode(
    d2t: np.ndarray | None,
    t2d: np.ndarray | None,
    vocab_size: int | None,
    slots: int | None,
    hashes: Collection[str],
    where: str,
) -> Mapping:
    """The mapping that a drafter's tables stand for.

    Args:
        d2t: [N], or None; a full vocabulary needs none.
        t2d: [V], or None.
        vocab_size: V by config.json, or None if it does not say: then the length of `t2d`.
        slots: `draft_vocab_size` by config.json; None for a full vocabulary, or if there is no config.json.
        hashes: of the mapping that was written with the head, see `mapping_hashes`.
        where: names the file in errors.

    Raises:
        RedraftError: an incomplete mapping, one that cannot be, or another than `hashes` name.
    """
    size = vocab_size if vocab_size is not None or t2d is None else len(t2d)
    if d2t is not None and size:
        mapping = Mapping.from_offsets(d2t, t2d, size, where, hashes)
    elif d2t is None and t2d is None and size and slots in (None, size):
        mapping = Mapping(np.arange(size), size)
    else:
        there = [name for name, table in (("d2t", d2t), ("t2d", t2d)) if table is not None]
        raise RedraftError(
            "The mapping is not complete.",
            where=where,
            expected="d2t, and t2d or vocab_size in config.json; or neither with a full draft vocabulary",
            found=f"{' and '.join(there) or 'neither'}, V {size}, draft_vocab_size {slots}",
        )
    for known in hashes:
        mapping.require_hash(known, where)
    return mapping


def read_mapping(source: str, *, prefix: bool = False) -> Mapping:
    """Read the mapping of a vocabulary artefact, a checkpoint folder, a safetensors file or a hub id.

    With `prefix` the zero offsets of a drafter that another tool wrote are taken at their word.

    Raises:
        RedraftError: nothing there, an unreadable file, what is there is no mapping, or it disagrees with the head,
            with config.json or with `redraft.json`.
    """
    path = Path(source)
    if path.is_file():
        return _from_files([path], path.parent, source, prefix)
    folder = checkout(source, None, DRAFTER_FILES)
    if (folder / VOCAB_RECORD).is_file():
        return read_vocab(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise RedraftError(
            "There is no mapping here.",
            where=folder,
            expected=f"{VOCAB_RECORD}, or safetensors with d2t and t2d",
            found=sorted(file.name for file in folder.iterdir())[:10],
        )
    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        from redraft.drafter.checkpoint import read_parts  # the old format needs torch

        return read_parts(folder, finite=False, prefix=prefix).mapping
    return _from_files(files, folder, source, prefix)


def whole_model(source: str) -> str | None:
    """The architecture of a model that is no drafter, if that is what lies at `source`."""
    place = Path(source)
    path = (place if place.is_dir() else place.parent) / "config.json"
    fields = flat_config(read_object(path)) if path.is_file() else {}
    named = fields.get("architectures")
    if "draft_vocab_size" in fields or not isinstance(named, list) or not named or named == [ARCHITECTURE]:
        return None
    return str(named[0])


def _from_files(files: list[Path], folder: Path, where: str, prefix: bool) -> Mapping:
    found, rows = _tables(files)
    fields = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    config = flat_config(fields)
    size, slots = (_whole(config, name, folder) for name in ("vocab_size", "draft_vocab_size"))
    hashes = mapping_hashes(folder, files)
    mapping = decode(found.get("d2t"), found.get("t2d"), size, slots, hashes, where)
    for name, number in (("draft_vocab_size in config.json", slots), ("rows of lm_head.weight", rows)):
        if number not in (None, len(mapping)):
            raise RedraftError(
                "d2t has another length.", where=where, expected=f"{number} ({name})", found=len(mapping)
            )
    if not prefix:
        mapping.require_meant(hashes, where)
    return mapping


def _whole(fields: dict[str, Any], name: str, folder: Path) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
        raise RedraftError(
            "config.json of the drafter holds no number.",
            where=f"{folder / 'config.json'}: {name}",
            expected="a positive whole number",
            found=repr(value)[:80],
        )
    return value


def _tables(files: list[Path]) -> tuple[dict[str, np.ndarray], int | None]:
    """`d2t` and `t2d` as far as they are there, and the rows of the head by its header."""
    found: dict[str, np.ndarray] = {}
    rows = None
    for path in files:
        try:
            with safe_open(path, "np") as file:
                names = {sglang_name(name): name for name in file.keys()}  # noqa: SIM118
                found |= {name: _table(file, names[name], path) for name in ("d2t", "t2d") if name in names}
                if "lm_head.weight" in names:
                    shape = file.get_slice(names["lm_head.weight"]).get_shape()
                    rows = shape[0] if shape else 0
        except (SafetensorError, OSError) as error:
            raise RedraftError("The file cannot be read.", where=path, found=error, cause=CAUSE) from error
    return found, rows


def _table(file: Any, name: str, path: Path) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (TypeError, AttributeError) as error:  # numpy has no bf16 and no fp8
        raise RedraftError(
            f"{name} cannot be read.",
            where=path,
            expected="int64 offsets d2t, bool mask t2d",
            found=file.get_slice(name).get_dtype(),
            cause="the mapping was cast together with the weights",
        ) from error
