"""The training loop: it learns, counts its steps, and says when the launch is not what was asked (cases C12, C14)."""

import pytest
import torch
from conftest import some_checkpoint

from redraft.drafter.fill import FILLS
from redraft.errors import RedraftError
from redraft.hidden.store import HiddenStates
from redraft.params import FitParams, LossParams
from redraft.target.model import Ends
from redraft.train.loop import fit, lr_factor
from redraft.train.measure import _half_width, best_fill, first_steps

FIT = FitParams(
    lr=2e-3,
    epochs=30,
    seed=0,
    ttt_steps=3,
    step_weight=0.8,
    batch_tokens=64,
    row_tokens=64,
    warmup=0.1,
    clip=0.5,
    precision="fp32",
    micro_tokens=64,
    loss=LossParams(mask="served", oov="drop", denominator="trained", l2=0.0, freeze=()),
    evals=1,
    patience=1,
    save_steps=1000,
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_learns_and_is_the_same_twice(states: dict[str, HiddenStates], ends: Ends, precision: str) -> None:
    params = FIT.model_copy(update={"precision": precision})
    weights = []
    for _ in range(2):
        checkpoint = some_checkpoint(1, scale=1.0)
        fitted = fit(checkpoint, ends, states["train"], states["heldout"], params)
        weights.append(checkpoint.drafter.state_dict())
        assert fitted.heldout["loss_0"] < fitted.start["loss_0"] - 0.5
        assert fitted.curve[-1]["step"] == fitted.steps
        assert fitted.tokens == 30 * states["train"].tokens
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_before_and_after_are_measured_in_the_same_precision(states: dict[str, HiddenStates], ends: Ends) -> None:
    params = FIT.model_copy(update={"precision": "bf16", "lr": 1e-30, "epochs": 1})
    fitted = fit(some_checkpoint(1), ends, states["train"], states["heldout"], params)
    assert fitted.start == fitted.heldout


def test_a_fraction_of_a_pass_stops_within_it(states: dict[str, HiddenStates], ends: Ends) -> None:
    rows = 3
    fitted = fit(
        some_checkpoint(1), ends, states["train"], states["heldout"], FIT.model_copy(update={"epochs": 1 / rows})
    )
    assert fitted.steps == 1
    assert fitted.tokens <= 64


def test_the_learning_rate_rises_and_falls_in_optimizer_steps() -> None:
    rates = [lr_factor(step, 100, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates.index(max(rates)) in (9, 10)
    assert max(rates) == 1
    assert rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_another_world_size_than_asked_stops(states: dict[str, HiddenStates], ends: Ends) -> None:
    with pytest.raises(RedraftError, match=r"train\.processes"):
        fit(some_checkpoint(), ends, states["train"], states["heldout"], FIT, processes=2)


def test_the_first_step_table_has_every_option(states: dict[str, HiddenStates], ends: Ends) -> None:
    donor = some_checkpoint(1)
    table = first_steps(donor, some_checkpoint(3).mapping, ends, states["heldout"], FIT)
    assert table.keys() == {"naive", "keep_donor_vocab", "scratch", *(f"remap_{fill}" for fill in FILLS)}
    losses = {fill: table[f"remap_{fill}"]["loss"] for fill in FILLS}
    assert losses[best_fill(table)] == min(losses.values())
    assert all(row["loss_interval"] > 0 for row in table.values())
    assert table["remap_zero"]["positions"] == table["naive"]["positions"] > 0
    same = first_steps(donor, donor.mapping, ends, states["heldout"], FIT)
    for option in ("naive", "remap_zero", "remap_target"):
        assert same[option] == same["keep_donor_vocab"]


def test_intervals_cover_the_mean_of_the_whole_95_times_in_100() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        counts = torch.randint(5, 40, (60,), generator=generator).double()
        level = 3 + torch.randn(60, generator=generator, dtype=torch.float64)  # what the positions of a row share
        sums = counts * level + counts.sqrt() * torch.randn(60, generator=generator, dtype=torch.float64)
        covered += abs(float(sums.sum() / counts.sum()) - 3) <= _half_width(torch.stack([sums, counts]))
    assert 0.90 <= covered / 400 <= 0.98
