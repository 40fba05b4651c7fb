"""Bookkeeping of the KV pool: which slots a request owns.

`req_to_token` [requests, pool_len] int32 lists the slots of each request by position; request b of a batch is its row
`req_pool_indices[b]`. Lists of slots of a batch are laid end to end, one request after the other. Semantics from
`sgl-kernel/csrc/cpu/speculative_decoding.cpp`, for `copy_all_layer_kv_cache_cpu` from
`sglang/kernels/ops/kvcache/cache_move.py`.
"""

import ctypes
from collections.abc import Iterator

from torch import Tensor


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yields for each request its row, its positions, and where these lie in the list of the batch."""
    offset = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        size = max(end - start, 0)
        yield row, slice(start, start + size), slice(offset, offset + size)
        offset += size


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Gives positions [start, end) of each request the slots `out_cache_loc` [sum of sizes]. `req_to_token`: out."""
    for row, positions, listed in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, positions] = out_cache_loc[listed].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The reverse: lists the slots of positions [start, end) of each request in `out_cache_loc` (out)."""
    for row, positions, listed in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[listed] = req_to_token[row, positions].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Lists each request's topk·num_steps slots from its length on in `out_cache_loc` (out)."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Makes a table with one row for each branch of the draft.

    Branch k of a request sees the request's slots, then the num_steps slots of its own that start at
    length + k·num_steps. Upstream leaves the rest of a row undefined; here it is 0.

    Returns:
        [requests · topk, pool_len], of the type of `req_to_token`.
    """
    table = req_to_token.new_zeros(len(req_pool_indices) * topk, pool_len)
    branches = iter(table)
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        slots = req_to_token[row]
        for start in range(length, length + topk * num_steps, num_steps):
            branch = next(branches)
            branch[:length] = slots[:length]
            branch[length : length + num_steps] = slots[start : start + num_steps]
    return table


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int | None = None
) -> None:
    """Packs the slots of accepted tokens to the front of `accept_out_cache_loc` (out).

    Args:
        accept_index: int32, places in `out_cache_loc`, -1 where nothing was accepted.
        out_cache_loc: int64 slots.
        accept_out_cache_loc: int64, at least as long as there are accepted tokens.
        size: how many of `accept_index` count. Upstream's op has it, sglang 0.5.23 leaves it out and means all.
    """
    places = accept_index.flatten()[:size].long()
    slots = out_cache_loc[places[places >= 0]]
    accept_out_cache_loc[: len(slots)] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copies slots `src_loc` to `tgt_loc` in every buffer of the pool, as if all were read before any is written.

    Args:
        data_ptrs: addresses of the buffers.
        strides: bytes of a slot in each.
        tgt_loc: int64 slots.
        src_loc: int64 slots, as many.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)
