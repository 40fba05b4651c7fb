"""How states are kept: at two bytes a value or at one, and what is kept of the target's law.

T tokens, H hidden size, L aux layers, F tokens whose final state is kept. Tensors of a shard:

| `extract.format` | aux | a kept final state |
|---|---|---|
| `bf16` | `aux` bf16 [T, LH] | `final` bf16 [F, H] |
| `fp8` | `aux` e4m3 [T, LH], `aux_scale` fp32 [T, L] | `final` e4m3 [F, H], `final_scale` fp32 [F, 1] |

| `extract.law` | the law |
|---|---|
| `states` | `final`, F = T |
| `scored` | `final` of the tokens that `scored` bool [T] marks, in their order |
| `top64` | `top_ids` int32 [T, 64] and `top_logits` bf16 [T, 64], largest first, less the largest of the token |

All have a row for every token, but for `final` under `scored`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError
from redraft.hidden.sizes import TOP

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448: what the largest value of a token and layer is scaled to."""
LEAST_SCALE = 2.0**-120
"""Of a token and layer, so that nothing is divided by 0: values below some 1e-38 are kept as 0."""
STATES = ("aux", "final", "top_ids", "top_logits")
PART = 256
"""Tokens whose logits over the full vocabulary are held at once."""


def scored_positions(loss_mask: Tensor) -> Tensor:
    """bool [T], where a target may be scored, from the loss mask [T] of one document.

    The law at t + 1 + k is asked where x[t+1] and x[t+2+k] are in one answer: every k asks for the tokens of an answer
    but its last. Counting like SpecForge (`loss.mask: input`) asks for the token after each of an answer's: both are
    kept, so that any number of draft steps and either way of counting can be trained.
    """
    supervised = loss_mask.bool()
    return supervised | F.pad(supervised, (1, 0))[:-1]


def top_logits(final: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logits of each token, ids int32 [T, 64] and logits [T, 64], largest first, on the device of both.

    Args:
        final: [T, H], after the target's final norm.
        head: [V, H]; computed in its dtype.
    """
    found = [(part.to(head) @ head.T).topk(min(TOP, len(head))) for part in final.split(PART)]
    return torch.cat([each.indices for each in found]).int(), torch.cat([each.values for each in found])


def packed(
    states: dict[str, Tensor],
    kept: str,
    law: str,
    head: Tensor | None = None,
    scored: Tensor | None = None,
    layers: int = 3,
) -> dict[str, Tensor]:
    """The tensors of a shard, see above, of the states of one document or several, in any float dtype.

    Args:
        states: `aux` [T, LH]; `final` [T, H], or `top_ids` and `top_logits` as `top_logits` gives them (up to a
            constant of each token); `greedy` int32 [T]. Whatever else is in it stays as it is.
        kept: `bf16` or `fp8`.
        law: `states`, `scored` or `top64`.
        head: [V, H], asked for where logits must be made of `final`.
        scored: bool [T], see `scored_positions`; asked for under `scored`.
        layers: L.

    Raises:
        RedraftError: a value that is not finite, a law that these states cannot give, or a target's own next token that
            is not among the largest logits.
    """
    for name in STATES:
        if name in states and not bool(states[name].isfinite().all()):
            raise RedraftError("A hidden state is not finite.", where=name)
    tensors = {name: tensor for name, tensor in states.items() if name not in STATES}
    tensors |= _kept("aux", states["aux"], kept, layers)
    if law == "top64":
        return tensors | _top(states, head)
    if "final" not in states:
        raise RedraftError(
            "The final states cannot be had: this engine gives the largest logits alone.",
            where="extract.law in the profile",
            found=law,
            fix="extract.law: top64, or another extract.engine",
        )
    if law == "states":
        return tensors | _kept("final", states["final"], kept, 1)
    assert scored is not None
    return tensors | {"scored": scored} | _kept("final", states["final"][scored], kept, 1)


def _top(states: dict[str, Tensor], head: Tensor | None) -> dict[str, Tensor]:
    if "top_ids" in states:
        ids, logits = states["top_ids"][:, :TOP].int(), states["top_logits"][:, :TOP]
    else:
        assert head is not None
        ids, logits = top_logits(states["final"], head)
    missed = (ids != states["greedy"][:, None]).all(1)
    if bool(missed.any()):
        raise RedraftError(
            "The target's own next token is not among its largest logits.",
            where=f"token {int(missed.nonzero()[0])} of {len(missed)}",
            cause="logits of another token: the engine counts positions otherwise",
        )
    # a law is the same whatever is taken off its logits; near 0 bf16 rounds them less
    return {"top_ids": ids, "top_logits": (logits.float() - logits.float().amax(1, keepdim=True)).bfloat16()}


def _kept(name: str, states: Tensor, kept: str, layers: int) -> dict[str, Tensor]:
    """`states` [T, layers x H] as `name`, with a scale for each token and layer under `fp8`."""
    if kept == "bf16":
        return {name: states.bfloat16()}
    parts = states.float().unflatten(1, (layers, -1))
    scale = (parts.abs().amax(2) / LARGEST).clamp(min=LEAST_SCALE)
    # past 448 a value would become NaN
    values = (parts / scale[..., None]).clamp(-LARGEST, LARGEST).to(FP8)
    return {name: values.flatten(1), f"{name}_scale": scale}


def unpacked(tensors: dict[str, Tensor], loss_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Back to `aux` bf16 [T, LH], and `final` bf16 [T, H] or `top_ids` [T, 64] and `top_logits` bf16 [T, 64].

    Args:
        tensors: of one document or several; what is no state stays as it is.
        loss_mask: [T], of that document: every token that it scores must have its final state. Those of others are 0.

    Raises:
        RedraftError: the final state of a token that is scored was not kept.
    """
    states = {name: tensor for name, tensor in tensors.items() if name != "scored" and not name.endswith("_scale")}
    for name in ("aux", "final"):
        if (scale := tensors.get(f"{name}_scale")) is not None:
            parts = states[name].float().unflatten(1, (scale.shape[1], -1))
            states[name] = (parts * scale[..., None]).flatten(1).bfloat16()
    if "scored" in tensors:
        scored, final = tensors["scored"].bool(), states["final"]
        if loss_mask is not None and bool((scored_positions(loss_mask) & ~scored).any()):
            raise RedraftError(
                "The final state of a token that is scored was not kept.",
                where="hidden states, extract.law: scored",
                expected=f"{int(scored_positions(loss_mask).sum())} tokens of a document",
                found=f"{int(scored.sum())}, others",
                cause="the loss mask of the corpus changed after extraction",
                fix=rerun("extract"),
            )
        states["final"] = final.new_zeros(len(scored), final.shape[1])
        states["final"][scored] = final
    return states
