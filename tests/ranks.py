"""What the tests of many processes run: `torchrun ranks.py JOB.json`; rank 0 writes the result."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import some_checkpoint

from redraft.corpus.corpus import read_corpus
from redraft.frame.errors import RedraftError
from redraft.frame.launch import asked_to_stop, is_main
from redraft.frame.profile import FitParams
from redraft.hidden.rows import HiddenStates, read_manifest
from redraft.target.ends import read_ends
from redraft.train import state
from redraft.train.loop import fit
from redraft.train.state import weights_hash
from redraft.train.step import TTTModule


def die_at(step: int, number: int) -> Callable[[str, dict[str, float]], None]:
    """A listener that sends this process a signal once the curve has the row of `step`."""

    def log(curve: str, row: dict[str, float]) -> None:
        if curve == "train" and row["step"] == step:
            os.kill(os.getpid(), number)

    return log


def fail_on_rank_1() -> None:
    """From its third training forward on, rank 1 raises, and the others wait for it in a collective."""
    forward, done = TTTModule.forward, [0]

    def failing(self: TTTModule, *arguments: object, **keywords: object) -> object:
        done[0] += not keywords.get("exact")
        if done[0] > 3 and not is_main():
            raise OSError(5, "Input/output error", "/hidden/shard-7")
        return forward(self, *arguments, **keywords)  # type: ignore[arg-type]

    TTTModule.forward = failing  # type: ignore[method-assign, assignment]


def save_slowly(marker: Path) -> None:
    """The state that is saved when told to stop takes seconds, as a large one does; `marker` says that it is done."""
    seal = state._seal

    def slow(folder: Path) -> None:
        time.sleep(3 if asked_to_stop() else 0)
        seal(folder)
        if asked_to_stop():
            marker.touch()

    state._seal = slow


def main(job: dict[str, object]) -> None:
    folder = Path(str(job["states"]))
    manifest = read_manifest(folder / "hidden/manifest.json")
    corpora = {split: read_corpus(folder / f"corpus/{split}.safetensors") for split in ("train", "heldout")}
    states = {split: HiddenStates(manifest, split, corpus) for split, corpus in corpora.items()}
    checkpoint = some_checkpoint(1, scale=1.0)
    params = FitParams.model_validate(job["params"])
    ends = read_ends(Path(str(job["target"])))
    processes = int(str(job["processes"]))
    if job.get("fail"):
        fail_on_rank_1()
    if job.get("slow"):
        save_slowly(Path(str(job["slow"])))
    step, number = job.get("die", (0, signal.SIGKILL))  # type: ignore[misc]
    splits, resume = (states["train"], states["heldout"]), str(job.get("resume", "auto"))
    fitted = fit(
        checkpoint, ends, *splits, params, processes=processes, title="job", resume=resume, log=die_at(step, number)
    )
    if is_main():
        weights = weights_hash(checkpoint.drafter.state_dict())
        world = dist.get_world_size() if dist.is_initialized() else 1
        found = {"world": world, "backend": dist.get_backend() if dist.is_initialized() else None, "weights": weights}
        found |= {name: getattr(fitted, name) for name in ("curve", "tokens", "steps")}
        found |= {"start": fitted.start.metrics(), "heldout": fitted.heldout.metrics(), "walks": fitted.heldout.walks}
        Path(str(job["out"])).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(json.loads(Path(sys.argv[1]).read_text()))
    except RedraftError as error:
        sys.exit(str(error))
