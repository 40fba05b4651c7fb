"""`redraft plan`: what it tells of a step, held against a real one; and what it says of profiles and machines."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from redraft.drafter.model import Drafter, DrafterConfig, RMSNorm
from redraft.frame.params import load_config
from redraft.hidden.rows import Batch
from redraft.plan.load import Load, memory
from redraft.plan.shape import Shape
from redraft.train import attention
from redraft.train.step import TTTModule
from redraft.vocab.mapping import Mapping

KIMI = Shape(7168, 163_840, 61, 32_000, 18_432, 64, 64, 128)
SMALL = Shape(96, 700, 9, 384, 224, 4, 4, 24)
GROUPED = Shape(64, 500, 9, 256, 160, 8, 2, 16)
LOADS = [
    Load(SMALL, steps=1, rows=1, row_tokens=128, width=126, bf16=True, law="states"),
    Load(SMALL, steps=3, rows=2, row_tokens=160, width=96, bf16=True, law="states"),
    Load(SMALL, steps=3, rows=2, row_tokens=160, width=158, bf16=False, law="states"),
    Load(GROUPED, steps=5, rows=2, row_tokens=96, width=40, bf16=True, law="states"),
    Load(GROUPED, steps=7, rows=1, row_tokens=160, width=150, bf16=True, law="top64"),
    Load(GROUPED, steps=2, rows=3, row_tokens=64, width=20, bf16=False, law="top64"),
]


def drafter_config(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.slots,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=4096,
    )


def module_of(load: Load) -> TTTModule:
    """The module of a real training."""
    shape = load.shape
    generator = np.random.default_rng(0)
    mapping = Mapping(np.sort(generator.choice(shape.vocab, shape.slots, replace=False)), shape.vocab)
    embed, head = torch.randn(2, shape.vocab, shape.hidden, generator=torch.Generator().manual_seed(0))
    drafter = Drafter.fresh(drafter_config(shape), 0)
    return TTTModule(drafter, mapping, embed, head.bfloat16(), load.steps, "bf16" if load.bf16 else "fp32")


def batch_of(load: Load) -> Batch:
    """Full rows, at whose end stands an answer that asks `load.width` positions."""
    torch.manual_seed(1)
    rows, size, hidden = load.rows, load.row_tokens, load.shape.hidden
    mask = torch.zeros(rows, size, dtype=torch.uint8)
    mask[:, size - load.width - 1 :] = 1
    law: dict[str, Tensor] = {"final": torch.randn(rows, size, hidden).bfloat16()}
    if load.law == "top64":
        ids = torch.rand(rows, size, load.shape.vocab).topk(64).indices.int()
        law = {"top_ids": ids, "top_logits": torch.randn(rows, size, 64).sort(descending=True).values.bfloat16()}
    return Batch(
        input_ids=torch.randint(load.shape.vocab, (rows, size)).int(),
        loss_mask=mask,
        aux=torch.randn(rows, size, 3 * hidden).bfloat16(),
        greedy=torch.randint(load.shape.vocab, (rows, size)).int(),
        documents=torch.ones(rows, size, dtype=torch.int64),
        positions=torch.arange(size).expand(rows, size).contiguous(),
        **law,
    )


class _Norm(torch.autograd.Function):
    """Keeps what torch's kernel on a GPU keeps: its input, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, weight = ctx.saved_tensors
        normed, slope = x * scale, gradient * weight
        along = (slope * normed).mean(-1, keepdim=True)
        return (slope - normed * along) * scale, (gradient * normed).flatten(0, -2).sum(0)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that a GPU takes: all keys in one row of one kernel, norms that keep their input."""
    monkeypatch.setattr(attention, "_fused", lambda: None)
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: _Norm.apply(x.to(self.weight.dtype), self.weight))


def loss_of(module: TTTModule, batch: Batch) -> Tensor:
    output = module(batch)
    return (output.losses * output.contributing("train")).sum()


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_flops_are_those_that_torch_counts(load: Load) -> None:
    aten = torch.ops.aten
    kernels = {  # torch knows them of a GPU alone
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda g, q, k, v, *_, out_shape, **__: sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    module, batch = module_of(load), batch_of(load)
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        loss_of(module, batch).backward()
    assert load.flops() == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_what_autograd_keeps_is_what_is_told(load: Load) -> None:
    module, batch = module_of(load), batch_of(load)
    given = [*module.parameters(), *module.buffers(), *batch.tensors.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(batch)
    assert output.losses.shape == (load.steps, load.asked)
    kept[output.logits.untyped_storage().data_ptr()] = output.logits
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    copies = 2 * (load.shape.matrices - load.shape.parts["fc"]) if load.bf16 else 0  # that of fc no gradient asks for
    gradient = 4 * output.logits.numel()
    assert load.activations() + load.logits() - gradient + copies == pytest.approx(measured, rel=0.02)


class _Peak(TorchDispatchMode):
    """The largest number of bytes that tensors made under it had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.now -= self.live.pop(key)

        weakref.finalize(storage, gone)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_memory_of_a_step(load: Load) -> None:
    fit = load_config(ROOT).fit()
    size = load.tokens
    fit = fit.model_copy(update={"batch_tokens": size, "micro_tokens": size, "row_tokens": load.row_tokens})
    module = module_of(load)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    peak = _Peak()
    with peak:
        batch = batch_of(load).to("cpu").each(torch.clone)
    for _ in range(2):
        with peak:
            loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    held = sum(t.nbytes for t in [*module.parameters(), *module.buffers(), *moments])
    told = memory(load, fit, 1, sharded=False)
    print(peak.most + held, sum(told.values()), (peak.most + held) / sum(told.values()), told)
