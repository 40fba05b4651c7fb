"""The frame of a stage: atomic writes, errors without traceback, tracking that only watches (cases C29, C31)."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from redraft.cli import main
from redraft.frame import atomic, track
from redraft.frame.curves import read_curve, write_curve
from redraft.frame.errors import RedraftError
from redraft.frame.journal import journals, read
from redraft.frame.params import load_config
from redraft.frame.stage import Result, log, run

ROOT = Path(__file__).parent.parent


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "a" / "x.json", {"b": 1})
    with pytest.raises(ValueError, match="nan"):
        atomic.write_json(tmp_path / "a" / "x.json", {"b": float("nan")})
    assert json.loads((tmp_path / "a" / "x.json").read_text()) == {"b": 1}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]


def test_a_folder_is_whole_or_as_before(tmp_path: Path) -> None:
    with atomic.folder(tmp_path / "out") as partial:
        (partial / "one").write_text("1")
        assert not (tmp_path / "out").exists()

    def dies() -> None:
        with atomic.folder(tmp_path / "out") as partial:
            (partial / "two").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        dies()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "one"]


def test_a_curve_is_read_as_written(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "loss": 2.5}, {"step": 2.0, "loss": 5e-5}]
    write_curve(tmp_path / "c.csv", rows)
    assert read_curve(tmp_path / "c.csv") == rows
    write_curve(tmp_path / "c.csv", [])
    assert read_curve(tmp_path / "c.csv") == []


def test_an_error_says_what_where_and_what_to_do() -> None:
    text = str(RedraftError("It broke.", where="here", expected=1, found=2, cause="a cause", fix="mend it"))
    assert text.splitlines() == [
        "It broke.",
        "  where: here",
        "  expected: 1",
        "  found: 2",
        "  likely cause: a cause",
        "  what to do: mend it",
    ]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("params.yaml", "profiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_failing_stage_exits_with_its_message_and_writes_nothing(workspace: Path) -> None:
    def body(_: object) -> Result:
        raise RedraftError("It broke.", where="here")

    with pytest.raises(SystemExit) as caught:
        run("vocab", body)
    assert str(caught.value) == "vocab: It broke.\n  where: here"
    assert not (workspace / "metrics").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "shard"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "store"), "store"),
        (ConnectionResetError("gone"), "gone"),
    ],
)
def test_what_the_operating_system_refuses_is_one_clear_error(workspace: Path, error: OSError, told: str) -> None:
    def body(_: object) -> Result:
        raise error

    with pytest.raises(SystemExit, match=f"vocab: The operating system refused this(.|\\n)*{told}"):
        run("vocab", body)


def test_a_stage_script_ends_without_a_traceback(tmp_path: Path) -> None:
    script = ROOT / "stages" / "vocab.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "params.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    debug = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "REDRAFT_DEBUG": "1"},
    )
    assert "Traceback" in debug.stderr


def test_one_parent_with_a_child_for_each_stage(workspace: Path) -> None:
    curve = [{"step": 1.0, "loss": 3.0}, {"step": 2.0, "loss": 2.0}]
    result = Result({"slots": 5, "name": "x"}, {"rate": 7.0}, {"train": curve}, {"train/loss": 2.0})
    run("vocab", lambda _: result)
    run("train", lambda _: result)
    client = MlflowClient(track.tracking_uri())
    assert (workspace / ".store" / "mlflow.db").is_file()
    experiment = client.get_experiment_by_name("redraft/smollm")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [found for found in runs if track.PARENT_TAG in found.data.tags]
    children = {found.data.tags["stage"]: found for found in runs if found is not parent}
    assert children.keys() == {"vocab", "train"}
    assert {child.data.tags["mlflow.parentRunId"] for child in children.values()} == {parent.info.run_id}
    assert parent.data.params["lr"] == "0.002"
    assert parent.data.params["profile.vocab.slots"] == "3072"
    assert parent.data.metrics == {"train/loss": 2.0}
    assert children["vocab"].data.metrics["vocab/slots"] == 5
    history = client.get_metric_history(children["train"].info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.0)]
    assert {found.info.status for found in runs} == {"FINISHED"}
    run("vocab", lambda _: result)
    run("train", lambda _: result)
    runs = client.search_runs([experiment.experiment_id])
    assert len([found for found in runs if track.PARENT_TAG in found.data.tags]) == 2
    assert len(runs) == 6


def test_a_failed_stage_is_a_failed_run(workspace: Path) -> None:
    def body(_: object) -> Result:
        raise RedraftError("It broke.")

    with pytest.raises(SystemExit):
        run("train", body)
    client = MlflowClient(track.tracking_uri())
    experiment = client.get_experiment_by_name("redraft/smollm")
    assert {found.info.status for found in client.search_runs([experiment.experiment_id])} == {"FAILED"}


def test_an_experiment_is_a_run_of_its_own(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = load_config().params.model_dump()
    plain = track.pipeline_key(params)
    assert plain == track.pipeline_key(dict(reversed(params.items())))
    assert plain != track.pipeline_key({**params, "lr": 5e-5})
    monkeypatch.setenv("DVC_EXP_NAME", "lucky-name")
    assert track.pipeline_key(params) == "lucky-name"


def test_a_missing_server_costs_one_warning(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    run("vocab", lambda _: Result({"slots": 5}))
    assert time.monotonic() - began < 15
    assert capsys.readouterr().err.count("warning: MLflow at http://127.0.0.1:9") == 1
    assert json.loads((workspace / "metrics" / "vocab.json").read_text()) == {"slots": 5}


def test_publish_fills_in_what_a_missing_server_did_not_take(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = [{"step": float(step), "loss": 3.0 / step} for step in range(1, 251)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run("train", lambda _: Result({"slots": 5}, curves={"train": curve}, headline={"train/loss": 2.0}))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for path in journals():
        assert track.send(path) > 250
        assert track.send(path) == 0
    monkeypatch.setattr(sys, "argv", ["redraft", "publish"])
    main()
    assert "1 journals, 0 lines" in capsys.readouterr().out
    client = MlflowClient(track.tracking_uri())
    experiment = client.get_experiment_by_name("redraft/smollm")
    runs = client.search_runs([experiment.experiment_id])
    (child,) = [found for found in runs if found.data.tags.get("stage") == "train"]
    assert len(client.get_metric_history(child.info.run_id, "train/loss")) == 250
    assert child.data.metrics["train/slots"] == 5
    assert child.info.status == "FINISHED"
    assert len(runs) == 2


def test_a_killed_stage_goes_on_in_its_own_run(workspace: Path) -> None:
    def body(end: int, status: str | None) -> Result:
        for step in range(1, end):
            log("train", {"step": float(step), "loss": 1.0 / step})
        if status:
            raise SystemExit(143)
        return Result({"slots": 5})

    with pytest.raises(SystemExit) as caught:
        run("train", lambda _: body(6, "killed"))
    assert caught.value.code == 143
    client = MlflowClient(track.tracking_uri())
    experiment = client.get_experiment_by_name("redraft/smollm").experiment_id
    assert {found.info.status for found in client.search_runs([experiment])} == {"KILLED"}
    run("train", lambda _: body(9, None))  # from the state saved at step 4, say: steps 5 and on come again
    (child,) = client.search_runs([experiment], "tags.stage = 'train'")
    assert child.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(child.info.run_id, "train/loss")] == list(range(1, 9))


def test_other_ranks_write_and_track_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run("vocab", lambda _: Result({"slots": 5}))
    assert not (workspace / "metrics").exists()
    assert not (workspace / ".store").exists()


def test_a_foreign_run_id_does_not_take_the_stage_in(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    run("vocab", lambda _: Result({"slots": 5}))
    client = MlflowClient(track.tracking_uri())
    experiment = client.get_experiment_by_name("redraft/smollm").experiment_id
    assert {found.info.status for found in client.search_runs([experiment])} == {"FINISHED"}


def test_a_torn_line_stops_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> Result:
        log("train", {"step": 1.0, "loss": 3.0})
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        run("train", lambda _: dies())
    (path,) = journals()
    path.write_text(path.read_text() + '{"curve": "tr')
    run("train", lambda _: Result({"slots": 5}, curves={"train": [{"step": 2.0, "loss": 2.0}]}))
    assert [row["step"] for row in (line["row"] for line in read(path) if "row" in line)] == [1.0, 2.0]
    assert read(path)[-1]["status"] == "FINISHED"
