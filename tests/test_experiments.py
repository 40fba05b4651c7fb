"""DVC as people live it, on a finished run of profile `tiny`: what is stale, the run cache, queues, remotes, verify.

Cases C24 (types of `-S`), C25 (what a queued run sees) and C26 (a killed training goes on); C27 is test_diff.py, C28
test_hidden.py.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from clones import copy_of, metrics, ran, run_in, shell, started
from conftest import ROOT

from redraft.verify.compare import compare

pytestmark = [pytest.mark.journey, pytest.mark.timeout(900)]
TABLE = re.findall(r"^\| `([^`]+)` \| ([a-z, ]*)\|$", (ROOT / "docs/experiments.md").read_text(), re.M)
ALWAYS = {"machine"}


@pytest.fixture(scope="module")
def clone(finished_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(finished_tiny, tmp_path_factory.mktemp("experiments") / "redraft")


@pytest.fixture(autouse=True)
def finished(clone: Path) -> None:
    restore(clone)


def restore(clone: Path) -> None:
    shell("git", "reset", "--quiet", "--hard", cwd=clone)
    shell("dvc", "checkout", "--quiet", "--force", cwd=clone)


def test_a_knob_makes_stale_what_the_table_says(clone: Path) -> None:
    assert len(TABLE) > 20
    wrong = {}
    for setting, told in TABLE:
        change(clone, setting)
        stale = set(json.loads(shell("dvc", "status", "--json", cwd=clone))) - ALWAYS
        if stale != set(re.findall(r"\w+", told)):
            wrong[setting] = sorted(stale)
        shell("git", "checkout", "--quiet", "--", "params.yaml", "profiles", cwd=clone)
    assert not wrong


def change(clone: Path, setting: str) -> None:
    """As `dvc exp run -S` does, without a run."""
    from dvc.utils.hydra import apply_overrides

    path, _, rest = setting.rpartition(":")
    apply_overrides(clone / (path or "params.yaml"), [rest])


def test_former_parameters_come_from_the_run_cache_with_types_as_they_were(clone: Path) -> None:
    """C24: YAML 1.1 takes `5e-05` for text."""
    assert set(ran(shell("dvc", "exp", "run", "-S", "lr=5e-05", cwd=clone))) == {"machine", *AFTER}
    assert metrics(clone, "train")["knobs"]["lr"] == 5e-5  # type: ignore[index]
    text = shell("dvc", "exp", "run", "-S", "lr=profile", cwd=clone)
    assert set(ran(text)) <= {"machine", "report"}  # the report is in git, not in the cache, and takes a second
    assert text.count("is cached - skipping run") >= 3
    changed = shell("git", "status", "--porcelain", cwd=clone).split()[1::2]
    assert set(changed) <= {"dvc.lock", "metrics/report_timing.json"}
    restore(clone)
    for value in ("1e3x", "on"):
        refused = run_in(clone, "dvc", "exp", "run", "-S", f"lr={value}")
        assert refused.returncode
        assert "lr" in refused.stderr
        assert "Traceback" not in refused.stderr
        restore(clone)


AFTER = ("train", "probe", "bench", "report")


def test_a_sweep_of_two_workers_shares_the_shards_and_leaves_nothing_behind(clone: Path) -> None:
    shards = sorted((clone / ".store/hidden").rglob("*"))
    shell("dvc", "exp", "run", "--queue", "--name", "sweep", "-S", "lr=1e-5,5e-5", "train", cwd=clone)
    shell("dvc", "queue", "start", "--jobs", "2", cwd=clone)
    for _ in range(180):
        status = shell("dvc", "queue", "status", cwd=clone)
        if not re.search("Queued|Running", status):
            break
        time.sleep(1)
    assert status.count("Success") == 2, status
    for name, lr in (("sweep-1", 1e-5), ("sweep-2", 5e-5)):
        (ref,) = shell("git", "for-each-ref", "--format=%(refname)", f"refs/exps/*/*/{name}", cwd=clone).split()
        assert json.loads(shell("git", "show", f"{ref}:metrics/train.json", cwd=clone))["knobs"]["lr"] == lr
        assert set(ran(shell("dvc", "queue", "logs", name, cwd=clone))) <= {"machine", "train"}
    assert sorted((clone / ".store/hidden").rglob("*")) == shards
    assert shell("git", "status", "--porcelain", cwd=clone) == ""
    for _ in range(30):
        left = [each.pid for each in psutil.process_iter(["cwd"]) if (each.info["cwd"] or "").startswith(str(clone))]
        if not left:
            break
        time.sleep(1)
    assert not left
    assert not [path for path in (clone / ".dvc/tmp/exps").glob("tmp*") if path.is_dir()]


def test_a_queued_run_that_lacks_what_git_does_not_know_says_so(clone: Path) -> None:
    """C25."""
    (clone / "profiles/mine.yaml").write_bytes((clone / "profiles/tiny.yaml").read_bytes())
    try:
        refused = run_in(clone, "dvc", "exp", "run", "--temp", "-S", "profile=mine")
    finally:
        (clone / "profiles/mine.yaml").unlink()
        restore(clone)
    assert refused.returncode
    assert "profiles/mine.yaml" in refused.stdout + refused.stderr
    assert "git" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_killed_training_goes_on(clone: Path) -> None:
    """C26: DVC removes the outputs of a stage before it runs again; the state of the training lies elsewhere."""
    change(clone, "epochs=30")
    command = ["dvc", "repro", "train"]
    process = started(clone, *command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if list((clone / ".store/train").rglob("progress.json")) or process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.poll() is None, "the training ended before it could be killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.5)
    text = shell(*command, cwd=clone)
    assert re.search(r"goes on after step [1-9]", text), text[-2000:]
    assert not list((clone / ".store/train").rglob("progress.json"))
    restore(clone)


def test_a_second_clone_pulls_and_runs_nothing(clone: Path, tmp_path: Path) -> None:
    shell("dvc", "remote", "add", "--default", "--local", "mine", str(tmp_path / "remote"), cwd=clone)
    shell("dvc", "push", cwd=clone)
    second = tmp_path / "second"
    shell("git", "clone", "--quiet", str(clone), str(second), cwd=clone)
    shell("dvc", "remote", "add", "--default", "--local", "mine", str(tmp_path / "remote"), cwd=second)
    assert ran(shell("dvc", "repro", "--pull", "--allow-missing", cwd=second)) == ["machine"]
    assert shell("git", "status", "--porcelain", cwd=second) == ""
    shell("dvc", "pull", "artifacts/drafter", cwd=second)
    weights = "artifacts/drafter/model.safetensors"
    assert (second / weights).read_bytes() == (clone / weights).read_bytes()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `redraft verify` makes its folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_verify_runs_head_anew_and_compares(
    clone: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run that comes out the same is in test_tutorial.py."""
    cache = clone / ".dvc/cache"
    settings = tmp_path / "settings/dvc/config"  # a cache of the user's, which knows what came of all this
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[cache]\n    dir = {cache}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    kept = sorted(cache.rglob("*"))
    (clone / "notes.txt").write_text("not in HEAD")
    shell("git", "add", "notes.txt", cwd=clone)
    done = run_in(clone, "redraft", "verify", "--until", "vocab")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "not in HEAD, and so not verified: notes.txt" in done.stdout
    assert set(ran(done.stdout)) == {"machine", "target", "corpus", "vocab"}
    rows = dict(re.findall(r"^\| (\S+) \| \w+ \| ([^|]+) \|$", done.stdout, re.M))
    assert {path for path, how in rows.items() if how == "same"} >= {
        "artifacts/target",
        "artifacts/vocab",
        "plots/slots.csv",
    }
    assert set(rows.values()) == {"same", "not compared", "compared"}  # and the table's head
    assert sorted(cache.rglob("*")) == kept
    assert not list(temporary.glob("redraft-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_verify_that_is_stopped_leaves_nothing(clone: Path, temporary: Path, number: signal.Signals) -> None:
    process = started(clone, "redraft", "verify", stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            stage = [each for each in inside(temporary) if "stages/target.py" in each.info["cmdline"]]
            if any(sum(each.info["cpu_times"][:2]) > 3 for each in stage):
                break  # it is at work: what only starts ends by itself where its folder is removed
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(30) == 130
        assert not inside(temporary)
        assert not list(temporary.glob("redraft-*"))
    finally:
        process.kill()
        for left in inside(temporary):
            left.kill()


def inside(folder: Path) -> list[psutil.Process]:
    """The processes that work under a folder."""
    found = psutil.process_iter(["cwd", "cmdline", "cpu_times"])
    return [each for each in found if (each.info["cwd"] or "").startswith(str(folder)) and each.info["cmdline"]]


def test_what_is_not_as_committed_is_found(clone: Path, tmp_path: Path) -> None:
    tampered = copy_of(clone, tmp_path / "tampered")
    edited = ("metrics/summary.json", "metrics/bench.json", "metrics/train.json", "report.md")
    for path in edited:
        shell("sed", "-i", "-e", "$a \\ ", path, cwd=tampered)
    (tampered / "report/more.png").write_bytes(b"")
    (tampered / "plots/slots.csv").unlink()
    told_of = {each.path: each.how for each in compare(tampered, clone) if each.failed}
    assert set(told_of) == {*edited, "report", "plots/slots.csv"}
    assert told_of.pop("plots/slots.csv") == "in dvc.lock, but not committed"
    assert all("edited after the run" in how for how in told_of.values())
    restore(tampered)
    (tampered / "report/more.png").unlink()
    lock, text = tampered / "dvc.lock", (tampered / "dvc.lock").read_text()
    lock.write_text(re.sub(r"^  probe:\n(    .*\n)*", "", text, flags=re.M))
    assert {(each.stage, each.path) for each in compare(tampered, clone) if each.failed} == {("probe", "dvc.lock")}
    lock.write_text(text)
    edit(tampered, "metrics/train.json", "0.6")
    (told,) = [each for each in compare(tampered, clone) if each.failed]
    assert told.path == "metrics/train.json"
    assert "heldout.accuracy_0" in told.how
    other = tampered / "dvc.lock"
    machine = re.search(r"path: artifacts/machine.json\n\s+hash: md5\n\s+md5: (\w+)", other.read_text())
    assert machine
    other.write_text(other.read_text().replace(machine[1], "b" * 32))
    assert not [each for each in compare(tampered, clone) if each.failed], "another machine rounds otherwise"
    edit(tampered, "metrics/train.json", "0.1")
    (told,) = [each for each in compare(tampered, clone) if each.failed]
    assert "accuracy_0" in told.how


def edit(folder: Path, path: str, accuracy: str) -> None:
    """Another held-out accuracy near or far, and its hash in `dvc.lock`, as a commit would have it."""
    values = json.loads((folder / path).read_text())
    values["heldout"]["accuracy_0"] = round(values["heldout"]["accuracy_0"] * 1.01, 6) if accuracy == "0.6" else 0.1
    (folder / path).write_text(json.dumps(values))
    lock = folder / "dvc.lock"
    md5 = hashlib.md5((folder / path).read_bytes()).hexdigest()
    place = rf"(path: {re.escape(path)}\n\s+hash: md5\n\s+md5: )\w+"
    lock.write_text(re.sub(place, rf"\g<1>{md5}", lock.read_text()))
