"""The stand-in for SGLang's compiled CPU ops against references that share nothing with it; no engine is needed."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent / "sglang"))
import sgl_kernel
from sgl_kernel.tree import FULL_MASK, QLEN_ONLY

POOL, SLOTS, ROWS = 24, 200, 5  # longest request, slots, rows of req_to_token
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=150, deadline=None)


@dataclass
class Batch:
    """Requests on distinct random slots, their keys and values already in the pool."""

    generator: torch.Generator
    lengths: list[int]
    heads: int
    kv_heads: int
    mla: bool

    def __post_init__(self) -> None:
        self.rows = torch.randperm(ROWS, generator=self.generator)[: len(self.lengths)]
        order = torch.randperm(SLOTS, generator=self.generator)
        self.req_to_token = order[: ROWS * POOL].view(ROWS, POOL).int()
        self.k = self.noise(SLOTS, self.kv_heads, 12)
        self.v = self.k[..., :8] if self.mla else self.noise(SLOTS, self.kv_heads, 8)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def slots(self, number: int) -> Tensor:
        return self.req_to_token[self.rows[number], : self.lengths[number]].long()

    def expected(self, number: int, q: Tensor, visible: Tensor, cap: float) -> Tensor:
        """q [T, H, D], visible bool [T, length] -> [T, H, Dv]."""
        k, v = (pool[self.slots(number)].transpose(0, 1) for pool in (self.k, self.v))
        if not cap:
            heads = scaled_dot_product_attention(
                q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=0.3, enable_gqa=True
            )
            return heads[0].transpose(0, 1)
        out = torch.zeros(len(q), self.heads, v.shape[-1])
        for token in range(len(q)):  # a cap is nothing that torch has
            for head in range(self.heads):
                kv = head // (self.heads // self.kv_heads)
                seen = [s for s in range(k.shape[1]) if visible[token, s]]
                logits = torch.stack([cap * torch.tanh(q[token, head] @ k[kv, s] * 0.3 / cap) for s in seen])
                out[token, head] = sum(w * v[kv, s] for w, s in zip(logits.softmax(0), seen, strict=True))
        return out


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, POOL), min_size=1, max_size=ROWS))
    heads, kv_heads, mla = draw(st.sampled_from([(4, 4, False), (4, 2, False), (6, 1, False), (3, 1, True)]))
    return Batch(torch.Generator().manual_seed(draw(seeds)), lengths, heads, kv_heads, mla)


caps = st.sampled_from([0.0, 1.5])


@some
@given(batches(), caps, st.booleans())
def test_decode_attention(batch: Batch, cap: float, store: bool) -> None:
    count = len(batch.lengths)
    q = batch.noise(count, batch.heads, 12)
    expected = torch.cat(
        [batch.expected(b, q[b : b + 1], torch.ones(1, n, dtype=torch.bool), cap) for b, n in enumerate(batch.lengths)]
    )
    pools = batch.k.clone(), batch.v.clone()
    k, v, key, value = batch.k, batch.v, None, None
    loc = torch.stack([batch.slots(b)[-1] for b in range(count)])
    if store:  # the last token is not in the pool yet
        key, value = k[loc].reshape(count, -1), v[loc].reshape(count, -1)
        if batch.mla:
            value.fill_(float("nan"))  # part of the key, so not to be read
        k[loc] = float("nan")
        v[loc] = float("nan")
    out = torch.empty(count, batch.heads, 8)
    where = batch.req_to_token, batch.rows, torch.tensor(batch.lengths)
    torch.ops.sgl_kernel.decode_attention_cpu(q, k, v, 1.0, 1.0, out, key, value, loc, None, *where, 0.3, cap)
    torch.testing.assert_close(out, expected)
    assert torch.equal(k, pools[0])
    assert torch.equal(v, pools[1])


def extend(
    batch: Batch, q: Tensor, sizes: list[int], given_kv: bool, cap: float, tree_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Runs the op on the last `sizes` tokens of each request; with `given_kv` the pool does not have them."""
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].int()
    new = torch.cat([batch.slots(b)[n - size :] for b, (n, size) in enumerate(zip(batch.lengths, sizes, strict=True))])
    pool = batch.k, batch.v
    kv: tuple[Tensor | None, Tensor | None] = None, None
    if given_kv:
        kv = batch.k[new].flatten(1), batch.v[new].flatten(1)
        pool = batch.k.clone(), batch.v.clone()
        for buffer in pool:
            buffer[new] = float("nan")
    out = torch.full((len(q), batch.heads, 8), float("nan"))
    where = batch.req_to_token, batch.rows, torch.tensor(batch.lengths), torch.tensor(sizes).int(), starts, max(sizes)
    rest = 0.3, cap, False, 0, None, None, tree_mask, is_causal
    torch.ops.sgl_kernel.extend_attention_cpu(q, *kv, out, *pool, 1.0, 1.0, *where, *rest)
    return out


@some
@given(batches(), caps, st.booleans(), st.booleans(), st.data())
def test_extend_attention(batch: Batch, cap: float, given_kv: bool, is_causal: bool, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(0, n)) for n in batch.lengths]
    q = batch.noise(sum(sizes), batch.heads, 12)
    found = extend(batch, q, sizes, given_kv, cap, None, is_causal).split(sizes)
    for b, (part, tokens) in enumerate(zip(q.split(sizes), found, strict=True)):
        n, size = batch.lengths[b], sizes[b]
        visible = torch.tensor([[not is_causal or s <= n - size + t for s in range(n)] for t in range(size)])
        torch.testing.assert_close(tokens, batch.expected(b, part, visible.view(size, n), cap))


@some
@given(batches(), st.booleans(), st.booleans(), st.data())
def test_extend_attention_under_a_tree_mask(batch: Batch, given_kv: bool, full: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, min(batch.lengths)))
    sizes = [size] * len(batch.lengths)
    q = batch.noise(sum(sizes), batch.heads, 12)
    trees = [(batch.noise(size, size) > 0) | torch.eye(size, dtype=torch.bool) for _ in sizes]
    seen = [torch.cat([torch.ones(size, n - size) > 0, tree], 1) for n, tree in zip(batch.lengths, trees, strict=True)]
    mask = torch.cat([part.flatten() for part in (seen if full else trees)])
    found = extend(batch, q, sizes, given_kv, 0.0, mask, True).split(sizes)
    for b, (part, tokens) in enumerate(zip(q.split(sizes), found, strict=True)):
        torch.testing.assert_close(tokens, batch.expected(b, part, seen[b], 0.0))


def test_a_prefill_of_mla_brings_keys_and_values_of_its_own_shape() -> None:
    batch = Batch(torch.Generator().manual_seed(0), [7], 3, 1, True)
    q, k, v, out = batch.noise(7, 3, 10), batch.noise(7, 3, 10), batch.noise(7, 3, 6), torch.empty(7, 3, 6)
    where = batch.req_to_token, batch.rows, torch.tensor([7]), torch.tensor([7]), torch.tensor([0]), 7
    sgl_kernel.extend_attention_cpu(q, k.flatten(1), v.flatten(1), out, batch.k, batch.v, 1.0, 1.0, *where, 0.3, 0.0)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("asked", [{"sinks": torch.zeros(2)}, {"is_cross_attn": True}, {"sliding_window_size": 4}])
def test_what_the_attention_cannot_do_is_refused(asked: dict[str, object]) -> None:
    for op, before in ((sgl_kernel.decode_attention_cpu, 15), (sgl_kernel.extend_attention_cpu, 16)):
        with pytest.raises(NotImplementedError, match="stand-in"):
            op(*[None] * before, **asked)


# ---- trees


@dataclass
class Node:
    draft: int  # number among all drafts
    parent: "Node | None"
    place: int = 0  # in the tree
    orphan: bool = False

    def lineage(self) -> list["Node"]:
        return [self] + (self.parent.lineage() if self.parent else [])


@dataclass
class Tree:
    topk: int
    steps: int
    parent_list: list[int]
    nodes: list[Node]  # by place, the root first

    def children(self, node: Node) -> list[Node]:
        return [child for child in self.nodes[1:] if child.parent is node and not child.orphan]


def grow(draw: st.DrawFn, topk: int, steps: int, size: int, orphans: bool) -> Tree:
    """Drafts as SGLang does: in each step topk nodes get topk children each, then size - 1 drafts are selected."""
    root = Node(-1, None)
    expanded, parent_list = [root], [-1]
    drafts: list[Node] = []
    for step in range(steps):
        level: list[Node] = []
        for parent in expanded:
            level += [Node(len(drafts) + len(level) + i, parent) for i in range(topk)]
        drafts += level
        expanded = draw(st.permutations(level))[:topk] if step else level
        if step < steps - 1:
            parent_list += [node.draft for node in expanded]
    chosen: list[Node] = []
    while len(chosen) < size - 1:
        free = [d for d in drafts if d not in chosen and (orphans or d.parent in (root, *chosen))]
        chosen.append(draw(st.sampled_from(free)))
    nodes = [root, *sorted(chosen, key=lambda node: node.draft)]
    for place, node in enumerate(nodes):
        node.place = place
        node.orphan = node.parent is not None and not any(node.parent is other for other in nodes)
    return Tree(topk, steps, parent_list, nodes)


@st.composite
def forests(draw: st.DrawFn, orphans: bool = False) -> list[Tree]:
    topk, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    size = draw(st.integers(2, min(topk + (steps - 1) * topk**2, 9) + 1))
    return [grow(draw, topk, steps, size, orphans) for _ in range(draw(st.integers(1, 3)))]


@dataclass
class Built:
    mask: Tensor
    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor


def build(trees: list[Tree], lengths: list[int], mode: int) -> Built:
    count, size = len(trees), len(trees[0].nodes)
    width = size * count if mode == QLEN_ONLY else sum(lengths) + size * count
    links = torch.full((3, count, size), -1)
    built = Built(torch.ones(size * width, dtype=torch.bool), torch.full((count * size,), -7), *links)
    selected = torch.tensor([[node.draft for node in tree.nodes[1:]] for tree in trees])
    parent_list = torch.tensor([tree.parent_list if tree.steps > 1 else [] for tree in trees], dtype=torch.int64)
    out = built.mask, built.positions, built.index, built.child, built.sibling
    shape = trees[0].topk, trees[0].steps, size, mode
    sgl_kernel.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor(lengths), *out, *shape)
    return built


@some
@given(forests(), st.sampled_from([FULL_MASK, QLEN_ONLY]), st.data())
def test_build_tree(trees: list[Tree], mode: int, data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(1, 6)) for _ in trees]
    built = build(trees, lengths, mode)
    flat, size = built.mask.tolist(), len(trees[0].nodes)
    for b, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        for node in tree.nodes:
            row = [flat.pop(0) for _ in range(size if mode == QLEN_ONLY else length + size)]
            assert all(row[:-size])
            assert {place for place in range(size) if row[-size:][place]} == {n.place for n in node.lineage()}
            assert built.positions[b * size + node.place] == length + len(node.lineage()) - 1
            assert built.index[b, node.place] == b * size + node.place
            children, at = [], built.child[b, node.place]
            while at != -1:
                children.append(int(at))
                at = built.sibling[b, at]
            assert children == [child.place for child in tree.children(node)]
    assert flat == []


def test_a_tree_mask_of_bits_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="mode 2"):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[None] * 8, 1, 1, 2, 2)


@some
@given(st.booleans().flatmap(forests), st.integers(2, 3), st.data())
def test_verify_tree_greedy(trees: list[Tree], words: int, data: st.DataObject) -> None:
    """The walk: a child that is the target's next token, until there is none or the walk is as long as it may be."""
    count, size = len(trees), len(trees[0].nodes)
    built = build(trees, [1] * count, QLEN_ONLY)
    text = st.lists(st.integers(0, words), min_size=count * size, max_size=count * size).map(torch.tensor)
    tokens, target = data.draw(text), data.draw(text)
    longest = data.draw(st.integers(1, 5))
    predicts = torch.full((count * size,), -5, dtype=torch.int32)
    index = torch.full((count, longest), -1, dtype=torch.int32)
    number = torch.full((count,), -5, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=index,
        accept_token_num=number,
        candidates=tokens.view(count, size),
        retrive_index=built.index,
        retrive_next_token=built.child,
        retrive_next_sibling=built.sibling,
        target_predict=target.view(count, size),
    )
    expected = [-5] * (count * size)
    for b, tree in enumerate(trees):
        walk = [tree.nodes[0]]
        for _ in range(longest - 1):
            wanted = target[b * size + walk[-1].place]
            walk += [child for child in tree.children(walk[-1]) if tokens[b * size + child.place] == wanted][:1]
        walk = list({node.place: node for node in walk}.values())
        places = [b * size + node.place for node in walk]
        assert index[b].tolist() == places + [-1] * (longest - len(places))
        assert number[b] == len(places) - 1
        for place in places:
            expected[place] = int(target[place])
    assert predicts.tolist() == expected


# ---- bookkeeping


@some
@given(seeds, st.lists(st.tuples(st.integers(0, POOL), st.integers(0, POOL)).map(sorted), min_size=1, max_size=ROWS))
def test_slots_are_assigned_and_listed(seed: int, spans: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=generator)[: len(spans)]
    starts, ends = torch.tensor(spans).T
    slots = torch.randperm(1000, generator=generator)[: int((ends - starts).sum())]
    table = torch.full((ROWS, POOL), -1, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, POOL)
    left, expected = slots.tolist(), [[-1] * POOL for _ in range(ROWS)]
    for row, (start, end) in zip(rows.tolist(), spans, strict=True):
        for position in range(start, end):
            expected[row][position] = left.pop(0)
    assert table.tolist() == expected
    listed = torch.full_like(slots, -1)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, listed, POOL)
    assert listed.tolist() == slots.tolist()


@some
@given(seeds, st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, POOL - 9), min_size=1, max_size=ROWS))
def test_slots_of_a_draft(seed: int, topk: int, steps: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=generator)[: len(lengths)]
    table = torch.randperm(ROWS * POOL, generator=generator).view(ROWS, POOL).int()
    slots = torch.full((len(lengths) * topk * steps,), -1)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor(lengths), slots, POOL, topk, steps)
    branches = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, torch.tensor(lengths), topk, steps, POOL)
    assert branches.shape == (len(lengths) * topk, POOL)
    assert branches.dtype == torch.int32
    own = iter(slots.view(-1, steps).tolist())  # what the draft writes is what the branch reads
    for b, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        owned = table[row].tolist()
        listed = slots.view(len(lengths), -1)[b].tolist()
        assert listed == [owned[length + i] for i in range(topk * steps)]
        for k in range(topk):
            assert branches[b * topk + k, : length + steps].tolist() == owned[:length] + next(own)


@some
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=12), st.booleans(), st.data())
def test_slots_of_accepted_tokens(index: list[int], sized: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(index))) if sized else len(index)
    slots = torch.arange(100, 110)
    out = torch.full((len(index),), -1)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor(index).int(), slots, out, *([size] if sized else []))
    expected = [100 + i for i in index[:size] if i != -1]
    assert out.tolist() == expected + [-1] * (len(index) - len(expected))


@some
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=4))
def test_bonus_tokens(accepted: list[list[int]]) -> None:
    tokens = torch.tensor([row + [-1] * (4 - len(row)) for row in accepted]).int()
    lens = torch.tensor([len(row) for row in accepted]).int()
    bonus = torch.zeros_like(lens)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, lens, bonus, 4)
    assert bonus.tolist() == [row[-1] for row in accepted]


@some
@given(seeds, st.permutations(range(6)), st.integers(0, 6))
def test_slots_are_copied_in_every_buffer(seed: int, order: list[int], count: int) -> None:
    """Sources and targets may overlap: each target gets what its source held before."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(6, 3, generator=generator), torch.randn(6, 2, 2, generator=generator).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    source, target = torch.arange(count), torch.tensor(order[:count], dtype=torch.int64)
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, old in zip(buffers, before, strict=True):
        for slot in range(6):
            assert torch.equal(buffer[slot], old[order.index(slot)] if order.index(slot) < count else old[slot])


@some
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.data())
def test_rotate_input_ids(sizes: list[int], selected: bool, data: st.DataObject) -> None:
    ids = torch.arange(100, 100 + sum(sizes))
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    inside = [data.draw(st.integers(0, max(size - 1, 0))) for size in sizes]
    select = starts + torch.tensor(inside) if selected else None
    expected = []
    for b, (part, at) in enumerate(zip(ids.split(sizes), inside, strict=True)):
        row = part.tolist()
        if row:
            row = [*row[1:], row[-1]]  # what was last stays there if the new token goes elsewhere
            row[at if selected else -1] = b
        expected += row
    sgl_kernel.rotate_input_ids_cpu(ids, starts, torch.tensor(sizes), torch.arange(len(sizes))[:, None], select)
    assert ids.tolist() == expected
