"""The tree of drafts: building it, and the greedy walk through it that verifies.

A tree has n = draft_token_num tokens, the root (the last token of the target) first. Semantics from
`sgl-kernel/csrc/cpu/speculative_decoding.cpp`; how the drafts are numbered from `select_top_k_tokens` and
`organize_draft_results` in `sglang/srt/speculative/`. "retrive" is upstream's spelling.
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1  # sglang's TreeMaskMode; its third, bit-packed, is refused by upstream too


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """The place in the tree of each token's parent; None of a token whose parent was not selected.

    Draft i of all that were ever drafted is a child of the i // topk th expanded node: the root, or draft
    `parent_list[i // topk]`. A child that ties with its parent may be selected without it.
    """
    places = {draft: place for place, draft in enumerate(selected, 1)}
    return [0] + [places.get(parent_list[i // topk]) if i >= topk else 0 for i in selected]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Writes the trees of a batch: who may attend to whom, where each token stands, and the links for the walk.

    A token without its parent is linked nowhere, so it is never accepted; it attends as a child of the root.

    Args:
        parent_list: int64 [batch, topk·(depth - 1) + 1], the draft that each expanded node is; entry 0 is the root.
        selected_index: int64 [batch, n - 1], drafts in the tree, ascending.
        verified_seq_len: int64 [batch], lengths before the tree.
        tree_mask: out, bool, flat. `QLEN_ONLY`: [batch, n, n]. `FULL_MASK`: [n, length + n] of each request end to
            end, whose first `length` columns are left as they are.
        positions: out, int64 [batch · n], length + depth of each token.
        retrive_index: out, int64 [batch, n], the token's number in the batch.
        retrive_next_token: out, int64 [batch, n], filled with -1: the first child.
        retrive_next_sibling: out, int64 [batch, n], filled with -1: the next child of the same parent.
        topk: children of an expanded node.
        depth: steps of the draft.
        draft_token_num: n.
        tree_mask_mode: `FULL_MASK` or `QLEN_ONLY`.

    Raises:
        NotImplementedError: another mode.
    """
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}")
    size = draft_token_num
    mask = tree_mask.view(-1)
    end = 0
    for number, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[number].tolist(), parent_list[number].tolist(), topk)
        ancestry = torch.eye(size, dtype=torch.bool)
        for place, parent in enumerate(parents[1:], 1):
            ancestry[place] |= ancestry[parent or 0]  # a parent stands before its children
        width = size if int(tree_mask_mode) == QLEN_ONLY else length + size
        start, end = end, end + size * width
        mask[start:end].view(size, width)[:, width - size :] = ancestry
        positions.view(-1, size)[number] = length + ancestry.sum(1) - 1
        retrive_index[number] = torch.arange(number * size, (number + 1) * size)
        for place in range(size - 1, 0, -1):  # backwards, so that the first child comes first
            parent = parents[place]
            if parent is not None:
                retrive_next_sibling[number, place] = retrive_next_token[number, parent]
                retrive_next_token[number, parent] = place


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each tree from the root, each time to the first child that is the target's own next token.

    Args:
        predicts: out, int32 [batch · n], the target's token at each accepted place, elsewhere as it was.
        accept_index: out, int32 [batch, longest walk], filled with -1: numbers of the tokens walked over, root first.
        accept_token_num: out, int32 [batch], drafts accepted, the root not counted.
        candidates: int64 [batch, n], tokens of the trees.
        retrive_index: int64 [batch, n], see `build_tree_kernel_efficient_cpu`.
        retrive_next_token: int64 [batch, n].
        retrive_next_sibling: int64 [batch, n].
        target_predict: int64 [batch, n], the target's next token after each.
    """
    target = target_predict.flatten().tolist()
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for tree, (tokens, numbers, child, sibling) in enumerate(zip(*(t.tolist() for t in trees), strict=True)):
        at, accepted = 0, [numbers[0]]
        while len(accepted) < accept_index.shape[1]:
            following = child[at]
            while following != -1 and tokens[following] != target[numbers[at]]:
                following = sibling[following]
            if following == -1:
                break
            at = following
            accepted.append(numbers[at])
        accept_index[tree, : len(accepted)] = torch.tensor(accepted)
        accept_token_num[tree] = len(accepted) - 1
        predicts.view(-1)[accepted] = torch.tensor([target[number] for number in accepted], dtype=predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Writes the last accepted token of each request to `bonus_tokens` (out).

    Args:
        accept_tokens: int32 [batch · accept_stride], the first `accept_lens` of each row count.
        accept_lens: int32 [batch], at least 1.
        bonus_tokens: int32 [batch].
        accept_stride: length of a row.
    """
    rows = torch.arange(len(accept_lens))
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride)[rows, accept_lens.long() - 1])


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shifts each request's tokens one to the left and puts its new token `topk_index` at the end.

    Args:
        input_ids: out, int64 [tokens].
        extend_start_loc: int64 [batch], where a request starts.
        extend_seq_lens: int64 [batch], its tokens; a request of none is left alone.
        topk_index: int64 [batch].
        select_index: int64 [batch], where the new token goes instead of the end.
    """
    ends = extend_start_loc + extend_seq_lens
    places = (ends - 1 if select_index is None else select_index).tolist()
    tokens = topk_index.flatten().tolist()
    for start, end, place, token in zip(extend_start_loc.tolist(), ends.tolist(), places, tokens, strict=True):
        if end > start:
            input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
            input_ids[place] = token
