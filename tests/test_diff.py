"""`redraft diff`: two revisions side by side, what is noise, what cannot be compared, and the gate."""

import copy
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from redraft.cli.command import main
from redraft.diff.changes import judge
from redraft.diff.figures import Figure, Side, State, figures
from redraft.diff.page import MOST_LINES, page
from redraft.diff.revision import revision
from redraft.frame.errors import RedraftError
from redraft.report.summary import summary

MACHINE = {"processor": "P", "cores": 2, "memory_gib": 24, "gpus": [], "host": "h"}
ENGINE = {"engine": "torch", "spec_steps": 3}


def metrics(**changes: Any) -> dict[str, dict[str, Any]]:
    """Of five stages; `changes` by `stage__key__key`."""
    plain = {"label": "plain", "tokens_per_second": 20.0}
    row = {"label": "2 drafted", "ratio": 1.3, "ratio_low": 1.2, "ratio_high": 1.4}
    found: dict[str, Any] = {
        "vocab": {"slots": 3072, "coverage_heldout": 0.9},
        "remap": {
            "init": "remap",
            "option": "remap_fitted",
            "first_step": {
                "naive": {"loss": 7.7, "loss_interval": 0.1},
                "remap_fitted": {"loss": 4.6, "loss_interval": 0.1},
            },
        },
        "train": {
            "drafter": "d1",
            "tokens": 1000,
            "knobs": {"ttt_steps": 3},
            "heldout": {
                "accept_length": 1.5,
                "accept_length_interval": 0.04,
                "accuracy_0": 0.4,
                "accuracy_0_interval": 0.02,
                "ceiling_0": 0.91,
            },
        },
        "probe": {
            "drafter": "d1",
            "accept_length": 1.6,
            "verify_steps": 400,
            "accepted_at_1": 0.4,
            "accepted_at_2": 0.2,
            "engine": ENGINE,
            "asked": {"prompts": 12},
        },
        "bench": {
            "drafter": "d1",
            "target": "t",
            "prompts": 8,
            "asked": {"prompts": 8},
            "engine": ENGINE,
            "machine": MACHINE,
            "levels": {"1": {"word": "ship", "best": "2", "rows": {"plain": plain, "2": row}}},
        },
    }
    for place, value in changes.items():
        *path, last = place.split("__")
        inner = found
        for name in path:
            inner = inner[name]
        inner[last] = value
    return found


def write(stages: dict[str, Any], params: dict[str, Any], heldout: str = "md5", picture: str = "<svg/>") -> None:
    Path("metrics").mkdir(exist_ok=True)
    for stage, values in stages.items():
        Path(f"metrics/{stage}.json").write_text(json.dumps(values))
    Path("metrics/summary.json").write_text(json.dumps(summary(stages)))
    Path("params.yaml").write_text(yaml.safe_dump({"profile": "tiny", "lr": 0.001, **params}))
    Path("profiles").mkdir(exist_ok=True)
    Path("profiles/tiny.yaml").write_text(yaml.safe_dump({"vocab": {"slots": stages["vocab"]["slots"]}}))
    outs = [{"path": "artifacts/corpus/heldout.safetensors", "md5": heldout}]
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"corpus": {"outs": outs}}}))
    Path("report").mkdir(exist_ok=True)
    Path("report/loss.svg").write_text(picture)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(message: str) -> str:
    git("add", "-A")
    git("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "commit", "-qm", message)
    return git("rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one commit, on `main`."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    write(metrics(), {})
    commit("first")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, Any]:
    """What `redraft diff` prints, and its exit status or message."""
    monkeypatch.setattr("sys.argv", ["redraft", "diff", *words])
    try:
        main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    return capsys.readouterr().out, code


GOLDEN = """\
**ship → no**, `main` → `workspace`

|  | `main` | `workspace` | change |  |
| --- | ---: | ---: | ---: | ---: |
| tokens/s, times plain | 1.30 | 0.80 | -0.50 | **worse** |
| … low end of its interval | 1.20 | 0.70 | -0.50 | **worse** |
| accept length, served | 1.600 | 1.650 | +0.050 | within noise |
| accept length, predicted | 1.500 | 1.600 | +0.100 | **better** |
| held-out accuracy | 40.0% | 41.0% | +1.0 points | within noise |
| … its ceiling | 91.0% | 91.0% | – | same |
| coverage of the draft vocabulary | 90.0% | 88.0% | -2.0 points | **worse** |
| loss of the first step | 4.600 | 5.000 | +0.400 | **worse** |
| … of naive | 7.700 | – | – | **gone** |
| tokens trained on | 1,000 | 2,000 | +1,000 | changed |

Params: `lr` `0.001` → `0.002`

Pictures: [report/loss.svg](https://host/blob/1/report/loss.svg)

Gates: `accept_length` holds: +0.05, may fall by 0.1, `ratio_low` fails: -0.5, may fall by 0.1, `coverage` fails: \
-0.02, may fall by 0.01
"""


def test_a_pull_request_of_two_commits(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git("checkout", "-qb", "work")
    slow = {"label": "2 drafted", "ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9}
    stages = metrics(
        bench__levels__1__rows__2=slow,
        bench__levels__1__word="no: needs accept length ≥ 1.7",
        probe__accept_length=1.65,
        train__heldout__accept_length=1.6,
        train__heldout__accuracy_0=0.41,
        train__tokens=2000,
        vocab__coverage_heldout=0.88,
        remap__first_step={"remap_fitted": {"loss": 5.0, "loss_interval": 0.1}},
    )
    write(stages, {"lr": 0.002}, picture="<svg></svg>")
    commit("slower")
    text, code = said(capsys, monkeypatch, "--gate", "--link", "https://host/blob/1/")
    assert code == 1
    assert text == GOLDEN


def test_nothing_moved_is_said(repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, code = said(capsys, monkeypatch, "HEAD", "HEAD", "--gate")
    assert code == 0
    assert text.startswith("**ship** (as before)")
    assert not {"better", "worse", "Params", "Pictures"} & set(text.replace("*", " ").replace(":", " ").split())


def test_the_first_run_is_new_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    Path("README").write_text("x")
    commit("empty")
    write(metrics(), {})
    commit("run")
    text, code = said(capsys, monkeypatch, "--gate")
    assert code == 0
    assert text.startswith("**ship** (new)")
    assert text.count("| new |") == 10
    assert "not judged: nothing to compare with" in text
    text, _ = said(capsys, monkeypatch, "HEAD", "HEAD~1")
    assert text.startswith("**No verdict**")
    text, code = said(capsys, monkeypatch, "HEAD", "HEAD~1", "--gate")
    assert code == 1, "what was measured and is not any more has fallen"


def test_a_repository_of_one_commit(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, code = said(capsys, monkeypatch)
    assert code == 0
    assert "| new |" in text


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        ({"bench__machine": {**MACHINE, "host": "other"}}, "ratio", "machine.host"),
        ({"bench__engine": {"engine": "sglang", "spec_steps": 3}}, "ratio_low", "engine.engine"),
        ({"bench__asked": {"prompts": 9}}, "ratio", "asked.prompts"),
        ({"probe__asked": {"prompts": 2}}, "served_accept_length", "asked of the probe"),
        ({"probe__engine": {"engine": "sglang"}}, "served_accept_length", "engine of the probe"),
        ({"train__knobs": {"ttt_steps": 5}}, "predicted_accept_length", "ttt_steps 3 and 5"),
        ({"vocab__slots": 4096}, "first_loss", "slots"),
    ],
)
def test_what_cannot_be_compared_is_not(changes: dict[str, Any], name: str, why: str, repo: Path) -> None:
    base = Side.read(revision("HEAD"))
    write(metrics(**changes), {})
    commit("other")
    found = {each.name: each for each in figures(base, Side.read(revision("HEAD")))}
    assert found[name].state is State.APART
    assert why in found[name].why
    assert found["coverage"].state is State.SAME


def test_other_prompts_or_another_profile_leave_nothing_to_compare(repo: Path) -> None:
    base = Side.read(revision("HEAD"))
    write(metrics(train__heldout__accuracy_0=0.1), {}, heldout="other")
    commit("prompts")
    found = {each.name: each.state for each in figures(base, Side.read(revision("HEAD")))}
    assert {found[name] for name in ("accuracy", "coverage", "ceiling", "first_loss")} == {State.APART}
    write(metrics(), {"profile": "mine"})
    commit("profile")
    states = {each.state for each in figures(base, Side.read(revision("HEAD")))}
    assert states == {State.APART}


def test_an_experiment_that_only_trained_has_no_served_figures(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics of probe and bench, and the summary, are those of the drafter before."""
    before = json.loads(Path("metrics/summary.json").read_text())
    write(metrics(train__drafter="d2", train__heldout__accuracy_0=0.6), {})
    Path("metrics/summary.json").write_text(json.dumps(before))
    git("update-ref", "refs/exps/ab/cdef/only-train", commit("exp"))
    git("reset", "-q", "--hard", "HEAD~1")
    text, _ = said(capsys, monkeypatch, "HEAD", "only-train", "--json")
    told = json.loads(text)["figures"]
    assert told["accuracy"] == {"base": 0.4, "head": 0.6, "state": "better", "why": None}
    assert {told[name]["state"] for name in ("ratio", "ratio_low", "served_accept_length")} == {"gone"}
    assert told["verdict"]["head"] == "stale"


def test_what_an_older_redraft_wrote(repo: Path) -> None:
    Path("metrics/train.json").write_text("{}")
    commit("older")
    base = Side.read(revision("HEAD"))
    assert base.summary == json.loads(Path("metrics/summary.json").read_text())
    Path("metrics/summary.json").unlink()
    Path("params.yaml").unlink()
    Path("dvc.lock").unlink()
    commit("nothing")
    assert Side.read(revision("HEAD")).summary == {}


def test_an_unknown_revision_and_a_shallow_clone(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RedraftError, match="no such revision") as told:
        revision("nix")
    assert "fetch-depth" not in str(told.value)
    commit_of_first = git("rev-parse", "HEAD")
    write(metrics(), {"lr": 0.1})
    commit("second")
    git("clone", "-q", "--depth", "1", f"file://{repo}", str(tmp_path / "shallow"))
    monkeypatch.chdir(tmp_path / "shallow")
    for name in (commit_of_first, "HEAD~1"):
        with pytest.raises(RedraftError, match="fetch-depth: 0"):
            revision(name)


def test_a_shallow_clone_is_refused_without_a_base(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(metrics(), {"lr": 0.1})
    commit("second")
    git("clone", "-q", "--depth", "1", f"file://{repo}", str(tmp_path / "shallow"))
    monkeypatch.chdir(tmp_path / "shallow")
    _, code = said(capsys, monkeypatch)
    assert "fetch-depth: 0" in code


@pytest.mark.parametrize("text", ["{", "[1]", "<<<<<<< HEAD\n"])
def test_a_file_that_cannot_be_read_is_named(text: str, repo: Path) -> None:
    Path("metrics/bench.json").write_text(text)
    commit("broken")
    with pytest.raises(RedraftError, match=r"bench\.json"):
        Side.read(revision("HEAD"))


def test_gates_are_of_the_newer_params(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(metrics(vocab__coverage_heldout=0.85), {"gates": {"coverage": 0.1}})
    text, code = said(capsys, monkeypatch, "--gate")
    assert code == 0, text
    write(metrics(vocab__coverage_heldout=0.85), {"gates": {"coverage": "x"}})
    _, code = said(capsys, monkeypatch, "--gate")
    assert "coverage" in code
    assert "params.yaml" in code


numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**9), 10**9)


@given(st.lists(numbers, min_size=22, max_size=22), st.dictionaries(st.text(max_size=300), st.text(), max_size=40))
def test_the_page_has_at_most_25_lines_whatever_moved(values: list[Any], params: dict[str, str]) -> None:
    base, head = (dict(zip(summary(metrics()), half, strict=True)) for half in (values[:11], values[11:]))
    sides = [Side(values, metrics(), {"profile": "p"}, {}, "x") for values in (base, head)]
    found = figures(*sides)
    judged = judge(found, {"accept_length": 0.1, "ratio_low": 0.1, "coverage": 0.1})
    text = page(
        ("a|b\n`c`", "d"), found, {key: (1, value) for key, value in params.items()}, ["p.svg"] * 99, judged, ""
    )
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {6}


@given(st.floats(-10, 10), st.floats(-10, 10), st.sampled_from(["ratio", "accuracy", "coverage", "first_loss"]))
def test_there_and_back_are_opposites(one: float, two: float, name: str) -> None:
    opposite = {State.BETTER: State.WORSE, State.WORSE: State.BETTER}
    sides = [Side({name: value}, metrics(), {}, {}, "x") for value in (one, two)]
    ((there,), (back,)) = figures(*sides), figures(*reversed(sides))
    assert opposite.get(there.state, there.state) is back.state
    if there.state in opposite:
        assert ((two > one) != (name == "first_loss")) == (there.state is State.BETTER)


def test_a_served_interval_is_that_of_accepted_drafts() -> None:
    """Against the definition, over the histogram that the shares come from."""
    counts = [240, 80, 80]  # rounds with 0, 1, 2 accepted: P1 = 0.4, P2 = 0.2
    mean = sum(number * count for number, count in enumerate(counts)) / 400
    variance = sum(count * (number - mean) ** 2 for number, count in enumerate(counts)) / 400
    half = Side({}, metrics(), {}, {}, None).half("served_accept_length")
    assert half == pytest.approx(1.96 * math.sqrt(variance / 400))


@given(st.floats(0, 1), st.floats(-1, 1))
def test_a_gate_fails_if_and_only_if_the_fall_is_larger(most: float, change: float) -> None:
    figure = Figure("coverage", 0.5, 0.5 + change, State.NOISE)
    (told,) = judge([figure], {"coverage": most})
    if abs(-change - most) > 1e-9:
        assert told.failed == (-change > most)


def test_a_summary_never_has_figures_of_another_drafter() -> None:
    told = summary(metrics(train__drafter="d2"))
    assert (told["verdict"], told["ratio"], told["ratio_low"], told["served_accept_length"]) == ("stale", *[None] * 3)
    assert summary(metrics())["verdict"] == "ship"


def test_a_summary_of_a_bench_without_a_valid_level() -> None:
    stages = copy.deepcopy(metrics())
    stages["bench"]["levels"]["1"]["word"] = "invalid"
    told = summary(stages)
    assert (told["verdict"], told["ratio"]) == ("invalid", None)
    stages["bench"]["levels"] = {}
    assert summary(stages)["verdict"] == "not measured"
    stages["remap"]["first_step"].pop("naive")
    stages["train"]["heldout"].pop("accept_length")
    told = summary(stages)
    assert told["first_loss_naive"] is told["predicted_accept_length"] is None


def test_the_low_end_is_no_news_where_the_ratio_is_none() -> None:
    row = {"label": "2 drafted", "ratio": 1.33, "ratio_low": 1.32, "ratio_high": 1.34}
    base, head = (
        Side(summary(each), each, {}, {}, "x") for each in (metrics(), metrics(bench__levels__1__rows__2=row))
    )
    found = {each.name: each.state for each in figures(base, head)}
    assert (found["ratio"], found["ratio_low"]) == (State.NOISE, State.NOISE)


def test_a_shallow_clone_does_not_guess_where_a_branch_began(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit before is there, but it is not where three commits of work left `main`."""
    git("checkout", "-qb", "work")
    for number in range(3):
        write(metrics(), {"lr": 0.1 + number})
        commit(f"work {number}")
    git("clone", "-q", "--depth", "2", "-b", "work", f"file://{repo}", str(tmp_path / "shallow"))
    monkeypatch.chdir(tmp_path / "shallow")
    git("fetch", "-q", "--depth", "1", "origin", "main:refs/remotes/origin/main")
    git("remote", "set-head", "origin", "main")
    _, code = said(capsys, monkeypatch)
    assert "fetch-depth: 0" in str(code)


def test_a_folder_without_git_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    _, code = said(capsys, monkeypatch)
    assert "git repository" in str(code)


@pytest.mark.parametrize(
    "changes",
    [
        {"remap__first_step": {"remap_fitted": {"loss": 1.0, "loss_interval": "x"}}},
        {"remap__first_step": {"remap_fitted": {"loss": 1.0, "loss_interval": math.nan}}},
        {"probe__verify_steps": "x", "probe__accept_length": 1.1},
        {"train__heldout__accuracy_0_interval": "x", "train__heldout__accuracy_0": 0.1},
        {"train__heldout__accuracy_0": "x"},
        {"train__heldout__accuracy_0": math.nan},
        {"vocab__coverage_heldout": True},
    ],
)
def test_an_odd_value_is_no_traceback(
    changes: dict[str, Any], repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(metrics(**changes), {})
    text, code = said(capsys, monkeypatch, "HEAD", "--gate")
    assert code in (0, 1)
    assert text.startswith("**ship**")


def test_an_odd_level_of_the_bench_is_no_traceback(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = metrics()
    stages["bench"]["levels"] = {"x": {}}
    Path("metrics/bench.json").write_text(json.dumps(stages["bench"]))
    text, code = said(capsys, monkeypatch, "HEAD")
    assert code == 0
    assert text.startswith("**ship**")


def test_a_subfolder_is_no_project(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo / "metrics")
    _, code = said(capsys, monkeypatch, "HEAD", "HEAD", "--gate")
    assert "no project here" in str(code)
