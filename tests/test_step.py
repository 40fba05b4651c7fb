"""The TTT step against a slow, literal drafter that serves position by position with its own cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import HIDDEN, VOCAB, some_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint
from redraft.hidden.formats import packed, scored_positions, unpacked
from redraft.hidden.rows import Batch
from redraft.train.attention import TTTAttention, _fused
from redraft.train.measure import Tally
from redraft.train.step import StepOutput, TTTModule, counted_positions, greedy_tokens, ttt_step

STEPS = 3


def literal_logits(checkpoint: Checkpoint, ids: list[int], aux: Tensor, embed: Tensor, t: int, steps: int) -> Tensor:
    """[steps, N]: an engine's drafts at position t of one document, had the drafted tokens been the true ones.

    Written from the formulas, one position at a time: no batch, no unrolling, no shared code.
    """
    drafter, config = checkpoint.drafter, checkpoint.drafter.config
    weights = {name: weight.double() for name, weight in drafter.state_dict().items()}
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def rope(x: Tensor, position: int) -> Tensor:  # [heads, d]
        half = config.head_dim // 2
        angle = position * config.rope_theta ** -(torch.arange(half).double() * 2 / config.head_dim)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    def layer(state: Tensor, token: int, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([norm(embed[token].double(), "midlayer.input_layernorm"), norm(state, "midlayer.hidden_norm")])
        q, k, v = (
            (weights[f"midlayer.self_attn.{name}_proj.weight"] @ both).view(-1, config.head_dim) for name in "qkv"
        )
        q = rope(q, position)
        cache.append((rope(k, position), v))
        heads = []
        for head in range(config.num_attention_heads):
            keys = torch.stack([key[head // group] for key, _ in cache])
            values = torch.stack([value[head // group] for _, value in cache])
            heads.append((keys @ q[head] / config.head_dim**0.5).softmax(0) @ values)
        state = state + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = norm(state, "midlayer.post_attention_layernorm")
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return state + weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    cache: list[tuple[Tensor, Tensor]] = []
    for position in range(t + 1):
        state = layer(weights["fc.weight"] @ aux[position].double(), ids[position + 1], position, cache)
    logits = [weights["lm_head.weight"] @ norm(state, "norm")]
    for step in range(1, steps):
        state = layer(state, ids[t + 1 + step], t + step, cache)
        logits.append(weights["lm_head.weight"] @ norm(state, "norm"))
    return torch.stack(logits).float()


EMBED = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))


def batch_of(seed: int, rows: list[list[int]]) -> Batch:
    """Random packed rows: `rows` lists the lengths of the documents of each row."""
    torch.manual_seed(seed)
    width = max(map(sum, rows))
    ids = torch.randint(VOCAB, (len(rows), width))
    mask, documents, positions = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for row, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths, 1):
            documents[row, at : at + length] = number
            positions[row, at : at + length] = torch.arange(length)
            mask[row, at + length // 3 : at + length] = 1
            at += length
    aux, final = torch.randn(len(rows), width, 3 * HIDDEN), torch.randn(len(rows), width, HIDDEN)
    return Batch(ids, mask, aux, greedy_tokens(final, HEAD), documents, positions, final)


def of_the_top(batch: Batch, count: int) -> Batch:
    """The same batch with the law of the `count` largest logits, each moved by a constant of its token."""
    assert batch.final is not None
    logits = batch.final @ HEAD.T
    top = (logits + logits.mean(-1, keepdim=True)).topk(count)
    return replace(batch, final=None, top_ids=top.indices.int(), top_logits=top.values)


def run(checkpoint: Checkpoint, batch: Batch, steps: int = STEPS) -> StepOutput:
    ids = torch.from_numpy(checkpoint.mapping.ids)
    with torch.no_grad():
        return ttt_step(checkpoint.drafter, ids, EMBED, HEAD[ids], batch, steps)


@pytest.mark.parametrize(("seed", "rows"), [(0, [[7]]), (1, [[9, 6, 4], [5, 13]]), (2, [[3, 3, 3, 3], [11]])])
def test_every_step_gives_what_an_engine_drafts(seed: int, rows: list[list[int]]) -> None:
    checkpoint, batch = some_checkpoint(seed), batch_of(seed, rows)
    output = run(checkpoint, batch)
    width, checked = batch.input_ids.shape[1], 0
    for column, flat in enumerate(output.flat.tolist()):
        row, t = divmod(flat, width)
        own = batch.documents[row] == batch.documents[row, t]
        start = int(own.nonzero()[0])
        ids = [*batch.input_ids[row, own].tolist(), *[0] * STEPS]
        expected = literal_logits(checkpoint, ids, batch.aux[row, own], EMBED, t - start, STEPS)
        for step in range(STEPS):
            if output.counted[step, column]:
                assert torch.allclose(output.logits[step, column], expected[step], atol=1e-5, rtol=1e-5)
                checked += 1
    assert checked == int(output.counted.sum()) > 0


def test_loss_and_accuracy_by_their_definitions() -> None:
    checkpoint, batch = some_checkpoint(3), batch_of(3, [[12, 7], [18]])
    output = run(checkpoint, batch)
    ids = checkpoint.mapping.ids
    width = batch.input_ids.shape[1]
    for column, flat in enumerate(output.flat.tolist()):
        row, t = divmod(flat, width)
        for step in range(STEPS):
            if not output.counted[step, column]:
                continue
            assert batch.final is not None
            logits = HEAD @ batch.final[row, t + 1 + step]
            law = logits[ids].softmax(0)
            loss = -(law * output.logits[step, column].log_softmax(0)).sum()
            assert output.losses[step, column] == pytest.approx(float(loss), rel=1e-5)
            best = int(logits.argmax())
            assert bool(output.in_vocab[step, column]) == (best in ids)
            assert bool(output.correct[step, column]) == (ids[int(output.logits[step, column].argmax())] == best)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=14), st.integers(1, 4))
def test_a_position_counts_iff_both_tokens_are_in_one_answer(tokens: list[tuple[int, bool]], steps: int) -> None:
    documents = torch.tensor([sorted(number for number, _ in tokens)])
    documents = torch.where(documents == 0, torch.zeros_like(documents), documents)
    mask = torch.tensor([[int(flag) for _, flag in tokens]])
    counted = counted_positions(mask, documents, steps)[:, 0]
    size = len(tokens)
    for step in range(steps):
        for t in range(size):
            span = range(t + 1, t + 3 + step)
            inside = span[-1] < size and all(mask[0, s] and documents[0, s] == documents[0, t] > 0 for s in span)
            assert bool(counted[step, t]) == inside


@pytest.mark.parametrize("law", ["states", "top"])
def test_packing_changes_nothing(law: str) -> None:
    checkpoint = some_checkpoint(5)
    packed = batch_of(5, [[9, 6, 4]])
    packed = of_the_top(packed, 30) if law == "top" else packed
    together = Tally()
    together.add(run(checkpoint, packed))
    apart = Tally()
    for number in (1, 2, 3):
        own = packed.documents[0] == number
        apart.add(run(checkpoint, packed.each(lambda tensor, own=own: tensor[:, own])))
    assert together.positions == apart.positions > 0
    for name in ("loss", "accuracy", "ceiling", "joint"):
        assert getattr(together, name) == pytest.approx(getattr(apart, name), abs=1e-5), name


def test_tally_measures() -> None:
    output = StepOutput(
        flat=torch.arange(3),
        counted=torch.tensor([[True, True, True], [True, True, False]]),
        in_vocab=torch.tensor([[True, False, True], [True, True, True]]),
        told=torch.ones(2, 3, dtype=torch.bool),
        drafted=torch.tensor([[5, 6, 7], [8, 9, 9]]),
        best=torch.tensor([[5, 0, 7], [0, 9, 9]]),
        losses=torch.tensor([[1.0, 9.0, 3.0], [2.0, 4.0, 9.0]]),
        logits=torch.zeros(2, 3, 4),
    )
    tally = Tally()
    tally.add(output)
    assert tally.positions == 3
    assert tally.loss == [2.0, 3.0]
    assert tally.accuracy == pytest.approx([2 / 3, 1 / 2], abs=1e-6)
    assert tally.ceiling == pytest.approx([2 / 3, 1.0], abs=1e-6)
    assert tally.joint == pytest.approx([2 / 3, 0.0], abs=1e-6)


def test_a_measure_of_nothing_is_none_and_nan_stays() -> None:
    """C48: a loss of no position, or an accuracy, was 0.0."""
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    counted = torch.tensor([[True, True, True], [False, False, False]])
    ids, losses = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    tally = Tally()
    tally.add(StepOutput(torch.arange(3), counted, nothing, nothing, ids, ids + 1, losses, torch.zeros(2, 3, 4)))
    assert (tally.loss, tally.accuracy) == ([None, None], [0.0, None])
    assert (tally.ceiling, tally.joint) == ([0.0, None], [0.0, None])
    tally.add(StepOutput(torch.arange(3), counted, nothing, nothing, ids, ids, losses * np.nan, torch.zeros(2, 3, 4)))
    assert np.isnan(tally.loss[0])  # type: ignore[arg-type]


def test_specforges_mask_counts_where_the_read_token_is_supervised() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1]])
    documents = torch.tensor([[1, 1, 1, 1, 1, 1, 2, 2]])
    counted = counted_positions(mask, documents, 2, "input")[:, 0].int().tolist()
    assert counted == [[0, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0]]  # step k: mask[t+k], law at t+1+k inside


def test_the_law_of_all_logits_is_that_of_the_states() -> None:
    checkpoint, batch = some_checkpoint(4), batch_of(4, [[12, 7], [18]])
    whole, top = run(checkpoint, batch), run(checkpoint, of_the_top(batch, VOCAB))
    assert torch.allclose(top.losses, whole.losses, atol=1e-5)
    for name in ("logits", "drafted", "best", "in_vocab", "told"):
        assert torch.equal(getattr(top, name), getattr(whole, name)), name


def test_the_law_of_the_top_by_its_definition() -> None:
    """Few enough that often none of them has a slot: nothing is learnt there, and no loss is averaged over it."""
    checkpoint, batch = some_checkpoint(4), batch_of(4, [[12, 7], [18]])
    top = of_the_top(batch, 3)
    assert top.top_ids is not None
    assert top.top_logits is not None
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, EMBED, HEAD, STEPS)
    output, width = module(top), batch.input_ids.shape[1]
    slots = torch.from_numpy(checkpoint.mapping.slots)
    for column, flat in enumerate(output.flat.tolist()):
        row, t = divmod(flat, width)
        for step in output.counted[:, column].nonzero()[:, 0].tolist():
            at = row, t + 1 + step
            slot = slots[top.top_ids[at].long()]
            held = slot >= 0
            assert bool(output.told[step, column]) == bool(held.any())
            law = top.top_logits[at][held].softmax(0)
            loss = -(law * output.logits[step, column].log_softmax(0)[slot[held]]).sum()
            assert output.losses[step, column].item() == pytest.approx(loss.item(), abs=1e-5)
    assert not output.contributing("drop")[~output.told].any()
    assert 0 < output.contributing("train").sum() < output.counted.sum()
    (output.losses * ~output.told).sum().backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in checkpoint.drafter.parameters())


@pytest.mark.parametrize("counting", ["served", "input"])
@pytest.mark.parametrize("oov", ["drop", "train"])
@pytest.mark.parametrize("law", ["states", "top"])
def test_contributing_positions_are_known_before_the_forward(counting: str, oov: str, law: str) -> None:
    checkpoint, batch = some_checkpoint(7), batch_of(7, [[9, 6, 4], [15]])
    batch = of_the_top(batch, 2) if law == "top" else batch
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, EMBED, HEAD, STEPS)
    output = module(batch, counting)
    assert module.contributing(batch, counting, oov).tolist() == output.contributing(oov).sum(1).tolist()
    assert output.contributing(oov).sum() > 0


def test_a_row_of_padding_costs_nothing_and_breaks_nothing() -> None:
    checkpoint = some_checkpoint(1)
    whole = batch_of(0, [[9]])
    for batch in (whole, of_the_top(whole, 30)):
        assert run(checkpoint, batch.each(torch.zeros_like)).losses.shape == (STEPS, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_parts_is_attention_over_all_keys(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    tokens = (documents.flatten() > 0).nonzero()[:, 0]
    asked = torch.tensor([1, 2, 5, 8, 10, 11, 14])
    parts = [
        [
            torch.randn(1, heads, count, 8, generator=generator).to(dtype)
            for heads, count in ((4, 7), (2, keys), (2, keys))
        ]
        for keys in (len(tokens), 7, 7)
    ]
    found = []
    for way in ("_split", "_joined"):
        attend = TTTAttention(documents, tokens, asked)
        attend._split = getattr(attend, way)  # type: ignore[method-assign]
        inputs = [[tensor.clone().requires_grad_() for tensor in part] for part in parts]
        results = [attend(*part) for part in inputs]
        sum((result.float() ** 2).sum() for result in results).backward()  # type: ignore[union-attr]
        found.append([*results, *(tensor.grad for part in inputs for tensor in part)])
    close = {"atol": 1e-5} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.1}
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one.float(), two.float(), **close)


def test_without_the_private_kernels_the_plain_form_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are private operators of torch, looked up when first used."""
    checkpoint, batch = some_checkpoint(2), batch_of(2, [[9, 6, 4], [5, 13]])
    with_kernels = run(checkpoint, batch)
    monkeypatch.setattr(torch.ops, "aten", object())
    _fused.cache_clear()
    try:
        without = run(checkpoint, batch)
    finally:
        _fused.cache_clear()
    assert torch.allclose(without.losses, with_kernels.losses, atol=1e-5)
    assert not torch.equal(without.logits, with_kernels.logits)  # another order of sums: another path


@pytest.mark.parametrize("law", ["states", "top"])
def test_bf16_is_bf16_and_near(law: str) -> None:
    """D A7: an autocast opened outside is switched off by the module, so both sides of a comparison were fp32."""
    found = {}
    for precision in ("fp32", "bf16"):
        checkpoint, batch = some_checkpoint(1), batch_of(1, [[9, 6, 4], [5, 13], [19]])
        batch = of_the_top(batch, 64) if law == "top" else batch
        module = TTTModule(checkpoint.drafter, checkpoint.mapping, EMBED, HEAD, STEPS, precision)
        output = module(batch)
        (output.losses * output.contributing()).sum().backward()
        slope = checkpoint.drafter.fc.weight.grad
        assert slope is not None
        found[precision] = output.losses.detach(), slope
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(module(batch).losses, output.losses)
    (loss, slope), (rounded, turned) = found["fp32"], found["bf16"]
    gap, turn = float((rounded - loss).abs().max()), float((turned - slope).norm() / slope.norm())
    assert 1e-4 < gap < 0.2  # bf16 keeps 8 bits: 0.4 % of a logit
    assert 1e-4 < turn < 0.2


@pytest.mark.parametrize(("kept", "law"), [(kept, law) for kept in ("bf16", "fp8") for law in ("scored", "top64")])
def test_smaller_states_train_as_whole_ones_do(kept: str, law: str) -> None:
    """From documents as they are kept to losses: the tokens that are not scored are never asked for."""
    checkpoint, whole = some_checkpoint(6), batch_of(6, [[9, 6, 4]])
    whole = whole.cast(torch.bfloat16)
    documents = []
    for number in (1, 2, 3):
        own = {name: tensor[whole.documents == number] for name, tensor in whole.tensors.items()}
        states = {name: own[name] for name in ("input_ids", "loss_mask", "aux", "final", "greedy")}
        tensors = packed(states, kept, law, HEAD.bfloat16(), scored_positions(own["loss_mask"]))
        documents.append(unpacked(tensors, own["loss_mask"]))
    row = Batch.row(documents, 32)
    batch = Batch.stack([row, row.each(torch.zeros_like)]).to("cpu").cast(torch.float32)
    assert (batch.final is None) == (law == "top64")
    found, expected = run(checkpoint, batch), run(checkpoint, whole.cast(torch.float32))
    sums = [(each.losses * each.contributing()).sum() for each in (found, expected)]
    assert found.contributing().sum() == expected.contributing().sum() > 0
    assert sums[0].item() == pytest.approx(
        sums[1].item(), rel={"bf16": 1e-5, "fp8": 0.03}[kept] + 0.03 * (law == "top64")
    )
