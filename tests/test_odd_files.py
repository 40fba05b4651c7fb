"""Files as other programs leave them: whatever stands there ends in findings or in one clear error, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, llama, save_target, some_checkpoint, some_mapping
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_drafter import as_speculators, twice
from test_lint import FIELDS

from redraft.drafter.checkpoint import read_donor, read_parts, write_checkpoint
from redraft.drafter.mapping_of import read_mapping
from redraft.frame.errors import RedraftError
from redraft.preflight.export import export_for_speculators, export_sglang
from redraft.preflight.lint import describe, lint
from redraft.remap.remap import remap_folder
from redraft.target.config import read_config

AUX, NEW = (2, 4, 5), "0.5.23"
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from([0, 1, 2**31, 2**40, 10**30, -(10**18), 10**400])
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["default", "yarn", "llama3", "bfloat16", "sliding_attention", "LlamaForCausalLMEagle3"])
)
KEYS = st.sampled_from(
    ["rope_theta", "rope_type", "factor", "type", "use_aux_hidden_state", "quant_algo", "a"]
) | st.just("eagle_aux_hidden_state_layer_ids")
JSON = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
SLOW = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(llama().bfloat16(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "drafter"
    write_checkpoint(folder, some_checkpoint(), AUX)
    return folder


def changed(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_everything(drafter: Path, target: Path, out: Path) -> None:
    """Every way in which a drafter is read; a refusal leaves nothing behind."""
    for version in ("0.5.9", NEW):
        found = lint(drafter, target, version, tp=2)
        assert describe(found)
        assert len({(each.rule, each.found) for each in found}) == len(found)
    config = read_config(target)
    for read in (
        lambda: read_mapping(str(drafter)),
        lambda: read_parts(drafter),
        lambda: read_donor(drafter, config, AUX, tell=lambda line: None),
        lambda: remap_folder(drafter, some_mapping(3), "zero", target, out, tell=lambda line: None),
        lambda: export_sglang(drafter, target, NEW, out, aux_layers=AUX, metrics=drafter),
        lambda: export_for_speculators(drafter, str(target), out, aux_layers=AUX, tell=lambda line: None),
    ):
        with suppress(RedraftError):
            read()
        assert not any(path.name.startswith(".") for path in out.parent.iterdir())
        shutil.rmtree(out, ignore_errors=True)


@SLOW
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1), nested=st.booleans())
def test_any_field_of_a_drafters_config(
    changes: dict[str, Any], nested: bool, good: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("any") / "drafter"))
    if nested:
        as_speculators(folder)
    changed(folder / "config.json", changes)
    read_everything(folder, target, folder.parent / "out")


RECORD = ["aux_layers", "mapping", "shape", "training", "heldout", "target", "init", "foreign", "source", "exported"]


@SLOW
@given(changes=st.dictionaries(st.sampled_from(RECORD), JSON, min_size=1))
def test_any_field_of_redraft_json(
    changes: dict[str, Any], good: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("any") / "drafter"))
    changed(folder / "redraft.json", changes)
    read_everything(folder, target, folder.parent / "out")


OF_TARGET = ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "architectures", "model_type"]
OF_TARGET += ["dtype", "torch_dtype", "quantization_config", "rope_scaling", "rope_parameters", "text_config"]
OF_TARGET += ["tie_word_embeddings", "model_max_length", "auto_map"]


@SLOW
@given(
    changes=st.dictionaries(st.sampled_from(OF_TARGET), JSON), absent=st.lists(st.sampled_from(OF_TARGET), max_size=3)
)
def test_any_field_of_a_targets_config(
    changes: dict[str, Any], absent: list[str], good: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any") / "target"
    folder.mkdir()
    fields = {**json.loads((target / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: each for key, each in fields.items() if key not in absent}))
    with suppress(RedraftError):
        assert describe(lint(good, folder, NEW, tp=4))
    with suppress(RedraftError):
        export_sglang(good, folder, NEW, folder.parent / "out")
    assert sorted(path.name for path in folder.parent.iterdir()) in (["target"], ["out", "target"])


METRICS = ["drafter", "mapping", "accept_length", "engine", "levels", "heldout", "slots", "coverage_train", "verdict"]


@SLOW
@given(files=st.lists(st.dictionaries(st.sampled_from(METRICS), JSON), min_size=4, max_size=4), heldout=JSON)
def test_any_metrics(
    files: list[dict[str, Any]], heldout: object, good: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("any") / "drafter"))
    changed(folder / "redraft.json", {"heldout": heldout})
    (folder.parent / "m").mkdir()
    for name, fields in zip(("train", "vocab", "probe", "bench"), files, strict=True):
        (folder.parent / "m" / f"{name}.json").write_text(json.dumps({**fields, "heldout": heldout}))
    with suppress(RedraftError):
        export_sglang(folder, target, NEW, folder.parent / "out", metrics=folder.parent / "m")


BYTES: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"a": ',
    "list": b"[]",
    "number": b"7",
    "null": b"null",
    "deep": b"[" * 100_000,
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "binary": b"\xff\xfe\x00\x01\x80",
}


@pytest.mark.parametrize(
    "name", ["config.json", "redraft.json", "model.safetensors.index.json", "hf_quant_config.json"]
)
@pytest.mark.parametrize("content", list(BYTES))
def test_any_bytes_in_a_drafters_json(name: str, content: str, good: Path, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    (folder / name).write_bytes(BYTES[content])
    read_everything(folder, target, tmp_path / "out")
    assert describe(lint(folder, target, NEW)) != "nothing found" or (name, content) == ("hf_quant_config.json", "")


@pytest.mark.parametrize("name", ["config.json", "target.json"])
@pytest.mark.parametrize("content", list(BYTES))
def test_any_bytes_in_a_targets_json(name: str, content: str, good: Path, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "target"))
    (folder / name).write_bytes(BYTES[content])
    for read in (
        lambda: lint(good, folder, NEW),
        lambda: export_sglang(good, folder, NEW, tmp_path / "out"),
        lambda: remap_folder(good, some_mapping(3), "target", folder, tmp_path / "remapped"),
    ):
        with suppress(RedraftError):
            read()


def test_a_record_with_a_nan_is_refused(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    changed(folder / "redraft.json", {"heldout": {"accept_length": float("nan")}})
    with pytest.raises(RedraftError, match=r"redraft\.json"):
        remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def is_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(path.read_bytes()[:4]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"12345678"),
    "length": lambda path: path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:]),
    "twice": lambda path: path.write_bytes(twice(path.read_bytes())),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "a folder": is_folder,
    "a broken link": lambda path: (path.unlink(), path.symlink_to("gone")),
}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_any_damage_to_a_file(name: str, damage: str, good: Path, target: Path, tmp_path: Path) -> None:
    if name == "config.json" and damage == "twice":
        pytest.skip("a header is meant")
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    DAMAGE[damage](folder / name)
    read_everything(folder, target, tmp_path / "out")
    assert any(each.level == "error" for each in lint(folder, target, NEW)) or damage == "long"
    with pytest.raises(RedraftError):
        read_parts(folder)


@pytest.mark.parametrize(
    "tables",
    [
        {"d2t": torch.zeros(0, dtype=torch.int64)},
        {"d2t": torch.tensor(3)},
        {"d2t": torch.zeros(24).bfloat16()},
        {"d2t": torch.full((24,), 2**63 - 1)},
        {"d2t": torch.zeros(24, 2, dtype=torch.int64)},
        {"t2d": torch.zeros(VOCAB).to(torch.float8_e4m3fn)},
        {"t2d": torch.tensor(True)},
        {"t2d": torch.zeros(0, dtype=torch.bool)},
        {"lm_head.weight": torch.tensor(1.0)},
        {"embed_tokens.weight": torch.tensor(1.0)},
        {"embed_tokens.weight": torch.zeros(VOCAB)},
        {"fc.weight": torch.zeros(3)},
        {"fc.weight": torch.zeros(0, 0)},
    ],
    ids=lambda tables: "-".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in tables.items()),
)
def test_any_table_in_the_weights(tables: dict[str, torch.Tensor], good: Path, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    save_file({**load_file(folder / "model.safetensors"), **tables}, folder / "model.safetensors")
    read_everything(folder, target, tmp_path / "out")
    assert any(each.level == "error" for each in lint(folder, target, NEW))


def test_a_pickle_that_is_no_table(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    (folder / "model.safetensors").unlink()
    for content in (torch.zeros(3), [1, 2], {"state_dict": {"fc.weight": torch.zeros(3)}}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(RedraftError):
            read_parts(folder)


def command(*arguments: object) -> list[str]:
    code = "from redraft.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_the_target_of_the_command_line_may_be_anything(good: Path, target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    for place in (tmp_path, tmp_path / "gone", target / "config.json", good):
        done = subprocess.run(
            command("lint", good, "--target", place, "--version", NEW), capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ") or "error: " in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_may_not_be_read(good: Path, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    (folder / "model.safetensors").chmod(0)
    read_everything(folder, target, tmp_path / "out")


@pytest.mark.parametrize("wrong", [True, False])
def test_a_reader_that_has_left_is_no_traceback(wrong: bool, good: Path, target: Path, tmp_path: Path) -> None:
    """`redraft lint ... | head`: the output is more than a pipe holds, or the pipe is closed at once."""
    folder = Path(shutil.copytree(good, tmp_path / "drafter"))
    if wrong:
        changed(folder / "config.json", {"hidden_act": "x" * 100_000})
    arguments = command("lint", folder, "--target", target, "--version", NEW)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141
