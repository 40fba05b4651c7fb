"""A saved state whose files are not what was written is refused by the file's name (C40)."""

import contextlib
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import some_checkpoint
from test_train import FIT

from redraft.frame.errors import RedraftError
from redraft.hidden.rows import HiddenStates
from redraft.target.ends import Ends
from redraft.train.loop import Fitted, fit
from redraft.train.state import Progress, State
from redraft.train.update import Update

States = dict[str, HiddenStates]
PARAMS = FIT.model_copy(update={"epochs": 4, "save_steps": 2, "evals": 12, "patience": 12})
FILES = (
    "best.safetensors", "manifest.json", "model.safetensors", "optimizer.bin", "progress.json", "random_states_0.pkl",
)  # fmt: skip


class CutError(Exception):
    """Ends a training between two steps, as a kill would."""


def begun(states: States, ends: Ends, patch: pytest.MonkeyPatch, stop: int = 7) -> Path:
    """The folder of a training that was cut after `stop` steps."""
    apply, done = Update.apply, [0]

    def cut(self: Update, rate: float) -> None:
        if done[0] == stop:
            raise CutError
        done[0] += 1
        apply(self, rate)

    with patch.context() as patched:
        patched.setattr(Update, "apply", cut)
        with pytest.raises(CutError):
            fit(some_checkpoint(1, scale=1.0), ends, states["train"], states["heldout"], PARAMS)
    AcceleratorState._reset_state(reset_partial_state=True)
    (folder,) = Path(os.environ["REDRAFT_STORE"]).glob("train/*/*/step-*")
    return folder


def go_on(states: States, ends: Ends, resume: str) -> Fitted:
    AcceleratorState._reset_state(reset_partial_state=True)
    return fit(some_checkpoint(1, scale=1.0), ends, states["train"], states["heldout"], PARAMS, resume=resume)


def test_every_file_is_needed_whole(states: States, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(states, ends, monkeypatch)
    assert tuple(sorted(path.name for path in folder.rglob("*"))) == FILES
    kept = folder.parent / "kept"
    folder.rename(kept)
    for name in FILES:
        for harm in ("missing", "cut", "swapped", "one bit"):
            shutil.copytree(kept, folder)
            path = folder / name
            data = path.read_bytes()
            if harm == "missing":
                path.unlink()
            elif harm == "cut":
                path.write_bytes(data[: len(data) // 2])
            elif harm == "swapped":
                path.write_bytes((folder / FILES[FILES.index(name) - 1]).read_bytes())
            else:
                path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
            for resume in ("auto", "must"):
                with pytest.raises(RedraftError, match="damaged") as raised:
                    go_on(states, ends, resume)
                if name != "manifest.json" or harm in ("missing", "cut"):
                    assert str(path) in str(raised.value), (name, harm)
            shutil.rmtree(folder)
    kept.rename(folder)
    whole = go_on(states, ends, "must")
    assert whole.steps == 12


def test_a_state_of_another_step_is_not_taken(
    states: States, ends: Ends, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = begun(states, ends, monkeypatch)
    folder.rename(folder.with_name("step-000000008"))
    with pytest.raises(RedraftError, match=r"progress\.json[\s\S]*that of step 6"):
        go_on(states, ends, "auto")
    never = go_on(states, ends, "never")  # does not look at it
    assert never.steps == 12


def test_an_identity_that_cannot_be_read_is_told(
    states: States, ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(states, ends, monkeypatch).parent
    (folder / "identity.json").write_text("{")
    folder.rename(folder.with_name("0123456789abcdef"))
    go_on(states, ends, "auto")
    assert "identity.json said, which cannot be read" in capsys.readouterr().out


def test_a_state_that_cannot_be_written_is_one_error(
    states: States, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(states, ends, monkeypatch)
    (folder.parent / ".step-000000008.partial").write_text("in the way")
    with pytest.raises(RedraftError, match="cannot be saved") as raised:
        go_on(states, ends, "auto")
    assert ".step-000000008.partial" in str(raised.value)
    assert folder.is_dir()  # the one before is whole
    (folder.parent / ".step-000000008.partial").unlink()
    again = go_on(states, ends, "must")
    shutil.rmtree(folder.parent)
    at_once = go_on(states, ends, "auto")
    assert again.heldout == at_once.heldout
    assert torch.equal(torch.tensor(again.curve[-1]["loss"]), torch.tensor(at_once.curve[-1]["loss"]))


@pytest.mark.parametrize("which", ["weights", "best"])
def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """As torch's and safetensors' writers tell it, neither of which raises OSError."""
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path))
    state, large = State("train", {"params": {}}), torch.zeros(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step: int) -> None:
        best = {"w": large} if which == "best" else None
        fill = (lambda folder: torch.save(large, folder / "x.bin")) if which == "weights" else (lambda folder: None)
        state.save(Progress(step=step), best, fill, True, contextlib.nullcontext)

    save(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RedraftError, match="cannot be saved") as raised:
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(state.folder) in str(raised.value)
    assert "likely cause: no space left" in str(raised.value)
    assert [path.name for path in state.folder.glob("step-*")] == ["step-000000001"]
    save(3)
    assert sorted(path.name for path in state.folder.iterdir()) == ["identity.json", "step-000000003"]
