"""The page: whose figures they are, what to do next, and a dash for what is not known."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, some_checkpoint

from redraft.acceptance import Steps
from redraft.bench.load import Block
from redraft.bench.verdict import summary
from redraft.drafter.checkpoint import weights_sha256, write_checkpoint
from redraft.engines.arm import PLAIN, Arm, chain
from redraft.engines.engine import Generation
from redraft.frame.params import load_config
from redraft.report.page import PLOTTED, STAGES, draw, page

MACHINE = {"processor": "Example 9000", "cores": 4, "memory_gib": 8, "gpus": ["H9", "H9"], "host": "abc"}
ENGINE = {"engine": "sglang", "version": "0.5.23", "device": "cuda", "dtype": "bfloat16"}


def blocks(ms: float, steps: int, spec_steps: int) -> list[Block]:
    counted = Steps.in_turn([1] * steps, spec_steps) if steps else Steps()
    answer = Generation(list(range(20)), ms * 19 / 1000 + 0.1, 0.1, "length", counted, 10)
    return [Block([answer], answer.seconds) for _ in range(3)]


def bench(faster: float = 1.3, **more: Any) -> dict[str, Any]:
    """A bench in which every arm decodes `faster` times as fast as the plain one."""
    arms = [chain(1), chain(2), Arm(None, 3, 4, 8), chain(2, Path("artifacts/donor"))]
    series = {PLAIN: blocks(10, 0, 0)} | {arm: blocks(10 / faster, 9, arm.steps) for arm in arms}
    found = summary({1: series, 4: series}, 20, {16: "not today"})
    return {
        **found, "engine": ENGINE, "arms": {}, "memory_gib": {"plain": 1.0, "3x4x8": 2.0}, "machine": MACHINE,
        "target": "t", "drafter": "d", "asked": {"prompts": 8}, "prompts": 3, **more,
    }  # fmt: skip


@pytest.fixture
def metrics() -> dict[str, Any]:
    found = {stage: json.loads((ROOT / f"metrics/{stage}.json").read_text()) for stage in STAGES if stage != "bench"}
    return {**found, "bench": bench(drafter=found["train"].get("drafter"))}


def text(metrics: dict[str, Any]) -> str:
    return page(load_config(ROOT).params, metrics)


def test_the_first_lines_name_the_machine(metrics: dict[str, Any]) -> None:
    lines = text(metrics).splitlines()
    assert lines[0] == f"**{metrics['bench']['verdict']}**"
    assert lines[2].startswith("Measured on Example 9000, 4 cores, 8 GiB, H9, H9 (host abc); sglang 0.5.23, cuda, bf")
    metrics["bench"]["engine"] = {"engine": "sglang", "joined": "http://there:1"}
    assert text(metrics).splitlines()[2] == (
        "Measured on the server at http://there:1, whose machine is not known, asked from Example 9000, 4 cores, "
        "8 GiB, H9, H9 (host abc); sglang of a version that was not told, device untold, dtype untold."
    )


def test_arms_are_told_in_words(metrics: dict[str, Any]) -> None:
    told = text(metrics)
    for words in ("| plain |", "| 2 drafted |", "| tree of 8 (3 steps, topk 4) |", "| artifacts/donor, 2 drafted |"):
        assert words in told
    assert "plain 1.0, tree of 8 (3 steps, topk 4) 2.0." in told


def test_a_bench_of_another_drafter_is_no_verdict(metrics: dict[str, Any]) -> None:
    """A failed probe leaves the bench of an earlier drafter (fault 1.10): it is told as that."""
    for stage in ("probe", "train"):
        assert "stale" not in text({**metrics, stage: {**metrics[stage], "drafter": None}})  # figures of before
        metrics[stage]["drafter"] = metrics["bench"]["drafter"] = "d"
    assert "stale" not in text(metrics)
    for stage in ("probe", "train"):
        changed = {**metrics, stage: {**metrics[stage], "drafter": "another"}}
        assert text(changed).startswith("**stale: the bench measured another drafter")
        assert "ship" not in text(changed).partition("## Audit")[0]


def test_a_hash_is_of_the_weights(tmp_path: Path) -> None:
    """Two drafters of one vocabulary differ in it; one that is written twice does not."""
    one, other = some_checkpoint(1), some_checkpoint(2)
    other = replace(other, mapping=one.mapping)
    for name, checkpoint in (("one", one), ("again", one), ("other", other)):
        write_checkpoint(tmp_path / name, checkpoint, (2, 4, 5))
    hashes = {name: weights_sha256(tmp_path / name) for name in ("one", "again", "other")}
    assert hashes["one"] == hashes["again"] != hashes["other"]


@pytest.mark.parametrize(
    ("gained", "interval", "faster", "told"),
    [
        (0.0, 0.0, 0.7, "training moved held-out accuracy by +0.0 points, less than ± 0.5 can tell: a higher lr"),
        (0.01, 0.02, 0.7, "by +1.0 points, less than ± 2.0 can tell"),
        (0.0, None, 0.7, "by +0.0 points, less than ± 0.5 can tell"),
        (-0.1, 0.02, 0.7, "by -10.0 points: a lower lr"),
        (0.1, 0.02, 0.7, None),
        (0.0, 0.02, 1.3, None),  # it pays as it is
    ],
)
def test_training_that_changed_nothing_is_what_to_mend_first(
    gained: float, interval: float | None, faster: float, told: str | None, metrics: dict[str, Any]
) -> None:
    """Case B7 of the trial."""
    metrics["bench"] = bench(faster, drafter=metrics["train"]["drafter"])
    metrics["train"]["heldout"]["accuracy_0"] = metrics["train"]["start"]["accuracy_0"] + gained
    metrics["train"]["heldout"]["accuracy_0_interval"] = interval
    found = [line for line in text(metrics).splitlines() if line.startswith("- Concurrency 1:")]
    assert len(found) == 1
    assert (told or found[0]) in found[0]
    assert ("training moved" in found[0]) == bool(told)


def test_two_dtypes_are_explained(metrics: dict[str, Any]) -> None:
    assert "The probe serves in float32" in text(metrics)
    metrics["bench"]["engine"] = {**ENGINE, "dtype": "float32"}
    assert "The probe serves in float32" not in text(metrics)


def leaves(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*at, key))]
    return [at] if isinstance(value, float) else []


UNKNOWN = {
    "remap": ("loss", "loss_interval", "accuracy", "accuracy_interval", "joint", "ceiling"),
    "train": ("loss", "accuracy", "joint", "ceiling", "accept_length"),
    "audit": ("coverage",),
    "vocab": ("coverage_by_source",),
    "bench": ("step_ms", "token_ms", "first_token_ms", "cycle_fit_ms", "draft_share"),
}
"""What a stage may not know: a loss without a position, an interval of one row, a time that cannot be measured."""


@pytest.mark.parametrize("stage", UNKNOWN)
def test_what_is_not_known_is_a_dash_and_no_figure(stage: str, metrics: dict[str, Any], tmp_path: Path) -> None:
    changed = copy.deepcopy(metrics)
    found = [path for path in leaves(changed[stage]) if any(key.startswith(UNKNOWN[stage]) for key in path)]
    if stage == "bench":
        for level in changed[stage]["levels"].values():
            level.pop("curve", None)
    for path in found:
        inner = changed[stage]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = None
    told = text(changed)
    assert found
    assert "None" not in told
    assert "nan" not in told.split("## ")[0]
    assert stage == "vocab" or told.count("–") > text(metrics).count("–")
    curves = {name: [{"step": 1, "slot": 1, "loss": 1.0, "accuracy": None, "joint": 0.1, "moved": 1}] for name in
              ("donor", "train", "heldout", "drift")}  # fmt: skip
    draw(tmp_path, changed, curves)  # type: ignore[arg-type]
    assert all(path.read_text().startswith("<svg") for path in tmp_path.glob("*.svg"))


def stage(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", **environment}
    command = [sys.executable, str(ROOT / "stages/report.py")]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


def test_the_stage_names_no_path_that_will_be_gone(metrics: dict[str, Any], tmp_path: Path) -> None:
    """A queued experiment runs in a temporary workspace, which is removed."""
    for name in ("metrics", "plots", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    old = json.loads((tmp_path / "metrics/bench.json").read_text())
    del old["levels"]["1"]["rows"]["plain"]["tokens_per_second"]
    (tmp_path / "metrics/bench.json").write_text(json.dumps(old))
    done = stage(tmp_path)
    assert done.returncode == 1
    assert "one that an older redraft wrote" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "metrics/bench.json").write_text(json.dumps(metrics["bench"]))
    (tmp_path / "home").mkdir()
    for environment, told in (
        ({}, "report: report.md\n"),
        ({"DVC_ROOT": str(tmp_path / "home")}, "report: report.md, once the experiment is applied\n"),
    ):
        done = stage(tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{metrics['bench']['verdict']}\n{told}")


def layers(best: int | None = 0, half: float | None = 0.01) -> dict[str, Any]:
    """As `redraft.remap.shifts` gives it."""
    names = ("loss", "accuracy", "joint")
    rows = {
        str(shift): {"layers": [2 + shift, 4 + shift, 5 + shift]}
        | {key: value for name in names for key, value in {name: 0.25, f"{name}_interval": half}.items()}
        for shift in (-1, 0, 1)
    }
    for shift in ("-1", "1"):
        told = {f"{name}_difference": -0.125 for name in names}
        rows[shift] |= told | {f"{name}_difference_interval": half for name in names}
    verdict = "Set target.aux_layers: [3, 5, 6] in the profile and run again." if best else "These."
    return {
        "documents": 22, "positions": 2053, "shifts": rows, "left_out": {}, "best": best, "verdict": verdict,
    }  # fmt: skip


def test_which_layers_the_donor_was_trained_on_is_told(metrics: dict[str, Any]) -> None:
    told = "Which layers was the donor trained on?"
    metrics["remap"].pop("layers", None)
    assert told not in text(metrics)  # an older redraft did not measure it
    metrics["remap"]["layers"] = layers()
    page = text(metrics)
    assert f"## {told}\n\nThese.\n" in page
    assert (
        "| inputs of [3, 5, 6] | 0.250 ± 0.010 | -0.125 ± 0.010 | 25.0% ± 1.0% | -12.5% ± 1.0% | 0.250 ± 0.010 | "
        "-0.125 ± 0.010 |"
    ) in page
    assert "| inputs of [2, 4, 5] | 0.250 ± 0.010 | – |" in page
    assert "On 2,053 held-out positions of 22 documents" in page
    metrics["remap"]["layers"] = layers(1)
    assert "\n**Set target.aux_layers: [3, 5, 6] in the profile and run again.**\n" in text(metrics)


def test_shifts_that_were_not_measured_are_told(metrics: dict[str, Any]) -> None:
    metrics["remap"]["layers"] = found = layers(None, None)
    assert "| inputs of [3, 5, 6] | 0.250 | -0.125 |" in text(metrics)
    del found["shifts"]["-1"]
    found["left_out"] = {"-1": "no layer_1 in the shard"}
    assert "Shift -1 was not measured: no layer_1 in the shard." in text(metrics)
    found["shifts"] = {}
    assert "inputs of" not in text(metrics).partition("## Which layers")[2].partition("##")[0]


def sized(metrics: dict[str, Any], head: float = 1e-4, shares: tuple[float, ...] = (0.8, 0.9, 0.92)) -> dict[str, Any]:
    """With the figures of three sizes, the middle one chosen; a slot more takes the head `head` ms longer."""
    sizes = dict(zip((1024, metrics["vocab"]["slots"], 8192), shares, strict=True))
    names = ("coverage_train", "coverage_heldout", "ceiling_heldout", "seen_heldout")
    metrics["vocab"]["by_slots"] = {str(size): dict.fromkeys(names, share) for size, share in sizes.items()}
    metrics["bench"] |= {"slots": metrics["vocab"]["slots"], "head_ms": {str(size): head * size for size in sizes}}
    return metrics


def slots_of(metrics: dict[str, Any], folder: Path) -> str:
    """The section; its picture, and every other that the page refers to, is drawn."""
    told = text(metrics)
    curves = {
        name: [{"step": 1, "slot": 1, "loss": 1.0, "accuracy": 0.1, "joint": 0.1, "moved": 1}] for name in PLOTTED
    }
    draw(folder, metrics, curves)  # type: ignore[arg-type]
    pictures = re.findall(r"\]\(report/(\w+)\.svg\)", told)
    assert sorted(pictures) == sorted(path.stem for path in folder.glob("*.svg"))
    return told.partition("## How many slots?")[2].partition("\n## ")[0]


def test_how_many_slots_is_predicted_and_the_knee_marked(metrics: dict[str, Any], tmp_path: Path) -> None:
    told = slots_of(sized(metrics), tmp_path)
    assert "No other size is predicted to be faster by more than the bench's interval can tell (+0.0%)." in told
    assert re.search(r"\| \*\*3,072\*\* \(chosen, knee\) \| 90\.0% \| .* \| 0\.307 \| ", told)
    assert "“1 drafted” at concurrency 1" in told
    picture = (tmp_path / "slots.svg").read_text()
    assert "chosen, knee" in picture
    assert "Predicted tokens per second" in picture


def test_another_size_is_advised_where_the_bench_could_tell(metrics: dict[str, Any], tmp_path: Path) -> None:
    sized(metrics, head=0.0, shares=(0.3, 0.4, 0.8))
    for row in metrics["bench"]["levels"]["1"]["rows"].values():
        row["accepted_at"] = [0.4, 0.1]
    assert "**Try `vocab.slots: 8192` in the profile: +" in slots_of(metrics, tmp_path)
    for row in metrics["bench"]["levels"]["1"]["rows"].values():
        row["ratio_high"] = 9.0
    assert "No other size is predicted to be faster" in slots_of(metrics, tmp_path)
    dear = slots_of(sized(metrics, head=1e-3, shares=(0.9, 0.91, 0.92)), tmp_path)
    assert "**1,024** (knee)" in dear
    assert "**3,072** (chosen)" in dear


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found["bench"].pop("slots"), "the bench does not tell the cost of a head"),
        (lambda found: found["bench"].update(slots=7), "another number of slots"),
        (lambda found: found["bench"].update(head_ms=None), "the cost of a head was not measured"),
        (lambda found: found["bench"].update(head_ms={"3072": 99.0}), "more than a whole cycle"),
        (lambda found: found["bench"].update(levels={}), "no concurrency of the bench has a valid chain"),
        (
            lambda found: [level.update(word="invalid") for level in found["bench"]["levels"].values()],
            "no concurrency of the bench has a valid chain",
        ),
        (lambda found: found["remap"].update(option="keep_donor_vocab"), "keeps the donor's vocabulary"),
        (
            lambda found: [row.update(seen_heldout=0.0) for row in found["vocab"]["by_slots"].values()],
            "no held-out token that is drafted",
        ),
    ],
)
def test_without_a_prediction_coverage_is_told_and_why(
    change: Callable[[dict[str, Any]], Any], why: str, metrics: dict[str, Any], tmp_path: Path
) -> None:
    change(sized(metrics))
    told = slots_of(metrics, tmp_path)
    assert "Coverage alone" in told
    assert why in told
    assert "| **3,072** (chosen) | 90.0% |" in told
    assert "tokens/s" not in told
    assert "Coverage by number of slots" in (tmp_path / "slots.svg").read_text()


def test_figures_of_before_have_no_such_section(metrics: dict[str, Any], tmp_path: Path) -> None:
    metrics["vocab"].pop("by_slots", None)
    assert slots_of(metrics, tmp_path) == ""
    sized(metrics)
    metrics["vocab"]["by_slots"] = {"3072": metrics["vocab"]["by_slots"]["3072"]}  # a target of few ids
    assert "**3,072** (chosen, knee)" in slots_of(metrics, tmp_path / "one")
