"""The EAGLE-3 training step with its training-time test (TTT): K draft steps unrolled over true tokens.

Legend of shapes: B rows, S tokens of a row, H hidden size, V target vocabulary, N draft slots, K steps, P counted
positions.

At index t and step k the drafter sees the embedding of x[t+1+k], the state of step k-1 at t (fc(aux[t]) at k = 0) and
the rotary position t + k; it attends to the step-0 keys of positions up to t and to its own keys of steps 1..k. Its
logits stand for x[t+2+k], and are trained towards softmax(target logits at t+1+k restricted to the draft ids).
Worked example, K = 2, tokens a b c d e: at t = 0 step 0 reads b and learns the law of c; step 1 reads c and learns
that of d. Source: SafeAILab/EAGLE and SpecForge `algorithms/eagle3/model.py`, as SGLang serves it.

Position t counts at step k iff x[t+1] and x[t+2+k] are supervised in the same answer: what serving drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass

from redraft.drafter.model import ALL, Drafter
from redraft.train.attention import TTTAttention
from redraft.vocab.mapping import Mapping


@dataclass
class StepOutput:
    """Unreduced results at the P positions that count at any step."""

    positions: Tensor
    """int64 [P], flat index b * S + t."""
    counted: Tensor
    """bool [K, P], whether the position counts at step k."""
    in_vocab: Tensor
    """bool [K, P], whether the target's argmax has a slot; its mean over counted positions is the ceiling."""
    drafted: Tensor
    """int64 [K, P], the drafter's argmax as a target id."""
    best: Tensor
    """int64 [K, P], the target's argmax."""
    losses: Tensor
    """fp32 [K, P], nats of soft cross-entropy."""
    logits: Tensor
    """fp32 [K, P, N]."""

    @property
    def correct(self) -> Tensor:
        """bool [K, P], whether the drafter's argmax, as a target id, is the target's argmax."""
        return self.drafted == self.best

    def contributing(self, oov: str = "drop") -> Tensor:
        """bool [K, P], positions that contribute loss: counted, and with `drop` the target's argmax has a slot."""
        return self.counted & self.in_vocab if oov == "drop" else self.counted


register_dataclass(StepOutput)  # FSDP finds the outputs whose backward needs the weights gathered again


def shift(tensor: Tensor, by: int) -> Tensor:
    """Move dimension 1 left by `by`, zeros at the end: result[:, t] = tensor[:, t + by]."""
    return F.pad(tensor[:, by:], (0, 0) * (tensor.ndim - 2) + (0, min(by, tensor.shape[1])))


def answer_numbers(loss_mask: Tensor, documents: Tensor) -> Tensor:
    """int64 [B, S]: 0 outside answers, else a number that is the same within one answer of one document."""
    supervised = loss_mask.bool() & (documents > 0)
    before = F.pad(supervised, (1, 0))[:, :-1] & (F.pad(documents, (1, 0))[:, :-1] == documents)
    return (supervised & ~before).cumsum(1) * supervised


def counted_positions(loss_mask: Tensor, documents: Tensor, steps: int, mask: str = "served") -> Tensor:
    """bool [K, B, S], where position t counts at step k.

    `served`: x[t+1] and x[t+2+k] are in one answer of t's document. `input`: x[t+k] is supervised and the target's
    law at t+1+k lies in t's document, which is `loss_mask[t+k]` of SpecForge.
    """
    answers = answer_numbers(loss_mask, documents)
    if mask == "input":
        supervised = (loss_mask != 0) & (documents > 0)
        return torch.stack(
            [shift(supervised, step) & (shift(documents, 1 + step) == documents) for step in range(steps)]
        )
    first = shift(answers, 1)
    inside = (first > 0) & (shift(documents, 1) == documents)
    return torch.stack([inside & (shift(answers, 2 + step) == first) for step in range(steps)])


def ttt_step(
    drafter: Drafter,
    mapping_ids: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    aux_hidden: Tensor,
    target_hidden: Tensor,
    embed: Tensor,
    head: Tensor,
    steps: int,
    *,
    greedy: Tensor | None = None,
    draft_head: Tensor | None = None,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    mask: str = "served",
    lap: Callable[[str], None] = lambda part: None,
) -> StepOutput:
    """K unrolled draft steps from plain tensors.

    Args:
        drafter: the drafter.
        mapping_ids: int64 [N], target id of each slot.
        input_ids: int [B, S].
        loss_mask: [B, S], nonzero at answer tokens.
        aux_hidden: [B, S, 3H], inputs of the aux layers, low to high.
        target_hidden: [B, S, H], after the target's final norm.
        embed: [V, H], the target's embedding.
        head: [V, H], the target's head; not read if `greedy` and `draft_head` are given.
        steps: K.
        greedy: int [B, S], the target's argmax for the next token; from `head` if None.
        draft_head: [N, H], the rows of `head` in slot order; from `head` if None.
        documents: int64 [B, S], 1, 2, ... by packed document, 0 for padding; one document a row if None.
        positions: int64 [B, S], position in the document; 0..S-1 if None.
        mask: see `counted_positions`.
        lap: told the name of each part when it is done: `forward`, `loss`.
    """
    if documents is None:
        documents = torch.ones_like(input_ids, dtype=torch.int64)
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    counted = counted_positions(loss_mask, documents, steps, mask).flatten(1)
    rows = counted.any(0).nonzero()[:, 0]
    counted = counted[:, rows]
    states = _unroll(drafter, input_ids, aux_hidden, embed, documents, positions, steps, rows)
    lap("forward")
    wanted = (rows + 1 + torch.arange(steps, device=rows.device)[:, None]).clamp(max=input_ids.numel() - 1)  # [K, P]
    if draft_head is None:
        draft_head = head[mapping_ids]
    hidden = target_hidden.flatten(0, 1)
    if greedy is None:
        needed, place = wanted.unique(return_inverse=True)
        best = torch.cat([(part @ head.T).argmax(-1) for part in hidden[needed].split(256)])[place]
    else:
        best = greedy.flatten()[wanted].long()
    slots = mapping_ids.new_full((len(embed),), -1)
    slots[mapping_ids] = torch.arange(len(mapping_ids), device=slots.device)
    logits = drafter.logits(states).float()  # [K, P, N]
    losses = _soft_cross_entropy(logits, hidden, draft_head, wanted)
    lap("loss")
    return StepOutput(rows, counted, slots[best] >= 0, mapping_ids[logits.argmax(-1)], best, losses, logits)


def _unroll(
    drafter: Drafter,
    input_ids: Tensor,
    aux_hidden: Tensor,
    embed: Tensor,
    documents: Tensor,
    positions: Tensor,
    steps: int,
    rows: Tensor,
) -> Tensor:
    """The un-normed states of the K steps at the flat positions `rows`, [K, P, H].

    Nothing is computed of padding, nor past the keys and values of step 0 where no later position asks.
    """
    tokens = (documents.flatten() > 0).nonzero()[:, 0]
    asked = torch.searchsorted(tokens, rows)
    ids, places = input_ids.flatten().long(), positions.flatten()
    attend = TTTAttention(documents, tokens, rows)
    states = drafter.fc(aux_hidden.flatten(0, 1)[tokens])[None]
    kept: list[Tensor] = []
    for step in range(steps):
        at = rows if step else tokens
        embeds = F.embedding(ids[(at + 1 + step).clamp(max=len(ids) - 1)], embed).to(states.dtype)
        states = drafter.step(states, embeds[None], places[None, at] + step, attend, ALL if step else asked)
        kept.append(states[0])
    return torch.stack(kept)


def _soft_cross_entropy(logits: Tensor, hidden: Tensor, draft_head: Tensor, wanted: Tensor) -> Tensor:
    """fp32 [K, P]: -sum p log q, p the target's law over the draft ids at the flat positions `wanted` [K, P]."""
    with torch.no_grad():
        needed, place = wanted.unique(return_inverse=True)
        law = (hidden[needed] @ draft_head.to(hidden.dtype).T).float().softmax(-1)
    return torch.stack(
        [F.cross_entropy(part, law[at], reduction="none") for at, part in zip(place, logits, strict=True)]
    )


class TTTModule(nn.Module):
    """All draft steps in one `forward`, as DistributedDataParallel needs it."""

    mapping_ids: Tensor
    embed: Tensor
    draft_head: Tensor

    def __init__(
        self, drafter: Drafter, mapping: Mapping, embed: Tensor, head: Tensor, steps: int, precision: str = "fp32"
    ) -> None:
        """`embed` [V, H] and `head` [V, H] are the target's; they are not trained. `precision` bf16: under autocast."""
        super().__init__()
        self.rounded = precision == "bf16"
        ids = torch.from_numpy(mapping.ids)
        self.drafter = drafter
        self.steps = steps
        self.register_buffer("mapping_ids", ids, persistent=False)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("draft_head", head[ids].contiguous(), persistent=False)

    def forward(
        self,
        batch: dict[str, Tensor],
        mask: str = "served",
        lap: Callable[[str], None] = lambda part: None,
        exact: bool = False,
    ) -> StepOutput:
        """One batch of `redraft.hidden.shards.PackedRows`; `mask` and `lap` as in `ttt_step`; `exact`: no autocast.

        Autocast is opened here and not by Accelerate, which would open it for measurements as well, and not at all
        under FSDP2.
        """
        weight = self.drafter.fc.weight
        rounded = self.rounded and not exact
        final = batch["final"] if rounded else batch["final"].to(weight.dtype)
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=rounded):
            return self._step(batch, final, mask, lap)

    def _step(self, batch: dict[str, Tensor], final: Tensor, mask: str, lap: Callable[[str], None]) -> StepOutput:
        return ttt_step(
            self.drafter,
            self.mapping_ids,
            batch["input_ids"],
            batch["loss_mask"],
            batch["aux"].to(self.drafter.fc.weight.dtype),
            final,
            self.embed,
            self.draft_head,
            self.steps,
            greedy=batch["greedy"],
            draft_head=self.draft_head,
            documents=batch["documents"],
            positions=batch["positions"],
            mask=mask,
            lap=lap,
        )

    def contributing(self, batch: dict[str, Tensor], mask: str, oov: str) -> Tensor:
        """int64 [K], positions that contribute loss, told without a forward; see `StepOutput.contributing`."""
        counted = counted_positions(batch["loss_mask"], batch["documents"], self.steps, mask)
        if oov == "drop":
            held = torch.zeros(len(self.embed), dtype=torch.bool, device=counted.device)
            held[self.mapping_ids] = True
            best = held[batch["greedy"].long()]
            counted = counted & torch.stack([shift(best, 1 + step) for step in range(self.steps)])
        return counted.flatten(1).sum(1)
