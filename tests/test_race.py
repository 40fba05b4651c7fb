"""`redraft race`: who goes on, pairs on the same documents, the answer's words; and a race through DVC's own queue."""

import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from clones import copy_of, run_in, shell, started
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from redraft.frame.errors import RedraftError
from redraft.race.compare import Walk, ratio
from redraft.race.contenders import Contender, contenders, parse
from redraft.race.halving import early, go_on
from redraft.race.page import NO_DIFFERENCE, answer, figures, page
from redraft.race.pictures import lengths, speeds
from redraft.race.queue import Task, tasks
from redraft.race.rungs import Result, Rung, _ranked
from redraft.race.speed import Cycles, cycles
from redraft.report.plots import save_svg

CHATS = 60
NOBODY: Cycles = Cycles({}, None, None, "there is no bench here")


def walked(length: float, seed: int = 0, slots: int = 400, chats: int = CHATS, noise: float = 0.3) -> Walk:
    """A walk whose chats are hard or easy alike for every contender of one seed."""
    chance = np.random.default_rng(seed)
    rounds = chance.integers(5, 30, chats).astype(float)
    ease = chance.normal(0, noise, chats)
    return Walk("held out", slots, 3, rounds, rounds * np.clip(length - 1 + ease, 0, 3))


def result(name: str, walk: Walk, cycle: float | None = None, tokens: int = 1000) -> Result:
    told = {"accept_length": walk.length, "accept_length_interval": 0.05, "accuracy_0": 0.4, "ceiling_0": 0.9}
    train = {"tokens": tokens, "steps": 10, "kept_step": 10, "heldout": told, "start": {"accept_length": 1.0}}
    init = name.partition("-")[0]
    return Result(Contender(name, init, (("init", init),)), f"race-x-{name}", (("init", init),), train, walk, cycle)


def rung(share: float, *results: Result) -> Rung:
    made = _ranked(share, list(results), {})
    made.kept = [each.contender.name for each in made.results]
    return made


# who goes on

names = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=8, unique=True)


@given(names, st.sets(st.sampled_from("abcdefgh")), st.booleans())
def test_the_better_half_goes_on_with_the_best_of_both_kinds(ranked: list[str], scratch: set[str], tied: bool) -> None:
    kept = go_on(ranked, scratch, lambda one, other: tied)
    assert kept == [name for name in ranked if name in kept]  # in their order
    assert ranked[0] in kept
    keep = max(2, -(-len(ranked) // 2))
    assert len(kept) == min(len(ranked), keep + tied)
    for kind in (True, False):
        best = [name for name in ranked if (name in scratch) == kind][:1]
        assert set(best) <= set(kept)


def test_a_fresh_drafter_that_is_last_at_first_is_there_in_the_end() -> None:
    assert go_on(["remap", "keep", "scratch"], ["scratch"], lambda one, other: False) == ["remap", "scratch"]
    assert go_on(["remap", "keep", "scratch"], ["scratch"], lambda one, other: True) == ["remap", "keep", "scratch"]


@pytest.mark.parametrize(
    ("first", "last", "right", "told"),
    [
        (["a"], ["a"], True, "would have been right"),
        (["a"], ["b"], False, "would have been wrong: it was `a`"),
        (["a", "b"], ["b"], None, "no difference was seen between `a`, `b`: it would not have named `b`"),
        (["a"], ["a", "b"], True, "would have cost nothing that is seen"),
        (["a", "b"], ["a", "b"], True, "no difference was seen either"),
    ],
)
def test_would_the_first_answer_have_been_right(
    first: list[str], last: list[str], right: bool | None, told: str
) -> None:
    found = early(first, last, "10 %")
    assert found.right is right
    assert told in found.told


# pairs


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(np.float64, 12, elements=st.integers(1, 20).map(float)),
    arrays.arrays(np.float64, 12, elements=st.floats(0, 3)),
    st.floats(0.2, 5),
)
def test_a_contender_against_itself_and_the_other_way_round(
    rounds: np.ndarray[Any, Any], share: np.ndarray[Any, Any], factor: float
) -> None:
    one, other = Walk("h", 4, 3, rounds, rounds * share), Walk("h", 4, 3, rounds, rounds * share[::-1])
    same = ratio(one, one)
    assert (same.value, same.low, same.high, same.tied) == (1, 1, 1, True)
    there, back = ratio(one, other, factor), ratio(other, one, 1 / factor)
    assert there.value == pytest.approx(one.length / other.length * factor)
    assert (back.value, back.low, back.high) == pytest.approx((1 / there.value, 1 / there.high, 1 / there.low))
    assert there.tied == back.tied


def test_the_interval_is_near_the_jackknife_and_pairing_narrows_it() -> None:
    one, other = walked(1.6), walked(1.5)
    lengths = []
    for left in range(CHATS):
        parts = [np.delete(each, left) for each in (one.rounds, one.accepted, other.rounds, other.accepted)]
        lengths.append(np.log((1 + parts[1].sum() / parts[0].sum()) / (1 + parts[3].sum() / parts[2].sum())))
    spread = np.array(lengths) - np.mean(lengths)
    jackknife = 2.001 * np.sqrt((CHATS - 1) / CHATS * (spread**2).sum())
    found = ratio(one, other)
    assert np.log(found.high / found.value) == pytest.approx(jackknife, rel=0.05)
    assert not found.tied
    assert ratio(walked(1.6, seed=1), other).tied  # as far apart, on chats of another hardness


def test_the_interval_holds_what_it_says() -> None:
    """Of 400 pairs of equal contenders about one in twenty is told apart."""
    apart = 0
    for seed in range(400):
        chance = np.random.default_rng(seed)
        rounds = chance.integers(5, 30, CHATS).astype(float)
        draws = [rounds * np.clip(chance.normal(0.6, 0.4, CHATS), 0, 3) for _ in range(2)]
        apart += not ratio(*(Walk("h", 4, 3, rounds, draw) for draw in draws)).tied
    assert 8 <= apart <= 36


def test_a_single_chat_tells_no_difference_and_other_documents_are_refused() -> None:
    found = ratio(walked(2.0, chats=1), walked(1.2, chats=1))
    assert found.tied
    assert np.isnan(found.low)
    with pytest.raises(RedraftError, match="different held-out documents"):
        ratio(walked(2.0), walked(2.0, chats=CHATS - 1))


def test_turns_of_one_chat_are_one_cluster() -> None:
    told = {"heldout": "h", "slots": 4, "spec_steps": 3, "chats": [0, 0, 1], "kept": [[4, 2], [6, 3], [5, 0]]}
    walk = Walk.read(told)
    assert (walk.rounds.tolist(), walk.accepted.tolist()) == ([10, 5], [5, 0])
    assert walk.length == 1 + 5 / 15


# the answer


def test_the_known_case_fine_tuning_ends_behind_training_from_scratch(tmp_path: Path) -> None:
    """38 % against 74.7 %, and at a tenth of the tokens the other way round: nobody compared early."""
    rungs = [
        rung(0.1, result("remap", walked(1.30), tokens=100), result("scratch", walked(1.15), tokens=100)),
        rung(1.0, result("remap", walked(1.38)), result("scratch", walked(1.747))),
    ]
    word, told, said = answer(rungs)
    assert word == "scratch"
    assert told.startswith("**`scratch`**, on 100 % of the tokens: `scratch` has 1.2")
    assert (said.right, "would have been wrong: it was `remap`" in said.told) == (False, True)
    text = page("p", "abc", rungs, NOBODY)
    assert text.splitlines()[2] == f"{told} {said.told}"
    assert "there is no bench here" in text
    assert json.loads(json.dumps(figures("p", "abc", rungs, NOBODY), allow_nan=False))["answer"] == "scratch"
    save_svg(tmp_path / "p.svg", lengths(rungs))
    assert "scratch" in (tmp_path / "p.svg").read_text()


def test_no_difference_is_said_and_by_what() -> None:
    near = [result("remap", walked(1.5, seed=1)), result("keep_donor_vocab", walked(1.49, seed=2))]
    word, told, said = answer([rung(0.1, *near), rung(1.0, *near, result("scratch", walked(1.1)))])
    assert word == NO_DIFFERENCE
    assert "between `remap` and `keep_donor_vocab`" in told or "between `keep_donor_vocab` and `remap`" in told
    assert "times the accept length of `scratch`" in told
    assert said.right is True


def test_a_longer_accept_length_loses_where_its_head_costs_more(tmp_path: Path) -> None:
    table = Cycles({1: 40.0, 3: 50.0}, 400, {"400": 0.5, "4000": 5.0})
    slow, fast = table.at(3, 4000), table.at(3, 400)
    assert (slow, fast) == (pytest.approx(63.5), 50.0)
    rungs = [rung(1.0, result("remap", walked(1.5), fast), result("keep_donor_vocab", walked(1.6), slow))]
    word, told, _ = answer(rungs)
    assert word == "remap"
    assert "predicted tokens/s" in told
    assert "63.50 ms with 3 drafts and 4,000 slots" not in page("p", "x", rungs, NOBODY)  # nobody measured
    rungs[0].results[1].walk.__dict__["slots"] = 4000
    assert "63.50 ms with 3 drafts and 4,000 slots" in page("p", "x", rungs, table)
    save_svg(tmp_path / "p.svg", speeds(rungs))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"machine": {"cores": 3}}, "another machine"),
        ({"target": "other"}, "another target"),
        ({"engine": {"engine": "sglang"}}, "of the engine sglang"),
        ({"slots": None}, "older redraft"),
        ({"levels": {"1": {"word": "invalid", "rows": {}}}}, "no valid chain"),
    ],
)
def test_speeds_are_predicted_only_from_a_bench_of_this_machine(change: dict[str, Any], why: str) -> None:
    from importlib.metadata import version

    chain = {"steps": 2, "topk": 1, "drafter": None, "cycle_ms": 40.0}
    bench = {
        "machine": {"cores": 2},
        "target": "t",
        "engine": {"engine": "torch", "torch": version("torch").split("+")[0]},
        "slots": 400,
        "head_ms": None,
        "levels": {"1": {"word": "ship", "rows": {"2": chain, "plain": {**chain, "steps": 0}}}},
    }
    found = cycles(bench | change, "torch", "t", {"cores": 2})
    assert why in found.why_not
    assert bool(found.why_not) == bool(change)
    assert found.at(2, 400) == (None if change else 40.0)
    assert found.at(2, 500) is None  # what another head costs was not measured
    assert found.at(3, 400) is None  # one chain makes no line


# contenders and the queue's list


def test_every_init_with_what_changes_it() -> None:
    found = contenders(["remap", "scratch"], {"fill": ["zero", "mean"], "slots": ["20"], "lr": ["1e-3", "-1"]}, "p")
    assert len(found) == 4 + 2
    assert found[0].settings == (
        ("init", "remap"),
        ("fill", "zero"),
        ("profiles/p.yaml:vocab.slots", "20"),
        ("lr", "1e-3"),
    )
    assert len({each.name for each in found}) == 6
    with pytest.raises(RedraftError, match="at least two"):
        contenders(["remap"], {}, "p")


@given(st.lists(st.text(st.characters(exclude_characters=",\0\n"), min_size=1), min_size=2, max_size=6, unique=True))
def test_names_are_those_of_git_and_never_the_same(values: Sequence[str]) -> None:
    found = [each.name for each in contenders(["remap"], {"k": values}, "p")]
    assert len(set(found)) == len(values)
    assert all(re.fullmatch(r"[A-Za-z0-9_]+([.-]?[A-Za-z0-9_-]+)*", name) for name in found)


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=1,,2", "=3", "epochs=1,2", "profile=x"])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(RedraftError):
        parse([text])


def test_the_list_of_the_queue() -> None:
    text = (
        "Task     Name         Created    Status\n"
        "a4dd894  race-x-c-10  07:11 AM   Running\n"
        "ba3ad21               07:11 AM   Queued\n"
        "a219ad2  race-x-a-10  Nov 30, 2026  Success\n\nWorker status: 1 active, 0 idle\n"
    )
    assert tasks(text) == [Task("race-x-c-10", "Running"), Task("ba3ad21", "Queued"), Task("race-x-a-10", "Success")]
    assert tasks("No experiment tasks in the queue.\n") == []


# the whole, with DVC


@pytest.mark.slow
def test_a_race_on_tiny_agrees_with_a_separate_run(finished_tiny: Path, tmp_path: Path) -> None:
    clone = copy_of(finished_tiny, tmp_path / "clone")
    command = [
        sys.executable,
        "-m",
        "redraft.cli",
        "race",
        "--init",
        "remap,scratch",
        "--shares",
        "0.3,1",
        "--lr",
        "2e-3",
    ]

    shell("dvc", "exp", "run", "--queue", "--name", "of-the-user", "-S", "seed=3", "train", cwd=clone)
    refused = run_in(clone, *command)
    assert refused.returncode == 1
    assert "of-the-user" in refused.stderr
    shell("dvc", "queue", "remove", "of-the-user", cwd=clone)

    told = _interrupted(clone, command)
    assert shell("git", "status", "--porcelain", cwd=clone) == ""  # no page
    assert " Queued" not in shell("dvc", "queue", "status", cwd=clone)
    assert not [each for each in psutil.process_iter(["cmdline"]) if _runs_in(each, clone)]

    done = shell(*command, cwd=clone)
    assert f"{told}-30: accept length" in done
    assert "was there already" in done
    assert "race/tiny.md" in done
    numbers = json.loads((clone / "race/tiny.json").read_text())
    rows = {row["experiment"]: row for each in numbers["rungs"] for row in each["results"]}
    assert len(rows) == 4
    for rung_ in numbers["rungs"]:
        assert len({row["tokens"] for row in rung_["results"]}) == 1
    assert (clone / "race/tiny.svg").is_file()
    assert numbers["sentence"] in (clone / "race/tiny.md").read_text()

    (line,) = re.findall(r"^dvc exp run .*again-scratch-lr-2e-3-100 .*$", (clone / "race/tiny.md").read_text(), re.M)
    apart = [part for part in line.split() if part != "--temp"]
    shell(*apart, "--force", cwd=clone)  # not from the run cache
    heldout = json.loads((clone / "metrics/train.json").read_text())["heldout"]
    (row,) = [row for name, row in rows.items() if name.endswith("scratch-lr-2e-3-100")]
    assert (row["accept_length"], row["verify_steps"]) == (heldout["accept_length"], heldout["verify_steps"])


def _interrupted(clone: Path, command: Sequence[str]) -> str:
    """Start a race and stop it once a contender has finished; that one's name without its budget."""
    process = started(clone, *command)
    assert process.stdout
    for line in process.stdout:
        if found := re.match(r"(race-\S+)-30: accept length", line):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    return found[1]


def _runs_in(process: psutil.Process, clone: Path) -> bool:
    try:
        return "stages/train.py" in process.info["cmdline"] and Path(process.cwd()).is_relative_to(clone)
    except (psutil.Error, TypeError):
        return False
