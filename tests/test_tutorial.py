"""docs/tutorial.md, typed: every command in one shell, in a fresh clone."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from clones import clone_of, commit_all, environment, ran, shell, started
from conftest import ROOT
from typed import commands_of

from redraft.frame.process import free_port
from redraft.verify.compare import compare

pytestmark = [pytest.mark.journey, pytest.mark.timeout(900)]
CLONE = "git clone "
"""The line that the test does itself, of the working tree."""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, int]]:
    """The clone, all that was printed, and the port of the MLflow UI, which still runs."""
    folder = clone_of(tmp_path_factory.mktemp("tutorial") / "redraft", "smollm")
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name in ("pyproject.toml", "constraints.txt"):  # the environment is there: `make setup` has nothing to do
        os.utime(folder / name, (0, 0))
    commit_all(folder, "the working tree")
    lines = [line for line in commands_of(ROOT / "docs/tutorial.md") if not line.startswith(CLONE)]
    script = "\n".join(f"echo {shlex.quote(f'$ {line}')}\n{line}" for line in lines)
    port, began = free_port(), time.monotonic()
    with (folder.parent / "printed.txt").open("w+") as out:
        env = environment(folder) | {"UI_PORT": str(port)}
        shown = started(folder, "bash", "-eo", "pipefail", "-c", script, env=env, stdout=out, stdin=subprocess.DEVNULL)
        try:
            code = shown.wait(800)
            out.seek(0)
            text = out.read()
            print(f"typed in {time.monotonic() - began:.0f} s")
            assert code == 0, text[-5000:]
            yield folder, text, port
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shown.pid, signal.SIGTERM)


def test_every_command_works_and_nothing_but_what_changed_runs(typed: tuple[Path, str, int]) -> None:
    _, text, _ = typed
    parts = dict(part.partition("\n")[::2] for part in reversed(re.split(r"^\$ ", text, flags=re.M)[1:]))
    first, *_, again = re.findall(r"^\$ dvc repro\n(.*?)^\$ ", text, re.M | re.S)
    assert len(ran(first)) == 12
    assert ran(again) == ["machine"]
    after_lr = {"train", "probe", "bench", "report"}
    assert set(ran(parts["dvc exp run --name lr-4e-3 -S lr=4e-3"])) == {"machine", *after_lr}
    assert "extract" not in ran(parts["dvc exp run --run-all"])
    table = next(told for command, told in parts.items() if command.startswith("dvc exp show"))
    assert all(name in table for name in ("lr-4e-3", "sweep-1", "sweep-2"))
    assert max(map(len, table.splitlines())) < 300
    gated = next(told for command, told in parts.items() if command.startswith("redraft diff tiny --gate"))
    assert gated.count("may fall by") == 3  # `||` would hide a crash
    for command in ("redraft diff HEAD lr-4e-3", "redraft diff tiny"):
        assert "| accept length, predicted |" in parts[command]
        assert "lr` `profile` → `0.004`" in parts[command]
    assert not re.search(r"Warning\b", text), "a library's warning in what a new user sees"


def test_two_runs_of_one_commit_give_the_same_bytes(
    typed: tuple[Path, str, int], finished_tiny: Path, tmp_path: Path
) -> None:
    """The tutorial's first run and the one that other tests begin from: everything that is no time."""
    shell("git", "clone", "--quiet", "--branch", "tiny", str(typed[0]), str(tmp_path / "first"), cwd=tmp_path)
    found = compare(tmp_path / "first", finished_tiny)
    assert not [each for each in found if each.failed]
    assert {each.path for each in found if each.how == "same"} >= {
        "artifacts/drafter",
        "artifacts/walks.json",
        "artifacts/hidden/manifest.json",
        "artifacts/samples.txt",
        "metrics/train.json",
        "metrics/probe.json",
        "plots/train.csv",
    }


def test_the_race_has_a_page(typed: tuple[Path, str, int]) -> None:
    told = json.loads((typed[0] / "race/tiny.json").read_text())
    assert [rung["share"] for rung in told["rungs"]] == [0.3, 1.0]
    assert told["answer"] in {"remap", "keep_donor_vocab", "scratch", "no difference seen"}
    assert (typed[0] / "race/tiny.md").read_text().startswith("# Race: tiny")


def test_mlflow_shows_the_runs(typed: tuple[Path, str, int]) -> None:
    folder, _, port = typed
    for _ in range(60):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
            assert reply.status == 200
            break
        time.sleep(1)
    else:
        pytest.fail("the UI does not answer")
    assert (folder / ".store/mlflow.db").is_file()


def test_nothing_of_it_is_left_running(typed: tuple[Path, str, int]) -> None:
    """But the UI, which the reader ends."""
    for _ in range(60):
        there = [each.info for each in psutil.process_iter(["cwd", "cmdline"])]
        here = [info["cmdline"] or [] for info in there if (info["cwd"] or "").startswith(str(typed[0]))]
        left = [words for words in here if "mlflow" not in " ".join(words) and words[:2] != ["make", "ui"]]
        if not left:
            return
        time.sleep(1)
    pytest.fail(f"still running: {left}")
