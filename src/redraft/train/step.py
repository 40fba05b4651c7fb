"""The EAGLE-3 training step with its training-time test (TTT): K draft steps unrolled over true tokens.

Legend of shapes: B rows, S tokens of a row, H hidden size, V target vocabulary, N draft slots, K steps, T tokens that
are no padding, P positions asked: those that count at any step.

At index t and step k the drafter sees the embedding of x[t+1+k], the state of step k-1 at t (fc(aux[t]) at k = 0) and
the rotary position t + k; it attends to the step-0 keys of positions up to t and to its own keys of steps 1..k. Its
logits stand for x[t+2+k], and are trained towards softmax(target logits at t+1+k restricted to the draft ids).
Worked example, K = 2, tokens a b c d e: at t = 0 step 0 reads b and learns the law of c; step 1 reads c and learns
that of d. Source: SafeAILab/EAGLE and SpecForge `algorithms/eagle3/model.py`, as SGLang serves it.

Where the target's law is kept as its 64 largest logits, it is the softmax over those of them that have a slot: the same
but for what lies below the 64.

Position t counts at step k iff x[t+1] and x[t+2+k] are supervised in the same answer: what serving drafts.
A position of a batch is told by its flat index b * S + t.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass

from redraft.drafter.model import ALL, Drafter
from redraft.hidden.rows import Batch
from redraft.train.attention import TTTAttention
from redraft.vocab.mapping import Mapping


@dataclass
class StepOutput:
    """Unreduced results at the P positions asked."""

    flat: Tensor
    """int64 [P], flat indices of the positions asked, ascending."""
    counted: Tensor
    """bool [K, P], whether the position counts at step k."""
    in_vocab: Tensor
    """bool [K, P], whether the target's argmax has a slot; its mean over counted positions is the ceiling."""
    told: Tensor
    """bool [K, P], whether anything is known of the law over the draft ids: false where none of the 64 has a slot."""
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
        """bool [K, P], positions that contribute loss: counted, and with `drop` the target's argmax has a slot.

        With `train` any slot that the law is known of will do.
        """
        return self.counted & (self.in_vocab if oov == "drop" else self.told)


register_dataclass(StepOutput)  # FSDP finds the outputs whose backward needs the weights gathered again


def shift(tensor: Tensor, by: int) -> Tensor:
    """Move dimension 1 left by `by`, zeros at the end: result[:, t] = tensor[:, t + by]."""
    return F.pad(tensor[:, by:], (0, 0) * (tensor.ndim - 2) + (0, min(by, tensor.shape[1])))


def answer_numbers(loss_mask: Tensor, documents: Tensor) -> Tensor:
    """int64 [B, S]: 0 outside answers, else a number that is the same within one answer of one document."""
    supervised = loss_mask.bool() & (documents > 0)
    before = F.pad(supervised, (1, 0))[:, :-1] & (F.pad(documents, (1, 0))[:, :-1] == documents)
    return (supervised & ~before).cumsum(1) * supervised


def counted_positions(loss_mask: Tensor, documents: Tensor, steps: int, counting: str = "served") -> Tensor:
    """bool [K, B, S], where position t counts at step k.

    `served`: x[t+1] and x[t+2+k] are in one answer of t's document. `input`: x[t+k] is supervised and the target's
    law at t+1+k lies in t's document, which is `loss_mask[t+k]` of SpecForge.
    """
    answers = answer_numbers(loss_mask, documents)
    if counting == "input":
        supervised = (loss_mask != 0) & (documents > 0)
        return torch.stack(
            [shift(supervised, step) & (shift(documents, 1 + step) == documents) for step in range(steps)]
        )
    first = shift(answers, 1)
    inside = (first > 0) & (shift(documents, 1) == documents)
    return torch.stack([inside & (shift(answers, 2 + step) == first) for step in range(steps)])


def greedy_tokens(final: Tensor, head: Tensor) -> Tensor:
    """int64 [...], the target's argmax after each of the states `final` [..., H] under its `head` [V, H]."""
    parts = [(part @ head.T).argmax(-1) for part in final.flatten(0, -2).split(256)]
    return torch.cat(parts).view(final.shape[:-1])


def ttt_step(
    drafter: Drafter,
    mapping_ids: Tensor,
    embed: Tensor,
    draft_head: Tensor,
    batch: Batch,
    steps: int,
    *,
    counting: str = "served",
    lap: Callable[[str], None] = lambda part: None,
) -> StepOutput:
    """K unrolled draft steps from plain tensors.

    Args:
        drafter: the drafter.
        mapping_ids: int64 [N], target id of each slot.
        embed: [V, H], the target's embedding.
        draft_head: [N, H], rows of the target's head in slot order.
        batch: the rows; `aux` in the dtype of the drafter.
        steps: K.
        counting: which positions count, see `counted_positions`.
        lap: told the name of each part when it is done: `forward`, `loss`.
    """
    counted = counted_positions(batch.loss_mask, batch.documents, steps, counting).flatten(1)
    asked = counted.any(0).nonzero()[:, 0]
    states = unroll(drafter, embed, batch, steps, asked)
    lap("forward")
    output = judge(drafter.logits(states).float(), mapping_ids, draft_head, len(embed), batch, asked, counted[:, asked])
    lap("loss")
    return output


def unroll(drafter: Drafter, embed: Tensor, batch: Batch, steps: int, asked: Tensor) -> Tensor:
    """The un-normed states of the K steps at the flat indices `asked` [P], [K, P, H].

    Nothing is computed of padding, nor past the keys and values of step 0 where no later position asks.
    """
    tokens = (batch.documents.flatten() > 0).nonzero()[:, 0]
    wanted = torch.searchsorted(tokens, asked)
    ids, rotary = batch.input_ids.flatten().long(), batch.positions.flatten()
    attend = TTTAttention(batch.documents, tokens, asked)
    states = drafter.fc(batch.aux.flatten(0, 1)[tokens])[None]
    kept: list[Tensor] = []
    for step in range(steps):
        at = asked if step else tokens
        embeds = F.embedding(ids[(at + 1 + step).clamp(max=len(ids) - 1)], embed).to(states.dtype)
        states = drafter.step(states, embeds[None], rotary[None, at] + step, attend, ALL if step else wanted)
        kept.append(states[0])
    return torch.stack(kept)


def judge(
    logits: Tensor, mapping_ids: Tensor, draft_head: Tensor, vocab: int, batch: Batch, asked: Tensor, counted: Tensor
) -> StepOutput:
    """What logits fp32 [K, P, N] at the flat indices `asked` [P] are worth; `counted` bool [K, P], the rest as above.

    `vocab` is V.
    """
    steps = torch.arange(len(logits), device=asked.device)[:, None]
    law_at = (asked + 1 + steps).clamp(max=batch.input_ids.numel() - 1)  # [K, P]
    best = batch.greedy.flatten()[law_at].long()
    slots = mapping_ids.new_full((vocab,), -1)
    slots[mapping_ids] = torch.arange(len(mapping_ids), device=slots.device)
    told = torch.ones_like(counted)
    if batch.top_ids is None:
        assert batch.final is not None
        losses = _soft_cross_entropy(logits, batch.final.flatten(0, 1), draft_head, law_at)
    else:
        assert batch.top_logits is not None
        slot, law = _law_of_the_top(slots[batch.top_ids.flatten(0, 1)[law_at]], batch.top_logits.flatten(0, 1)[law_at])
        told, losses = law.any(-1), _sparse_cross_entropy(logits, slot, law)
    drafted = mapping_ids[logits.argmax(-1)]
    return StepOutput(asked, counted, slots[best] >= 0, told, drafted, best, losses, logits)


def _law_of_the_top(slot: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Slots int64 [K, P, 64] and their probabilities fp32, all 0 where none of the ids has a slot.

    Args:
        slot: int64 [K, P, 64], of the ids; -1: none, which is given back as slot 0 of probability 0.
        logits: [K, P, 64].
    """
    held = slot >= 0
    law = logits.float().masked_fill(~held, -torch.inf).softmax(-1)
    return slot.clamp(min=0), law.masked_fill(~held, 0.0)  # NaN where no id is held


def _sparse_cross_entropy(logits: Tensor, slot: Tensor, law: Tensor) -> Tensor:
    """Nats, fp32 [K, P], of a law that is 0 but at `slot`; 0 where it is 0 there as well."""
    return torch.stack(
        [
            (p * (part.logsumexp(-1, keepdim=True) - part.gather(-1, at))).sum(-1)
            for part, at, p in zip(logits, slot, law, strict=True)
        ]
    )


def _soft_cross_entropy(logits: Tensor, final: Tensor, draft_head: Tensor, law_at: Tensor) -> Tensor:
    """Nats, fp32 [K, P]: -sum p log q, q of the drafter's logits, p the target's law over the draft ids.

    Args:
        logits: fp32 [K, P, N], of the drafter.
        final: [B * S, H], after the target's final norm.
        draft_head: [N, H], rows of the target's head in slot order.
        law_at: int64 [K, P], flat indices where the law is read.
    """
    with torch.no_grad():
        needed, place = law_at.unique(return_inverse=True)
        law = (final[needed] @ draft_head.to(final.dtype).T).float().softmax(-1)
    return torch.stack(
        [F.cross_entropy(part, law[at], reduction="none") for at, part in zip(place, logits, strict=True)]
    )


class TTTModule(nn.Module):
    """All draft steps in one `forward`, as DistributedDataParallel needs it."""

    mapping_ids: Tensor
    """int64 [N], target id of each slot."""
    embed: Tensor
    """[V, H]."""
    draft_head: Tensor
    """[N, H], rows of the target's head in slot order."""

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
        batch: Batch,
        counting: str = "served",
        lap: Callable[[str], None] = lambda part: None,
        exact: bool = False,
    ) -> StepOutput:
        """All steps of a batch; `counting` and `lap` as in `ttt_step`; `exact`: no autocast.

        Autocast is opened here and not by Accelerate, which would open it for measurements as well, and not at all
        under FSDP2. One that is opened outside is switched off.
        """
        weight = self.drafter.fc.weight
        rounded = self.rounded and not exact
        given = replace(batch, aux=batch.aux.to(weight.dtype)) if rounded else batch.cast(weight.dtype)
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=rounded):
            return ttt_step(
                self.drafter, self.mapping_ids, self.embed, self.draft_head, given, self.steps,
                counting=counting, lap=lap,
            )  # fmt: skip

    def contributing(self, batch: Batch, counting: str, oov: str) -> Tensor:
        """int64 [K], positions that contribute loss, told without a forward; see `StepOutput.contributing`."""
        counted = counted_positions(batch.loss_mask, batch.documents, self.steps, counting)
        held = torch.zeros(len(self.embed), dtype=torch.bool, device=counted.device)
        held[self.mapping_ids] = True
        if oov == "drop":
            told = held[batch.greedy.long()]
        elif batch.top_ids is not None:
            told = held[batch.top_ids.long()].any(-1)
        else:
            return counted.flatten(1).sum(1)
        counted = counted & torch.stack([shift(told, 1 + step) for step in range(self.steps)])
        return counted.flatten(1).sum(1)
