"""`redraft plan`: what it tells of a step, held against a real one; and what it says of profiles and machines."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from redraft.cli.plan import text
from redraft.corpus.corpus import Corpus, write_corpus
from redraft.drafter.model import Drafter, DrafterConfig, RMSNorm
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.params import load_config
from redraft.hidden.formats import scored_positions
from redraft.hidden.rows import Batch, PackedRows
from redraft.plan.budget import Budget, Rates
from redraft.plan.fits import USABLE, verdicts
from redraft.plan.here import Here
from redraft.plan.load import Load, memory
from redraft.plan.made import Amount, amount, made_for
from redraft.plan.shape import Shape, read_shape
from redraft.target.facts import SIZES
from redraft.target.kimi_tiny import TEXT
from redraft.train import attention
from redraft.train.batches import Batches
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
    assert sum(told.values()) == pytest.approx(peak.most + held, rel=0.1)
    assert told["weights, fp32"] == sum(weight.nbytes for weight in module.parameters())
    assert told["AdamW, fp32"] == sum(moment.nbytes for moment in moments)
    assert told["batch"] >= sum(tensor.nbytes for tensor in batch.tensors.values())


@pytest.mark.parametrize("shape", [KIMI, SMALL, GROUPED], ids=["kimi", "small", "grouped"])
def test_weights_are_those_of_the_model(shape: Shape) -> None:
    with torch.device("meta"):
        drafter = Drafter(drafter_config(shape))
    counted = {name: sum(weight.numel() for weight in part.parameters()) for name, part in drafter.named_children()}
    assert counted == shape.parts
    norms = sum(part.weight.numel() for part in drafter.modules() if isinstance(part, nn.RMSNorm))
    assert shape.matrices == sum(counted.values()) - norms


KIMI_TOKENS = 37_000_000
MACHINE = Here(Path("store"), 10**13, 2 * 10**12, (141 * 10**9,) * 8, 6e8, 1.8e9)


def budget_of(machine: Here = MACHINE, tokens: int = KIMI_TOKENS, **train: object) -> Budget:
    """Of Kimi-K2.5 on a machine, with changes of the profile's section `train`."""
    config = load_config(ROOT, "kimi-k25")
    profile = config.profile
    changed = profile.model_copy(update={"train": profile.train.model_copy(update=train)})
    config = config.model_copy(update={"profile": changed})
    return Budget(config, ROOT, KIMI, Amount(tokens, tokens, 0.6, 0.6, "given"), Rates(), machine)


def verdict(budget: Budget, what: str) -> dict[str, Any]:
    (found,) = [each for each in verdicts(budget, budget.figures()) if each["what"] == what]
    return found


def test_bytes_of_kimi() -> None:
    told = budget_of().figures()
    by_variant = {(each["format"], each["law"]): each["bytes_per_token"] for each in told["variants"]}
    assert by_variant["bf16", "states"] == 57_344
    assert by_variant["fp8", "states"] <= 28_800
    assert by_variant["fp8", "top64"] <= 22_000
    in_all = {(each["format"], each["law"]): each["bytes"] for each in told["variants"]}
    assert in_all["bf16", "states"] == KIMI_TOKENS * (57_344 + 4)  # and the target's own next token
    extract = budget_of().config.profile.extract
    assert told["states"]["bytes"] == in_all[extract.format, extract.law]
    assert told["shape"]["drafter_weights"] == KIMI.weights


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 10**6), st.sampled_from([0.3, 1.0, 3.0]))
def test_optimizer_steps_are_those_of_a_training_of_full_rows(rows: int, epochs: float) -> None:
    budget = budget_of(tokens=rows * 4096)
    config = budget.config.model_copy(update={"params": budget.config.params.model_copy(update={"epochs": epochs})})
    training = replace(budget, config=config).training(0)
    assert training["steps"] == Batches(cast(PackedRows, range(rows)), config.fit()).total


@pytest.mark.parametrize("gigabytes", [141, 100, 80, 64, 48, 32, 24])
@pytest.mark.parametrize("launcher", ["accelerate/ddp.yaml", "accelerate/fsdp2.yaml"])
def test_the_setting_that_is_named_makes_a_training_fit(gigabytes: int, launcher: str) -> None:
    gpus = (gigabytes * 10**9,) * 8
    found = verdict(budget_of(replace(MACHINE, gpus=gpus), launcher=launcher), "memory of one GPU")
    assert found["fits"] == (found["needed"] <= USABLE * min(gpus)) == (found["knob"] is None)
    if found["fits"] or not (named := re.search(r"micro_tokens: (\d+)", found["knob"])):
        assert found["fits"] or gigabytes < 40
        return
    launcher = "accelerate/fsdp2.yaml" if "fsdp2" in found["knob"] else launcher
    budget = budget_of(replace(MACHINE, gpus=gpus), launcher=launcher, micro_tokens=int(named[1]))
    steps = re.search(r"ttt_steps: (\d)", found["knob"])
    fit = budget.fit.model_copy(update={"ttt_steps": int(steps[1])} if steps else {})
    assert budget.gpu_bytes(fit, budget.sharded) <= USABLE * min(gpus)


@pytest.mark.parametrize("free", [10**13, 10**12, 9 * 10**11, 10**9])
def test_the_disk_is_held_against_every_variant(free: int) -> None:
    budget = budget_of(replace(MACHINE, disk_free=free))
    told, found = budget.figures(), verdict(budget, "disk at the store")
    for each in told["variants"]:
        assert each["fits"] == (each["bytes"] + told["disk"]["training_state"] <= free)
    assert found["fits"] == told["states"]["fits"]
    fitting = [each for each in told["variants"] if each["fits"]]
    if not found["fits"] and fitting:
        best = max(fitting, key=lambda each: each["bytes"])
        assert f"extract.format: {best['format']} with extract.law: {best['law']}" in found["knob"]
    elif not found["fits"]:
        held = int(re.findall(r"at most ([\d,]+) tokens", found["knob"])[0].replace(",", ""))
        smaller = budget_of(replace(MACHINE, disk_free=free), tokens=max(1, held)).figures()
        assert held == 0 or any(each["fits"] for each in smaller["variants"])


def test_fewer_gpus_and_less_memory_are_told() -> None:
    found = verdict(budget_of(replace(MACHINE, gpus=(141 * 10**9,) * 4)), "GPUs")
    assert (found["fits"], found["needed"], found["there"]) == (False, 8, 4)
    assert "train.processes: 4" in found["knob"]
    found = verdict(budget_of(replace(MACHINE, ram=10**11)), "RAM")
    processes = int(re.findall(r"train.processes: (\d)", found["knob"])[0])
    assert verdict(budget_of(replace(MACHINE, ram=10**11), processes=processes), "RAM")["fits"]
    assert verdict(budget_of(replace(MACHINE, gpus=())), "memory of one GPU")["fits"] is None


def test_what_does_not_fit_is_red_on_a_terminal_and_a_word_elsewhere() -> None:
    budget = budget_of(replace(MACHINE, disk_free=10**9))
    told = budget.figures()
    told = {**told, "sizes_of": "plan", "verdicts": verdicts(budget, told)}
    plain, coloured = text(told), text(told, coloured=True)
    assert "\033" not in plain
    assert re.sub(r"\033\[\d+m", "", coloured) == plain
    red = [line for line in coloured.splitlines() if line.startswith("\033[31m")]
    assert len(red) == sum(each["fits"] is False for each in told["verdicts"]) > 0
    assert all("DOES NOT FIT" in line for line in red)
    assert all(len(line) < 200 for line in plain.splitlines())


def test_the_sizes_of_the_small_target_are_those_that_it_is_made_with() -> None:
    shape = read_shape(load_config(ROOT, "kimi-tiny"), ROOT / "tests")[0]
    assert (shape.hidden, shape.vocab, shape.depth) == tuple(TEXT[name] for name in SIZES)


COMMAND = """
import sys
from redraft.cli import main
main()
assert "torch" not in sys.modules, "slow to import"
"""


def redraft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, "plan", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_budget_of_kimi_is_printed_without_a_hub_and_without_torch(tmp_path: Path) -> None:
    for name in ("params.yaml", "profiles", "accelerate"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = ("--profile", "kimi-k25", "--tokens", str(KIMI_TOKENS))
    told, figures = redraft(tmp_path, *words), redraft(tmp_path, *words, "--json", "--extract-rate", "10000")
    assert not told.stderr + figures.stderr
    for each in (" 57,344  2.12 TB", "1,190,948,864 weights", "saved activations", "give --extract-rate"):
        assert each in told.stdout
    found = json.loads(figures.stdout)
    assert found["variants"][0]["bytes"] == KIMI_TOKENS * 57_348
    assert found["extraction"]["seconds"] == 3700
    assert all(sum(each["parts"].values()) == each["bytes"] for each in found["memory"]["columns"])
    assert "How many tokens" in redraft(tmp_path, "--profile", "kimi-k25").stderr
    for words in (("--tokens", "0"), ("--tokens", "1.5"), ("--tokens", "nan"), ("--tokens", "5", "--supervised", "2")):
        refused = redraft(tmp_path, "--profile", "kimi-k25", *words)
        assert refused.returncode == 2
        assert "is not a" in refused.stderr.splitlines()[-1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose stages target, donor and corpus were run by hand for the profile `tiny` of params.yaml."""
    params = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(re.sub("^profile: .*", "profile: tiny", params, flags=re.M))
    (tmp_path / "profiles").mkdir()
    for name in ("tiny", "smollm"):
        shutil.copy(ROOT / f"profiles/{name}.yaml", tmp_path / "profiles")
    sizes = {"model_type": "llama", "hidden_size": 64, "vocab_size": 500, "num_hidden_layers": 8}
    atomic.write_json(tmp_path / "artifacts/target/config.json", sizes)
    atomic.write_json(tmp_path / "artifacts/target/target.json", {"source": "fit:tiny"})
    for seed, split in enumerate(("train", "heldout", "donor")):
        write_corpus(tmp_path / f"artifacts/corpus/{split}.safetensors", some_corpus(seed))
    return tmp_path


def some_corpus(seed: int) -> Corpus:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (12,), generator=generator)
    total = int(lengths.sum())
    mask = torch.randint(2, (total,), generator=generator).to(torch.uint8)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Corpus(torch.zeros(total, dtype=torch.int32), mask, offsets, [str(n) for n in range(12)], [""] * 12, {})


def test_tokens_and_shares_are_those_of_the_corpus(project: Path) -> None:
    found = amount(load_config(project), project, None, None)
    corpora = [some_corpus(seed) for seed in range(3)]  # the donor's states lie in the store as well
    masks = [corpus.document(index)[1] for corpus in corpora for index in range(len(corpus))]
    tokens = sum(map(len, masks))
    assert (found.tokens, found.trained) == (tokens, len(corpora[0].input_ids))
    assert found.supervised == sum(int(mask.sum()) for mask in masks) / tokens
    assert found.scored == sum(int(scored_positions(mask).sum()) for mask in masks) / tokens
    assert amount(load_config(project), project, 7, None).tokens == 7


def test_artefacts_of_another_profile_are_not_this_ones(project: Path) -> None:
    assert read_shape(load_config(project), project)[0].hidden == 64
    for stage in ("target", "corpus"):
        assert made_for(stage, load_config(project), project)
    lock = "stages:\n  target:\n    params:\n      profiles/smollm.yaml:\n        target: 1\n  corpus:\n    params:\n"
    (project / "dvc.lock").write_text(lock + "      profiles/tiny.yaml:\n        corpus: 1\n")
    assert not made_for("target", load_config(project), project)
    assert made_for("corpus", load_config(project), project)
    assert not made_for("extract", load_config(project), project)
    with pytest.raises(RedraftError, match="sizes of the target are not known"):
        read_shape(load_config(project), project)
    with pytest.raises(RedraftError, match="How many tokens"):
        amount(load_config(project, "smollm"), project, None, None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("hidden_size: 65", "another size than the files"),
        ("head_dim: 16", "another size than the files"),
        ("head_dim: 32.5", "cannot be used"),
        ("", ""),
    ],
)
def test_sizes_in_the_profile_are_held_against_the_files(project: Path, change: str, error: str) -> None:
    sizes = ["hidden_size: 64", "vocab_size: 500", "num_hidden_layers: 8", "intermediate_size: 192"]
    sizes += ["num_attention_heads: 4", "num_key_value_heads: 2", "head_dim: 32"]
    told = [change if change and line.startswith(change.split(":")[0]) else line for line in sizes]
    path = project / "profiles/tiny.yaml"
    path.write_text(path.read_text() + "\nplan:\n" + "".join(f"  {line}\n" for line in told))
    with pytest.raises(RedraftError, match=error) if error else contextlib.nullcontext():
        assert read_shape(load_config(project), project)[0] == Shape(64, 500, 8, 400, 192, 4, 2, 32)


def test_a_donor_of_another_target_is_refused(project: Path) -> None:
    path = project / "profiles/tiny.yaml"
    path.write_text(path.read_text().replace("source: train", "source: donor"))
    donor = {"hidden_size": 64, "vocab_size": 500, "intermediate_size": 96, "num_attention_heads": 4}
    atomic.write_json(project / "donor/config.json", donor)
    shape, places = read_shape(load_config(project), project)
    assert (shape.kv_heads, shape.head_dim, shape.intermediate) == (4, 16, 96)
    assert "donor/config.json" in places
    for change, error in ({"vocab_size": 501}, "another target"), ({"num_attention_heads": None}, "cannot be used"):
        atomic.write_json(project / "donor/config.json", {**donor, **change})
        with pytest.raises(RedraftError, match=error):
            read_shape(load_config(project), project)
