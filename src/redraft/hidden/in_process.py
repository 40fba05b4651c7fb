"""Hidden states from transformers in this process, over all GPUs and the machine's memory where it needs them."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from redraft.frame.device import resolve
from redraft.frame.profile import Profile
from redraft.hidden.engine import Opening, States
from redraft.hidden.sizes import TOP
from redraft.target.model import Target, load_target

_ROWS = 512
"""Positions whose logits [V] are held at once."""


def opening(folder: Path, profile: Profile) -> Opening:
    """The target of `folder`, in bf16 where the machine multiplies it, else in fp32."""
    params, dtype = profile.target, resolve("auto")

    @contextmanager
    def opened(layers: Sequence[int]) -> Iterator[InProcess]:
        target = load_target(
            folder,
            dtype=dtype,
            aux_layers=params.aux_layers,
            trust_remote_code=params.trust_remote_code,
            device_map="auto" if torch.cuda.device_count() > 1 else None,
        )
        yield InProcess(target, profile.extract.batch_tokens, TOP if profile.extract.law == "top64" else 0)

    release = f"{version('transformers')}, torch {version('torch').partition('+')[0]}"
    return Opening({"name": "transformers", "release": release, "dtype": dtype}, opened)


@dataclass
class InProcess:
    """A loaded target as an engine."""

    target: Target
    batch_tokens: int
    """Padded tokens of one forward, at most; one document may have more."""
    top: int = 0
    """Largest logits that are given besides, made where the head lies."""

    def states(
        self, groups: Sequence[Sequence[Tensor]], layers: Sequence[int], *, around: bool = False
    ) -> Generator[tuple[int, int, States]]:
        """See `redraft.hidden.engine.Engine`; documents in their order."""
        for group, documents in enumerate(groups):
            done = 0
            while done < len(documents):
                size, longest = 1, len(documents[done])
                while done + size < len(documents):
                    longest = max(longest, len(documents[done + size]))
                    if longest * (size + 1) > self.batch_tokens:
                        break
                    size += 1
                batch = documents[done : done + size]
                for place, states in enumerate(forward(self.target, batch, layers, around=around, top=self.top), done):
                    yield group, place, states
                done += size


@torch.inference_mode()
def forward(
    target: Target, documents: Sequence[Tensor], layers: Sequence[int], *, around: bool = False, top: int = 0
) -> list[States]:
    """One forward over documents (ids [T] each), padded on the right; per document its `States`, views of the batch.

    Args:
        target: the loaded target, on one device or on several.
        documents: ids.
        layers: inputs of layers.
        around: whether `unnormed` is wanted.
        top: how many of the largest logits are wanted as `top_ids` and `top_logits`.
    """
    device = target.device
    padded = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.int64)
    attention = torch.zeros_like(padded)
    for row, ids in enumerate(documents):
        padded[row, : len(ids)] = ids
        attention[row, : len(ids)] = 1
    with target.capture(layers) as captured:
        given = {"input_ids": padded.to(device), "attention_mask": attention.to(device)}
        final = target.decoder(**given, use_cache=False).last_hidden_state
    whole = {f"layer_{layer}": captured.inputs[layer].cpu() for layer in layers}
    if around:
        assert captured.unnormed is not None
        whole["unnormed"] = captured.unnormed.cpu()
    whole["final"] = final.cpu()
    results = []
    for row, ids in enumerate(documents):
        logits = map(target.logits, final[row, : len(ids)].split(_ROWS))
        results.append({**{name: states[row, : len(ids)] for name, states in whole.items()}, **_law(logits, top)})
    return results


def _law(logits: Iterable[Tensor], top: int) -> States:
    """`greedy` of logits that come in parts [T, V], and with `top` the largest ones, where they lie."""
    greedy, largest = [], []
    for part in logits:
        greedy.append(
            part.max(-1).indices
        )  # on CPUs three times as fast as argmax, which in bf16 costs a third of a forward
        largest += [part.topk(min(top, part.shape[-1]))] if top else []
    law = {"greedy": torch.cat(greedy).int().cpu()}
    if top:
        law["top_ids"] = torch.cat([each.indices for each in largest]).int().cpu()
        law["top_logits"] = torch.cat([each.values for each in largest]).cpu()
    return law
