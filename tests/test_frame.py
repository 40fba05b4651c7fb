"""The frame of a stage: atomic writes, errors without traceback, ranks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from redraft.frame import atomic
from redraft.frame.curves import read_curve, write_curve
from redraft.frame.errors import RedraftError
from redraft.frame.stage import Result, run

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


def test_other_ranks_write_and_track_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run("vocab", lambda _: Result({"slots": 5}))
    assert not (workspace / "metrics").exists()
    assert not (workspace / ".store" / "journal").exists()
