"""The engine `import`: hidden states that another tool wrote, found by their token ids.

SpecForge (`scripts/prepare_hidden_states.py`): `*.ckpt` or `*.ckpt.gz`, of a document `input_ids` [T],
`aux_hidden_state` [1, T, 3H] and `hidden_state` [1, T, H], after the final norm.

speculators (`generate-offline-data`) and vLLM's connector: `*.safetensors`, of a document `token_ids` [T] and
`hidden_states` [T, n, H], the last one last, before the final norm.

A pickle is opened with `weights_only`, so that nothing in it runs.
"""

import gzip
import io
import pickle
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError, some
from redraft.frame.extraction import DumpParams
from redraft.frame.files import open_tensors
from redraft.frame.profile import Profile
from redraft.frame.progress import note, progress
from redraft.frame.store import files_fingerprint
from redraft.hidden.engine import Opening, States
from redraft.hidden.pool import document_key
from redraft.target.ends import Ends, read_ends
from redraft.target.facts import read_facts
from redraft.target.norm import PLAIN, FinalNorm, final_norm

KINDS = ("*.ckpt", "*.ckpt.gz", "*.safetensors")
LEAST_RIGHT = 0.05
"""Share of the positions at which a language model's argmax is the next token, at least, in any text it can read."""
_ROWS = 256
_UNIT = 0.1
"""A normed state over the norm's weight has this near to 1 as its root mean square."""


def opening(folder: Path, profile: Profile) -> Opening:
    """The dumps that `extract.dumps` names, for the target in `folder`.

    Raises:
        RedraftError: no files, or not the aux layers of the target.
    """
    params = profile.extract.dumps
    assert params is not None
    files = dump_files(Path(params.folder).expanduser())
    identity = {
        "name": "import", "release": params.release, "dtype": params.dtype, "layers": list(params.layers),
        "final": params.final, "files": files_fingerprint([Path(params.folder).expanduser()]),
    }  # fmt: skip

    @contextmanager
    def opened(layers: Sequence[int]) -> Iterator[Dumps]:
        ends = read_ends(folder)
        known = params.final == "unnormed" or _is_plain(folder)
        norm = final_norm(folder, ends.norm, profile.target.trust_remote_code) if known else None
        yield Dumps(files, params, ends, norm)

    return Opening(identity, opened)


def _is_plain(folder: Path) -> bool:
    return read_facts(folder).fields.get("model_type") in PLAIN


def dump_files(folder: Path) -> list[Path]:
    """The files of dumps under `folder`, at any depth, sorted.

    Raises:
        RedraftError: there are none.
    """
    found = sorted(path for kind in KINDS for path in folder.rglob(kind) if path.is_file())
    if not found:
        raise RedraftError(
            "There are no dumps of hidden states.",
            where=folder,
            expected=", ".join(KINDS),
            found="no such folder" if not folder.is_dir() else some(sorted(path.name for path in folder.iterdir())),
            fix="correct extract.dumps.folder in the profile",
        )
    return found


@dataclass(frozen=True)
class Dump:
    """What a file holds of one document."""

    ids: Tensor
    """[T]."""
    states: Tensor | None
    """[T, n, H], low to high, without the last; None where only ids were asked for."""
    last: Tensor | None
    """[T, H]."""


def read_dump(path: Path, layers: int, only_ids: bool = False) -> Dump:
    """Read a file.

    Args:
        path: a file of `dump_files`.
        layers: states that it should hold besides the last one.
        only_ids: leave the states on the disk.

    Raises:
        RedraftError: a file that cannot be read, holds code, or has other tensors or shapes.
    """
    if path.suffix == ".safetensors":
        with open_tensors(path) as file:
            names = [name for name in list(file.keys()) if not only_ids or name == "token_ids"]
            given = {name: file.get_tensor(name) for name in names}
        _require(path, given, ("token_ids",) if only_ids else ("token_ids", "hidden_states"))
        if only_ids:
            return Dump(given["token_ids"], None, None)
        states = given["hidden_states"]
        if states.ndim != 3 or states.shape[1] != layers + 1:
            raise _shape(path, "hidden_states", f"[T, {layers} + 1, H]", states)
        return _checked(path, Dump(given["token_ids"], states[:, :-1], states[:, -1]))
    given = _unpickled(path)
    _require(path, given, ("input_ids",) if only_ids else ("input_ids", "aux_hidden_state", "hidden_state"))
    ids = given["input_ids"].reshape(-1)
    if only_ids:
        return Dump(ids, None, None)
    aux, last = (given[name].squeeze(0) for name in ("aux_hidden_state", "hidden_state"))
    if aux.ndim != 2 or aux.shape[1] % layers or last.ndim != 2:
        raise _shape(path, "aux_hidden_state", f"[1, T, {layers} H]", given["aux_hidden_state"])
    return _checked(path, Dump(ids, aux.unflatten(1, (layers, -1)), last))


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                found = torch.load(io.BytesIO(packed.read()), map_location="cpu", weights_only=True)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise RedraftError(
            "A dump holds more than tensors.",
            where=path,
            found=str(error).splitlines()[0],
            cause="a pickle can run code when it is opened; only tensors and plain values are",
            fix="write it again with torch.save of a dictionary of tensors",
        ) from error
    except Exception as error:  # a cut or foreign file fails in many ways
        raise RedraftError(
            "A dump cannot be read.",
            where=path,
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            cause="an incomplete copy, or a file of another kind",
        ) from error
    if not isinstance(found, dict):
        raise RedraftError("A dump holds no dictionary.", where=path, found=type(found).__name__)
    return found


def _require(path: Path, given: dict[str, Any], names: Sequence[str]) -> None:
    lacking = [name for name in names if not isinstance(given.get(name), Tensor)]
    if lacking:
        raise RedraftError(
            "A dump lacks a tensor.",
            where=path,
            expected=", ".join(names),
            found=some(sorted(given)),
            cause="aux states alone: the target's law cannot be told without the last state"
            if lacking == ["hidden_state"]
            else "a file of another tool, or of another release of it",
        )


def _shape(path: Path, name: str, expected: str, found: Tensor) -> RedraftError:
    return RedraftError(
        "A tensor of a dump has another shape.",
        where=f"{path}: {name}",
        expected=expected,
        found=list(found.shape),
        cause="extract.dumps.layers in the profile are not those that were dumped",
    )


def _checked(path: Path, dump: Dump) -> Dump:
    assert dump.states is not None
    assert dump.last is not None
    lengths = [len(dump.ids), len(dump.states), len(dump.last)]
    if len(set(lengths)) != 1 or dump.states.shape[2] != dump.last.shape[1]:
        raise RedraftError(
            "The tensors of a dump do not agree.",
            where=path,
            expected="as many tokens, and one hidden size",
            found=f"{lengths} tokens, hidden {dump.states.shape[2]} and {dump.last.shape[1]}",
        )
    return dump


@dataclass
class Dumps:
    """Dumps as an engine."""

    files: list[Path]
    params: DumpParams
    ends: Ends
    norm: FinalNorm | None
    """None where the last states are normed already and the family's norm is not known."""

    @cached_property
    def index(self) -> dict[str, Path]:
        """The file of every document, by the key of its ids."""
        found: dict[str, Path] = {}
        twice = 0
        for path in progress(self.files, "read ids of dumps", "file"):
            key = document_key(read_dump(path, len(self.params.layers), only_ids=True).ids)
            twice += key in found
            found.setdefault(key, path)
        if twice:
            note(f"{self.params.folder}: {twice} dumps have the ids of another one; the first by name is taken")
        return found

    def states(
        self, groups: Sequence[Sequence[Tensor]], layers: Sequence[int], *, around: bool = False
    ) -> Generator[tuple[int, int, States]]:
        """See `redraft.hidden.engine.Engine`; layers that were not dumped are left out where some are wanted around."""
        self._require_documents(groups)
        if not around and (lacking := sorted(set(layers) - set(self.params.layers))):
            raise RedraftError(
                "The dumps lack an aux layer.",
                where="extract.dumps.layers in the profile",
                expected=f"{list(layers)}, inputs of layers",
                found=f"{list(self.params.layers)}: no {some(lacking)}",
                cause="ids of outputs of layers, as SGLang and SpecForge count them, are one lower",
                fix="write them as inputs of layers; or set target.aux_layers to what was dumped",
            )
        right, seen = 0, 0
        for group, documents in enumerate(groups):
            for place, ids in enumerate(documents):
                states = self._states(self.index[document_key(ids)], layers, around)
                right += int((states["greedy"][:-1] == ids[1:]).sum())
                seen += len(ids) - 1
                yield group, place, states
        if seen and right < LEAST_RIGHT * seen:
            note(
                f"warning: the target's best token is the next one at {right / seen:.1%} of the positions of the "
                "dumps: states of another model, or text that it does not know"
            )

    def _require_documents(self, groups: Sequence[Sequence[Tensor]]) -> None:
        wanted = [ids for documents in groups for ids in documents]
        missing = [ids for ids in wanted if document_key(ids) not in self.index]
        if missing:
            first = missing[0].tolist()
            raise RedraftError(
                "The dumps do not hold every document of the corpus.",
                where=self.params.folder,
                expected=f"{len(wanted)} documents, by their token ids",
                found=f"{len(missing)} are not there; the first has {len(first)} tokens: {some(first[:8])}",
                cause="another tokenizer or template, another corpus.max_length, or a corpus that grew since",
                fix="dump what is missing with the same ids (artifacts/corpus/*.safetensors holds them)",
            )

    def _states(self, path: Path, layers: Sequence[int], around: bool) -> States:
        dump = read_dump(path, len(self.params.layers))
        assert dump.states is not None
        assert dump.last is not None
        hidden = self.ends.head.shape[1]
        if dump.last.shape[1] != hidden:
            raise RedraftError(
                "The dumps are of a target of another size.",
                where=path,
                expected=f"hidden size {hidden}",
                found=dump.last.shape[1],
            )
        self._require_reading(path, dump.last)
        final = dump.last if self.params.final == "normed" or self.norm is None else self.norm(dump.last)
        head = self.ends.head.to(final.dtype)
        found = {
            f"layer_{layer}": dump.states[:, place].contiguous()
            for place, layer in enumerate(self.params.layers)
            if layer in layers
        }
        found |= {"unnormed": dump.last} if around and self.params.final == "unnormed" else {}
        greedy = torch.cat([(part @ head.T).argmax(-1) for part in final.split(_ROWS)]).int()
        return {**found, "final": final.contiguous(), "greedy": greedy}

    def _require_reading(self, path: Path, last: Tensor) -> None:
        """A normed state over the norm's weight has a root mean square of 1, whatever the text."""
        if self.norm is None:
            return
        weight = self.norm.weight.float()
        used = weight.abs() > 1e-3 * weight.abs().max()
        size = (last.float()[:, used] / weight[used]).square().mean(1).sqrt().median()
        found = "normed" if abs(float(size) - 1) < _UNIT else "unnormed"
        if found != self.params.final:
            raise RedraftError(
                "The last state of a dump is not what the profile says.",
                where=f"{path}, extract.dumps.final in the profile",
                expected=f"{self.params.final} (root mean square over the norm's weight: 1 if normed)",
                found=f"{found}: {float(size):.3g}",
                fix=f"final: {found}",
            )
