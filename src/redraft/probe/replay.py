"""Replay: a drafter along answers that are known, right or with a known fault of serving."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.progress import progress
from redraft.hidden.rows import Batch
from redraft.target.model import Target
from redraft.train.step import greedy_tokens, ttt_step
from redraft.train.walk import walk
from redraft.vocab.mapping import Mapping

Counts = np.ndarray
"""int64 [prompts, K + 1], verify steps by accepted drafts."""
SGLANG_THETA = 10000.0
"""What SGLang takes when config.json does not say."""


class _PostNorm(Drafter):
    """SGLang under `norm_output: true`: the state handed to the next draft step is normed."""

    def step(self, *arguments: Any, **keywords: Any) -> Tensor:
        return self.norm(super().step(*arguments, **keywords))

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states)


def _changed(drafter: Drafter, kind: type[Drafter] = Drafter, **fields: Any) -> Drafter:
    """A drafter of the same weights, not copied, with another class or other fields of its configuration."""
    config: DrafterConfig = replace(drafter.config, **fields)
    with torch.device("meta"):
        other = kind(config)
    other.load_state_dict(drafter.state_dict(), assign=True)
    return other.requires_grad_(False)


@dataclass
class Replay:
    """The drafter along answers that are known: what would be accepted, right or with a fault of serving."""

    target: Target
    draft: Checkpoint
    spec_steps: int
    documents: list[tuple[list[int], int]]
    """Prompt and answer joined, and the length of the prompt."""

    def __post_init__(self) -> None:
        self.draft.drafter.to(self.target.head)
        depth = len(self.target.decoder.layers)
        near = {layer + by for layer in self.target.aux_layers for by in (-1, 0, 1)}
        self._layers = sorted(layer for layer in near if 0 <= layer < depth)
        self._slots = torch.from_numpy(self.draft.mapping.ids).to(self.target.head.device)
        self._states = [self._run(*document) for document in progress(self.documents, "replay", "prompt")]

    @torch.inference_mode()
    def _run(self, ids: list[int], prompt: int) -> tuple[dict[int, Tensor], Batch]:
        """Inputs of layers by number, [1, S, H] each, and the document with those of the aux layers."""
        tokens = torch.tensor(ids, device=self.target.head.device)
        with self.target.capture(self._layers) as captured:
            final = self.target.decoder(input_ids=tokens[None], use_cache=False).last_hidden_state
        inputs = captured.inputs
        mask = (torch.arange(len(ids), device=tokens.device) >= prompt).long()
        document = {"input_ids": tokens, "loss_mask": mask, "aux": self._aux(inputs, self.target.aux_layers)[0]}
        document |= {"final": final[0], "greedy": greedy_tokens(final[0], self.target.head)}
        return inputs, Batch.row([document])

    @staticmethod
    def _aux(inputs: dict[int, Tensor], layers: Sequence[int]) -> Tensor:
        """[1, S, 3H]."""
        return torch.cat([inputs[layer] for layer in layers], dim=-1)

    def counts(
        self,
        drafter: Drafter | None = None,
        layers: Sequence[int] | None = None,
        ids: np.ndarray | None = None,
        shift: int = 0,
    ) -> Counts:
        """Whole verify steps of each answer by accepted drafts.

        Args:
            drafter: in place of the right one.
            layers: whose inputs feed the drafter, in place of the aux layers.
            ids: int64 [N], the token that each slot is taken for.
            shift: positions by which the drafter's tokens come late (1) or early (-1).
        """
        given = drafter or self.draft.drafter
        rows = [
            self._walk(batch, self._aux(inputs, layers or self.target.aux_layers), given, ids, shift)
            for inputs, batch in self._states
        ]
        return np.array(rows, dtype=np.int64)

    @torch.inference_mode()
    def _walk(self, batch: Batch, aux: Tensor, drafter: Drafter, ids: np.ndarray | None, shift: int) -> list[int]:
        read = replace(batch, aux=aux, input_ids=batch.input_ids.roll(shift, 1))
        head = self.target.head[self._slots]
        output = ttt_step(drafter, self._slots, self.target.embed, head, read, self.spec_steps)
        if ids is not None:
            output = replace(output, drafted=torch.from_numpy(ids).to(aux.device)[output.logits.argmax(-1)])
        return walk(output, batch.input_ids, batch.loss_mask, batch.documents).sum((0, 1)).tolist()

    def faults(self, donor: Mapping | None) -> Iterator[tuple[str, Callable[[], Counts]]]:
        """Every known fault of serving, with what it would accept; `donor` is another mapping that may have got in."""
        drafter, mapping = self.draft.drafter, self.draft.mapping
        slots, aux = np.arange(len(mapping)), self.target.aux_layers
        for by, word in ((1, "late"), (-1, "early")):
            moved = [layer + by for layer in aux]
            if set(moved) <= set(self._layers):
                yield (
                    f"the aux layers are captured one too {word}: {moved}",
                    partial(self.counts, layers=moved),
                )
        for place, layer in enumerate(aux):
            for by in (1, -1):
                moved = [*aux[:place], layer + by, *aux[place + 1 :]]
                if layer + by in self._layers and len(set(moved)) == len(moved):
                    name = f"aux layer {layer} is captured as {layer + by}"
                    yield name, partial(self.counts, layers=moved)
        yield "d2t holds ids, and is read as offsets", partial(self.counts, ids=mapping.ids + slots)
        yield "d2t is missing or zero: slots are taken for ids", partial(self.counts, ids=slots)
        if donor is not None and len(donor) == len(mapping) and donor.hash != mapping.hash:
            yield "the mapping is another drafter's (the donor's)", partial(self.counts, ids=donor.ids)
        # a random row is right by chance alone, 1 in N
        yield "lm_head is missing: its rows are random", partial(self.counts, ids=np.full(len(mapping), -1))
        yield "the drafter's tokens come one position late", partial(self.counts, shift=1)
        yield "the drafter's tokens come one position early", partial(self.counts, shift=-1)
        yield "the fed-back state is normed (norm_output)", partial(self.counts, _changed(drafter, _PostNorm))
        if drafter.config.rope_theta != SGLANG_THETA:
            lost = _changed(drafter, rope_theta=SGLANG_THETA)
            yield f"rope_theta is lost: {SGLANG_THETA:g}, not {drafter.config.rope_theta:g}", partial(self.counts, lost)
