"""The torch engine as an oracle, and the probe's comparison (cases C20, C23)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import SHAPE, llama, save_target, some_checkpoint
from test_step import literal_logits
from transformers import MistralConfig, MistralForCausalLM

from redraft.acceptance import Acceptance, Steps
from redraft.corpus.tokenizer import load_tokenizer, stop_ids
from redraft.drafter.checkpoint import write_checkpoint
from redraft.engines.arm import Arm
from redraft.engines.engine import Generation, Margin
from redraft.engines.open import Models, _in_process
from redraft.engines.torch import TorchEngine
from redraft.frame.errors import RedraftError
from redraft.probe.probe import Comparison, require_acceptance, require_lossless, serve_both
from redraft.target.model import Target, load_target

NEVER = frozenset([-1])
PROMPTS = [[5, 9, 31, 7], [80, 2, 2], [40], list(range(10, 30))]


def greedy_of_transformers(prompt: list[int], tokens: int) -> list[int]:
    model = llama()
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_greedy_output_is_the_targets_own(target: Target, steps: int) -> None:
    engine = TorchEngine(target, some_checkpoint(2) if steps else None, steps, NEVER)
    for prompt in PROMPTS:
        given = engine.generate(prompt, 30)
        assert given.ids == greedy_of_transformers(prompt, 30)
        assert given.finish == "length"
        assert given.steps.verify <= 29
        assert given.steps.order is None if not steps else all(0 <= each <= steps for each in given.steps.order or ())


def test_the_engine_drafts_what_the_formulas_say(target: Target) -> None:
    """Every round's drafts equal those of the literal drafter of test_step, fed with the target's real states."""
    checkpoint = some_checkpoint(2)
    engine = TorchEngine(target, checkpoint, 3, NEVER)
    drafted: list[list[int]] = []
    original = engine._draft
    engine._draft = lambda *inputs: drafted.append(original(*inputs)) or drafted[-1]  # type: ignore[method-assign]
    prompt = PROMPTS[3]
    given = engine.generate(prompt, 24)
    known = [*prompt, *given.ids]
    with torch.no_grad(), target.capture(target.aux_layers) as captured:
        target.decoder(input_ids=torch.tensor([known]), use_cache=False)
    aux = target.aux(captured)[0]
    at = len(prompt) - 1
    ids = checkpoint.mapping.ids
    accepted = given.steps.order or []
    for number, drafts in enumerate(drafted[: len(accepted)]):
        own: list[int] = []
        for k in range(3):
            logits = literal_logits(checkpoint, [*known[: at + 2], *own, 0], aux, target.embed, at, k + 1)[k]
            own.append(int(ids[int(logits.argmax())]))
        assert drafts == own
        right = next((k for k in range(3) if own[k] != known[at + 2 + k]), 3)
        assert accepted[number] == right
        at += right + 1


def test_an_answer_ends_at_the_stop_token_and_the_cut_round_is_left_out(target: Target) -> None:
    plain = TorchEngine(target, None, 0, NEVER).generate(PROMPTS[0], 30).ids
    stop = plain[12]
    end = plain.index(stop)
    for steps in (0, 1, 3):
        engine = TorchEngine(target, some_checkpoint(2) if steps else None, steps, frozenset([stop]))
        given = engine.generate(PROMPTS[0], 30)
        assert given.ids == plain[: end + 1]
        assert given.finish == "stop"
        whole = given.steps.order or []
        assert sum(whole) + len(whole) <= end


@pytest.mark.parametrize(
    ("room", "accepted", "rounds"), [(9, [3, 3], 2), (10, [3, 3], 3), (12, [3, 3], 3), (13, [3] * 3, 3)]
)
def test_a_round_that_the_answers_end_cuts_is_not_counted(
    target: Target, room: int, accepted: list[int], rounds: int
) -> None:
    """A drafter that is always right gives 1 + 4 + 4 + ... tokens; what does not fit whole is left out."""
    prompt = PROMPTS[3]
    plain = TorchEngine(target, None, 0, NEVER).generate(prompt, 40).ids
    for limit, stop in ((room, NEVER), (40, frozenset([plain[room - 1]]))):
        if stop != NEVER and plain.index(plain[room - 1]) != room - 1:
            continue
        engine = TorchEngine(target, some_checkpoint(2), 3, stop)
        engine._draft = lambda _states, _fed, start, _memory: plain[start + len(_fed) - len(prompt) + 1 :][:3]  # type: ignore[method-assign]
        given = engine.generate(prompt, limit)
        assert given.ids == plain[:room]
        assert (given.steps.order, given.steps.verify) == (accepted, rounds)
        assert sum(given.steps.histogram or ()) == rounds
        assert sum(engine.acceptance().histogram) == len(accepted)


def test_margin_is_the_gap_of_two_logits(target: Target) -> None:
    engine = TorchEngine(target, None, 0, NEVER)
    with torch.no_grad():
        logits = llama()(torch.tensor([PROMPTS[3]])).logits[0, -1]
    margin = engine.margin(PROMPTS[3], 3, 8, 4)
    assert margin.gap == pytest.approx(float(logits[3] - logits[8]), abs=1e-4)
    assert 0 <= margin.shape_noise < 1e-3


def test_stop_ids_are_those_of_tokenizer_and_generation_config(tiny_folder: Path) -> None:
    assert stop_ids(tiny_folder, load_tokenizer(tiny_folder)) == {2}


@dataclass
class Scripted:
    """An engine that plays written answers."""

    answers: Sequence[Generation]
    spec_steps: int = 0
    gap: float = 1.0
    asked: int = 0

    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return answer

    def margin(self, prefix: list[int], first: int, second: int, width: int) -> Margin:
        return Margin(self.gap, 0.5)

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def acceptance(self) -> Acceptance:
        counted = Acceptance(self.spec_steps)
        for answer in self.answers:
            counted.add(answer.steps)
        return counted


def compared(plain: Scripted, speculative: Scripted) -> Comparison:
    found = serve_both({0: plain, 2: speculative}, [[0]], 3, "test")  # type: ignore[dict-item]
    assert not plain.running
    assert not speculative.running
    return found


def answer(ids: list[int], seconds: float = 1.0, first: float = 0.1, accepted: Sequence[int] = ()) -> Generation:
    return Generation(ids, seconds, first, "length", Steps.in_turn(accepted, 2))


def test_a_near_tie_is_counted_and_any_other_difference_fails() -> None:
    one, two = Scripted([answer([1, 2, 3])]), Scripted([answer([1, 9, 3])], spec_steps=2)
    found = compared(one, two)
    assert (found.equal, found.ties, found.compared_tokens) == (0, 0, 1)
    assert found.different[0]["tokens"] == [2, 9]
    with pytest.raises(RedraftError, match="answer token 1"):
        require_lossless(found)
    tie = compared(Scripted([answer([1, 2, 3])], gap=5e-4), two)
    assert (tie.ties, tie.different) == (1, [])
    require_lossless(tie)


def test_an_answer_that_ends_early_is_a_difference() -> None:
    found = compared(Scripted([answer([1, 2, 3])]), Scripted([answer([1, 2])], 2))
    assert found.different[0]["position"] == 2


def test_a_drafter_that_accepts_nothing_fails_the_probe() -> None:
    require_acceptance(1.5, 1.05)
    with pytest.raises(RedraftError, match="next to nothing"):
        require_acceptance(1.02, 1.05)


def test_a_sliding_window_keeps_what_a_rejected_draft_pushed_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, sliding_window=8)
    target = load_target(save_target(MistralForCausalLM(config), tmp_path), dtype="fp32", device="cpu")
    plain = TorchEngine(target, None, 0, NEVER)
    for steps in (1, 3):
        engine = TorchEngine(target, some_checkpoint(2), steps, NEVER)
        for prompt in PROMPTS:
            assert engine.generate(prompt, 24).ids == plain.generate(prompt, 24).ids


def test_each_drafter_is_fed_the_layers_it_was_trained_on(target: Target, tmp_path: Path) -> None:
    """A drafter that is compared with may be of other layers than the profile's."""
    write_checkpoint(tmp_path / "other", some_checkpoint(2), (3, 5, 6))
    models = Models(target, some_checkpoint(1), NEVER)
    arms = [Arm(tmp_path / "other", 3), Arm(None, 3)]
    assert [_in_process(models, arm).target.aux_layers for arm in arms] == [(3, 5, 6), (2, 4, 5)]  # type: ignore[attr-defined]
    (tmp_path / "other/redraft.json").unlink()  # nothing tells: the target's
    assert _in_process(models, arms[0]).target.aux_layers == (2, 4, 5)  # type: ignore[attr-defined]
