"""The working tree as a repository of its own, where real `dvc` runs the stages with the clone's own code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def environment(cwd: Path) -> dict[str, str]:
    """In which commands run the code of the clone `cwd`, and ours by name, and no settings of ours reach them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_", "REDRAFT_"))}
    # the clone's own code, with bytecode on: __pycache__ must not make a stage stale
    return kept | {"PATH": path, "PYTHONPATH": str(cwd / "src"), "PYTHONDONTWRITEBYTECODE": ""}


def run_in(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the clone's own code."""
    return subprocess.run(command, cwd=cwd, env=environment(cwd), capture_output=True, text=True, check=False)


def answers_to_signals() -> None:
    """For `preexec_fn`: the child can be signalled, though a script in whose background we run has signals ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def started(cwd: Path, *command: str, **how: Any) -> subprocess.Popen[str]:
    """A command that runs beside us, in a session of its own, with the clone's own code; `how` as of Popen."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment(cwd)} | how
    return subprocess.Popen(command, cwd=cwd, text=True, start_new_session=True, preexec_fn=answers_to_signals, **how)


def shell(*command: str, cwd: Path) -> str:
    done = run_in(cwd, *command)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def clone_of(folder: Path, profile: str) -> Path:
    """A clone in `folder` of the working tree, changes and all, with `profile` in params.yaml."""
    shell("git", "clone", "--quiet", str(ROOT), str(folder), cwd=ROOT)
    names = shell("git", "diff", "--name-only", "--no-renames", "HEAD", cwd=ROOT)  # staged or not
    names += shell("git", "ls-files", "--others", "--exclude-standard", cwd=ROOT)
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (folder / name).write_bytes((ROOT / name).read_bytes())
    params = folder / "params.yaml"
    params.write_text(params.read_text().replace("profile: smollm ", f"profile: {profile} "))
    return folder


def commit_all(folder: Path, message: str) -> None:
    for key, value in (("user.name", "test"), ("user.email", "test@localhost"), ("commit.gpgsign", "false")):
        shell("git", "config", key, value, cwd=folder)
    shell("git", "add", "--all", cwd=folder)
    shell("git", "commit", "--quiet", "--allow-empty", "--no-verify", "--message", message, cwd=folder)


def copy_of(finished: Path, folder: Path) -> Path:
    """A copy of a finished clone with cache, store and times, so that nothing in it is stale."""
    shell("cp", "--archive", "--reflink=auto", str(finished), str(folder), cwd=finished)
    return folder


def metrics(folder: Path, stage: str) -> dict[str, object]:
    return json.loads((folder / "metrics" / f"{stage}.json").read_text())


def ran(text: str) -> list[str]:
    """The stages that `dvc repro` or `dvc exp run` ran."""
    return [line.split("'")[1] for line in text.splitlines() if line.startswith("Running stage")]
