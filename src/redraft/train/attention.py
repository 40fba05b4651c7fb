"""Attention of the unrolled draft steps: causal over step-0 keys, own position over the keys of later steps."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def _fused() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The CPU kernel that tells its log-sum-exp, and its backward; None in a torch without these private operators."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = (getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward"))
    return (forward, backward) if forward and backward else None


class TTTAttention:
    """Lays flat tokens and queries out by row, so that one fused kernel sees [B, heads, queries, keys].

    No score is kept. A query sees the step-0 keys of its document up to its own position, and of every later step the
    key of its own position alone. Q is the largest number of queries in a row.
    """

    visible: Tensor
    """bool [B, 1, Q, S], the step-0 keys that a query sees."""
    own: Tensor
    """bool [B, 1, Q, Q], the keys of a later step that a query sees: its own."""
    bias: Tensor
    """[B, 1, Q, S] in the dtype of the queries, 0 where `visible`, else -inf; made at the first call, on a CPU."""

    def __init__(self, documents: Tensor, tokens: Tensor, asked: Tensor) -> None:
        """Lay out a batch.

        Args:
            documents: int64 [B, S], document of each position.
            tokens: int64 [T], positions whose keys there are, flat: b * S + s.
            asked: int64 [P], positions that ask, flat, ascending.
        """
        batch, size = documents.shape
        self.batch, self.size, self.tokens = batch, size, tokens
        row = asked // size
        counts = torch.bincount(row, minlength=batch)
        self.width = max(1, int(counts.max()))  # a batch may be all padding
        order = torch.arange(len(asked), device=asked.device)
        self.places = row * self.width + order - (counts.cumsum(0) - counts)[row]
        column = asked.new_zeros(batch * self.width)
        column[self.places] = asked % size
        column = column.view(batch, self.width, 1)
        same = documents.gather(1, column[:, :, 0])[:, :, None] == documents[:, None]
        self.visible = (same & (torch.arange(size, device=asked.device) <= column))[:, None]
        self.own = torch.eye(self.width, dtype=torch.bool, device=asked.device).expand(batch, 1, -1, -1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def _lay(self, flat: Tensor, places: Tensor, width: int) -> Tensor:
        """[1, heads, n, d] to [B, heads, width, d], zeros where nothing lies."""
        laid = flat.new_zeros(self.batch * width, flat.shape[1], flat.shape[3])
        laid[places] = flat[0].transpose(0, 1)
        return laid.unflatten(0, (self.batch, width)).transpose(1, 2)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1,h,P,d], [1,g,n,d], [1,g,n,d] to [1,h,P,d], n = T at step 0, else P; remembers keys and values."""
        places, width = (self.places, self.width) if self.keys else (self.tokens, self.size)
        groups = query.shape[1] // key.shape[1]
        for kept, new in ((self.keys, key), (self.values, value)):
            kept.append(self._lay(new, places, width).repeat_interleave(groups, 1))
        laid = self._lay(query, self.places, self.width)
        attended = self._split(laid) if laid.device.type == "cpu" and _fused() else self._joined(laid)
        return attended.transpose(1, 2).flatten(0, 1)[self.places].transpose(0, 1)[None]

    def _joined(self, query: Tensor) -> Tensor:
        """All keys in one row; of a later step's block only the diagonal is seen."""
        mask = torch.cat([self.visible, *[self.own] * (len(self.keys) - 1)], 3)
        return F.scaled_dot_product_attention(query, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=mask)

    def _split(self, query: Tensor) -> Tensor:
        """The same without the blocks that are hidden but for their diagonal: half the time on a CPU."""
        if not hasattr(self, "bias"):
            hidden = ~self.visible
            self.bias = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        return _SplitAttention.apply(query, self.keys[0], self.values[0], self.bias, *self.keys[1:], *self.values[1:])


class _SplitAttention(torch.autograd.Function):
    """Softmax over a block of keys and a few own keys, the block by the fused kernel.

    The kernel gives the block's output and log-sum-exp, with which the own keys are joined; its backward, handed the
    joined output and log-sum-exp, gives the block's share of the exact gradient, as in ring attention
    (Liu et al. 2023).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *own: Tensor) -> Tensor:
        count, scale = len(own) // 2, query.shape[-1] ** -0.5
        keys, values = own[:count], own[count:]
        kernel = _fused()
        assert kernel
        result, total = kernel[0](query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        shares: list[Tensor] = []
        if count:
            scores = [(query.float() * own_key.float()).sum(-1) * scale for own_key in keys]
            joined = torch.logsumexp(torch.stack([total, *scores]), 0)
            shares = [(score - joined).exp() for score in scores]
            summed = result.float() * (total - joined).exp()[..., None]
            for share, own_value in zip(shares, values, strict=True):
                summed = summed + share[..., None] * own_value
            result, total = summed.to(query.dtype), joined
        ctx.save_for_backward(query, key, value, bias, result, total, *own, *shares)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, result, total, *rest = ctx.saved_tensors
        count, scale = len(rest) // 3, query.shape[-1] ** -0.5
        keys, values, shares = rest[:count], rest[count : 2 * count], rest[2 * count :]
        kernel = _fused()
        assert kernel
        for_query, for_key, for_value = kernel[1](
            gradient, query, key, value, result, total, 0.0, False, attn_mask=bias, scale=scale
        )
        along = (gradient.float() * result.float()).sum(-1)
        for_keys, for_values = [], []
        for own_key, own_value, share in zip(keys, values, shares, strict=True):
            slope = (share * ((gradient.float() * own_value.float()).sum(-1) - along))[..., None] * scale
            for_query = for_query + (slope * own_key).to(query.dtype)
            for_keys.append((slope * query).to(own_key.dtype))
            for_values.append((share[..., None] * gradient).to(own_value.dtype))
        return (for_query, for_key, for_value, None, *for_keys, *for_values)
