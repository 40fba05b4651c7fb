"""On which layers a donor was trained: measured in every remap, and a donor of the other convention is used (A12)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import LAYERS, extracted, some_checkpoint
from test_hidden import PARAMS, corpus_of
from test_train import FIT

from redraft.drafter.checkpoint import Checkpoint
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.rows import HiddenStates, PackedRows
from redraft.remap import shifts
from redraft.remap.shifts import layer_shifts
from redraft.target.ends import Ends
from redraft.target.model import Target
from redraft.train.loop import fit
from redraft.train.measure import evaluate
from redraft.train.step import TTTModule

Shard = dict[str, torch.Tensor]
AUX, HIGH = (2, 4, 5), (3, 5, 6)
LENGTHS = [30, 25, 20, 18, 40, 33, 28, 22, 35, 27]
STEPS = 3


@dataclass
class Case:
    """Two donors that know ten documents: of the aux layers, and of those one higher; and how they are measured."""

    donors: dict[tuple[int, ...], Checkpoint]
    states: dict[tuple[int, ...], HiddenStates]
    shards: dict[tuple[int, ...], Shard]
    ends: Ends

    def measured(self, trained: tuple[int, ...], extracted: tuple[int, ...], **changes: Any) -> dict[str, Any]:
        given = {"shard": self.shards[extracted], "aux_layers": extracted, "depth": LAYERS, "steps": STEPS, **changes}
        return layer_shifts(self.donors[trained], self.ends, **given)


@pytest.fixture(scope="module")
def case(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case({}, {}, {}, Ends(target.embed, target.head, target.head[0]))
    corpus = corpus_of(LENGTHS)
    params = PARAMS.model_copy(update={"diagnostic_positions": 1000})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_STORE", str(tmp_path_factory.mktemp("store")))
        for layers in (AUX, HIGH):
            fed = replace(target, aux_layers=layers)
            manifest = extracted(fed, {"train": corpus, "heldout": corpus}, params)
            states = {split: HiddenStates(manifest, split, corpus) for split in ("train", "heldout")}
            donor = some_checkpoint(1, slots=60, scale=1.0)
            changes = {"epochs": 60, "lr": 5e-3, "ttt_steps": STEPS}
            fit(donor, made.ends, states["train"], states["heldout"], FIT.model_copy(update=changes))
            made.donors[layers], made.states[layers] = donor, states["heldout"]
            made.shards[layers] = read_diagnostic(manifest, corpus)
        yield made


@pytest.mark.parametrize(
    ("trained", "extracted", "best"), [(AUX, AUX, 0), (HIGH, HIGH, 0), (HIGH, AUX, 1), (AUX, HIGH, -1)]
)
def test_the_layers_of_training_are_found(
    trained: tuple[int, ...], extracted: tuple[int, ...], best: int, case: Case
) -> None:
    found = case.measured(trained, extracted)
    assert found["best"] == best
    assert (found["documents"], list(found["shifts"])) == (len(LENGTHS), ["-1", "0", "1"])
    for shift, row in found["shifts"].items():
        assert row["layers"] == [layer + int(shift) for layer in extracted]
        if shift == "0":
            continue
        for name in ("loss", "accuracy", "joint"):
            difference, half = row[f"{name}_difference"], row[f"{name}_difference_interval"]
            assert difference == pytest.approx(row[name] - found["shifts"]["0"][name], abs=3e-6)
            if int(shift) == best:
                assert abs(difference) > half, name
                assert (difference < 0) == (name == "loss")
    assert (f"target.aux_layers: {list(trained)}" in found["verdict"]) == bool(best)
    json.dumps(found, allow_nan=False)


def test_the_figures_are_those_of_the_one_measure(case: Case) -> None:
    """Shift 0 on all documents is what `evaluate` says of them; the drafter is left as it was."""
    donor = case.donors[AUX]
    before = {name: each.clone() for name, each in donor.drafter.state_dict().items()}
    row = case.measured(AUX, AUX)["shifts"]["0"]
    assert all(torch.equal(each, before[name]) for name, each in donor.drafter.state_dict().items())
    rounded = some_checkpoint(1, slots=60)
    rounded.drafter.load_state_dict({name: each.bfloat16() for name, each in before.items()})
    module = TTTModule(rounded.drafter, donor.mapping, case.ends.embed.float(), case.ends.head, STEPS)
    params = FIT.model_copy(update={"ttt_steps": STEPS})
    heldout = evaluate(module, PackedRows(case.states[AUX], params.row_tokens), params)
    assert (row["loss"], row["accuracy"]) == pytest.approx((heldout.loss[0], heldout.accuracy[0]), abs=2e-3)
    assert heldout.joint[-1] * STEPS <= row["joint"] + 1e-6  # type: ignore[operator]


def test_a_shift_whose_layers_were_not_kept_is_left_out_and_said(case: Case) -> None:
    shard = {name: each for name, each in case.shards[AUX].items() if name != "layer_1"}
    found = case.measured(AUX, AUX, shard=shard)
    assert list(found["shifts"]) == ["0", "1"]
    assert found["left_out"] == {"-1": "no layer_1 in the shard"}
    assert found["best"] == 0
    lowest = case.measured(AUX, AUX, aux_layers=(0, 4, 5), shard={**shard, "layer_0": shard["layer_2"]})
    assert "no layer_-1" in lowest["left_out"]["-1"]
    for lacking in ({}, {name: each for name, each in shard.items() if name != "final"}):
        nothing = case.measured(AUX, AUX, shard=lacking)
        assert (nothing["shifts"], nothing["best"], nothing["positions"]) == ({}, None, 0)
        assert "could be measured" in nothing["verdict"]


def test_what_leaves_the_last_layer_is_the_input_of_one_that_would_follow(case: Case) -> None:
    shard = {name: each for name, each in case.shards[AUX].items() if name not in ("layer_6", "unnormed")}
    found = case.measured(HIGH, AUX, shard={**shard, "unnormed": case.shards[AUX]["layer_6"]}, depth=6)
    assert found["shifts"] == case.measured(HIGH, AUX)["shifts"]
    assert found["best"] == 1
    assert "no layer's input" in found["verdict"]
    assert "target.aux_layers" not in found["verdict"]


def test_the_largest_logits_stand_for_the_law_where_an_engine_has_no_final_state(case: Case) -> None:
    shard = dict(case.shards[AUX])
    logits = shard.pop("final").float() @ case.ends.head.float().T
    top = logits.topk(64)
    found = case.measured(HIGH, AUX, shard={**shard, "top_ids": top.indices.int(), "top_logits": top.values})
    whole = case.measured(HIGH, AUX)
    assert found["best"] == whole["best"] == 1
    for shift, row in whole["shifts"].items():
        assert found["shifts"][shift]["joint"] == row["joint"]
        assert found["shifts"][shift]["loss"] == pytest.approx(row["loss"], rel=0.1)


def part(shard: Shard, documents: int) -> Shard:
    """The first documents of a shard."""
    offsets = shard["offsets"][: documents + 1]
    return {**{name: each[: offsets[-1]] for name, each in shard.items()}, "offsets": offsets}


def test_too_few_documents_tell_nothing(case: Case) -> None:
    one = case.measured(HIGH, AUX, shard=part(case.shards[AUX], 1))
    assert one["best"] is None
    assert "1 documents are too few" in one["verdict"]
    for row in one["shifts"].values():
        assert row["loss_interval"] is row["joint_interval"] is None
        assert row["loss"] is not None
    assert one["shifts"]["1"]["joint_difference_interval"] is None
    few = case.measured(HIGH, AUX, shard=part(case.shards[AUX], 4))
    assert few["best"] is None
    assert few["shifts"]["1"]["joint_difference_interval"] is not None


def row(loss: float | None, joint: float | None, half: float | None = 0.1, accuracy: float = 0.0) -> dict[str, Any]:
    told = {"loss": loss, "accuracy": accuracy, "joint": joint}
    return {
        key: value
        for name, each in told.items()
        for key, value in {name: 1.0, f"{name}_difference": each, f"{name}_difference_interval": half}.items()
    }


@pytest.mark.parametrize(
    ("low", "high", "best"),
    [
        (row(1.0, -1.0), row(1.0, -1.0), 0),
        (row(1.0, 0.0), row(0.0, -1.0), 0),
        (row(1.0, -1.0), row(-1.0, 1.0), 1),
        (row(-1.0, 0.0), row(1.0, -1.0), -1),  # a weak donor's loss alone tells
        (row(1.0, -1.0), row(-1.0, -1.0), None),  # measures that contradict each other
        (row(1.0, -1.0), row(0.05, -0.05), None),
        (row(1.0, -1.0), row(-1.0, 1.0, None), None),
        (row(None, None, None), row(None, None, None), None),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_0(
    low: dict[str, Any], high: dict[str, Any], best: int | None
) -> None:
    assert shifts._best({"-1": low, "0": {}, "1": high}) == best
