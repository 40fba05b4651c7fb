"""The two attention ops of SGLang's backend `intel_amx`.

Semantics from `sgl-kernel/csrc/cpu/extend.cpp` and the caller, sglang's `srt/layers/attention/intel_amx_backend.py`.
Both compute softmax(q·kᵀ·sm_scale)·v in float32, with the logits capped to logit_cap·tanh(x / logit_cap) if it is
positive. Request b owns the slots `req_to_token[req_pool_indices[b], :seq_lens[b]]` of the pool. H query heads share Hk
key heads in groups of H / Hk. Shapes: q and output [tokens, H, D or Dv], k_buffer [slots, Hk, D], v_buffer
[slots, Hk, Dv]; with MLA Hk = 1 and v_buffer is a view of the front of k_buffer. Not here: attention sinks, sliding
windows, cross attention, quantised pools (so k_scale and v_scale are not read).
"""

import torch
from torch import Tensor


def _refuse(sinks: Tensor | None, is_cross_attn: bool, sliding_window_size: int) -> None:
    if sinks is not None or is_cross_attn or sliding_window_size > 0:
        raise NotImplementedError("the stand-in has no attention sinks, cross attention or sliding window")


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, visible: Tensor | None) -> Tensor:
    """q [T, H, D], k [S, Hk, D], v [S, Hk, Dv], visible bool [T, S] -> [T, H, Dv] float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    return (logits.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1)


def decode_attention_cpu(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """One new token a request, which sees all `seq_lens` slots of its request; these include its own.

    Args:
        query: [batch, H, D].
        k_buffer: out, if key is given.
        v_buffer: out, if key is given.
        k_scale: not read.
        v_scale: not read.
        output: out, [batch, H, Dv].
        key: [batch, Hk·D] to be stored at `loc` first, or None if it is there already.
        value: [batch, Hk·Dv], likewise.
        loc: int64 [batch] slots.
        attn_logits: upstream's scratch space, not used.
        req_to_token: int32 [requests, pool_len].
        req_pool_indices: int64 [batch].
        seq_lens: int64 [batch].
        sm_scale: factor of the logits.
        logit_cap: 0 for none.
        is_cross_attn: must be false.
        sliding_window_size: must be 0.
        encoder_lens: not read.
        sinks: must be None.

    Raises:
        NotImplementedError: one of these three is asked for.
    """
    _refuse(sinks, is_cross_attn, sliding_window_size)
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():  # with MLA the value is part of the key
            v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        token = query[number : number + 1]
        output[number] = _attend(token, k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, None)[0]


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Several new tokens a request, which see the slots before them and, under a mask, each other.

    Args:
        q: [tokens, H, D]; request b has `extend_seq_lens[b]` of them from `extend_start_loc[b]` on.
        k: [tokens, Hk·D] of the new tokens, or None if they are to be read from the pool. A prefill of MLA passes
            multi-head keys and values here, whose shapes are not the pool's; it has nothing before the new tokens.
        v: [tokens, Hk·Dv], likewise.
        o: out, [tokens, H, Dv].
        k_buffer: [slots, Hk, D].
        v_buffer: [slots, Hk, Dv].
        k_scale: not read.
        v_scale: not read.
        req_to_token: int32 [requests, pool_len].
        req_pool_indices: int64 [batch].
        seq_lens: int64 [batch], the new tokens included.
        extend_seq_lens: int [batch].
        extend_start_loc: int [batch].
        max_len_extend: not read.
        sm_scale: factor of the logits.
        logit_cap: 0 for none.
        is_cross_attn: must be false.
        sliding_window_size: must be 0.
        encoder_lens: not read.
        sinks: must be None.
        tree_mask: bool, flat, see `build_tree_kernel_efficient_cpu`: which new tokens see each other. Its length tells
            the mode; what precedes the new tokens is always seen.
        is_causal: without a tree mask, whether a new token sees only itself and those before it.

    Raises:
        NotImplementedError: cross attention, a sliding window or sinks are asked for.
    """
    _refuse(sinks, is_cross_attn, sliding_window_size)
    sizes = extend_seq_lens.tolist()
    qlen_only = tree_mask is not None and tree_mask.numel() == sum(size * size for size in sizes)
    masked = 0
    for row, length, size, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), sizes, extend_start_loc.tolist(), strict=True
    ):
        if size == 0:
            continue
        before, new = length - size, slice(start, start + size)
        visible = torch.ones(size, length, dtype=torch.bool)
        if tree_mask is not None:
            width = size if qlen_only else length
            seen = tree_mask.view(-1)[masked : masked + size * width].view(size, width)
            visible[:, before:] = seen[:, width - size :]
            masked += size * width
        elif is_causal:
            visible = visible.tril(before)
        slots = req_to_token[row, :length].long()
        if k is None or v is None:
            keys, values = k_buffer[slots], v_buffer[slots]
        else:
            keys = k.reshape(len(q), -1, q.shape[-1])[new]
            values = v.reshape(len(q), -1, o.shape[-1])[new]
            if before:
                keys = torch.cat([k_buffer[slots[:before]].to(keys.dtype), keys])
                values = torch.cat([v_buffer[slots[:before]].to(values.dtype), values])
        o[new] = _attend(q[new], keys, values, sm_scale, logit_cap, visible)
