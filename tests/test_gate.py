"""The first-batch gate: each planted fault stops the training, and is called by its name (cases C11, C01)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import extracted, some_checkpoint
from test_hidden import PARAMS, corpus_of
from test_train import FIT, heldout

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.errors import RedraftError
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.rows import HiddenStates
from redraft.target.ends import Ends
from redraft.target.model import Target
from redraft.train import gate
from redraft.train.loop import fit
from redraft.train.measure import Heldout
from redraft.vocab.mapping import Mapping

Shard = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Shard, tuple[int, ...]]:
    """A drafter that knows its documents, and the diagnostic shard of the same documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_STORE", str(tmp_path_factory.mktemp("store")))
        corpus = corpus_of([30, 25, 20, 18, 40, 33])
        params = PARAMS.model_copy(update={"diagnostic_positions": 1000})
        manifest = extracted(target, {"train": corpus, "heldout": corpus}, params)
        states = {split: HiddenStates(manifest, split, corpus) for split in ("train", "heldout")}
        checkpoint = some_checkpoint(1, slots=60, scale=1.0)
        ends = Ends(target.embed, target.head, target.head[0])
        changes = {"epochs": 250, "lr": 5e-3}
        fit(checkpoint, ends, states["train"], states["heldout"], FIT.model_copy(update=changes))
        checkpoint.record["init"] = "remap"
        return checkpoint, read_diagnostic(manifest, corpus), tuple(target.aux_layers)


def found(
    checkpoint: Checkpoint,
    shard: Shard,
    layers: tuple[int, ...],
    target: Target,
    donor: Mapping | None = None,
    embed: torch.Tensor | None = None,
) -> dict[str, gate.Measured]:
    ends = Ends(target.embed if embed is None else embed, target.head, target.decoder.norm.weight)
    return dict(gate.alternatives(checkpoint, donor or checkpoint.mapping, ends, shard, layers))


def test_a_sound_drafter_passes(trained: tuple[Checkpoint, Shard, tuple[int, ...]], target: Target) -> None:
    measured = found(*trained, target)
    assert (measured["as it is"].accuracy or 0) > 0.5
    assert gate.diagnose(measured) is None
    start = heldout(measured["as it is"].loss, measured["as it is"].accuracy)
    gate.check(start, trained[0], "stop", 0.5, lambda: pytest.fail("nothing is wrong"))


def test_each_planted_fault_is_named(trained: tuple[Checkpoint, Shard, tuple[int, ...]], target: Target) -> None:
    checkpoint, shard, layers = trained
    vocab, size = checkpoint.mapping.vocab_size, len(checkpoint.mapping)
    other = Mapping(np.sort(np.random.default_rng(9).choice(vocab, size, replace=False)), vocab)
    swapped = Checkpoint(checkpoint.drafter, other, checkpoint.record)
    assert gate.diagnose(found(swapped, shard, layers, target, checkpoint.mapping)) == (
        "the donor's mapping belongs to this head"
    )
    lower = {f"layer_{layer}": shard[f"layer_{layer - 1}"] for layer in range(2, 7)}
    assert gate.diagnose(found(checkpoint, {**shard, **lower}, layers, target)) == (
        "every aux layer was captured one too low"
    )
    early = {"input_ids": shard["input_ids"].roll(-1)}
    assert gate.diagnose(found(checkpoint, {**shard, **early}, layers, target)) == "tokens come one position too early"
    late = {"input_ids": shard["input_ids"].roll(1)}
    assert gate.diagnose(found(checkpoint, {**shard, **late}, layers, target)) == "tokens come one position too late"
    raw = found(checkpoint, {**shard, "final": shard["unnormed"]}, layers, target)
    sound = found(checkpoint, shard, layers, target)["as it is"]
    assert raw["the final state was taken before its norm"].loss == pytest.approx(sound.loss, rel=0.02)
    assert raw["as it is"].loss != pytest.approx(sound.loss, rel=0.02)
    other_embed = torch.randn(target.embed.shape, generator=torch.Generator().manual_seed(0))
    measured = found(checkpoint, shard, layers, target, embed=other_embed)
    assert (measured["as it is"].accuracy or 0) < 0.3
    assert gate.diagnose(measured) is None


def test_a_cause_has_to_explain_much() -> None:
    readings = {"as it is": gate.Measured(9.0, 0.02), "x": gate.Measured(8.9, 0.03)}
    assert gate.diagnose(readings) is None
    assert gate.diagnose({**readings, "y": gate.Measured(9.1, 0.5)}) is None
    assert gate.diagnose({**readings, "y": gate.Measured(2.0, 0.5)}) == "y"


def test_numbers_that_cannot_be_right() -> None:
    assert gate.suspicion(heldout(4.0, 0.3), 4096, "remap", 0.3) is None
    assert "above ln N" in str(gate.suspicion(heldout(8.4, 0.3), 4096, "remap", 0.3))
    assert gate.suspicion(heldout(8.4, 0.3), 4096, "scratch", None) is None
    assert "above ln N + 1" in str(gate.suspicion(heldout(9.4, 0.3), 4096, "scratch", None))
    assert "above ln N" in str(gate.suspicion(heldout(float("nan"), 0.3), 4096, "remap", 0.3))
    assert "at chance" in str(gate.suspicion(heldout(4.0, 0.0002), 4096, "remap", 0.3))
    assert gate.suspicion(heldout(4.0, 0.0002), 4096, "remap", 0.0001) is None


@pytest.mark.parametrize("init", ["remap", "scratch"])
def test_nothing_to_learn_is_told(init: str) -> None:
    """C48: no position's next token had a slot; loss and ceiling were 0.0 and the gate had nothing to say."""
    assert "ceiling 0" in str(gate.suspicion(heldout(None, 0.0), 4096, init, None))


def test_the_checkpoint_stays_where_it_is(
    trained: tuple[Checkpoint, Shard, tuple[int, ...]], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D A15: the gate moved the checkpoint's own drafter to the GPU and left it there for the whole training."""
    checkpoint, shard, layers = trained
    monkeypatch.setattr(checkpoint.drafter, "to", lambda *device: pytest.fail("moved"))
    found(checkpoint, shard, layers, target)


@pytest.mark.parametrize(
    ("policy", "init", "stops"),
    [("stop", "remap", True), ("warn", "remap", False), ("stop", "naive", False), ("off", "remap", False)],
)
def test_what_follows_is_the_users_choice(
    policy: str, init: str, stops: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = some_checkpoint(1)
    checkpoint.record["init"] = init
    measured = {
        "as it is": gate.Measured(18.0, 0.01),
        "the donor's mapping belongs to this head": gate.Measured(2, 0.4),
    }
    start = heldout(18.0, 0.01)
    if stops:
        with pytest.raises(RedraftError, match=r"worse than knowing nothing[\s\S]*the donor's mapping belongs"):
            gate.check(start, checkpoint, policy, 0.3, lambda: measured)
    else:
        gate.check(start, checkpoint, policy, 0.3, lambda: measured)
    assert ("warning" in capsys.readouterr().out) == (not stops and policy != "off")


def test_a_training_that_the_gate_stops_leaves_no_state(
    states: dict[str, HiddenStates], ends: Ends, tmp_path: Path
) -> None:
    def stop(start: Heldout) -> None:
        raise RedraftError("It cannot be right.")

    with pytest.raises(RedraftError, match="cannot be right"):
        fit(some_checkpoint(1), ends, states["train"], states["heldout"], FIT, gate=stop)
    assert not list((tmp_path / "store" / "train").glob("*/*/step-*"))
