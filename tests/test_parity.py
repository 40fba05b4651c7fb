"""Parity and diagnosis: faults planted in an engine are told apart by what it accepts (cases C16, C20)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from redraft.acceptance import Steps
from redraft.corpus.build import tokenize_file
from redraft.corpus.corpus import read_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.drafter.checkpoint import Checkpoint, read_checkpoint
from redraft.engines.engine import Generation
from redraft.engines.open import Models
from redraft.engines.torch import TorchEngine
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams
from redraft.probe.parity import (
    LEAST_GAP,
    agreeing,
    counts,
    gap,
    hold_against_models,
    hold_against_training,
    pooled,
    require_parity,
)
from redraft.probe.probe import Comparison
from redraft.probe.replay import Replay, _changed, _PostNorm
from redraft.regenerate.local import regenerate
from redraft.target.model import Target, load_target
from redraft.vocab.mapping import Mapping

STEPS, TOKENS, STOP = 3, 40, frozenset([2])


@pytest.fixture(scope="session")
def models(project: Path) -> Models:
    target = load_target(project / "artifacts/target", dtype="fp32", device="cpu")
    return Models(target, read_checkpoint(project / "artifacts/drafter"), STOP)


@pytest.fixture(scope="session")
def prompts(project: Path) -> list[list[int]]:
    heldout = read_corpus(project / "artifacts/corpus/heldout.safetensors")
    return [heldout.prompt(index) for index in range(len(heldout))]


def served(target: Target, draft: Checkpoint, prompts: list[list[int]]) -> Comparison:
    engine = TorchEngine(target, draft, STEPS, STOP)
    answers = [engine.generate(prompt, TOKENS) for prompt in prompts]
    return Comparison(answers=[(prompt, given, given) for prompt, given in zip(prompts, answers, strict=True)])


def other_mapping(mapping: Mapping) -> Mapping:
    """As ascending and as large, with a twentieth of the ids exchanged."""
    generator = np.random.default_rng(0)
    rest = np.setdiff1d(np.arange(mapping.vocab_size), mapping.ids)
    gone = generator.choice(len(mapping), len(mapping) // 20, replace=False)
    return Mapping(
        np.sort([*np.delete(mapping.ids, gone), *generator.choice(rest, len(gone), replace=False)]), mapping.vocab_size
    )


def test_a_good_drafter_is_served_as_the_walk_says(models: Models, prompts: list[list[int]]) -> None:
    outputs = served(models.target, models.draft, prompts)
    found = hold_against_models(outputs, STEPS, models, other_mapping(models.draft.mapping), here=True)
    assert found is not None
    assert found["difference"] == found["interval"] == 0.0
    whole = counts([row[2] for row in outputs.answers], STEPS, every=False)
    assert found["walked"] == pytest.approx(pooled(whole).length, abs=1e-4)
    again = hold_against_models(outputs, STEPS, models, models.draft.mapping, here=False)
    assert again is not None
    assert again["difference"] == 0.0


def test_a_corpus_of_ids_is_walked_as_it_is_served(models: Models, project: Path, tmp_path: Path) -> None:
    """Answers that were never text: what is trained on is what the engine gives, and accepted drafts agree exactly."""
    tokenizer = load_tokenizer(project / "artifacts/target")
    asked = [json.loads(line) for line in (ROOT / "data/tiny/heldout.jsonl").read_text().splitlines()]
    for row in asked:
        row["messages"] += [{"role": "user", "content": "Where would I find a pump?"}]
    made = regenerate(models.target, tokenizer, asked, stop=STOP, max_new_tokens=TOKENS, batch=1)
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    corpus, told = tokenize_file(tmp_path / "heldout.jsonl", tokenizer, CorpusParams(max_length=500, max_dropped=0.0))
    turns = []
    for index in range(len(corpus)):
        ids, mask = (each.tolist() for each in corpus.document(index))
        starts = [at for at in range(1, len(mask)) if mask[at] > mask[at - 1]]
        ends = [at for at in range(1, len(mask) + 1) if mask[at - 1] > (mask[at] if at < len(mask) else 0)]
        turns += [(ids[:start], ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert len(turns) == told["turns"] > len(asked)
    outputs = served(models.target, models.draft, [prompt for prompt, _ in turns])
    assert [row[1].ids for row in outputs.answers] == [answer for _, answer in turns]
    replay = Replay(models.target, models.draft, STEPS, [([*prompt, *ids], len(prompt)) for prompt, ids in turns])
    assert replay.counts().tolist() == counts([row[2] for row in outputs.answers], STEPS, every=False).tolist()


def planted(models: Models, fault: str) -> tuple[Target, Checkpoint]:
    """What a server with `fault` computes."""
    target, draft = models.target, models.draft
    ids = draft.mapping.ids
    if fault == "late":
        return replace(target, aux_layers=tuple(layer + 1 for layer in target.aux_layers)), draft
    if fault == "one":
        return replace(target, aux_layers=(*target.aux_layers[:2], target.aux_layers[2] + 1)), draft
    if fault == "norm":
        return target, replace(draft, drafter=_changed(draft.drafter, _PostNorm))
    if fault == "theta":
        return target, replace(draft, drafter=_changed(draft.drafter, rope_theta=1e6))
    if fault == "random":
        generator = torch.Generator().manual_seed(5)
        drafter = _changed(draft.drafter)
        drafter.lm_head.weight = torch.nn.Parameter(torch.randn(drafter.lm_head.weight.shape, generator=generator))
        return target, replace(draft, drafter=drafter)
    mapping: Any = {
        "donor": other_mapping(draft.mapping).ids,
        "absolute": (ids + np.arange(len(ids))).clip(max=draft.mapping.vocab_size - 1),
        "zeros": np.arange(len(ids)),
    }
    named = replace(draft, mapping=draft.mapping)
    engine_ids = mapping[fault]
    named.mapping = type(
        "Any", (), {"ids": engine_ids, "vocab_size": draft.mapping.vocab_size}
    )()  # not a valid mapping
    return target, named


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("late", "the aux layers are captured one too late"),
        ("one", "aux layer 5 is captured as 6"),
        ("norm", "norm_output"),
        ("donor", "another drafter's"),
        ("absolute", "d2t holds ids"),
        ("zeros", "slots are taken for ids"),
        ("random", "lm_head is missing"),
    ],
)
def test_a_planted_fault_is_named(fault: str, named: str, models: Models, prompts: list[list[int]]) -> None:
    target, draft = planted(models, fault)
    outputs = served(target, draft, prompts)
    with pytest.raises(RedraftError, match="not served as it is computed here") as caught:
        hold_against_models(outputs, STEPS, models, other_mapping(models.draft.mapping), here=True)
    cause = next(line for line in str(caught.value).splitlines() if "likely cause" in line)
    assert named in cause


def test_a_lost_rope_theta_is_named(models: Models, prompts: list[list[int]]) -> None:
    """The tiny drafter was trained with 10000, which is what SGLang takes; so here another one is the right one."""
    draft = replace(models.draft, drafter=_changed(models.draft.drafter, rope_theta=50.0))
    outputs = served(models.target, models.draft, prompts)
    with pytest.raises(RedraftError, match=r"likely cause: .*rope_theta is lost: 10000, not 50"):
        hold_against_models(outputs, STEPS, replace(models, draft=draft), draft.mapping, here=True)


def test_a_fault_that_is_not_known_is_told_as_such(models: Models, prompts: list[list[int]]) -> None:
    outputs = served(models.target, models.draft, prompts)
    replay = Replay(models.target, models.draft, STEPS, [([*p, *given.ids], len(p)) for p, given, _ in outputs.answers])
    always = np.zeros((len(prompts), STEPS + 1), dtype=np.int64)
    always[:, STEPS] = 7
    with pytest.raises(RedraftError, match="none of the faults below"):
        require_parity(always, replay.counts(), "walked", replay, None, exact=True)


def test_training_s_own_prediction_is_held_against_the_served_figure() -> None:
    answers = [Generation([1] * 30, 1.0, 0.1, "length", Steps.in_turn([1, 0, 2, 0] * 5, 3))] * 8
    outputs = Comparison(answers=[([1], answer, answer) for answer in answers])
    record: dict[str, Any] = {"training": {"ttt_steps": 3}, "heldout": {"accept_length": 1.76, "verify_steps": 300}}
    found = hold_against_training(outputs, 3, record)
    assert found is not None
    assert found["difference"] == pytest.approx(-0.01)
    with pytest.raises(RedraftError, match="not served as training predicted"):
        hold_against_training(outputs, 3, {**record, "heldout": {"accept_length": 2.4, "verify_steps": 300}})
    assert hold_against_training(outputs, 2, record) is None  # walked with another number of drafts
    assert hold_against_training(outputs, 3, {}) is None


histograms = hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.just(4)), elements=st.integers(0, 40)).filter(np.any)


@given(histograms)
def test_a_measurement_agrees_with_itself(found: np.ndarray) -> None:
    same = gap(found, found)
    assert (same.difference, same.half, same.real) == (0.0, 0.0, False)
    assert agreeing(found, found).all()


@given(histograms, histograms)
@settings(max_examples=50)
def test_a_gap_has_one_size_and_two_signs(one: np.ndarray, other: np.ndarray) -> None:
    if one.shape != other.shape:
        return
    there, back = gap(one, other), gap(other, one)
    assert there.difference == pytest.approx(-back.difference)
    assert there.half == pytest.approx(back.half)
    assert there.difference == pytest.approx(pooled(one).length - pooled(other).length)


def test_the_interval_of_a_gap_holds_what_it_promises() -> None:
    """Two measurements of one drafter on the same 60 prompts differ by chance alone, in 1 of 370 cases too much."""
    generator = np.random.default_rng(1)
    wrong = apart = 0
    for _ in range(400):
        skill = generator.beta(4, 4, size=60)
        pair = []
        for _ in range(2):
            rows = [np.bincount((generator.random((30, 3)) < each).cumprod(1).sum(1), minlength=4) for each in skill]
            pair.append(np.array(rows))
        wrong += gap(*pair).real
        worse = np.array(
            [np.bincount((generator.random((30, 3)) < 0.8 * each).cumprod(1).sum(1), minlength=4) for each in skill]
        )
        apart += gap(pair[0], worse).real
    assert wrong <= 6
    assert apart >= 395


def test_less_than_rounding_is_no_gap() -> None:
    one = np.array([[1000, 0, 0, 1000]])
    assert not gap(one, np.array([[1005, 0, 0, 995]])).real
    assert gap(one, np.array([[1000, 0, 0, 1100]])).difference < -LEAST_GAP
