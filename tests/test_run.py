"""The real thing: a fresh clone, real `dvc`, every stage on profile `tiny`, then an experiment with another lr."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from clones import copy_of, metrics, ran, run_in, shell
from mlflow import MlflowClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone(finished_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profile `tiny`, after `dvc repro` and a commit."""
    return copy_of(finished_tiny, tmp_path_factory.mktemp("clone") / "redraft")


def test_every_stage_leaves_its_artefacts(clone: Path) -> None:
    assert metrics(clone, "probe")["lossless"] is True
    assert metrics(clone, "probe")["accept_length"] > 1.3  # type: ignore[operator]
    table = metrics(clone, "remap")["first_step"]
    assert table["remap_zero"]["loss"] < min(table["scratch"]["loss"], table["naive"]["loss"])  # type: ignore[index]
    bench = metrics(clone, "bench")
    report = (clone / "report.md").read_text()
    assert report.splitlines()[0].startswith(f"**{bench['verdict']}")
    pictures = [line.split("](")[1].split(")")[0] for line in report.replace("![", "\n![").splitlines() if "![" in line]
    assert sorted(pictures) == sorted(f"report/{path.name}" for path in (clone / "report").glob("*.svg"))
    assert all((clone / picture).read_text().startswith("<svg") for picture in pictures)
    assert not list(clone.rglob("*.partial"))


def test_a_second_repro_does_nothing(clone: Path) -> None:
    began = time.monotonic()
    text = shell("dvc", "repro", cwd=clone)
    assert ran(text) == ["machine"]
    assert time.monotonic() - began < 20  # 5 s on an idle machine; a stage alone would take longer than this
    shell("dvc", "repro", "--dry", "--allow-missing", cwd=clone)
    assert shell("git", "status", "--porcelain", cwd=clone) == ""


def test_a_clone_measures_anew_only_on_another_machine(clone: Path, tmp_path: Path) -> None:
    # metrics are in git: without a machine among its inputs, bench is skipped and a newcomer reads another's figures
    second = tmp_path / "second"
    shell("git", "clone", "--quiet", str(clone), str(second), cwd=clone)
    shutil.copytree(clone / ".dvc/cache/files", second / ".dvc/cache/files")  # not the run cache, which knows the bench
    shell("dvc", "checkout", cwd=second)
    shutil.copytree(clone / ".store", second / ".store")
    assert ran(shell("dvc", "repro", cwd=second)) == ["machine"]
    assert shell("git", "status", "--porcelain", cwd=second) == ""
    lock = (second / "dvc.lock").read_text()
    recorded = re.findall(r"path: artifacts/machine.json\n\s+hash: md5\n\s+md5: (\w+)", lock)
    assert len(set(recorded)) == 1
    assert len(recorded) == 2  # made by machine, read by bench
    (second / "dvc.lock").write_text(lock.replace(recorded[0], "a" * 32))  # as if it was made on another machine
    assert ran(shell("dvc", "repro", cwd=second)) == ["machine", "bench", "report"]


@pytest.mark.parametrize("change", ["+learning_rate=0.1", "ttt_steps=true", "profile=tinny", "lr=.nan"])
def test_what_cannot_be_used_is_refused_even_when_nothing_would_run(clone: Path, change: str) -> None:
    try:
        done = run_in(clone, "dvc", "exp", "run", "-S", change)
    finally:
        shell("git", "checkout", "HEAD", "--", "params.yaml", cwd=clone)  # from HEAD: DVC may have staged it
    assert done.returncode != 0
    assert "machine: " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_experiment_with_another_lr_reruns_train_and_what_follows(clone: Path) -> None:
    text = shell("dvc", "exp", "run", "-S", "lr=5e-5", cwd=clone)
    assert ran(text) == ["machine", "train", "probe", "bench", "report"]
    assert "lr: 5e-05" in (clone / "params.yaml").read_text()
    assert json.loads((clone / "artifacts" / "drafter" / "redraft.json").read_text())["training"]["lr"] == 5e-5
    difference = shell("dvc", "metrics", "diff", "--md", "HEAD", cwd=clone)
    assert "| metrics/summary.json | accuracy " in re.sub(" +", " ", difference)
    assert len(difference.splitlines()) <= 13  # the figures that decide, and no others
    assert "| params.yaml | lr " in " ".join(
        shell("dvc", "params", "diff", "--md", "HEAD", cwd=clone).split(" ")
    ).replace("  ", " ")
    client = MlflowClient(f"sqlite:///{clone}/.store/mlflow.db")
    experiment = client.get_experiment_by_name("redraft/tiny")
    runs = client.search_runs([experiment.experiment_id])
    parents = {run.info.run_id: run for run in runs if "pipeline.run" in run.data.tags}
    assert sorted(run.data.params["lr"] for run in parents.values()) == ["0.002", "5e-05"]
    for number, parent in parents.items():
        stages = {run.data.tags["stage"] for run in runs if run.data.tags.get("mlflow.parentRunId") == number}
        assert stages >= {"train", "probe", "bench", "report"}
        assert {"probe/accept_length", "bench/ratio_at_1", "train/accuracy"} <= parent.data.metrics.keys()


def test_an_experiment_in_a_temporary_workspace_uses_the_store_of_the_main_one(clone: Path) -> None:
    shards = sorted((clone / ".store").glob("*/*.safetensors"))
    text = shell("dvc", "exp", "run", "--temp", "-S", "lr=3e-4", cwd=clone)
    assert "Ran experiment" in text
    assert sorted((clone / ".store").glob("*/*.safetensors")) == shards
    assert "lr: 0.0003" not in (clone / "params.yaml").read_text()
    (name,) = re.findall(r"Ran experiment\(s\): (\S+)", text)
    client = MlflowClient(f"sqlite:///{clone}/.store/mlflow.db")
    experiment = client.get_experiment_by_name("redraft/tiny").experiment_id
    (parent,) = client.search_runs([experiment], f"tags.`pipeline.run` = '{name}'")
    assert parent.data.params["lr"] == "0.0003"
    assert "bench/ratio_at_1" in parent.data.metrics


def test_the_stage_starts_the_processes_that_the_profile_asks_for(clone: Path) -> None:
    profile, before = clone / "profiles" / "tiny.yaml", metrics(clone, "train")
    client = MlflowClient(f"sqlite:///{clone}/.store/mlflow.db")
    experiment = client.get_experiment_by_name("redraft/tiny").experiment_id
    runs = len(client.search_runs([experiment], "tags.stage = 'train'"))
    journals = len(list((clone / ".store" / "journal").glob("train-*.jsonl")))
    text = profile.read_text()
    try:
        profile.write_text(
            text.replace("processes: 1", "processes: 2").replace("micro_tokens: 512\n", "micro_tokens: 256\n")
        )
        shell(sys.executable, "stages/train.py", cwd=clone)
        after = metrics(clone, "train")
    finally:
        profile.write_text(text)
        shell("git", "checkout", "--", "metrics", "plots", "dvc.lock", cwd=clone)
        shell("dvc", "checkout", "--force", cwd=clone)
    assert (after["steps"], after["tokens"]) == (before["steps"], before["tokens"])
    for name, value in before["heldout"].items():  # type: ignore[attr-defined]
        assert isinstance(value, int) or after["heldout"][name] == pytest.approx(value, abs=0.02), name  # type: ignore[index]
    assert len(client.search_runs([experiment], "tags.stage = 'train'")) == runs + 1
    assert len(list((clone / ".store" / "journal").glob("train-*.jsonl"))) == journals + 1
