"""MLflow as it is filled while stages run: names, figures, parents, curves; it only watches (cases C29 to C31, C48)."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.tracking.context.registry import resolve_tags
from ruamel.yaml import YAML

from redraft.frame import journal as journal_module
from redraft.frame import mlflow_runs, track
from redraft.frame.errors import RedraftError
from redraft.frame.journal import Journal, journals, read
from redraft.frame.mlflow_client import tracking_uri
from redraft.frame.params import load_config
from redraft.frame.stage import Result, log, run

ROOT = Path(__file__).parent.parent


def runs(uri: str | None = None) -> list[Run]:
    client = MlflowClient(uri or tracking_uri())
    experiment = client.get_experiment_by_name("redraft/smollm")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def parents() -> list[Run]:
    return [found for found in runs() if mlflow_runs.PARENT_TAG in found.data.tags]


def children(stage: str) -> list[Run]:
    return [found for found in runs() if found.data.tags.get("stage") == stage]


def history(child: Run, name: str) -> list[tuple[int, float]]:
    points = MlflowClient(tracking_uri()).get_metric_history(child.info.run_id, name)
    return [(point.step, point.value) for point in points]


def stage(name: str, body: Callable[[], Result | None] | None = None) -> None:
    run(name, lambda _: (body() if body else None) or Result({"slots": 5}))


def fails() -> None:
    raise RedraftError("It broke.", where="here")


def knob(workspace: Path, **values: object) -> None:
    """Set knobs in params.yaml."""
    path, yaml = workspace / "params.yaml", YAML()
    params = {**yaml.load(path.read_text()), **values}
    path.unlink()
    with path.open("w") as file:
        yaml.dump(params, file)


def test_one_parent_with_a_child_for_each_stage(workspace: Path) -> None:
    curve = [{"step": 1.0, "loss": 3.0}, {"step": 2.0, "loss": 2.0}]
    result = Result({"slots": 5, "name": "x"}, {"rate": 7.0}, {"train": curve}, {"train/loss": 2.0})
    for name in ("vocab", "train"):
        run(name, lambda _: result)
    (parent,) = parents()
    (vocab,), (train,) = children("vocab"), children("train")
    assert {child.data.tags["mlflow.parentRunId"] for child in (vocab, train)} == {parent.info.run_id}
    assert parent.data.params["lr"] == train.data.params["lr"] == "0.002"
    assert parent.data.params["profile.vocab.slots"] == "3072"
    assert parent.data.metrics == {"train/loss": 2.0}
    assert vocab.data.metrics["vocab/slots"] == 5
    assert history(train, "train/loss") == [(1, 3.0), (2, 2.0)]
    assert vocab.info.status == train.info.status == "FINISHED"
    for name in ("vocab", "train"):
        run(name, lambda _: result)
    assert len(parents()) == 2
    assert len(runs()) == 6


def test_the_parent_runs_until_the_pipeline_ends(workspace: Path) -> None:
    def status() -> tuple[str, str]:
        (parent,) = parents()
        return parent.info.status, parent.data.tags.get(mlflow_runs.ERROR_TAG, "")

    def looks() -> None:
        assert status() == ("RUNNING", "")

    stage("vocab", looks)
    assert status() == ("RUNNING", "")
    with pytest.raises(SystemExit):
        stage("train", fails)
    assert status() == ("FAILED", "It broke.")
    (failed,) = children("train")
    assert (failed.info.status, failed.data.tags[mlflow_runs.ERROR_TAG]) == ("FAILED", "It broke.")
    stage("train", looks)
    assert status() == ("RUNNING", "")
    assert [child.info.status for child in children("train")] == ["FAILED", "FINISHED"]
    stage("report", looks)
    assert status() == ("FINISHED", "")
    stage("report")  # the pipeline run has ended: this is another one
    assert [parent.info.status for parent in parents()] == ["FINISHED", "FINISHED"]


def test_a_stage_that_goes_on_beside_a_failed_one_mends_nothing(workspace: Path) -> None:
    """As `dvc repro --keep-going` does."""
    with pytest.raises(SystemExit):
        stage("corpus", fails)
    stage("donor")
    assert [parent.info.status for parent in parents()] == ["FAILED"]


def test_an_error_of_another_kind_is_told_with_its_kind(workspace: Path) -> None:
    def body() -> None:
        raise ValueError("odd\nvalue")

    with pytest.raises(ValueError, match="odd"):
        stage("train", body)
    assert {found.data.tags[mlflow_runs.ERROR_TAG] for found in runs()} == {"ValueError: odd"}


def test_a_partial_run_ends_when_another_begins(workspace: Path) -> None:
    stage("vocab")
    knob(workspace, lr=1e-5)
    stage("vocab", lambda: None)
    assert [parent.info.status for parent in parents()] == ["FINISHED", "RUNNING"]
    knob(workspace, lr=0.002)
    stage("train")  # the first pipeline run goes on after all
    assert [parent.info.status for parent in parents()] == ["RUNNING", "RUNNING"]
    stage("report")
    assert [parent.info.status for parent in parents()] == ["FINISHED", "RUNNING"]


@pytest.mark.parametrize("next_run", ["the same", "another"])
def test_a_process_that_dies_is_told_by_whoever_comes_next(workspace: Path, next_run: str) -> None:
    script = "import os, signal; from redraft.frame.stage import run; "
    script += "run('train', lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert {found.info.status for found in runs()} == {"RUNNING"}
    if next_run == "another":
        knob(workspace, lr=1e-5)
        stage("vocab")
        assert [parent.info.status for parent in parents()] == ["KILLED", "RUNNING"]
    else:
        (workspace / "src").mkdir()
        (workspace / "src" / "mend.py").write_text("")
        stage("train")
        assert [parent.info.status for parent in parents()] == ["RUNNING"]
    child = children("train")[0]
    assert child.info.status == "KILLED"
    assert "without a word" in child.data.tags[mlflow_runs.ERROR_TAG]


def test_an_experiment_is_a_run_of_its_own(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = load_config().params.model_dump()
    plain = track.pipeline_key(params)
    assert plain == track.pipeline_key(dict(reversed(params.items())))
    assert plain != track.pipeline_key({**params, "lr": 5e-5})
    monkeypatch.setenv("DVC_EXP_NAME", "lucky-name")
    assert track.pipeline_key(params) == "lucky-name"


def test_two_people_share_no_parent(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one server with the same commit and params: two workspaces, and two users of one."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workspace}/.store/mlflow.db")
    for person, folder in (("ann", "."), ("bob", "."), ("ann", "other")):
        (workspace / folder).mkdir(exist_ok=True)
        for name in ("params.yaml", "profiles"):
            if not (workspace / folder / name).exists():
                (workspace / folder / name).symlink_to(ROOT / name)
        monkeypatch.setenv("LOGNAME", person)
        monkeypatch.chdir(workspace / folder)
        stage("vocab")
    assert [parent.data.tags["mlflow.user"] for parent in parents()] == ["ann", "bob", "ann"]
    assert len({child.data.tags["mlflow.parentRunId"] for child in children("vocab")}) == 3
    # who begins a run in one workspace does not end those of another
    assert [parent.info.status for parent in parents()] == ["FINISHED", "RUNNING", "RUNNING"]
    monkeypatch.chdir(workspace)
    stage("train")
    (train,) = children("train")
    assert train.data.tags["mlflow.parentRunId"] == parents()[0].info.run_id


def test_user_source_and_commit_are_tagged_as_by_mlflow(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (workspace / "stages").mkdir()
    (workspace / "stages" / "vocab.py").write_text("")
    for command in (["init", "-q"], ["add", "stages"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(sys, "argv", ["stages/vocab.py"])
    stage("vocab")
    names = [f"mlflow.{name}" for name in ("user", "source.name", "source.type", "source.git.commit")]
    expected = {name: resolve_tags()[name] for name in names}
    for found in runs():
        assert {name: found.data.tags[name] for name in names} == expected


def killed_training(rows: list[tuple[float, float]], end: bool = True) -> None:
    def body() -> None:
        for step, loss in rows:
            log("train", {"step": step, "loss": loss})
        if end:
            raise SystemExit(143)

    if end:
        with pytest.raises(SystemExit):
            stage("train", body)
    else:
        stage("train", body)


BROKEN = [(float(step), 99.0) for step in range(1, 6)]
MENDED = [(float(step), 1.0) for step in range(1, 9)]


def test_a_killed_stage_goes_on_in_its_own_run(workspace: Path) -> None:
    killed_training(BROKEN)
    assert {found.info.status for found in runs()} == {"KILLED"}
    killed_training(MENDED, end=False)  # from the state saved at step 4, say: steps 5 and on come again
    (child,) = children("train")
    assert child.info.status == "FINISHED"
    assert history(child, "train/loss") == [*BROKEN, *MENDED[5:]]


@pytest.mark.parametrize("changed", ["src/x.py", "stages/train.py", "artifacts/hidden/manifest.json", "resume"])
def test_a_mended_run_does_not_continue_the_curve_of_the_broken_one(workspace: Path, changed: str) -> None:
    for name in ("src/x.py", "stages/train.py", "artifacts/hidden/manifest.json"):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("fault")
    killed_training(BROKEN)
    if changed == "resume":
        knob(workspace, resume="never")
    else:
        (workspace / changed).write_text("mend!")  # of the same length
    killed_training(MENDED, end=False)
    assert [history(child, "train/loss") for child in children("train")] == [BROKEN, MENDED]
    assert len(parents()) == 1


def test_another_learning_rate_is_another_run(workspace: Path) -> None:
    """C30: MLflow refuses a param that changes, and would end the run that was killed as FAILED."""
    knob(workspace, lr=1e-4)
    killed_training(BROKEN)
    knob(workspace, lr=2e-4)
    killed_training(MENDED, end=False)
    told = [(child.data.params["lr"], child.info.status, history(child, "train/loss")) for child in children("train")]
    assert told == [("0.0001", "KILLED", BROKEN), ("0.0002", "FINISHED", MENDED)]
    assert [found.info.status for found in parents()] == ["KILLED", "RUNNING"]


def test_a_torn_line_stops_nothing(workspace: Path) -> None:
    killed_training([(1.0, 3.0)])
    (path,) = journals()
    path.write_text(path.read_text() + '{"curve": "tr')
    killed_training([(2.0, 2.0)], end=False)
    assert [row["step"] for row in (line["row"] for line in read(path) if "row" in line)] == [1.0, 2.0]
    assert read(path)[-1]["status"] == "FINISHED"
    assert history(children("train")[0], "train/loss") == [(1, 3.0), (2, 2.0)]


def test_a_journal_is_found_by_its_ends(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of 50 journals of 200 rows is read to find the one of a stage."""
    header = {"stage": "train", "key": "k", "params": {"lr": 1}, "tags": {"profile": "smollm"}}
    for number in range(50):
        written = Journal.start({**header, "key": f"k{number % 5}", "stage": f"stage{number}"})
        for step in range(200):
            written.row("train", {"step": float(step), "loss": 1.0})
        written.write({"status": "FAILED"})
        written.lock.release()
    parsed = []
    real = journal_module._parse
    monkeypatch.setattr(journal_module, "_parse", lambda raw: parsed.append(raw) or real(raw))
    found = Journal.start(header)
    assert found.path.name.startswith("train-")
    assert len(parsed) == 50
    Journal.start({**header, "key": "k1", "stage": "stage1"})
    assert len(parsed) < 50 + 51 + 2 * 10  # and the last lines of its pipeline run


def test_a_foreign_run_id_does_not_take_the_stage_in(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    stage("vocab")
    assert [found.info.status for found in children("vocab")] == ["FINISHED"]


def test_two_processes_are_one_run(workspace: Path) -> None:
    """C31: real ranks of torchrun, under a run id that is not theirs."""
    (workspace / "ranks.py").write_text(
        "import os; from pathlib import Path; from redraft.frame.stage import Result, run\n"
        "run('train', lambda _: Path(os.environ['RANK']).touch() or Result({'slots': 5}), lambda _: (2, 'torchrun'))"
    )
    env = {**os.environ, "MLFLOW_RUN_ID": "0" * 32}
    subprocess.run([sys.executable, "ranks.py"], env=env, capture_output=True, text=True, check=True)
    assert Path("0").is_file()
    assert Path("1").is_file()
    assert len(journals()) == len(parents()) == len(children("train")) == 1
    assert len(runs()) == 2
    assert children("train")[0].data.metrics["train/slots"] == 5


@pytest.mark.parametrize("uri", ["./mlruns", "file:///{workspace}/mlruns"])
def test_a_folder_for_runs_is_refused_with_the_ways_out(
    uri: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C29: the stage goes on, and what MLflow did not take goes to a database later."""
    with monkeypatch.context() as folder:
        folder.setenv("MLFLOW_TRACKING_URI", uri.format(workspace=workspace))
        stage("vocab")
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert "sqlite:///mlflow.db" in told
    assert "mlflow migrate-filestore" in told
    assert "redraft publish" in told
    assert not (workspace / "mlruns").exists()
    assert mlflow_runs.send(journals()[0]) > 0
    assert children("vocab")[0].data.metrics["vocab/slots"] == 5


def test_a_missing_server_costs_one_warning(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:secret@127.0.0.1:9")
    began = time.monotonic()
    stage("vocab")
    assert time.monotonic() - began < 15
    told = capsys.readouterr().err
    assert told.count("warning: MLflow at http://127.0.0.1:9") == 1
    assert "secret" not in told
    assert json.loads((workspace / "metrics" / "vocab.json").read_text()) == {"slots": 5}


@pytest.fixture
def silent_server() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes connections and never answers; and those it took."""
    taken: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)


def test_a_server_that_never_answers_stalls_a_training_once(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    silent_server: tuple[str, list[Any]],
) -> None:
    uri, taken = silent_server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(track, "SEND_SECONDS", 0.0)

    def body() -> None:
        asked = len(taken)
        for step in range(1000):
            log("train", {"step": float(step), "loss": 1.0})
        assert len(taken) == asked  # a second was lost at the start: the next attempt is 100 s away

    stage("train", body)
    assert capsys.readouterr().err.count("warning: MLflow") == 1


def test_one_failure_ends_neither_live_tracking_nor_the_last_send(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(track, "SHARE", 1e9)
    down = {"now": True}

    def flaky(*arguments: Any) -> int:
        if down["now"]:
            raise TimeoutError("no answer")
        return mlflow_runs.send(*arguments)

    monkeypatch.setattr(track, "send", flaky)

    def body() -> None:
        log("train", {"step": 1.0, "loss": 3.0})
        down["now"] = False
        log("train", {"step": 2.0, "loss": 2.0})
        (child,) = children("train")
        assert history(child, "train/loss") == [(1, 3.0), (2, 2.0)]
        down["now"] = True

    def back(seconds: float) -> None:
        down["now"] = False

    monkeypatch.setattr(time, "sleep", back)
    stage("train", body)
    (child,) = children("train")
    assert (child.info.status, child.data.metrics["train/slots"]) == ("FINISHED", 5)
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_stage_prints_nothing_of_mlflow_or_its_libraries(tmp_path: Path) -> None:
    """Also when it makes the database."""
    for name in ("params.yaml", "profiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "from redraft.frame.stage import Result, run; run('vocab', lambda _: Result({'slots': 5}))"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "DVC_"))}
    plain, strict = (
        subprocess.run(
            [sys.executable, *flags, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        for flags in ([], ["-W", "always"])
    )
    assert (plain.stdout, plain.stderr) == ("", "")
    assert "SADeprecationWarning" not in strict.stderr
    assert (tmp_path / ".store" / "mlflow.db").is_file()
