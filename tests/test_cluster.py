"""docs/cluster.md: its script is told to stop and goes on, its two launchers train together. On one machine."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from clones import copy_of, environment, metrics, shell, started
from conftest import ROOT
from dvc.utils.hydra import apply_overrides

from redraft.frame.process import free_port

pytestmark = [pytest.mark.journey, pytest.mark.timeout(600)]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def clone(finished_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(finished_tiny, tmp_path_factory.mktemp("cluster") / "redraft")


def test_the_script_tells_the_training_waits_for_it_and_the_next_job_goes_on(clone: Path) -> None:
    (script,) = [block for block in BLOCKS if "#SBATCH" in block]
    apply_overrides(clone / "params.yaml", ["epochs=40"])
    job = started(clone, "bash", "-c", script.replace("dvc repro", "dvc repro train"))
    state = clone / ".store/train"
    try:
        for _ in range(900):
            if list(state.rglob("progress.json")) or job.poll() is not None:
                break
            time.sleep(0.1)
        assert job.poll() is None, job.communicate()[0][-2000:]
        job.send_signal(signal.SIGTERM)  # to the script alone, as B:TERM does
        code = job.wait(60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert code == 128 + signal.SIGTERM
    assert not [each for each in psutil.process_iter(["cwd"]) if (each.info["cwd"] or "").startswith(str(clone))]
    assert list(state.rglob("progress.json"))
    text = shell("dvc", "repro", "train", cwd=clone)
    assert re.search(r"goes on after step [1-9]", text), text[-2000:]
    assert metrics(clone, "train")["tokens"] > 40 * 1000  # type: ignore[operator]
    shell("git", "reset", "--quiet", "--hard", cwd=clone)
    shell("dvc", "checkout", "--quiet", "--force", cwd=clone)


def test_two_launchers_train_together(clone: Path) -> None:
    (command,) = [block.strip() for block in BLOCKS if block.startswith("torchrun")]
    before = metrics(clone, "train")
    apply_overrides(clone / "profiles/tiny.yaml", ["train.processes=2", "train.micro_tokens=256"])
    command = command.replace(":29500", f":{free_port()}").replace(
        "torchrun", f"{sys.executable} -m torch.distributed.run"
    )
    env = environment(clone) | {"HEAD": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    nodes = [started(clone, "bash", "-c", command, env=env) for _ in range(2)]
    printed = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)[-3000:]
    after = metrics(clone, "train")
    assert (after["tokens"], after["steps"]) == (before["tokens"], before["steps"])
    assert after["drafter"] != before["drafter"]  # sums of two processes round otherwise
    shell("dvc", "commit", "--force", "train", cwd=clone)
    assert '"train"' not in shell("dvc", "status", "--json", cwd=clone)
