"""The train stage on real files: its figures are those of the drafter that it writes; its processes end together."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SLOTS, extracted, some_checkpoint, some_mapping, write_states
from filelock import FileLock
from test_hidden import PARAMS, corpus_of

from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import read_checkpoint, write_checkpoint
from redraft.frame.curves import read_curve
from redraft.frame.params import load_config
from redraft.hidden.rows import HiddenStates, PackedRows, read_manifest
from redraft.preflight.lint import lint
from redraft.report.page import _first_step
from redraft.target.ends import read_ends, target_hash
from redraft.target.model import Target
from redraft.train.measure import evaluate
from redraft.train.step import TTTModule
from redraft.vocab.build import Vocabulary, write_vocab

LAYERS = (2, 4, 5)
SIZES = {"batch_tokens": 128, "micro_tokens": 64, "row_tokens": 64, "save_steps": 2}


def put(path: Path, **values: object) -> None:
    """Set values of a YAML file by their keys, wherever they stand."""
    text = path.read_text()
    for key, value in values.items():
        text, found = re.subn(rf"^( *){key}: +[^\s#]+", rf"\g<1>{key}: {value}", text, flags=re.M)
        assert found, key
    path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path, target: Target, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose stages up to remap are done, for the tests' Llama; the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDRAFT_STORE", raising=False)
    corpora = {"train": corpus_of([30, 25, 20, 18, 40, 33]), "heldout": corpus_of([30, 25, 20], seed=0)}
    manifest = extracted(target, corpora, PARAMS, target_hash(llama_folder))
    write_states({split: HiddenStates(manifest, split, corpora[split]) for split in corpora}, tmp_path / "artifacts")
    (tmp_path / "artifacts/target").symlink_to(llama_folder)
    initial = some_checkpoint(1, scale=1.0)
    initial.record = {"init": "keep_donor_vocab"}
    assert tuple(target.aux_layers) == LAYERS
    for name in ("initial", "donor"):
        write_checkpoint(tmp_path / "artifacts" / name, initial, LAYERS)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    shutil.copy(ROOT / "profiles/tiny.yaml", tmp_path / "profiles")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    put(tmp_path / "params.yaml", profile="tiny", lr=2e-3, epochs=6, evals=12, patience=12, init="keep_donor_vocab")
    text = (tmp_path / "profiles/tiny.yaml").read_text()
    head, mine, rest = re.split(r"(^train:\n(?:  .*\n)+)", text, maxsplit=1, flags=re.M)
    for key, value in SIZES.items():
        mine = re.sub(rf"{key}: \d+", f"{key}: {value}", mine)
    (tmp_path / "profiles/tiny.yaml").write_text(head.replace("max_length: 128", "max_length: 64") + mine + rest)
    return tmp_path


def stage(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_stage", ROOT / f"stages/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_drafter_that_is_written(folder: Path) -> None:
    """A10 and C46: the headline was the last measurement's; and figures were of weights before they were rounded."""
    put(folder / "params.yaml", lr=0.05, gate="off")
    config = load_config()
    result = stage("train").main(config)
    assert result.metrics
    heldout, rows = result.metrics["heldout"], read_curve(folder / "plots/heldout.csv")
    kept = next(row for row in rows if row["step"] == result.metrics["kept_step"])
    assert 0 < kept["step"] < rows[-1]["step"]
    assert rows[-1]["accept_length"] != kept["accept_length"]
    assert result.headline == {
        "train/loss": heldout["loss_0"],
        "train/accuracy": heldout["accuracy_0"],
        "train/predicted_accept_length": heldout["accept_length"],
    }
    assert (kept["loss"], kept["accept_length"]) == pytest.approx(
        (heldout["loss_0"], heldout["accept_length"]), rel=1e-5
    )
    written = read_checkpoint(folder / "artifacts/drafter")
    assert written.record["heldout"] == heldout
    walks = json.loads((folder / "artifacts/walks.json").read_text())
    assert (walks["slots"], walks["spec_steps"], len(walks["samples"])) == (SLOTS, config.fit().ttt_steps, 3)
    for when, figures in (("start", result.metrics["start"]), ("kept", heldout)):
        rounds, accepted = (sum(column) for column in zip(*walks[when], strict=True))
        assert (figures["verify_steps"], figures["accept_length"]) == (rounds, round(1 + accepted / rounds, 4))
    states = HiddenStates(
        read_manifest(folder / "artifacts/hidden/manifest.json"), "heldout", corpus_of([30, 25, 20], seed=0)
    )
    ends, params = read_ends(folder / "artifacts/target"), config.fit()
    for name, figures in (("drafter", heldout), ("initial", result.metrics["start"])):
        read = read_checkpoint(folder / "artifacts" / name)
        module = TTTModule(read.drafter, read.mapping, ends.embed.float(), ends.head, params.ttt_steps)
        assert evaluate(module, PackedRows(states, params.row_tokens), params).metrics() == figures


def test_training_starts_from_what_the_table_of_first_steps_says(folder: Path) -> None:
    """Both are of the head rows as they are written: filled ones are rounded there."""
    put(folder / "params.yaml", init="remap", fill="fitted", epochs=1, gate="off")
    mapping = some_mapping(3)
    write_vocab(folder / "artifacts/vocab", Vocabulary(mapping, 0, 0), {}, {})
    config = load_config()
    remap = stage("remap").main(config)
    assert remap.metrics
    first = remap.metrics["first_step"]["remap_fitted"]
    trained = stage("train").main(config)
    assert trained.metrics
    start = trained.metrics["start"]
    assert (start["loss_0"], start["accuracy_0"], start["ceiling_0"]) == (
        first["loss"], first["accuracy"], first["ceiling"],
    )  # fmt: skip
    assert remap.headline["remap/first_loss"] == first["loss"]
    undefined = {**first, "loss": None, "loss_interval": None, "accuracy_interval": None}
    page = _first_step(config.params, {**remap.metrics, "first_step": {"remap_fitted": undefined}})
    assert f"| `remap_fitted` | – | {first['accuracy']:.1%} |" in page


def test_the_remap_says_on_which_layers_the_donor_was_trained_and_the_record_travels(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder / "params.yaml", init="remap", fill="zero", epochs=1, gate="off")
    write_vocab(folder / "artifacts/vocab", Vocabulary(some_mapping(3), 0, 0), {}, {})
    layers = stage("remap").main(load_config()).metrics["layers"]
    assert set(layers["shifts"]) == {"-1", "0", "1"}
    assert layers["best"] is None  # of so few documents
    assert "warning" not in capsys.readouterr().out
    stage("train").main(load_config())
    for name in ("initial", "drafter"):
        assert read_checkpoint(folder / "artifacts" / name).record["layers"] == layers
    told = {**layers, "best": 1, "verdict": "The donor was trained on other layers."}
    remap = stage("remap")
    monkeypatch.setattr(remap, "layer_shifts", lambda *given: told)
    remap.main(load_config())
    assert "warning: The donor was trained on other layers." in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_layers_that_do_not_start_with_2_go_through_every_stage(
    architecture: str, folder: Path, target: Target, llama_folder: Path
) -> None:
    """A12: from states of (3, 5, 6) to files that the newest release reads as that."""
    layers, named = (3, 5, 6), folder / "artifacts/target"
    named.unlink()
    shutil.copytree(llama_folder, named)
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    corpora = {split: read_corpus(folder / f"artifacts/corpus/{split}.safetensors") for split in ("train", "heldout")}
    manifest = extracted(replace(target, aux_layers=layers), corpora, PARAMS, target_hash(named))
    (folder / "artifacts/hidden/manifest.json").write_text(json.dumps(manifest))
    write_checkpoint(folder / "artifacts/donor", some_checkpoint(1, scale=1.0), layers, named)
    write_vocab(folder / "artifacts/vocab", Vocabulary(some_mapping(3), 0, 0), {}, {})
    put(folder / "params.yaml", init="remap", fill="zero", epochs=1, gate="off")
    for name in ("remap", "train"):
        stage(name).main(load_config())
    for name in ("donor", "initial", "drafter"):
        drafter = folder / "artifacts" / name
        assert read_checkpoint(drafter).record["aux_layers"] == list(layers)
        assert not [each for each in lint(drafter, named, "0.5.23") if each.rule.startswith("layers")]


def many(folder: Path, *command: str) -> tuple[float, int, str]:
    """Run a command to its end; seconds, exit code, and what it said."""
    began = time.monotonic()
    environment = {**os.environ, "REDRAFT_DEBUG": "0", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return time.monotonic() - began, done.returncode, done.stdout + done.stderr


def test_a_step_has_a_row_for_every_process(folder: Path) -> None:
    put(folder / "profiles/tiny.yaml", processes=3)
    _, code, said = many(folder, "stages/train.py")
    assert code == 1
    assert "3 x 64 = 192" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_what_stops_one_process_stops_all_and_is_told_once(folder: Path) -> None:
    """D A9: the lock, the gate and a state that cannot be saved, each on rank 0 alone, held all others for minutes."""
    put(folder / "profiles/tiny.yaml", processes=2)
    initial = read_checkpoint(folder / "artifacts/initial")
    with torch.no_grad():
        initial.drafter.lm_head.weight.mul_(64)
    write_checkpoint(folder / "artifacts/initial", initial, LAYERS)
    (folder / "artifacts/vocab").mkdir()
    expected = {
        "gate": "The numbers before the first step cannot be right.",
        "lock": "Another process runs this very training.",
        "save": "The state of the training cannot be saved.",
    }
    for case, message in expected.items():
        if case == "save":
            put(folder / "params.yaml", gate="off")
            (lock,) = folder.glob(".store/train/train/*.lock")
            lock.with_suffix("").mkdir(exist_ok=True)
            (lock.with_suffix("") / ".step-000000002.partial").write_text("in the way")
        held = FileLock(next(folder.glob(".store/train/train/*.lock"), folder / "no.lock"))
        if case == "lock":
            held.acquire()
        seconds, code, said = many(folder, "stages/train.py")
        held.release()
        assert code == 1, (case, said)
        assert said.count(message) == 1, (case, said)
        assert "Traceback" not in said, (case, said)
        assert seconds < 60, case
    assert not list(folder.glob("artifacts/drafter"))


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_others(folder: Path) -> None:
    params = load_config().fit().model_dump(mode="json")
    job = {
        "states": "artifacts", "target": "artifacts/target", "out": "out.json", "processes": 2,
        "params": params, "fail": True,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    launcher = ("-m", "redraft.frame.launch", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    seconds, code, said = many(folder, *launcher, str(ROOT / "tests/ranks.py"), "job.json")
    assert code == 1, said
    assert said.count("/hidden/shard-7") == 1, said
    assert "A file of the training cannot be read" in said
    assert "Traceback" not in said, said
    assert seconds < 60


def test_a_process_that_waits_for_one_that_failed_is_ended(tmp_path: Path) -> None:
    """As under NCCL, where the main thread hears neither a signal nor that the connection is gone."""
    script = (
        "import sys, time, types, pathlib, torch\n"
        "from redraft.train.processes import Together\n"
        "one = types.SimpleNamespace(num_processes=2, process_index=0, is_main_process=True, device='cpu',\n"
        "                            reduce=lambda tensor: tensor)\n"
        f"together = Together(one, pathlib.Path({str(tmp_path / 'state')!r}))\n"
        "with together.ending():\n"
        "    print(together.note, flush=True)\n"
        "    time.sleep(600)\n"
    ).replace("\\\n", "\n")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        Path(child.stdout.readline().strip()).write_text("rank 1: no")
        assert child.wait(timeout=30) == 1
    finally:
        child.kill()
