"""The engine `import`: hidden states that SpecForge or speculators dumped, found by token ids and checked before use.

A dump says neither which target made it nor which layers it holds. What can be told from the numbers is: width, dtype
and count of the states, whether the last one went through this target's final norm, and whether it foretells the next
tokens. Layers named wrongly are found by the samples that `extract` makes again with the target, where it can.
"""

import hashlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from redraft.frame.device import compute_device, resolve
from redraft.frame.errors import RedraftError, some
from redraft.frame.extraction import DumpParams
from redraft.frame.files import spread
from redraft.frame.profile import Profile
from redraft.frame.progress import progress
from redraft.hidden.alike import apart
from redraft.hidden.dump_files import DumpFile, dump_files, read_dump
from redraft.hidden.dump_index import DumpIndex
from redraft.hidden.engine import Engine, Opening, States
from redraft.target.config import aux_layers_at
from redraft.target.ends import read_ends
from redraft.target.facts import TargetFacts, read_facts
from redraft.target.model import DTYPES
from redraft.target.norm import PLAIN, FinalNorm, final_norm

SECTION = "extract.dumps in the profile"
_DTYPES = {**DTYPES, "fp16": torch.float16}
_PAGE, _PAGES, _THREADS = 4096, 16, 8
"""Bytes of a page of a file, how many of them stand for a longer file, and files at once."""
PROBED, PROBED_TOKENS = 16, 500
"""Documents that are looked at before the first one is given, and tokens of them that tell of other ids."""
LEAST_GAIN, ENOUGH = 0.05, 0.5
"""By which the share of next tokens foretold must exceed chance, and the share that is never refused: text that repeats
one token is foretold by chance."""
NORMED, MOST = 0.05, 0.9
"""How near to 1 the mean square of a normed state over the norm's weight is, and for which share of the tokens."""
_ROWS = 256
"""States whose logits are computed at once."""


def opening(folder: Path, profile: Profile) -> Opening:
    """The dump that the profile names, for the target in `folder`; its files are listed and sampled, not read yet.

    Raises:
        RedraftError: no dump there, or of two tools.
    """
    params = profile.extract.dumps
    assert params is not None
    root = Path(params.folder).expanduser()
    files = dump_files(root)

    @contextmanager
    def opened(layers: Sequence[int]) -> Iterator[Engine]:
        facts, ends = read_facts(folder), read_ends(folder)
        _require_layers(params, facts, profile.target.aux_layers)
        index = DumpIndex(root, files, facts.vocab)
        norm = None
        if params.final == "unnormed" or facts.fields.get("model_type") in PLAIN:
            norm = final_norm(folder, ends.norm, bool(profile.target.trust_remote_code))
        yield Dumps(params, index, ends.head, norm, profile.extract.tolerance)

    identity = {
        "name": "import",
        "release": params.release,
        "dtype": params.dtype,
        "layers": list(params.layers),
        "final": params.final,
        "files": _digest(root, files),
    }
    return Opening(identity, opened)


def _digest(folder: Path, files: Sequence[Path]) -> str:
    """Of all names, sizes and a sample of the bytes."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, told in zip(files, progress(pool.map(_sample, files), "dump", "file", len(files)), strict=True):
            digest.update(f"{file.relative_to(folder)}\n{told}\n".encode())
    return digest.hexdigest()


def _sample(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for start, length in spread(size, _PAGE, _PAGES):
            opened.seek(start)
            digest.update(opened.read(length))
    return f"{size} {digest.hexdigest()}"


def _require_layers(params: DumpParams, facts: TargetFacts, chosen: tuple[int, ...] | None) -> None:
    """The layers must be some of the target's, and its aux layers among them."""
    aux = aux_layers_at(facts.depth, chosen)
    if params.layers[-1] >= facts.depth:
        raise RedraftError(
            "The dump's layers are not the target's.",
            where=f"{SECTION}: layers",
            expected=f"inputs of layers, so from 0 to {facts.depth - 1}; the last state is not one of them",
            found=list(params.layers),
            cause=f"{facts.depth} is what vLLM calls the last state" if params.layers[-1] == facts.depth else None,
        )
    if not set(aux) <= set(params.layers):
        raise RedraftError(
            "The dump lacks aux layers.",
            where=f"{SECTION}: layers",
            expected=f"inputs of {list(aux)} among them: target.aux_layers in the profile, or its default",
            found=list(params.layers),
            cause="ids of SpecForge's that name outputs of layers: the input of a layer is one more",
            fix="correct the layers; or set target.aux_layers to layers of the dump on which the donor was trained",
        )


class Dumps:
    """An indexed dump as an engine."""

    def __init__(
        self, params: DumpParams, index: DumpIndex, head: Tensor, norm: FinalNorm | None, tolerance: float
    ) -> None:
        self.params, self.index, self.norm, self.tolerance = params, index, norm, tolerance
        self.probed = False
        self.hidden, self.dtype = head.shape[1], _DTYPES[params.dtype]
        device = compute_device()
        fast = device.type == "cuda" or (resolve("auto") == "bf16" and self.dtype == torch.bfloat16)
        self.head = head.to(device, self.dtype if fast else torch.float32)

    def states(
        self, groups: Sequence[Sequence[Tensor]], layers: Sequence[int], *, around: bool = False
    ) -> Generator[tuple[int, int, States]]:
        """See `Engine`; documents in their order. With `around`, only the layers that the dump holds.

        Raises:
            RedraftError: documents that the dump lacks, or states that cannot be theirs and this target's.
        """
        found = self.index.find_all([ids for group in groups for ids in group])
        documents = [(group, place, ids) for group, each in enumerate(groups) for place, ids in enumerate(each)]
        if not self.probed:
            self._probe([(ids, files) for (_, _, ids), files in zip(documents, found, strict=True)])
            self.probed = True
        for (group, place, ids), files in zip(documents, found, strict=True):
            states = self._read(files[0], ids)
            held = {
                f"layer_{layer}": states[place] for place, layer in enumerate(self.params.layers) if layer in layers
            }
            yield group, place, {**held, **self._last(states[-1], around)}

    def _last(self, state: Tensor, around: bool) -> States:
        """What follows from the last state [T, H]."""
        unnormed = self.params.final == "unnormed"
        final = self._normed(state) if unnormed else state
        return {**({"unnormed": state} if unnormed and around else {}), "final": final, "greedy": self._greedy(final)}

    def _normed(self, state: Tensor) -> Tensor:
        assert self.norm is not None
        return self.norm(state)

    def _greedy(self, final: Tensor) -> Tensor:
        parts = [(part.to(self.head) @ self.head.T).argmax(-1) for part in final.split(_ROWS)]
        return torch.cat(parts).int().cpu()

    def _read(self, path: Path, ids: Tensor) -> list[Tensor]:
        """The states of a document from a file whose ids begin with its own, [T, H] each.

        Raises:
            RedraftError: another number of states, another width or dtype, NaN, or a file that changed since it was
                indexed.
        """
        dumped = read_dump(path)
        refuse = partial(RedraftError, where=path)
        if not torch.equal(dumped.ids[: len(ids)].int(), ids.int()):
            raise refuse("A dump changed while it was read.", expected="the ids that were indexed", found="others")
        states = [part for wide in dumped.states for part in wide.split(self.hidden, 1)]
        _require_count(dumped, states, self.params.layers, self.hidden)
        odd = {str(part.dtype).removeprefix("torch.") for part in states if part.dtype != self.dtype}
        if odd:
            raise refuse("The states have another dtype.", expected=f"{SECTION}: dtype {self.params.dtype}", found=odd)
        states = [part[: len(ids)].clone() for part in states]  # read here, and once
        for place, part in enumerate(states):
            if not bool(part.isfinite().all()):
                name = f"the input of layer {self.params.layers[place]}" if part is not states[-1] else "the last state"
                fix = "remove the file and dump its document again"
                raise refuse("A state in the dump is not finite.", found=f"NaN or infinity in {name}", fix=fix)
        return states

    def _probe(self, documents: Sequence[tuple[Tensor, list[Path]]]) -> None:
        """Look at some documents, evenly spread: repeated ones, the last state's norm, and the tokens it foretells."""
        chosen = documents[:: max(1, len(documents) // PROBED)][:PROBED]
        last, greedy, following = [], [], []
        for ids, files in chosen:
            states = self._read(files[0], ids)
            if len(files) > 1:
                self._require_same(files, ids, states)
            last.append(states[-1])
            greedy.append(self._last(states[-1], False)["greedy"][:-1])
            following.append(ids[1:].int())
        if chosen:
            self._require_norm(torch.cat(last))
            self._require_foretold(torch.cat(greedy), torch.cat(following))

    def _require_same(self, files: list[Path], ids: Tensor, states: list[Tensor]) -> None:
        """Two dumps that begin with the same ids must hold the same states: else they are of two targets."""
        for one, other in zip(states, self._read(files[1], ids), strict=True):
            difference = apart(one, other)
            if not difference <= self.tolerance:
                raise RedraftError(
                    "Two dumps of the same token ids hold different states.",
                    where=f"{files[0]} and {files[1]}",
                    expected=f"a relative difference of at most {self.tolerance} (extract.tolerance)",
                    found=f"{difference:.3g}",
                    cause="dumps of two targets, or of two choices of layers, in one folder",
                    fix="name a folder that holds the dumps of one run alone",
                )

    def _require_norm(self, last: Tensor) -> None:
        """Hold the last states [T, H] against the final norm: behind it, their mean square over its weight is 1."""
        if self.norm is None:
            return
        weight = self.norm.weight.float()
        used = weight != 0
        square = (last[:, used].float() / weight[used]).pow(2).mean(-1)
        normed = float(((square - 1).abs() < NORMED).float().mean()) > MOST
        if normed != (self.params.final == "normed"):
            raise RedraftError(
                "The last state of the dump is not what the profile says.",
                where=f"{self.index.folder} ({SECTION}: final)",
                expected=f"{self.params.final}, by the weight of the target's final norm",
                found=f"a mean square of {float(square.median()):.3g} over that weight (median of {len(last)} tokens); "
                "1 after the norm",
                cause="the state was taken after the norm"
                if normed
                else "it was taken before it, or of another target",
                fix=f"final: {'normed' if normed else 'unnormed'}, if the dump is of this target",
            )

    def _require_foretold(self, greedy: Tensor, following: Tensor) -> None:
        """Refuse states that foretell the next tokens no better than chance: those of other ids, or another target's.

        Any text is foretold far better by a model that reads it; an answer of its own most of all.
        """
        if len(greedy) < PROBED_TOKENS:
            return
        share = float((greedy == following).float().mean())
        size = len(self.head)
        counts = [torch.bincount(ids.long(), minlength=size).double() / len(ids) for ids in (greedy, following)]
        chance = float(counts[0] @ counts[1])
        if share < min(chance + LEAST_GAIN, ENOUGH):
            raise RedraftError(
                "The last states of the dump do not foretell the next tokens.",
                where=self.index.folder,
                expected=f"the target's best token to be the next one at far more than {chance:.1%} of the positions, "
                "which is chance",
                found=f"{share:.1%} of {len(greedy):,}",
                cause="a dump of another target, not made for this head; or states of other documents",
                fix="name the dump of this target, or another extract.engine",
            )


def _require_count(dumped: DumpFile, states: list[Tensor], layers: Sequence[int], hidden: int) -> None:
    width = sum(part.shape[1] for part in dumped.states)
    if width % hidden or any(part.shape[1] % hidden for part in dumped.states):
        raise RedraftError(
            "The states in the dump have another width.",
            where=dumped.path,
            expected=f"a multiple of {hidden}, the target's hidden size",
            found=some([part.shape[1] for part in dumped.states]),
            cause="a dump of another target",
        )
    if len(states) == len(layers) + 1:
        return
    bare = len(states) == len(layers)
    raise RedraftError(
        "The dump lacks the last state." if bare else "The dump holds another number of states.",
        where=dumped.path,
        expected=f"{len(layers) + 1}: the inputs of layers {list(layers)} ({SECTION}), and the last state",
        found=len(states),
        cause="--no-include-last-layer of speculators, or a vLLM that gives none (vllm-project/vllm#46788)"
        if bare
        else None,
        fix="dump it again with the last state: without it there is no law to train on; or correct the layers"
        if bare
        else "correct the layers",
    )
