# ruff: noqa: F811 (a fixture of another file)
"""`redraft store` in a project with git and DVC, as a user types it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_hidden import corpus_of
from test_train_stage import folder, stage  # noqa: F401

from redraft.cli import main
from redraft.corpus.corpus import write_corpus
from redraft.frame import atomic
from redraft.frame.params import load_config
from redraft.hidden.rows import HiddenStates, read_manifest

MANIFEST = Path("artifacts/hidden/manifest.json")


def redraft(capsys: pytest.CaptureFixture[str], *words: str, code: int | str | None = None) -> str:
    """What a command prints; `code`: how it ends, or what its error says."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["redraft", "store", *words])
        if code is None:
            main()
        else:
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == code or (isinstance(code, str) and code in str(ended.value.code))
    return capsys.readouterr().out


def make() -> dict[str, Any]:
    """Run the stage extract, as `dvc repro` does."""
    stage("extract").main(load_config())
    return read_manifest(MANIFEST)


@pytest.mark.slow
def test_the_store_is_listed_verified_emptied_and_rebuilt(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.rmtree(".store")
    first = make()
    command = {"cwd": folder, "check": True, "capture_output": True, "text": True}
    (folder / "dvc.yaml").write_text(f"stages:\n  extract:\n    cmd: 'true'\n    outs: [{MANIFEST}]\n")
    dvc = [sys.executable, "-m", "dvc"]
    for words in (
        ["git", "init", "-q", "-b", "one"],
        [*dvc, "init", "-q"],
        [*dvc, "commit", "-fq"],
        ["git", "add", "dvc.lock"],
    ):
        subprocess.run(words, **command)  # type: ignore[call-overload]
    identity = ["-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", *identity, "commit", "-qm", "x"], **command)  # type: ignore[call-overload]
    corpora = {"train": corpus_of([30, 22], 5), "heldout": corpus_of([17, 9], 6)}
    for split, corpus in corpora.items():
        write_corpus(folder / f"artifacts/corpus/{split}.safetensors", corpus)
    second = make()
    assert second["states"] == first["states"]
    (row,) = json.loads(redraft(capsys, "ls", "--json"))["hidden"]
    assert row["used by"] == ["one", "workspace"]
    assert not row["stale"]
    assert row["shards"] == len({shard["name"] for each in (first, second) for shard in each["shards"]}) + 2
    assert "one, workspace" in redraft(capsys, "ls")
    assert "0 damaged" in redraft(capsys, "verify")

    redraft(capsys, "rm", row["states"], code="These hidden states are used")
    with pytest.MonkeyPatch.context() as patch:  # nobody can be asked: nothing is removed
        (folder / "elsewhere").mkdir()
        patch.setenv("REDRAFT_STORE", str(folder / ".store"))
        patch.chdir(folder / "elsewhere")
        redraft(capsys, "rm", "--stale", code="What uses the states cannot be told")
    kept = Path(".dvc/cache/files").rename("away")
    redraft(capsys, "rm", "--stale", code="What uses the states cannot be told")
    kept.rename(".dvc/cache/files")
    users = Path(".store/hidden") / row["states"] / "users"
    other = users / "0123456789.json"
    shutil.copy(next(users.glob("*.json")), other)
    assert "workspace 01234567" in redraft(capsys, "ls")
    redraft(capsys, "rm", "--stale", code="Other workspaces make hidden states here")
    other.unlink()
    subprocess.run(["git", "update-ref", "-d", "refs/heads/one"], **command)  # type: ignore[call-overload]
    assert json.loads(redraft(capsys, "ls", "--json"))["hidden"][0]["stale"]
    redraft(capsys, "rm", "--stale")
    (row,) = json.loads(redraft(capsys, "ls", "--json"))["hidden"]
    assert (row["used by"], row["stale"], row["shards"]) == (["workspace"], 0, len(second["shards"]) + 1)

    shutil.rmtree(".store")  # a clone that pulled the manifest
    corpora = {
        split: stage("extract").read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in ("train",)
    }
    with pytest.raises(Exception, match="redraft store rebuild"):
        HiddenStates(second, "train", corpora["train"])
    assert "no hidden states" in redraft(capsys, "ls")
    assert "made" in redraft(capsys, "rebuild")
    assert "nothing to make" in redraft(capsys, "rebuild")
    HiddenStates(second, "train", corpora["train"])

    path = Path(".store/hidden") / second["states"] / f"{second['shards'][0]['name']}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert path.name in redraft(capsys, "verify", code=1)
    atomic.write_json(MANIFEST, {**second, "shards": [{**second["shards"][0], "sha256": "0" * 64}]})
    path.unlink()
    redraft(capsys, "rebuild", code="not those of the manifest")


def test_what_cannot_be_said_to_the_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDRAFT_STORE", raising=False)
    assert "no hidden states" in redraft(capsys, "ls")
    redraft(capsys, "rm", code="Say what to remove")
    redraft(capsys, "rm", "0123", code="no such hidden states")
    redraft(capsys, "rebuild", code="cannot be read")
    assert ROOT.is_dir()
