"""The training loop: it learns, counts its steps, and says when the launch is not what was asked (cases C12, C14)."""

import contextlib
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import extracted, some_checkpoint
from test_hidden import PARAMS, corpus_from

from redraft.frame.device import resolve
from redraft.frame.errors import RedraftError
from redraft.frame.profile import FitParams, LossParams
from redraft.hidden.rows import Batch, HiddenStates, PackedRows
from redraft.remap.fills import FILLS
from redraft.remap.first_step import best_fill, first_steps
from redraft.remap.remap import initial
from redraft.target.ends import Ends
from redraft.target.model import Target
from redraft.train.batches import Batches
from redraft.train.loop import fit, lr_factor
from redraft.train.measure import Heldout, _half_width, as_written, evaluate
from redraft.train.state import Progress, State, check_whole, load
from redraft.train.step import TTTModule
from redraft.train.update import Update

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


def heldout(loss: float | None, accuracy: float | None) -> Heldout:
    """What `evaluate` would find in one draft step."""
    ceiling = 0.0 if loss is None else 0.9
    return Heldout(100, [loss], [accuracy], [ceiling], [accuracy], 0.1, 0.1, 1.5, 60)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_learns_and_is_the_same_twice(states: dict[str, HiddenStates], ends: Ends, precision: str) -> None:
    params = FIT.model_copy(update={"precision": precision})
    weights = []
    for _ in range(2):
        checkpoint = some_checkpoint(1, scale=1.0)
        fitted = fit(checkpoint, ends, states["train"], states["heldout"], params)
        weights.append(checkpoint.drafter.state_dict())
        before, after = fitted.start.loss[0], fitted.heldout.loss[0]
        assert before is not None
        assert after is not None
        assert after < before - 0.5
        assert fitted.curve[-1]["step"] == fitted.steps
        assert fitted.tokens == 30 * states["train"].tokens
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_before_and_after_are_measured_in_the_same_precision(states: dict[str, HiddenStates], ends: Ends) -> None:
    params = FIT.model_copy(update={"precision": "bf16", "epochs": 1})
    checkpoint = some_checkpoint(1)
    fresh = TTTModule(some_checkpoint(1).drafter, checkpoint.mapping, ends.embed.float(), ends.head, params.ttt_steps)
    rows = PackedRows(states["heldout"], params.row_tokens)
    fitted = fit(checkpoint, ends, states["train"], states["heldout"], params)
    assert fitted.start == evaluate(fresh, rows, params)
    rounded = TTTModule(fresh.drafter, checkpoint.mapping, ends.embed.float(), ends.head, params.ttt_steps, "bf16")
    assert not torch.equal(rounded(rows[0]).losses, rounded(rows[0], exact=True).losses)


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


def test_one_unroll_under_every_head_is_each_head_by_itself(states: dict[str, HiddenStates], ends: Ends) -> None:
    donor, mapping = some_checkpoint(1), some_checkpoint(3).mapping
    rows = PackedRows(states["heldout"], FIT.row_tokens)
    table = first_steps(donor, mapping, ends, states["heldout"], FIT)
    for name, row in table.items():
        init, fill = ("remap", name.removeprefix("remap_")) if name.startswith("remap") else (name, "zero")
        start = initial(init, fill, donor, mapping, ends.head, FIT.seed)
        module = TTTModule(start.drafter, start.mapping, ends.embed.float(), ends.head, FIT.ttt_steps)
        with as_written(module):
            found = evaluate(module, rows, FIT)
        assert (row["loss"], row["accuracy"], row["joint"]) == (found.loss[0], found.accuracy[0], found.joint[-1]), name
        assert (row["loss_interval"], row["ceiling"]) == (found.loss_interval, found.ceiling[0]), name
    chosen = initial("remap", "fitted", donor, mapping, ends.head, FIT.seed)
    fitted = fit(chosen, ends, states["train"], states["heldout"], FIT.model_copy(update={"epochs": 1}))
    assert fitted.start.loss[0] == table["remap_fitted"]["loss"]  # what training starts from


def test_one_row_has_no_interval(states: dict[str, HiddenStates], ends: Ends) -> None:
    """A7 of the user's trial: two held-out chats in one packed row had a loss of 4.219 plus or minus 0."""
    params = FIT.model_copy(update={"row_tokens": 128, "micro_tokens": 128})
    table = first_steps(some_checkpoint(1), some_checkpoint(3).mapping, ends, states["heldout"], params)
    assert all(row["loss_interval"] is row["accuracy_interval"] is None for row in table.values())
    assert all(row["loss"] > 0 for row in table.values())
    assert _half_width(torch.tensor([[3.0, 0.0], [9.0, 0.0]], dtype=torch.float64)) is None  # one row with positions


def test_the_fullest_rows_are_those_with_the_most_positions_asked(
    target: Target, tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D A8: a row of 64 tokens with 4 counted positions was tried before one of 63 with 59."""
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    few, many = [0] * 60 + [1] * 4, [0] * 4 + [1] * 59
    corpus = corpus_from(
        {name: ([3] * len(mask), mask) for name, mask in (("few", few), ("many", many), ("x", [0, 1, 1]))}
    )
    manifest = extracted(target, {"train": corpus, "heldout": corpus}, PARAMS)
    states = HiddenStates(manifest, "train", corpus)
    rows = PackedRows(states, 64)
    dealt = Batches(rows, FIT)
    assert [[rows.samples(number) for number in batch] for batch in dealt.fullest()] == [[["many"]], [["few"]]]
    both = Batches(rows, FIT.model_copy(update={"micro_tokens": 128})).fullest()
    assert [sorted(sample for number in batch for sample in rows.samples(number)) for batch in both] == [
        ["few", "many"]
    ]
    tried: list[list[int]] = []
    try_out = Update.try_out

    def told(self: Update, batch: Batch) -> None:
        tried.append((batch.documents > 0).sum(1).tolist())
        try_out(self, batch)

    monkeypatch.setattr(Update, "try_out", told)
    fit(some_checkpoint(1), ends, states, states, FIT.model_copy(update={"epochs": 0.1}))
    assert tried == [[63], [64]]


def test_intervals_cover_the_mean_of_the_whole_95_times_in_100() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        counts = torch.randint(5, 40, (60,), generator=generator).double()
        level = 3 + torch.randn(60, generator=generator, dtype=torch.float64)  # what the positions of a row share
        sums = counts * level + counts.sqrt() * torch.randn(60, generator=generator, dtype=torch.float64)
        half = _half_width(torch.stack([sums, counts]))
        assert half is not None
        covered += abs(float(sums.sum() / counts.sum()) - 3) <= half
    assert 0.90 <= covered / 400 <= 0.98


def test_the_weights_with_the_best_joint_acceptance_stay(states: dict[str, HiddenStates], ends: Ends) -> None:
    params = FIT.model_copy(update={"evals": 10, "patience": 2, "lr": 5e-2, "epochs": 40})
    checkpoint = some_checkpoint(1, scale=1.0)
    fitted = fit(checkpoint, ends, states["train"], states["heldout"], params)
    scores = {row["step"]: row["joint"] for row in fitted.evaluations}
    assert scores[fitted.kept] == max(scores.values())
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, ends.embed.float(), ends.head, params.ttt_steps)
    again = evaluate(module, PackedRows(states["heldout"], params.row_tokens), params)
    assert again.metrics() == fitted.heldout.metrics()
    later = [step for step in scores if step > fitted.kept]
    assert fitted.steps == max(scores)
    assert len(later) <= 2


def test_frozen_parts_stay_and_a_pull_holds_the_rest(states: dict[str, HiddenStates], ends: Ends) -> None:
    def moved(**loss: object) -> dict[str, float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        checkpoint = some_checkpoint(1, scale=1.0)
        before = {name: weight.detach().clone() for name, weight in checkpoint.drafter.named_parameters()}
        params = FIT.model_copy(update={"loss": FIT.loss.model_copy(update=loss), "epochs": 10})
        fit(checkpoint, ends, states["train"], states["heldout"], params)
        return {
            name: float((weight.detach() - before[name]).norm())
            for name, weight in checkpoint.drafter.named_parameters()
        }

    free, frozen, pulled = moved(), moved(freeze=("lm_head", "midlayer")), moved(l2=100.0)
    for name, distance in free.items():
        assert distance > 0
        assert (frozen[name] == 0) == name.startswith(("lm_head", "midlayer"))
    assert sum(pulled.values()) < 0.7 * sum(free.values())


def test_a_state_is_taken_up_only_by_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path))
    state = State("train", {"params": {"lr": 1.0}, "mapping": "a"})
    assert state.find("auto") == (None, None)
    with pytest.raises(RedraftError, match="no state to resume"):
        state.find("must")
    best, rows = {"w": torch.ones(2)}, [heldout(2.0, 0.1), heldout(1.0, 0.2)]
    for step in (3, 5):
        progress = Progress(step=step, evaluations=rows, best=1)
        state.save(progress, best, lambda folder: None, True, contextlib.nullcontext)
    found, _ = state.find("auto")
    assert found is not None
    assert [path.name for path in state.folder.glob("step-*")] == [found.name] == ["step-000000005"]
    check_whole(found)
    progress, weights = load(found)
    assert (progress.step, progress.evaluations) == (5, rows)
    assert weights is not None
    assert torch.equal(weights["w"], best["w"])
    assert state.find("never") == (None, None)
    with state.alone(), pytest.raises(RedraftError, match="runs this very training"), state.alone():
        pass
    other = State("train", {"params": {"lr": 2.0}, "mapping": "a"})
    with pytest.raises(RedraftError, match=r"differs in params\.lr \(was 1\.0, now 2\.0\)"):
        other.find("must")
    state.discard()
    assert state.find("auto") == (None, None)


def test_auto_precision_is_what_the_machine_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for features, expected in (({}, "fp32"), ({"amx_bf16": True}, "bf16"), ({"avx512_bf16": True}, "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=features: found)
        assert resolve("auto") == expected
    assert (resolve("bf16"), resolve("fp32")) == ("bf16", "fp32")


def test_padding_and_packing_change_no_measurement(states: dict[str, HiddenStates], ends: Ends) -> None:
    checkpoint = some_checkpoint(1, scale=1.0)
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, ends.embed.float(), ends.head, FIT.ttt_steps)
    found = []
    for row, micro in ((32, 32), (64, 256), (256, 256)):
        params = FIT.model_copy(update={"row_tokens": row, "micro_tokens": micro})
        found.append(evaluate(module, PackedRows(states["heldout"], row), params).metrics())
    for other in found[1:]:
        for name in (name for name in found[0] if not name.endswith("interval")):
            assert other[name] == pytest.approx(found[0][name], abs=2e-6), name
