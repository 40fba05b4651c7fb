"""Many processes: the same global batch gives the same numbers, whatever cuts it (cases C12, C13, C14)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from clones import answers_to_signals
from conftest import write_states
from test_train import FIT

from redraft.hidden.rows import HiddenStates

TESTS = Path(__file__).parent


def start(
    states: dict[str, HiddenStates], target: Path, out: Path, processes: int, *, die: Any = None, **changes: Any
) -> subprocess.CompletedProcess[str]:
    """Run `fit` in a process of its own, or under torchrun in as many."""
    write_states(states, out.parent)
    params = FIT.model_copy(update={"epochs": 4, **changes}).model_dump(mode="json")
    job = {"states": str(out.parent), "target": str(target), "out": str(out), "processes": processes, "params": params}
    out.with_suffix(".job").write_text(json.dumps(job | ({"die": die} if die else {})))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(TESTS / "ranks.py"), str(out.with_suffix(".job"))]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, preexec_fn=answers_to_signals
    )


def train(states: dict[str, HiddenStates], target: Path, out: Path, processes: int, **changes: Any) -> dict[str, Any]:
    """Run `fit` to its end; what it found."""
    done = start(states, target, out, processes, **changes)
    assert done.returncode == 0, done.stderr[:6000]
    return {**json.loads(out.read_text()), "said": done.stdout + done.stderr}


@pytest.mark.slow
def test_processes_and_accumulation_change_nothing(
    states: dict[str, HiddenStates], llama_folder: Path, tmp_path: Path
) -> None:
    batch = {"batch_tokens": 256, "warmup": 0.5}
    runs = [
        train(states, llama_folder, tmp_path / f"{processes}-{micro}.json", processes, micro_tokens=micro, **batch)
        for processes, micro in ((1, 256), (1, 64), (2, 128), (2, 64))
    ]
    first = runs[0]
    assert [run["world"] for run in runs] == [1, 1, 2, 2]
    assert runs[2]["backend"] == runs[3]["backend"] == "gloo"
    assert first["steps"] >= 4
    for other in runs[1:]:
        assert (other["steps"], other["tokens"]) == (first["steps"], first["tokens"])
        for mine, its in zip(first["curve"], other["curve"], strict=True):
            assert its["lr"] == pytest.approx(mine["lr"], rel=1e-12)
            assert its["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert other["walks"] == first["walks"]  # each document once
        for when in ("start", "heldout"):
            assert other[when]["positions"] == first[when]["positions"]
            for name, value in first[when].items():
                assert other[when][name] == pytest.approx(value, abs=2e-5), name
    rates = [row["lr"] for row in first["curve"]]
    assert rates.index(max(rates)) + 1 in (round(0.5 * first["steps"]), round(0.5 * first["steps"]) + 1)


@pytest.mark.slow
def test_a_process_without_rows_does_not_hang(
    states: dict[str, HiddenStates], llama_folder: Path, tmp_path: Path
) -> None:
    found = train(
        states, llama_folder, tmp_path / "one-row.json", 2, row_tokens=256, batch_tokens=512, micro_tokens=256
    )
    assert found["world"] == 2
    assert found["tokens"] == 4 * states["train"].tokens  # one packed row: the second process has padding alone


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_training_ends_with_the_same_weights(
    states: dict[str, HiddenStates], llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    shape = {"batch_tokens": 128, "save_steps": 2, "evals": 4, "patience": 4}
    whole = train(states, llama_folder, tmp_path / "whole.json", processes, **shape)
    for left in (tmp_path / "store" / "train").iterdir():
        shutil.rmtree(left)
    kills = ((1, signal.SIGKILL), (5, signal.SIGKILL), (6, signal.SIGTERM))
    for step, number in kills if processes == 1 else kills[1:2]:
        done = start(states, llama_folder, tmp_path / "cut.json", processes, die=(step, number), **shape)
        assert done.returncode != 0
        if processes == 1:
            assert done.returncode == (143 if number == signal.SIGTERM else -number)
            assert "Traceback" not in done.stderr
        else:
            assert done.stderr.count("Another process of this training ended without a word.") == 1
    again = train(states, llama_folder, tmp_path / "again.json", processes, **shape)
    assert "goes on after step" in again["said"]
    assert again["weights"] == whole["weights"]
    for name in ("curve", "heldout", "tokens", "steps"):
        assert again[name] == whole[name], name
    other = train(states, llama_folder, tmp_path / "other.json", processes, **shape, lr=1e-3)
    assert "differs in params.lr (was 0.002, now 0.001)" in other["said"]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "group"])
def test_a_terminated_launcher_saves_and_says_so(
    states: dict[str, HiddenStates], llama_folder: Path, tmp_path: Path, whom: str
) -> None:
    """DVC does not pass the signal on, so users send it to the whole group."""
    job, store = tmp_path / "long.job", tmp_path / "store" / "train"
    write_states(states, tmp_path)
    params = FIT.model_copy(update={"epochs": 3000, "save_steps": 20, "batch_tokens": 128}).model_dump(mode="json")
    fields = {"states": str(tmp_path), "target": str(llama_folder), "out": str(tmp_path / "x"), "processes": 2}
    job.write_text(json.dumps({**fields, "params": params, "slow": str(tmp_path / "sealed")}))
    script = f"import sys; sys.argv = ['{TESTS / 'ranks.py'}', '{job}']; from redraft.frame.launch import launch; "
    command = [sys.executable, "-c", script + "launch(2, 'torchrun')"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=answers_to_signals)
    try:
        end = time.monotonic() + 120
        while not list(store.glob("*/*/step-*")):
            assert time.monotonic() < end
            assert launcher.poll() is None
            time.sleep(0.2)
        (os.killpg if whom == "group" else os.kill)(launcher.pid, signal.SIGTERM)
        launcher.wait(timeout=120)
        assert (tmp_path / "sealed").exists()  # it waited for its processes
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 143, said.decode()[-3000:]
    assert b"Traceback" not in said
    (saved,) = store.glob("*/*/step-*")
    progress = json.loads((saved / "progress.json").read_text())
    assert progress["step"] == int(saved.name.removeprefix("step-")) < 9000


@pytest.mark.slow
def test_a_sharded_module_does_what_a_whole_one_does() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(TESTS / "sharded.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[:6000]
    assert "rank 0: the same" in done.stdout
    assert "rank 1: the same" in done.stdout
