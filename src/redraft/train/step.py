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

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redraft.drafter.model import Drafter
from redraft.vocab.mapping import Mapping


@dataclass
class StepOutput:
    """Unreduced results at the P positions that count at step 0; those of later steps are among them."""

    positions: Tensor
    """int64 [P], flat index b * S + t."""
    counted: Tensor
    """bool [K, P], whether the position counts at step k."""
    in_vocab: Tensor
    """bool [K, P], whether the target's argmax has a slot; its mean over counted positions is the ceiling."""
    correct: Tensor
    """bool [K, P], whether the drafter's argmax, as a target id, is the target's argmax."""
    losses: Tensor
    """fp32 [K, P], nats of soft cross-entropy."""
    logits: Tensor
    """fp32 [K, P, N]."""

    @property
    def trained(self) -> Tensor:
        """bool [K, P], positions that contribute loss: counted, and the target's argmax has a slot."""
        return self.counted & self.in_vocab


class TTTAttention:
    """Attention of the unrolled steps: causal over step-0 keys, own position over the keys of later steps."""

    def __init__(self, visible: Tensor) -> None:
        """`visible`: bool [B, S, S], whether query position i may see step-0 key j."""
        self.bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))[
            :, None, None
        ]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B,h,S,d], [B,g,S,d], [B,g,S,d] to [B,h,S,d]; remembers key and value for the steps that follow."""
        self.keys.append(key)
        self.values.append(value)
        groups = key.shape[1]
        query = query.unflatten(1, (groups, -1)) * query.shape[-1] ** -0.5  # [B, g, h/g, S, d]
        scores = (query @ self.keys[0][:, :, None].mT).float() + self.bias
        own = [(query * later[:, :, None]).sum(-1, keepdim=True).float() for later in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(value.dtype)
        size = key.shape[2]
        result = weights[..., :size] @ self.values[0][:, :, None]
        for number, later in enumerate(self.values[1:]):
            result = result + weights[..., size + number, None] * later[:, :, None]
        return result.flatten(1, 2)


def shift(tensor: Tensor, by: int) -> Tensor:
    """Move dimension 1 left by `by`, zeros at the end: result[:, t] = tensor[:, t + by]."""
    return F.pad(tensor[:, by:], (0, 0) * (tensor.ndim - 2) + (0, min(by, tensor.shape[1])))


def answer_numbers(loss_mask: Tensor, documents: Tensor) -> Tensor:
    """int64 [B, S]: 0 outside answers, else a number that is the same within one answer of one document."""
    supervised = loss_mask.bool() & (documents > 0)
    before = F.pad(supervised, (1, 0))[:, :-1] & (F.pad(documents, (1, 0))[:, :-1] == documents)
    return (supervised & ~before).cumsum(1) * supervised


def counted_positions(loss_mask: Tensor, documents: Tensor, steps: int) -> Tensor:
    """bool [K, B, S]: position t counts at step k iff x[t+1] and x[t+2+k] are in one answer of t's document."""
    answers = answer_numbers(loss_mask, documents)
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
    """
    if documents is None:
        documents = torch.ones_like(input_ids, dtype=torch.int64)
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    counted = counted_positions(loss_mask, documents, steps).flatten(1)
    rows = counted[0].nonzero()[:, 0]
    counted = counted[:, rows]
    states = _unroll(drafter, input_ids, aux_hidden, embed, documents, positions, steps, rows)
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
    logits = drafter.logits(torch.stack(states)).float()  # [K, P, N]
    losses = _soft_cross_entropy(logits, hidden, draft_head, wanted)
    return StepOutput(rows, counted, slots[best] >= 0, mapping_ids[logits.argmax(-1)] == best, losses, logits)


def _unroll(
    drafter: Drafter,
    input_ids: Tensor,
    aux_hidden: Tensor,
    embed: Tensor,
    documents: Tensor,
    positions: Tensor,
    steps: int,
    rows: Tensor,
) -> list[Tensor]:
    """The un-normed states of the K steps at the flat positions `rows`, each [P, H]."""
    size = input_ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=input_ids.device).tril()
    attend = TTTAttention((documents[:, :, None] == documents[:, None, :]) & causal)
    states = drafter.fc(aux_hidden)
    kept = []
    for step in range(steps):
        embeds = F.embedding(shift(input_ids, 1 + step).long(), embed).to(states.dtype)
        states = drafter.step(states, embeds, positions + step, attend)
        kept.append(states.flatten(0, 1)[rows])
    return kept


def _soft_cross_entropy(logits: Tensor, hidden: Tensor, draft_head: Tensor, wanted: Tensor) -> Tensor:
    """fp32 [K, P]: -sum p log q, p the target's law over the draft ids at the flat positions `wanted` [K, P]."""
    with torch.no_grad():
        needed, place = wanted.unique(return_inverse=True)
        law = (hidden[needed] @ draft_head.to(hidden.dtype).T).float().softmax(-1)
    return torch.stack([-(law[at] * part.log_softmax(-1)).sum(-1) for at, part in zip(place, logits, strict=True)])


class TTTModule(nn.Module):
    """All draft steps in one `forward`, as DistributedDataParallel needs it."""

    mapping_ids: Tensor
    embed: Tensor
    draft_head: Tensor

    def __init__(self, drafter: Drafter, mapping: Mapping, embed: Tensor, head: Tensor, steps: int) -> None:
        """`embed` [V, H] and `head` [V, H] are the target's; they are not trained."""
        super().__init__()
        ids = torch.from_numpy(mapping.ids)
        self.drafter = drafter
        self.steps = steps
        self.register_buffer("mapping_ids", ids, persistent=False)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("draft_head", head[ids].contiguous(), persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> StepOutput:
        """One batch of `redraft.hidden.store.PackedRows`."""
        weight = self.drafter.fc.weight
        return ttt_step(
            self.drafter,
            self.mapping_ids,
            batch["input_ids"],
            batch["loss_mask"],
            batch["aux"].to(weight.dtype),
            batch["final"].to(weight.dtype) if not torch.is_autocast_enabled(weight.device.type) else batch["final"],
            self.embed,
            self.draft_head,
            self.steps,
            greedy=batch["greedy"],
            draft_head=self.draft_head,
            documents=batch["documents"],
            positions=batch["positions"],
        )
