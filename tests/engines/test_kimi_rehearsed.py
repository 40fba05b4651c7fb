"""Kimi-K2.5 rehearsed: real `dvc repro` of profile `kimi-tiny`, its states from this process and from vLLM."""

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from clones import clone_of, metrics, ran, shell
from conftest import ROOT
from typed import commands_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
FROM_STATES = {"machine", "donor", "audit", "extract", "remap", "train", "probe", "bench", "report"}
"""What runs anew with states from elsewhere: the donor is trained on the target's states too."""
STAGES = {"target", "corpus", "vocab", *FROM_STATES}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = clone_of(tmp_path_factory.mktemp("kimi") / "redraft", "kimi-tiny")
    (folder / ".engines").symlink_to(ROOT / ".engines")
    return folder


@pytest.fixture(scope="module")
def found(clone: Path) -> dict[str, dict[str, Any]]:
    """Metrics of the probe and of the extraction, by what the states came from."""
    profile = clone / "profiles/kimi-tiny.yaml"
    figures = {}
    for engine, stages in (("transformers", STAGES), ("vllm", FROM_STATES)):
        profile.write_text(profile.read_text().replace("engine: transformers ", f"engine: {engine} "))
        began = time.monotonic()
        text = shell("dvc", "repro", cwd=clone)
        print(f"\n{engine}: {time.monotonic() - began:.0f} s")
        assert set(ran(text)) == stages
        figures[engine] = {stage: metrics(clone, stage) for stage in ("extract", "train", "probe", "bench")}
    return figures


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_what_is_served_is_what_was_trained(engine: str, found: dict[str, dict[str, Any]]) -> None:
    probe = found[engine]["probe"]
    assert probe["lossless"]
    assert probe["engine"]["engine"] == "sglang"
    assert probe["accept_length"] > 1.3
    assert probe["parity"]["difference"] == 0


def test_states_of_both_engines_train_drafters_of_the_same_acceptance(found: dict[str, dict[str, Any]]) -> None:
    one, other = found.values()
    assert one["extract"]["train"]["tokens"] == other["extract"]["train"]["tokens"]
    for stage, predicted in (("probe", False), ("train", True)):
        lengths = [(each[stage]["heldout"] if predicted else each[stage])["accept_length"] for each in (one, other)]
        print(f"\n{stage}: accept length {lengths[0]} on states of transformers, {lengths[1]} on states of vLLM")
        assert lengths[0] == pytest.approx(lengths[1], abs=0.1)


IN_SMALL = {
    "AQ-MedAI/Kimi-K2-Instruct-eagle3@COMMIT": "artifacts/donor",
    "AQ-MedAI/Kimi-K25-eagle3@COMMIT": "artifacts/drafter",
    "kimi-k25": "kimi-tiny",
    "--output data/kimi-tiny/": "--output ",
    " --url http://HOST:PORT": "",
    "--tp-size 8 --context-length 128000": "--tp-size 1 --context-length 512",
}
"""What the run book says of the real thing, and what stands for it here, in turn."""


def commands() -> list[str]:
    """Commands of the run book that are ours or DVC's."""
    lines = [line for line in commands_of(ROOT / "docs/kimi-k25.md") if line.startswith(("redraft ", "dvc "))]
    for theirs, ours in IN_SMALL.items():
        lines = [line.replace(theirs, ours) for line in lines]
    return lines


def test_every_command_of_the_run_book_runs(clone: Path, found: dict[str, dict[str, Any]]) -> None:
    """On what the repro left, so a stage that would run again is a fault."""
    assert len(commands()) > 15
    shutil.copy(clone / "metrics/bench.json", clone / "before.json")
    for split in ("train", "heldout"):
        rows = [json.loads(line) for line in (clone / f"data/kimi-tiny/{split}.jsonl").read_text().splitlines()]
        asked = [{"messages": row["messages"][:1]} for row in rows[:3]]
        (clone / f"{split}-prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    for command in commands():
        words = shlex.split(command.replace("redraft ", f"{sys.executable} -m redraft.cli ", 1))
        text = shell(*words, cwd=clone)
        assert set(ran(text)) <= {"machine"}, command
    assert "reasoning_content" in (clone / "train.jsonl").read_text()
