"""One file of a dump, opened safely: tensors by memory map, and nothing that a pickle could run.

| tool | files | tensors |
|---|---|---|
| SpecForge `prepare_hidden_states.py` | `rows_0-2000/data_0.ckpt`, or `.ckpt.gz` | `input_ids` [T], `aux_hidden_state` [1, T, nH], `hidden_state` [1, T, H], after the final norm |
| speculators since it asks a vLLM server | `hs_0.safetensors` | `token_ids` [T], `hidden_states` [T, n + 1, H], the last one before the final norm |
| speculators before that | `data_0.pt` | `input_ids` [T], `hidden_states`: a list of n + 1 times [T, H] |

Read in SpecForge's script (commits 0168a59 and, later, f1424fb) and in speculators (03cdc10, and with servers 1db75b4).
The later script of SpecForge pads the ids on the right to the longest document of a batch, and dumps states for the
padding too: T may be more than a document has.
"""  # noqa: E501

import gzip
import io
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import open_tensors

PATTERNS = {
    "SpecForge": ("*.ckpt", "*.ckpt.gz"),
    "speculators": ("*.safetensors",),
    "speculators, old": ("data_*.pt",),
}
"""By tool, names of its files."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class DumpFile:
    """One document and its states, of which nothing but the ids is read yet where the file allows that."""

    path: Path
    ids: Tensor
    """[T]."""
    states: list[Tensor]
    """Mapped [T, H] or [T, nH] each, in the order of the layers, the last state behind them."""


def dump_files(folder: Path) -> list[Path]:
    """The files of a dump, sorted by name.

    Raises:
        RedraftError: no folder, no such files, or files of two tools.
    """
    expected = "; ".join(f"{tool}: {', '.join(names)}" for tool, names in PATTERNS.items())
    found = {
        tool: sorted(path for name in names for path in folder.rglob(name) if path.is_file())
        for tool, names in PATTERNS.items()
    }
    tools = [tool for tool, files in found.items() if files]
    if len(tools) != 1:
        raise RedraftError(
            "There are dumps of two tools." if tools else "There is no dump of hidden states.",
            where=f"{folder} (extract.dumps.folder in the profile)",
            expected=expected,
            found=", ".join(f"{len(found[tool]):,} of {tool}" for tool in tools)
            or ("no such files" if folder.is_dir() else "no such folder"),
            fix="name the folder of one of them" if tools else None,
        )
    return found[tools[0]]


def read_dump(path: Path) -> DumpFile:
    """Open one file.

    Raises:
        RedraftError: cut short or of another kind, things in it that are no tensors, or tensors that are missing or do
            not fit each other.
    """
    if path.suffix == ".safetensors":
        with open_tensors(path) as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping); mapped, not read
        ids, states = _tensor(path, held, "token_ids"), _tensor(path, held, "hidden_states")
        if states.ndim != 3:
            raise _odd(path, "hidden_states", "[T, n, H]", list(states.shape))
        parts = list(states.unbind(1))
    else:
        held = _load(path)
        ids, parts = _tensor(path, held, "input_ids"), _parts(path, held)
    ids = ids.reshape(-1) if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or ids.is_floating_point() or not len(ids):
        raise _odd(path, "token ids", "whole numbers, [T]", f"{ids.dtype} {list(ids.shape)}")
    for part in parts:
        if part.ndim != 2 or len(part) != len(ids) or part.dtype not in _FLOATS:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _FLOATS)
            raise _odd(path, "states", f"[{len(ids)}, H] for as many ids, {kinds}", f"{part.dtype} {list(part.shape)}")
    return DumpFile(path, ids, parts)


def _parts(path: Path, held: dict[str, Any]) -> list[Tensor]:
    """The states in a pickle, without SpecForge's batch dimension."""
    states = held.get("hidden_states")
    if isinstance(states, list) and states:
        return [_tensor(path, {"hidden_states": each}, "hidden_states") for each in states]
    names = ["aux_hidden_state", *(["hidden_state"] if held.get("hidden_state") is not None else [])]
    parts = [_tensor(path, held, name) for name in names]
    return [part[0] if part.ndim == 3 and len(part) == 1 else part for part in parts]


def _tensor(path: Path, held: dict[str, Any], name: str) -> Tensor:
    """A plain tensor that is no larger than the bytes behind it."""
    found = held.get(name)
    if not isinstance(found, Tensor):
        raise RedraftError(
            "A dump lacks a tensor.",
            where=path,
            expected=name,
            found=some(sorted(map(str, held))) if found is None else type(found).__name__,
            cause="SpecForge ran without --enable-aux-hidden-states, or for another kind of drafter"
            if name == "aux_hidden_state"
            else "a file of another tool or release",
        )
    if found.layout != torch.strided or found.is_meta or found.nbytes > found.untyped_storage().nbytes():
        raise _odd(path, name, "a plain tensor, with all of its bytes", f"{found.layout} {list(found.shape)}")
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".gz":
            found = torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), map_location="cpu", weights_only=True)
        else:
            found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise RedraftError(
            "A dump holds other things than tensors, and is not opened.",
            where=path,
            found=str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0][:200],
            cause="a pickle can run any code when it is opened; or a file that is no dump",
            fix="if you trust it, save it again as a dict of tensors alone",
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise RedraftError(
            "A dump cannot be read.",
            where=path,
            found=(str(error).strip().splitlines() or [type(error).__name__])[0][:200],
            cause="cut short: the disk was full, or the tool or a copy was stopped; or torch wrote its oldest format",
            fix="remove it and dump its document again",
        ) from error
    if not isinstance(found, dict):
        raise _odd(path, "content", "a dict of tensors", type(found).__name__)
    return found


def _odd(path: Path, what: str, expected: object, found: object) -> RedraftError:
    return RedraftError(
        "A dump holds something else.",
        where=f"{path}: {what}",
        expected=expected,
        found=found,
        cause="a file of another tool or release, or of states that were quantised",
    )
