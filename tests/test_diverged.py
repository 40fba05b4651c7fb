"""NaN of any kind becomes an error that says where and what to do, never a state, a finished run or a figure (C48)."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB, some_checkpoint
from test_train import FIT

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.curves import read_curve, write_curve
from redraft.frame.errors import RedraftError
from redraft.hidden.rows import HiddenStates
from redraft.remap.first_step import best_fill, first_steps
from redraft.target.ends import Ends
from redraft.train.loop import fit
from redraft.train.update import Update
from redraft.vocab.mapping import Mapping

States = dict[str, HiddenStates]
Row = dict[str, float]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "store" / "train").glob("*/*/step-*"))


def break_after(step: int, patch: pytest.MonkeyPatch, value: float, part: str = "lm_head.weight") -> None:
    """One weight of `part` becomes `value` with optimizer step `step`, whatever the gradients said."""
    done, apply = [0], Update.apply

    def broken(self: Update, rate: float) -> None:
        apply(self, rate)
        done[0] += 1
        if done[0] == step:
            with torch.no_grad():
                self.module.drafter.get_parameter(part).view(-1)[0] = value  # type: ignore[union-attr,operator]

    patch.setattr(Update, "apply", broken)


def test_one_step_too_long_is_no_finished_training(states: States, ends: Ends, tmp_path: Path) -> None:
    """lr 1e30, one step: the loss was finite, the weights it left are not worth a figure."""
    params = FIT.model_copy(update={"lr": 1e30, "epochs": 1 / 3, "warmup": 0.0})
    told: list[tuple[str, Row]] = []
    checkpoint = some_checkpoint(1, scale=1.0)
    before = {name: weight.clone() for name, weight in checkpoint.drafter.state_dict().items()}
    with pytest.raises(RedraftError, match=r"diverged[\s\S]*step 1 of 1[\s\S]*lr 1e\+30[\s\S]*a smaller lr") as raised:
        fit(checkpoint, ends, states["train"], states["heldout"], params, log=lambda *row: told.append(row))
    assert any(f" s{number}" in str(raised.value) for number in range(6))  # names the samples of the step
    assert all(math.isfinite(value) for _, row in told for value in row.values())
    assert not saved(tmp_path)
    assert all(torch.equal(before[name], weight) for name, weight in checkpoint.drafter.state_dict().items())


def test_nan_between_two_rows_of_the_curve_is_seen_at_its_step(
    states: States, ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing looked at the loss between rows; a state that was due first ended in a traceback of the JSON writer."""
    break_after(12, monkeypatch, float("nan"), "fc.weight")
    params = FIT.model_copy(update={"epochs": 200, "save_steps": 10})  # a row every 10 steps
    told: list[tuple[str, Row]] = []
    with pytest.raises(RedraftError, match=r"step 13 of 600[\s\S]*gradient norm nan"):
        fit(
            some_checkpoint(1, scale=1.0), ends, states["train"], states["heldout"], params,
            log=lambda *row: told.append(row),
        )  # fmt: skip
    assert saved(tmp_path) == ["step-000000010"]
    assert [row["step"] for curve, row in told if curve == "train"] == [10]


@pytest.mark.parametrize(
    ("value", "part"),
    [(math.nan, "lm_head.weight"), (math.inf, "midlayer.mlp.up_proj.weight"), (1e38, "lm_head.weight")],
)
def test_weights_broken_by_the_very_step_that_is_saved_replace_nothing(
    states: States, ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, part: str
) -> None:
    """The window's loss was finite, so the state of step 3 took the place of the last good one, for ever."""
    break_after(3, monkeypatch, value, part)
    params = FIT.model_copy(update={"save_steps": 1})
    with pytest.raises(RedraftError, match=r"diverged[\s\S]*step 3 of"):
        fit(some_checkpoint(1, scale=1.0), ends, states["train"], states["heldout"], params)
    assert saved(tmp_path) == ["step-000000002"]


def test_numbers_that_are_none_before_the_first_step_stop_it(states: States, ends: Ends) -> None:
    checkpoint = some_checkpoint(1)
    with torch.no_grad():
        checkpoint.drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(RedraftError, match="before the first step"):
        fit(checkpoint, ends, states["train"], states["heldout"], FIT)
    with pytest.raises(RedraftError, match="first_step: naive"):
        first_steps(checkpoint, checkpoint.mapping, ends, states["heldout"], FIT)


def test_no_position_with_a_slot_is_no_loss_of_zero(states: States, ends: Ends, tmp_path: Path) -> None:
    """Loss 0.0 and ceiling 0.0 went through a whole training; now they are null, and the gate is told."""
    read = [states[split].read(index) for split in states for index in range(len(states[split]))]
    likely = set(torch.cat([document["greedy"] for document in read]).tolist())
    ids = np.array(sorted(set(range(VOCAB)) - likely))
    assert len(ids) > 2
    mapping = Mapping(ids, VOCAB)
    checkpoint = Checkpoint(some_checkpoint(1, slots=len(ids), scale=1.0).drafter, mapping)
    fitted = fit(
        checkpoint, ends, states["train"], states["heldout"], FIT.model_copy(update={"epochs": 2, "save_steps": 1})
    )
    figures = fitted.heldout.metrics()
    assert (figures["loss_0"], figures["ceiling_0"], figures["loss_0_interval"]) == (None, 0.0, None)
    assert json.dumps(figures, allow_nan=False)
    assert all("loss" not in row for row in (*fitted.curve, *fitted.evaluations))
    table = first_steps(some_checkpoint(1), mapping, ends, states["heldout"], FIT)
    assert table["remap_zero"]["loss"] is None
    assert table["keep_donor_vocab"]["loss"] > 0
    with pytest.raises(RedraftError, match="ceiling 0"):
        best_fill(table)


def test_nothing_to_train_on_is_told(states: States, ends: Ends) -> None:
    corpus = states["train"].corpus
    states["train"].corpus = replace(corpus, loss_mask=torch.zeros_like(corpus.loss_mask))
    with pytest.raises(RedraftError, match="No position can be trained on"):
        fit(some_checkpoint(1), ends, states["train"], states["heldout"], FIT)


def test_a_curve_holds_numbers_or_nothing(tmp_path: Path) -> None:
    rows: list[Row] = [{"step": 0, "joint": 0.5}, {"step": 9, "loss": 2.5, "joint": 0.25}]
    write_curve(tmp_path / "c.csv", rows)
    assert (tmp_path / "c.csv").read_text() == "step,joint,loss\n0,0.5,\n9,0.25,2.5\n"
    assert read_curve(tmp_path / "c.csv") == rows
    for value in (float("nan"), float("inf")):
        with pytest.raises(RedraftError, match=r"c\.csv: step 9"):
            write_curve(tmp_path / "c.csv", [{"step": 9, "loss": value}])
