"""What a run has in MLflow besides figures: files, inputs, tags, load of the machine; and the model registry."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.numpy import save_file

from redraft.cli.command import main
from redraft.drafter.checkpoint import weights_sha256
from redraft.frame import attachments, load, mlflow_runs
from redraft.frame.attachments import MOST_BYTES, without_secrets
from redraft.frame.errors import RedraftError
from redraft.frame.mlflow_client import tracking_uri
from redraft.frame.params import load_config
from redraft.frame.stage import Result, run
from redraft.frame.track import stage_run


def parent() -> Run:
    client = MlflowClient(tracking_uri())
    number = client.get_experiment_by_name("redraft/smollm").experiment_id
    (found,) = [each for each in client.search_runs([number]) if mlflow_runs.PARENT_TAG in each.data.tags]
    return found


def artifacts(number: str, folder: str = "") -> set[str]:
    listed = MlflowClient(tracking_uri()).list_artifacts(number, folder or None)
    return {path for each in listed for path in (artifacts(number, each.path) if each.is_dir else {each.path})}


def text_of(number: str, path: str, folder: Path) -> str:
    return Path(MlflowClient(tracking_uri()).download_artifacts(number, path, str(folder))).read_text()


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def drafter(workspace: Path) -> str:
    """A folder of a drafter, and its hash."""
    import numpy as np

    write("artifacts/drafter/redraft.json", json.dumps({"target": "t" * 64, "mapping": "m" * 64}))
    write("artifacts/drafter/config.json", "{}")
    save_file({"fc.weight": np.ones((2, 2), np.float32)}, workspace / "artifacts/drafter/model.safetensors")
    return weights_sha256(Path("artifacts/drafter"))


def trained(workspace: Path) -> str:
    """The stages train, probe and report; the hash of the drafter."""
    sha = drafter(workspace)
    outs = [{"path": f"artifacts/corpus/{split}.safetensors", "md5": split * 4} for split in ("train", "heldout")]
    write("dvc.lock", yaml.safe_dump({"stages": {"corpus": {"outs": outs}}}))
    run("train", lambda _: Result({"tokens": 5}))

    def probe(_: object) -> Result:
        write("artifacts/samples.txt", "a sample")
        write(".store/serve/7.log", "started --api-key sk-abc123456 with HF_TOKEN=hf_zzzzzzzz\nready")
        return Result({"accept_length": 2.0})

    write(".store/serve/old.log", "of another run")
    time.sleep(0.05)
    run("probe", probe)

    def report(_: object) -> Result:
        write("report.md", "# page")
        write("report/loss.svg", "<svg/>")
        write("report/large.svg", "x" * (MOST_BYTES + 1))
        return Result(headline={"summary/ratio": 1.25}, tags={"verdict": "ship", "drafter": sha})

    run("report", report)
    return sha


def test_a_run_has_its_page_its_pictures_and_no_secret(workspace: Path, tmp_path: Path) -> None:
    sha = trained(workspace)
    found = parent()
    assert artifacts(found.info.run_id) == {
        "drafter/config.json",
        "drafter/redraft.json",
        "samples.txt",
        "logs/probe/7.log",
        "report.md",
        "report/loss.svg",
    }
    assert text_of(found.info.run_id, "report.md", tmp_path) == "# page"
    log = text_of(found.info.run_id, "logs/probe/7.log", tmp_path)
    assert log == "started --api-key *** with HF_TOKEN=***\nready"
    assert (found.data.tags["verdict"], found.data.tags["drafter"]) == ("ship", sha)
    assert found.data.metrics["summary/ratio"] == 1.25


def test_the_corpora_are_inputs_with_the_hashes_that_dvc_has(workspace: Path) -> None:
    trained(workspace)
    told = {each.dataset.name: (each.dataset.digest, each.tags[0].value) for each in parent().inputs.dataset_inputs}
    assert told == {"smollm-train": ("train" * 4, "training"), "smollm-heldout": ("heldout" * 4, "evaluation")}


def test_a_stage_that_ran_again_replaces_its_files(workspace: Path, tmp_path: Path) -> None:
    for text in ("first", "second"):
        write("artifacts/samples.txt", text)
        with pytest.raises(SystemExit):  # a refusal comes after the figures and files, and the run goes on
            run("probe", lambda _: Result({"accept_length": 1.0}, refused=RedraftError("Too low.")))
    assert text_of(parent().info.run_id, "samples.txt", tmp_path) == "second"


def test_files_of_a_missing_server_come_later_as_the_run_wrote_them(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        trained(workspace)
    write("report.md", "of a later run")
    main_with(["redraft", "publish"])
    assert text_of(parent().info.run_id, "report.md", tmp_path) == "# page"


@pytest.mark.parametrize("lock", ["", "<<<<<<< HEAD\n", "stages: {}", "stages: 3", None])
def test_a_lock_that_tells_no_corpus_costs_no_training(lock: str | None, workspace: Path) -> None:
    if lock is not None:
        write("dvc.lock", lock)
    run("train", lambda _: Result({"tokens": 5}))
    assert (parent().info.status, parent().inputs.dataset_inputs) == ("RUNNING", [])


def test_files_that_cannot_be_read_cost_no_stage(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("report.md").mkdir()
    run("report", lambda _: Result(headline={"summary/ratio": 1.0}))
    assert parent().info.status == "FINISHED"
    assert "files: [Errno 21] Is a directory" in capsys.readouterr().err


def test_files_are_no_reason_to_fail(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store for artifacts that cannot be written: figures are there, and the fault is told by name."""

    def refuse(*_: object) -> None:
        raise PermissionError("no bucket")

    monkeypatch.setattr(MlflowClient, "log_artifact", refuse)
    write("report.md", "# page")
    with stage_run("report", load_config()) as tracked:
        tracked.publish({"x": 1}, {}, {}, {"summary/ratio": 1.0}, {"verdict": "ship"})
    assert parent().data.metrics["summary/ratio"] == 1.0
    assert tracked.refused == {"report.md": "no bucket"}


def test_the_log_of_a_server_that_died_is_there_and_nothing_of_another_run(workspace: Path, tmp_path: Path) -> None:
    write("artifacts/samples.txt", "of another run")

    def probe(_: object) -> Result:
        write(".store/serve/7.log", "--api-key sk-abc123456\nCUDA out of memory")
        raise RedraftError("The server ended.")

    with pytest.raises(SystemExit):
        run("probe", probe)
    found = parent()
    assert (found.info.status, artifacts(found.info.run_id)) == ("FAILED", {"logs/probe/7.log"})
    assert text_of(found.info.run_id, "logs/probe/7.log", tmp_path) == "--api-key ***\nCUDA out of memory"


def test_load_of_the_machine_is_sampled_and_its_thread_ends(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    monkeypatch.setattr(load, "EVERY", 0.05)
    run("train", lambda _: time.sleep(0.4) or Result())
    client = MlflowClient(tracking_uri())
    (child,) = [each for each in client.search_runs(["1"]) if each.data.tags.get("stage") == "train"]
    assert 0 < child.data.metrics["system/system_memory_usage_percentage"] <= 100
    assert "system/cpu_utilization_percentage" in child.data.metrics
    assert not [thread for thread in threading.enumerate() if thread.name == "load"]
    assert capsys.readouterr().err == ""


def registered(*words: str) -> None:
    main_with(["redraft", "register", *words])


def main_with(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        main()


def test_a_drafter_is_registered_with_a_link_and_never_copied(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(workspace)
    registered("--name", "mine")
    registered("--name", "mine", "--source", "s3://drafters/mine/2")
    out = capsys.readouterr().out
    assert "mine, version 2" in out
    client = MlflowClient(tracking_uri())
    one, two = (client.get_model_version("mine", str(number)) for number in (1, 2))
    assert one.tags["folder"] == (workspace / "artifacts/drafter").resolve().as_uri()
    assert two.tags["folder"] == "s3://drafters/mine/2"
    assert (one.tags["verdict"], one.tags["ratio"], one.run_id) == ("ship", "1.25", parent().info.run_id)
    assert not [path for path in artifacts(one.run_id) if path.endswith(".safetensors")]


def test_a_real_server_gets_files_and_registers(
    workspace: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    trained(workspace)
    registered("--name", "mine")
    assert "version 1" in capsys.readouterr().out
    version = MlflowClient(server).get_model_version("mine", "1")
    assert version.tags["folder"].startswith("file://")
    assert "report/loss.svg" in artifacts(version.run_id)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--name", "a/b:c"], "name"),
        (["nowhere", "--name", "x"], "no drafter"),
    ],
)
def test_what_cannot_be_registered_is_told(words: list[str], told: str, workspace: Path) -> None:
    trained(workspace)
    with pytest.raises(SystemExit, match=rf"(?is)error: .*{re.escape(told)}"):
        registered(*words)


def test_a_drafter_that_no_run_made_and_a_server_that_is_away(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter(workspace)
    with pytest.raises(SystemExit, match="No run in MLflow made this drafter"):
        registered("--name", "x")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match="MLflow did not register"):
        registered("--name", "x")


@given(st.text(st.characters(categories=["L", "N"]), min_size=8, max_size=40))
def test_a_secret_never_stays(secret: str) -> None:
    for line in (
        f"--api-key {secret}",
        f"--api-key={secret} --port 3",
        f'"hf_token": "{secret}"',
        f"Authorization: Bearer {secret}",
        f"AWS_SECRET_ACCESS_KEY={secret}",
        f"http://ann:{secret}@host/x",
    ):
        assert secret not in without_secrets(line), line
    assert "tokens: 512" in without_secrets("tokens: 512")


def test_an_environment_variable_is_a_secret_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "plainlookingword")
    assert without_secrets("argv: [plainlookingword]") == "argv: [***]"
    assert attachments.without_secrets("max_total_num_tokens=4096, context_len=512") == (
        "max_total_num_tokens=4096, context_len=512"
    )
