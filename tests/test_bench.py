"""The bench against a real server process that plays cache, slow starts, short answers and errors (cases C21, C22)."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_http import gateway, http
from test_sglang import FAKE, params

from redraft.acceptance import Steps
from redraft.bench.figures import arm_figures, cycle_figures, drift, invalid, ratio
from redraft.bench.load import Block, Plan, blocks_of, measure
from redraft.bench.machine import machine, require_same
from redraft.bench.verdict import summary
from redraft.cli import main
from redraft.engines.alike import MAY_DIFFER, SETTINGS, require_alike
from redraft.engines.arm import AGAIN, PLAIN, Arm, chain
from redraft.engines.engine import Generation, serving
from redraft.engines.open import open_arms
from redraft.engines.sglang import SGLangEngine
from redraft.frame.errors import RedraftError
from redraft.frame.params import Config, load_config
from redraft.preflight.facts import Finding
from redraft.probe.probe import serve_both

TOKENS = 20


def arms(folder: Path) -> dict[Arm, SGLangEngine]:
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir()
    drafter.mkdir()
    return {
        chain(steps): SGLangEngine(
            params(), target, drafter if steps else None, steps, frozenset([2]), 64, folder / "logs"
        )
        for steps in (0, 3)
    }


slowest: dict[tuple[int, Arm], float] = {}
"""Of the last bench, by level and arm, s to the first token."""


def bench(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake: str = "", levels: tuple[int, ...] = (1,), cycle: float = 1.0,
    prompts: int = 6, together: bool = False,
) -> dict[str, Any]:  # fmt: skip
    for name, value in {
        "PYTHONPATH": str(FAKE),
        "FAKE": fake,
        "FAKE_TOKEN_SECONDS": "0.004",
        "FAKE_CYCLE": str(cycle),
    }.items():
        monkeypatch.setenv(name, value)
    engines, told = arms(folder), list[str]()
    asked = [[10 * number, number] for number in range(prompts)]
    found = measure(engines, Plan.of(asked, TOKENS, levels), together=together, told=told.append)
    assert "answers of at most 20 tokens" in told[0]
    assert "at the pace of the first answers about" in told[1]
    assert len(told) == 2
    slowest.clear()
    slowest.update(
        {
            (level, arm): max(answer.first_token_seconds for block in blocks for answer in block.answers)
            for level, series in found.items()
            for arm, blocks in series.items()
        }
    )
    return summary(found, TOKENS, {})


def test_the_faster_arm_ships_and_the_slower_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 tokens a cycle: a cycle of 1.2 plain steps ships at 1.67, one of 2.5 gives 0.8, told as plainly."""
    fast = bench(tmp_path, monkeypatch, cycle=1.2)["levels"]["1"]
    assert fast["word"] == "ship"
    assert fast["rows"]["3"]["ratio"] == pytest.approx(1.67, abs=0.25)
    assert fast["drift"] is not None
    (tmp_path / "slow").mkdir()
    slow = bench(tmp_path / "slow", monkeypatch, cycle=2.5)["levels"]["1"]
    assert slow["word"].startswith("no: needs accept length")
    assert slow["rows"]["3"]["ratio"] == pytest.approx(0.8, abs=0.12)
    assert slow["rows"]["3"]["break_even"] == pytest.approx(2.5, abs=0.2)
    assert slow["rows"]["3"]["needed_cycle_ms"] == pytest.approx(2 * slow["rows"]["plain"]["step_ms"], rel=0.1)


def test_arms_that_live_at_once_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench(tmp_path, monkeypatch, cycle=1.2, together=True)["levels"]["1"]
    assert found["word"] == "ship"
    assert found["drift"] is None


def test_the_slow_first_answer_of_every_level_is_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench(tmp_path, monkeypatch, "slow first", levels=(1, 2), prompts=24)
    assert set(slowest) == {(level, name) for level in (1, 2) for name in (PLAIN, chain(3), AGAIN)}
    assert max(slowest.values()) < 1.0
    assert all(level["word"] != "invalid" for level in found["levels"].values())


def test_without_a_warm_up_it_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.bench.load.warm_up", lambda *_: None)
    bench(tmp_path, monkeypatch, "slow first", prompts=6)
    assert min(slowest.values()) > 1.0


def test_a_busy_server_forgets_a_moment_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(tmp_path, monkeypatch, "busy", cycle=1.2)["levels"]["1"]["word"] == "ship"


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("cache", "of the prompt tokens were cached"),
        ("short", "3 tokens an answer where 20 were asked for"),
        ("sometimes 500", "errors (The server refused a request.)"),
        ("restarts", "the server changed or was restarted"),
    ],
)
def test_a_level_that_cannot_be_believed_is_invalid(
    fake: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench(tmp_path, monkeypatch, fake, prompts=12)
    assert found["levels"]["1"]["word"] == "invalid"
    assert "ratio" not in found["levels"]["1"]["rows"]["3"]
    assert reason in found["levels"]["1"]["reason"]
    assert found["verdict"].startswith("invalid: ")


def test_more_clients_answer_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench(tmp_path, monkeypatch, levels=(1, 4), prompts=16)
    assert found["levels"]["4"]["word"] != "invalid"
    rates = {level: told["rows"]["plain"]["tokens_per_second"] for level, told in found["levels"].items()}
    assert rates["4"] > 2 * rates["1"]


def test_chats_that_end_by_themselves_are_valid_and_arms_of_other_lengths_are_not() -> None:
    def run(tokens: int) -> list[Block]:
        return [Block([answer(tokens, 0.1 * tokens, tokens // 2)], 0.1 * tokens)] * 8

    assert invalid({PLAIN: run(30), chain(3): run(30)}, 512) == []
    (reason,) = invalid({PLAIN: run(30), chain(3): run(45)}, 512)
    assert reason == "3 drafted: 45 tokens an answer where the plain arm gives 30"


def test_a_concurrency_needs_prompts_for_all_its_clients() -> None:
    assert [len(block) for block in blocks_of([[1]] * 7, 1)] == [1] * 7
    assert [len(block) for block in blocks_of([[1]] * 128, 4)] == [16] * 8
    assert [len(block) for block in blocks_of([[1]] * 50, 4)] == [6] * 8
    assert [len(block) for block in blocks_of([[1]] * 14, 4)] == [4] * 3
    for prompts, clients in ((2, 1), (11, 4)):
        with pytest.raises(RedraftError, match="too few prompts"):
            blocks_of([[1]] * prompts, clients)


# --- figures


def answer(tokens: int, seconds: float, steps: int = 0, cached: int = 0) -> Generation:
    counted = Steps.in_turn([1] * steps, 3)
    return Generation(list(range(tokens)), seconds, 0.1, "length", counted, prompt_tokens=10, cached_tokens=cached)


rates = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=12)


@given(rates, st.floats(0.3, 3.0))
def test_a_constant_ratio_has_no_spread(seconds: list[float], factor: float) -> None:
    """Blocks of any speed: if every pair has one ratio, so has the interval, since blocks are resampled in pairs."""
    series = {
        PLAIN: [Block([answer(20, each)], each) for each in seconds],
        chain(3): [Block([answer(20, each / factor, 9)], each / factor) for each in seconds],
    }
    found = ratio(series, chain(3))
    assert found["ratio"] == pytest.approx(factor, abs=1e-3)
    assert found["ratio_low"] == pytest.approx(found["ratio_high"], abs=2e-3)


def test_the_interval_holds_the_true_ratio() -> None:
    """Of 200 benches of 12 noisy blocks whose true ratio is 1.25, about 95 % hold it."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        noise = generator.lognormal(0, 0.1, size=(2, 12))
        series = {
            PLAIN: [Block([answer(20, 1.0)], each) for each in noise[0]],
            chain(3): [Block([answer(20, 0.8, 9)], 0.8 * each) for each in noise[1]],
        }
        found = ratio(series, chain(3))
        held += found["ratio_low"] <= 1.25 <= found["ratio_high"]
    assert 170 <= held <= 200


def test_a_machine_that_drifts_widens_the_interval() -> None:
    def run(seconds: float) -> list[Block]:
        return [Block([answer(20, seconds)], seconds) for _ in range(4)]

    series = {PLAIN: run(1.0), chain(3): [Block([answer(20, 0.95, 9)], 0.95)] * 4, AGAIN: run(0.9)}
    found = ratio(series, chain(3))
    assert drift(series) == pytest.approx(0.1111, abs=1e-3)
    assert found["ratio_low"] < 1 < found["ratio_high"]


def test_figures_of_an_arm() -> None:
    blocks = [Block([answer(11, 1.1, 5)], 1.2), Block([answer(21, 2.1, 10), answer(6, 0.6, 2)], 3.0)]
    found = arm_figures(blocks) | cycle_figures(blocks, chain(3))
    assert found["tokens_per_second"] == pytest.approx(38 / 4.2, abs=1e-3)
    assert found["step_ms"] == pytest.approx(1000 * 3.5 / 35)
    assert found["cycle_ms"] == pytest.approx(1000 * 3.5 / 17, abs=1e-2)
    assert found["cycle_fit_ms"] == pytest.approx(np.polyfit([5, 10, 2], [1.0, 2.0, 0.5], 1)[0] * 1000, abs=1e-2)
    assert (found["accept_length"], found["accepted_at"]) == (2.0, [1.0, 0.0, 0.0])
    assert found["finish"] == {"stop": 0, "length": 3}
    assert invalid({PLAIN: blocks}, 20) == []
    assert "cached" in invalid({PLAIN: [Block([answer(20, 1.0, cached=1)], 1.0)]}, 20)[0]


def level(plain: list[Generation], drafted: list[Generation]) -> dict[str, Any]:
    series = {arm: [Block([each], each.seconds or 1.0) for each in answers] * 3 for arm, answers in (
        (PLAIN, plain), (chain(3), drafted))}  # fmt: skip
    found = summary({1: series}, 2, {})
    json.dumps(found, allow_nan=False)
    return found["levels"]["1"]


GOOD = Generation(list(range(20)), 1.1, 0.1, "length", Steps.in_turn([1] * 9, 3), 10)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (Generation([1, 2], 0.5, 0.5, "length", Steps.in_turn([0], 3)), "came at once"),  # one event
        (Generation([1, 2], 0.5, 0.49999, "length", Steps.in_turn([0], 3)), "came at once"),  # all of them at once
        (Generation([1], 0.5, 0.5, "length", Steps()), "no answer has a second token"),
        (Generation([], 0.5, 0.5, "stop", Steps()), "no answer has a second token"),
        (Generation([1, 2], 0.5, 0.1, "stop", Steps()), "no whole verify step"),
        (Generation([1, 2], 0.5, 0.1, "stop", Steps.in_turn([], 3, cut=2)), "no whole verify step"),
        (Generation([1, 2], 0.5, 0.1, "stop", Steps(0, 0)), "no whole verify step"),
    ],
)
def test_what_cannot_be_measured_is_told_and_no_traceback(odd: Generation, reason: str) -> None:
    """Faults of kind 1.18: a time of 0, answers of no token or of one, no verify step after everything ran."""
    found = level([GOOD], [odd])
    assert found["word"] == "invalid"
    assert any(part.startswith("3 drafted: ") and reason in part for part in found["reason"].split("; "))
    assert "ratio" not in found["rows"]["3"]
    if "verify" not in reason:
        assert found["rows"]["3"]["step_ms"] is None
        assert found["rows"]["3"]["token_ms_p95"] is None
        assert level([odd], [GOOD])["word"] == "invalid"


def test_answers_of_one_token_among_others_do_no_harm() -> None:
    short = Generation([1], 0.1, 0.1, "stop", Steps(), 10)
    found = level([GOOD, short], [GOOD, short])
    assert found["word"] != "invalid"
    assert found["rows"]["3"]["step_ms"] == pytest.approx(1000 / 19, abs=1e-3)
    assert found["rows"]["3"]["token_ms"] == pytest.approx(1000 / 19, abs=1e-3)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(1e-6, 2), st.floats(0, 2), st.lists(st.integers(0, 3), max_size=3),
                       st.none() | st.integers(0, 3)), min_size=1, max_size=3),
)  # fmt: skip
def test_no_answers_end_in_a_traceback_or_in_nan(parts: list[Any]) -> None:
    answers = [
        Generation([7] * tokens, first + more, first, "length", Steps.in_turn(order, 3, cut))
        for tokens, first, more, order, cut in parts
    ]
    assert level(answers, answers)["word"]


def test_a_bench_of_answers_of_one_token_is_refused_before_anything_starts(project: Path) -> None:
    with pytest.raises(RedraftError, match=r"bench\.max_new_tokens.*\n.*at least 2"):
        Plan.of([[1]] * 9, 1, [1])
    for name in ("bench", "probe"):
        stage = __import__("runpy").run_path(f"stages/{name}.py")["main"]
        config = configured(project, {}, {"max_new_tokens": 1})
        probe = config.profile.probe.model_copy(update={"max_new_tokens": 1})
        config = config.model_copy(update={"profile": config.profile.model_copy(update={"probe": probe})})
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            with pytest.raises(RedraftError, match=rf"where: {name}\.max_new_tokens"):
                stage(config)


# --- arms


shapes = st.builds(lambda steps: chain(steps), st.integers(1, 9)) | st.builds(
    Arm, st.none() | st.sampled_from([Path("artifacts/donor"), Path("other")]), st.integers(1, 4), st.integers(2, 4),
    st.integers(2, 9),
)  # fmt: skip


def test_an_arm_has_a_key_and_words() -> None:
    donor = Path("artifacts/donor")
    arms = [PLAIN, AGAIN, chain(2), Arm(None, 3, 4, 8), chain(3, donor), Arm(donor, 3, 4, 8)]
    assert [arm.key for arm in arms] == [
        "plain", "plain again", "2", "3x4x8", "artifacts/donor 3", "artifacts/donor 3x4x8",
    ]  # fmt: skip
    assert [arm.label for arm in arms] == [
        "plain", "plain again", "2 drafted", "tree of 8 (3 steps, topk 4)", "artifacts/donor, 3 drafted",
        "artifacts/donor, tree of 8 (3 steps, topk 4)",
    ]  # fmt: skip
    assert chain(0) == PLAIN
    assert chain(2).told() == {"label": "2 drafted", "drafter": None, "steps": 2, "topk": 1, "tokens": 3}


@given(st.lists(shapes, unique=True))
def test_no_two_arms_share_a_key_or_their_words(arms: list[Arm]) -> None:
    every = {PLAIN, AGAIN, *arms}
    assert len({arm.key for arm in every}) == len({arm.label for arm in every}) == len(every)


def test_chains_of_a_profile_with_trees_are_chains(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench.spec_steps` are chains, whatever tree the probe serves; another drafter is served as the probe is."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    donor = str(project / "artifacts/donor")
    found, _ = opened(project, {"topk": 2, "draft_tokens": 6}, {"spec_steps": (1, 3), "compare": (donor,)})
    assert [arm.key for arm in found] == ["plain", "1", "3", f"{donor} 3x2x6"]
    assert [(each.params.topk, each.draft_tokens) for each in list(found.values())[1:]] == [(1, 2), (1, 4), (2, 6)]


# --- whose figures


def report(folder: Path, name: str, **changes: Any) -> str:
    plain, row = (
        {**PLAIN.told(), "tokens_per_second": 40.0},
        {**chain(3).told(), "tokens_per_second": 50.0, "ratio": 1.2},
    )
    made: dict[str, Any] = {
        "levels": {"1": {"rows": {"plain": plain, "3": row}, "word": "ship"}},
        "machine": machine(),
        "engine": {"engine": "torch", "torch": "2.13.0", "dtype": "bfloat16", "spec_steps": 0},
        "asked": {"prompts": 8, "max_new_tokens": 64},
        "prompts": 8,
        "target": "a6142d",
    }
    for key, value in changes.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    (folder / name).write_text(json.dumps(made))
    return str(folder / name)


def test_benches_of_one_machine_and_engine_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (report(tmp_path, name) for name in ("a.json", "b.json"))
    monkeypatch.setattr(sys, "argv", ["redraft", "compare", one, two])
    main()
    out = capsys.readouterr().out
    assert "| 1 | plain | 40.0 | 40.0 | 1.00 |" in out
    assert "| 1 | 3 drafted | 50.0 | 50.0 | 1.00 |" in out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"machine": {"host": "another"}}, r"machine.host.*what to do: run both benches on one machine$"),
        ({"engine": {"engine": "sglang"}}, r"engine.engine torch and sglang.*what to do: run both with one engine and"),
        (
            {"asked": {"prompts": 9}},
            r"asked.prompts 8 and 9\n.*what to do: run both on one target, with the same bench",
        ),
        ({"prompts": 7}, r"prompts 8 and 7\n.*what to do: run both on one target.*as many held-out samples$"),
        ({"target": "b"}, r"target a6142d and b\n.*what to do: run both on one target"),
    ],
)  # what to do: case C16 of the trial
def test_benches_of_two_machines_or_engines_are_never_divided(
    changes: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = report(tmp_path, "a.json"), report(tmp_path, "b.json", **changes)
    monkeypatch.setattr(sys, "argv", ["redraft", "compare", one, two])
    with pytest.raises(SystemExit, match=f"(?s)not divided by each other.*{told}"):
        main()


def paths(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [path for key in value for path in paths(value[key], (*at, key))] if isinstance(value, dict) else []
    return [at, *inner] if at else inner


@pytest.mark.parametrize("odd", [None, "x", [], {}])
def test_a_bench_of_another_form_is_one_error(odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of kind 1.18: whatever is left out of a bench or stands there in another form."""
    good = report(tmp_path, "a.json")
    made = json.loads(Path(good).read_text())
    for path in paths(made):
        changed = json.loads(json.dumps(made))
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        if odd is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = odd
        (tmp_path / "b.json").write_text(json.dumps(changed))
        monkeypatch.setattr(sys, "argv", ["redraft", "compare", good, str(tmp_path / "b.json")])
        with suppress(SystemExit):  # and nothing else
            main()


def test_a_bench_of_an_older_redraft_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = report(tmp_path, "a.json")
    old = json.loads(Path(good).read_text())
    del old["levels"]["1"]["rows"]["3"]["label"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    monkeypatch.setattr(sys, "argv", ["redraft", "compare", good, str(tmp_path / "old.json")])
    with pytest.raises(SystemExit, match=r"(?s)older redraft.*old\.json.*no levels\.1\.rows\.3\.label"):
        main()


def test_what_two_runs_of_one_engine_may_differ_in() -> None:
    one = {"machine": machine(), "asked": {}, "engine": {"engine": "sglang", "command": ["a"], "version": "0.5.23"}}
    require_same(one, {**one, "engine": {**one["engine"], "command": ["b"]}}, "test")
    with pytest.raises(RedraftError, match=r"engine.version 0\.5\.23 and 0\.5\.22"):
        require_same(one, {**one, "engine": {**one["engine"], "version": "0.5.22"}}, "test")


def test_joined_servers_differ_in_speculation_alone() -> None:
    plain = {"version": "0.5.23", "max_running_requests": 8, "attention_backend": "fa3"}
    require_alike(plain, {**plain, "speculative_num_steps": 3, "attention_backend": "flashinfer"})
    with pytest.raises(RedraftError, match="hosts"):
        require_alike({**plain, "joined": "http://a:1"}, {**plain, "joined": "http://b:1"})
    with pytest.raises(RedraftError, match="max_running_requests 8 and 48"):
        require_alike(plain, {**plain, "max_running_requests": 48})


# --- which arms there are


def configured(project: Path, server: dict[str, Any], bench: dict[str, Any], **params: Any) -> Config:
    config = load_config(project)
    profile = config.profile
    changed = profile.model_copy(
        update={"engine": profile.engine.model_copy(update=server), "bench": profile.bench.model_copy(update=bench)}
    )
    return Config(params=config.params.model_copy(update=params), profile=changed)


def opened(project: Path, server: dict[str, Any], bench: dict[str, Any], **params: Any) -> tuple[dict[str, Any], bool]:
    artifacts = project / "artifacts"
    return open_arms(configured(project, server, bench, **params), artifacts / "target", artifacts / "drafter")


def test_launched_arms_are_chains_trees_and_other_drafters(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    donor = str(project / "artifacts/donor")
    found, together = opened(project, {}, {"spec_steps": (1, 3), "trees": ((3, 2, 5),), "compare": (donor,)})
    assert not together
    assert [arm.key for arm in found] == ["plain", "1", "3", "3x2x5", f"{donor} 3"]
    by_key = {arm.key: each for arm, each in found.items()}
    assert (by_key["3x2x5"].params.topk, by_key["3x2x5"].draft_tokens) == (2, 5)
    assert by_key[f"{donor} 3"].drafter == Path(donor)
    assert by_key["plain"].drafter is None
    with pytest.raises(RedraftError, match="fewer requests at once"):
        opened(project, {"max_running": 2}, {"concurrency": (1, 4)})


def test_arms_of_the_engine_torch(project: Path) -> None:
    donor = str(project / "artifacts/donor")
    found, together = opened(project, {}, {"spec_steps": (2,), "compare": (donor,)}, engine="torch")
    assert together
    assert {arm.key: each.spec_steps for arm, each in found.items()} == {"plain": 0, "2": 2, f"{donor} 3": 3}
    with pytest.raises(RedraftError, match="chains only"):
        opened(project, {}, {"trees": ((3, 2, 5),)}, engine="torch")


def test_joined_servers_are_linted_by_their_own_release(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.002")
    launched = arms(tmp_path)
    with serving(launched[PLAIN]) as plain, serving(launched[chain(3)]) as speculative:
        both = {"baseline_url": plain._base, "url": speculative._base}
        found, together = opened(project, both, {})
        assert together
        assert list(found) == [PLAIN, chain(3)]
        assert list(opened(project, {"baseline_url": plain._base}, {})[0]) == [PLAIN]
        only, _ = opened(project, {"url": speculative._base}, {})
        assert list(only) == [chain(3)]
        plan = Plan.of([[number] for number in range(4)], TOKENS, [1])
        alone = summary(measure(only, plan, together=True, told=lambda _: None), TOKENS, {})
        assert alone["levels"]["1"]["word"] == "unclear: no ratio"
        assert "ratio" not in alone["levels"]["1"]["rows"]["3"]
        with pytest.raises(RedraftError, match="a server with speculation"):
            serve_both({0: found[PLAIN]}, [[1]], 4, "test")
        monkeypatch.setattr("redraft.engines.open.lint", lambda *_, **__: [Finding("odd", "error", "x", "y", "z")])
        with pytest.raises(RedraftError, match="odd"):
            opened(project, both, {})


INFO = {
    "version": "0.5.23", "dtype": "float32", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "context_length": 64, "tp_size": 2,
}  # fmt: skip
PLAIN_INFO = {**{name: value for name, value in INFO.items() if "spec" not in name}, "speculative_algorithm": None}


@pytest.mark.parametrize(
    ("told", "version", "context", "parallel"),
    [
        ({}, "0.5.23", 64, 2),
        ({"context_length": None}, "0.5.23", None, 2),  # SGLang tells none that was not set: the target's
        ({"context_length": "64", "tp_size": None}, "0.5.23", None, 1),
        ({"version": "0.0.0.dev1+gf97c09dac"}, "0.0.0.dev1+gf97c09dac", 64, 2),  # nightly images
        ({"version": None}, "0.5.23", 64, 2),  # a gateway: what the newest release would do
    ],
)
def test_a_joined_server_is_linted_for_what_it_is(
    told: dict[str, Any], version: str, context: int | None, parallel: int, project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Faults of kind 1.17: its own context, release and tensor parallel size."""
    asked: list[Any] = []

    def lint(drafter: Path, target: Path, version: str, *, context: int | None, tp: int) -> list[Finding]:
        asked.append((version, context, tp))
        return []

    monkeypatch.setattr("redraft.engines.open.lint", lint)
    with gateway({"/server_info": http({**INFO, **told})}) as url:
        assert list(opened(project, {"url": url}, {})[0]) == [chain(3)]
    assert asked == [(version, context, parallel)]


@pytest.mark.parametrize(("flags", "parallel"), [({}, 1), ({"tp": 4}, 4), ({"tensor-parallel-size": "8"}, 8)])
def test_a_launched_server_is_linted_for_its_flags(
    flags: dict[str, Any], parallel: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    asked: list[Any] = []

    def lint(*_: Any, context: int, tp: int) -> list[Finding]:
        asked.append((context, tp))
        return []

    monkeypatch.setattr("redraft.engines.open.lint", lint)
    opened(project, {"flags": {"context-length": 100, **flags}}, {"spec_steps": (3,)})
    assert asked == [(100, parallel)]
    for odd in ({"context-length": "32k"}, {"tp-size": True}):
        with pytest.raises(RedraftError, match="no whole number"):
            opened(project, {"flags": odd}, {"spec_steps": (3,)})


def test_joined_servers_that_differ_are_refused_before_anything_is_measured(project: Path) -> None:
    with (
        gateway({"/server_info": http({**PLAIN_INFO, "kv_cache_dtype": "fp8_e5m2"})}) as plain,
        gateway({"/server_info": http({**INFO, "kv_cache_dtype": "auto"})}) as speculative,
        pytest.raises(RedraftError, match=r"kv_cache_dtype fp8_e5m2 and auto"),
    ):
        opened(project, {"baseline_url": plain, "url": speculative}, {})


def test_what_must_agree_is_of_what_is_recorded() -> None:
    assert set(MAY_DIFFER) < set(SETTINGS)
    for name in SETTINGS:
        pair = {"joined": "http://a:1", name: 1}, {"joined": "http://a:2", name: 2}
        if name in MAY_DIFFER:
            require_alike(*pair)
        else:
            with pytest.raises(RedraftError, match=f"{name} 1 and 2"):
                require_alike(*pair)
