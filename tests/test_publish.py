"""What MLflow is sent: every figure, under a name that it takes; the rest of what it refuses a part of (case C68)."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name, _validate_param_name
from test_track import children, history, parents, runs

from redraft.cli import main
from redraft.frame import mlflow_runs
from redraft.frame.journal import Journal, journals
from redraft.frame.mlflow_client import client, is_away, tracking_uri
from redraft.frame.mlflow_names import figures, shortened, valid_name
from redraft.frame.mlflow_runs import send
from redraft.frame.params import flatten, load_config
from redraft.frame.stage import Result, log, run
from redraft.frame.track import stage_run

ROOT = Path(__file__).parent.parent
HOSTILE = st.text(alphabet='aAé数./-_ :…?"(),=@+#%\\\n\t0', max_size=12) | st.text(max_size=300)
EXAMPLES = [
    "ShareGPT (filtered)", "open/orca/", "What is … in mathematics?", "", ".", "..", "...", "/", "//", "a//b", "./a",
    "../a", "/a", "a/..", "a\n", "loss-0123abcd", "x" * 250, "x" * 251, "\ud800",
]  # fmt: skip


def accepted(name: str) -> bool:
    try:
        _validate_metric_name(name)
        _validate_param_name(name)
    except MlflowException:
        return False
    return len(name) <= MAX_ENTITY_KEY_LENGTH


@given(st.lists(HOSTILE, unique=True, max_size=20))
@example(EXAMPLES)
def test_names_are_valid_and_stay_distinct(names: list[str]) -> None:
    """C68; the rule is MLflow's own."""
    made = [valid_name(name) for name in names]
    assert all(map(accepted, made))
    everything = {*names, *made}  # a made name may stand beside the one that it was made of
    assert len(set(map(valid_name, everything))) == len(everything)


@given(st.text(alphabet="abz./-_ :09é", min_size=1, max_size=30))
def test_a_name_that_mlflow_takes_is_kept(name: str) -> None:
    """But for one that ends as a shortened name does, which the alphabet has not."""
    assert (valid_name(name) == name) == accepted(name)


LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
TREE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a.0"[]', max_size=4), inner, max_size=4),
    max_leaves=12,
)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in numbers(each)]
    return [value] if isinstance(value, bool | int | float) else []


@given(st.dictionaries(st.text('a.0"[]', max_size=4), TREE, max_size=4))
@example({"a.b": 1, "a": {"b": 2}, '"a.b"': 3, 'a."b': 4})
@example({"a.0": 1, "a": [2]})
def test_every_number_is_a_figure(values: dict[str, Any]) -> None:
    assert sorted(map(repr, figures(values).values())) == sorted(map(repr, numbers(values)))


def test_figures_have_the_names_one_expects() -> None:
    values = {"a": {"b": 1, "c": [0.5, 0.2]}, "d.e": True, "none": None, "text": "7"}
    assert figures(values) == {"a.b": 1, "a.c.0": 0.5, "a.c.1": 0.2, "d.e": True}
    assert flatten({"flags": {"tp-size": 8, "ids": [1, 2]}}) == {"flags.tp-size": 8, "flags.ids": [1, 2]}


def test_long_values_stay_distinct() -> None:
    one, two = (shortened("x" * 7000 + end, 6000) for end in "ab")
    assert len(one) == len(two) == 6000
    assert one != two


STAGES = sorted({path.stem.removesuffix("_timing") for path in (ROOT / "metrics").glob("*.json")} - {"summary"})


@pytest.fixture
def committed(workspace: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """By stage, the committed metrics, published."""
    found = {}
    for stage in STAGES:
        files = [ROOT / "metrics" / f"{stage}{end}.json" for end in ("", "_timing")]
        metrics, timing = (json.loads(path.read_text()) if path.is_file() else {} for path in files)
        with stage_run(stage, load_config()) as tracked:
            tracked.publish(metrics, timing, {}, {}, {})
        found[stage] = {**metrics, "timing": timing}
    assert capsys.readouterr().err == ""
    return found


def test_every_committed_figure_is_read_back(committed: dict[str, dict[str, Any]]) -> None:
    for stage, values in committed.items():
        (child,) = children(stage)
        assert child.info.status == "FINISHED"
        assert sorted(child.data.metrics.values()) == pytest.approx(sorted(map(float, numbers(values))), rel=1e-12)
        plain = {f"{stage}/{key}": value for key, value in values.items() if isinstance(value, int | float)}
        assert plain.items() <= child.data.metrics.items()
    (vocab,) = children("vocab")
    coverage = committed["vocab"]["coverage_by_source"]["train"]["Compare … for an engineer."]
    (name,) = [name for name, value in vocab.data.metrics.items() if value == coverage]
    assert name.startswith("vocab/coverage_by_source.train.Compare _ for an engineer.-")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HOSTILE, unique=True, max_size=40))
@example(EXAMPLES)
def test_hostile_sources_lose_no_figure(workspace: Path, names: list[str]) -> None:
    """C68."""
    shares = {name: 1 / (2 + number) for number, name in enumerate(names)}
    with stage_run("vocab", load_config()) as tracked:
        tracked.publish(
            {"slots": 3, "coverage_by_source": {"train": shares}}, {"seconds": 1.0}, {}, {"vocab/x": 1.0}, {}
        )
    child, parent = children("vocab")[-1], parents()[-1]
    assert child.info.status == "FINISHED"
    found = dict(child.data.metrics)
    assert (found.pop("vocab/slots"), found.pop("vocab/timing.seconds")) == (3, 1)
    assert sorted(found.values()) == sorted(shares.values())
    assert parent.data.metrics == {"vocab/x": 1}
    assert send(journals()[-1]) == 0


def publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["redraft", "publish"])
    main()


def test_publish_fills_in_what_a_missing_server_did_not_take(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = [{"step": float(step), "loss": 3.0 / step} for step in range(1, 251)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run("train", lambda _: Result({"slots": 5}, curves={"train": curve}, headline={"train/loss": 2.0}))
    with pytest.raises(SystemExit) as caught:
        publish(monkeypatch)
    assert "did not take 1 of the journals" in str(caught.value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for path in journals():
        assert send(path) > 250
        assert send(path) == 0
    capsys.readouterr()
    publish(monkeypatch)
    assert "1 journals, 0 lines" in capsys.readouterr().out
    (child,) = children("train")
    assert len(history(child, "train/loss")) == 250
    assert child.data.metrics["train/slots"] == 5
    assert child.info.status == "FINISHED"
    assert len(runs()) == 2
    assert [parent.info.status for parent in parents()] == ["FINISHED"]  # nothing more will come


def test_a_journal_of_an_earlier_release_is_sent(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names that MLflow never took: it has the child, FINISHED, without a figure."""
    folder = workspace / ".store" / "journal"
    folder.mkdir()
    tags = {"git.commit": "abc", "git.dirty": "true", "dvc.exp.baseline": "", "profile": "smollm"}
    params = {"lr": 0.002, "profile.engine.env.MY VAR (x)": "1"}
    written = [
        {"stage": "vocab", "key": "abc-1", "params": params, "tags": tags, "time": 1000},
        {"numbers": {"vocab/slots": 3.0, "vocab/coverage_by_source.train.ShareGPT (filtered)": 0.9}, "time": 2000},
        {"headline": {}, "time": 2000},
        {"status": "FINISHED", "time": 3000},
    ]
    path = folder / "vocab-0123456789ab.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    store = MlflowClient(tracking_uri())
    experiment = store.create_experiment("redraft/smollm")
    parent = store.create_run(experiment, tags={"pipeline.run": "abc-1"}).info.run_id
    store.set_terminated(parent)
    tags = {"mlflow.parentRunId": parent, "stage": "vocab", "redraft.journal": path.stem}
    store.set_terminated(store.create_run(experiment, tags=tags).info.run_id)
    publish(monkeypatch)
    (child,) = children("vocab")
    assert sorted(child.data.metrics.values()) == [0.9, 3]
    assert child.data.params["lr"] == "0.002"
    assert len(child.data.params) == 2
    assert [found.info.status for found in runs()] == ["FINISHED", "FINISHED"]
    assert send(path) == 0


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a server had a stricter rule of names than ours."""
    monkeypatch.setattr(mlflow_runs, "valid_name", lambda name: name)


def is_refused_in_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> Result:
        for step in (1.0, 1e30):  # no integer of 64 bits
            log("train", {"step": step, "loss": step})
        figures = {f"figure {number}": number for number in range(1200)}
        return Result({**figures, "a (b)": 1, "c/": 2, "huge": 10**400}, headline={"h?": 1.0, "train/loss": 2.0})

    run("train", lambda _: body())
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert "refused 5 of" in told
    for name in ("train/a (b): ", "train/c/: ", "train/huge: ", "train/loss: ", "h?: "):
        assert told.count(f"  {name}") == 1, name
    child, parent = children("train")[-1], parents()[-1]
    assert child.info.status == "FINISHED"
    assert {f"train/figure {number}": number for number in range(1200)}.items() <= child.data.metrics.items()
    assert history(child, "train/loss") == [(1, 1.0)]
    assert parent.data.metrics == {"train/loss": 2}
    assert "train/a (b)" in child.data.tags["redraft.refused"]
    publish(monkeypatch)  # tried no more
    printed = capsys.readouterr()
    assert ("1 journals, 0 lines" in printed.out, printed.err) == (True, "")


def test_what_is_refused_is_told_by_name_and_the_rest_is_sent(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strict(monkeypatch)
    is_refused_in_part(capsys, monkeypatch)


def trigger(database: Path, statement: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(statement)
    connection.close()


def test_a_store_that_writes_nothing_refuses_no_figure(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a full disk: nothing is taken for refused, and all is sent later."""
    database = workspace / ".store" / "mlflow.db"
    tables = ("metrics", "tags", "params")
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def body() -> Result:
        for table in tables:
            trigger(
                database, f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        return Result({"slots": 5, "forced": 2})

    run("vocab", lambda _: body())
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert "refused" not in told
    assert [found.info.status for found in runs()] == ["RUNNING", "RUNNING"]  # not FINISHED without a figure
    for table in tables:
        trigger(database, f"DROP TRIGGER no_{table}")
    publish(monkeypatch)
    (child,) = children("vocab")
    assert (child.data.metrics["vocab/slots"], child.info.status) == (5, "FINISHED")
    assert "redraft.refused" not in child.data.tags


@pytest.mark.parametrize(
    ("status", "away"),
    [(400, False), (413, False), (500, False), (401, True), (403, True), (408, True), (429, True), (502, True),
     (503, True), (504, True), (None, True)],
)  # fmt: skip
def test_a_server_that_says_no_is_told_from_one_that_cannot_answer(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, away: bool
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as answering:
        if status:
            threading.Thread(target=answering.serve_forever, daemon=True).start()
        else:
            answering.server_close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{answering.server_port}")
        with pytest.raises(MlflowException) as caught:
            client(patience=10).set_tag("0" * 32, "a", "b")
        if status:
            answering.shutdown()
    assert is_away(caught.value) == away


def test_what_the_database_behind_a_server_refuses_is_told_by_name(
    workspace: Path, server: str, server_database: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    when = "BEFORE INSERT ON metrics WHEN NEW.key = 'vocab/forced' BEGIN SELECT RAISE(ABORT, 'no'); END"
    trigger(server_database, f"CREATE TRIGGER no_forced {when}")
    run("vocab", lambda _: Result({"slots": 5, "forced": 2, "padded": 0}))
    trigger(server_database, "DROP TRIGGER no_forced")
    told = capsys.readouterr().err
    assert told.count("warning: ") == told.count("  vocab/forced: ") == 1
    (child,) = children("vocab")
    assert child.info.status == "FINISHED"
    assert {"vocab/slots": 5, "vocab/padded": 0}.items() <= child.data.metrics.items()


def test_a_deleted_experiment_is_told_as_such(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MlflowClient(tracking_uri())
    number = store.create_experiment("redraft/smollm")
    store.delete_experiment(number)
    run("vocab", lambda _: Result({"slots": 5}))
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert f"The MLflow experiment `redraft/smollm` (id {number}) is deleted" in told
    assert f"mlflow experiments restore --experiment-id {number}" in told
    assert "Traceback" not in told
    with pytest.raises(SystemExit, match="is deleted"):
        publish(monkeypatch)
    restore = [sys.executable, "-m", "mlflow", "experiments", "restore", "--experiment-id", number]
    subprocess.run(restore, env={**os.environ, "MLFLOW_TRACKING_URI": tracking_uri()}, check=True)
    publish(monkeypatch)
    assert children("vocab")[0].data.metrics["vocab/slots"] == 5


def test_a_deleted_run_stays_deleted(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MlflowClient(tracking_uri())

    def body() -> Result:
        store.delete_run(children("vocab")[0].info.run_id)
        return Result({"slots": 5})

    run("vocab", lambda _: body())
    publish(monkeypatch)
    assert not children("vocab")
    assert capsys.readouterr().err == ""
    store.delete_run(parents()[0].info.run_id)
    run("train", lambda _: Result({"slots": 5}, headline={"train/loss": 2.0}))
    publish(monkeypatch)
    assert [parent.data.metrics for parent in parents()] == [{"train/loss": 2}]


def test_a_real_server_gets_all_but_what_it_refuses(
    workspace: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    strict(monkeypatch)
    is_refused_in_part(capsys, monkeypatch)


def test_a_request_that_is_too_large_is_sent_in_parts(
    workspace: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server takes a million bytes at once: 100 long params are more."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    params = {f"key {number}": "数" * 6500 for number in range(100)}
    params |= {"profile.engine.flags.tp-size": 8, "profile.engine.env.A (b)": "", "profile.engine.port": None}
    header = {"stage": "vocab", "key": "large", "params": params, "tags": {"profile": "large"}}
    written = Journal.start(header)
    written.write({"status": "FINISHED"})
    written.lock.release()
    refused: dict[str, str] = {}
    assert send(written.path, refused=refused) == 2
    assert not refused
    store = MlflowClient(server)
    found = store.search_runs([store.get_experiment_by_name("redraft/large").experiment_id])
    assert [len(each.data.params) for each in found] == [103, 103]
    assert found[0].data.params["profile.engine.flags.tp-size"] == "8"


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("http://tracking:5000", "http://tracking:5000"),
        ("https://ann:secret@tracking/mlflow", "https://tracking/mlflow"),
        ("databricks", "Databricks"),
        ("databricks://prod", "Databricks"),
        ("sqlite:////srv/mlflow.db", None),
        ("postgresql://db/mlflow", None),
        (None, None),
    ],
)
def test_make_ui_serves_a_database_and_points_at_a_server(tmp_path: Path, uri: str | None, told: str | None) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    stand_in = tmp_path / ".venv" / "bin" / "mlflow"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/bin/sh\necho "serves $*"\n')
    stand_in.chmod(0o755)
    (tmp_path / ".venv" / "ready").touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "MAKE"))}
    if uri:
        env["MLFLOW_TRACKING_URI"] = uri
    done = subprocess.run(["make", "-s", "ui"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    if told:
        assert told in done.stdout
        assert "serves" not in done.stdout
        assert "secret" not in done.stdout
    else:
        store = uri or f"sqlite:///{tmp_path}/.store/mlflow.db"
        assert done.stdout.strip().endswith(f"--backend-store-uri {store}")
