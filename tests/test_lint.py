"""Preflight: what SGLang would make of a drafter's files (cases C04, C05, C07, C09, C10, C16, C18)."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HIDDEN, LAYERS, SLOTS, VOCAB, deepseek_config, llama, save_target, some_checkpoint, some_mapping
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_drafter import as_speculators

from redraft.cli import main
from redraft.drafter.checkpoint import Checkpoint, write_checkpoint
from redraft.frame.errors import RedraftError
from redraft.preflight import export as exporting
from redraft.preflight import lint as linting
from redraft.preflight import rules_weights
from redraft.preflight.lint import describe, lint, require_clean
from redraft.preflight.releases import Release
from redraft.vocab.mapping import Mapping

AUX = (2, 4, 5)
VERSIONS = ["0.5.5", "0.5.6", "0.5.8", "0.5.9", "0.5.10.post1", *(f"0.5.{number}" for number in range(11, 24))]
"""In their order."""
NEW = "0.5.23"
LM_HEAD, FC = "lm_head.weight", "fc.weight"
Q = "midlayer.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Fault = Callable[[Path], object]


def make_targets(root: Path) -> dict[str, Path]:
    """A Llama with its weights, and the configurations of a DeepSeek and of a Kimi."""
    made = {"llama": save_target(llama().bfloat16(), root / "llama")}
    text = {**deepseek_config().to_dict(), "dtype": "bfloat16", "architectures": ["DeepseekV3ForCausalLM"]}
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    for name, fields in (("deepseek", text), ("kimi", kimi)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(fields))
        made[name] = root / name
    return made


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "drafter"
    write_checkpoint(folder, some_checkpoint(), AUX)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "drafter"))


def levels(findings: list[Any]) -> set[tuple[str, str]]:
    return {(finding.level, finding.rule) for finding in findings}


def errors(findings: list[Any]) -> set[str]:
    return {finding.rule for finding in findings if finding.level == "error"}


@pytest.mark.parametrize("family", ["llama", "deepseek", "kimi"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_drafter_of_redraft_passes(good: Path, targets: dict[str, Path], family: str, version: str) -> None:
    old = Release.parse(version) < (0, 5, 14)
    expected = {("note", "tp-capture")} if old else set()
    if family == "kimi" and version in VERSIONS[:4]:
        expected |= {("error", "target-hooks")}
    assert levels(lint(good, targets[family], version)) == expected


def config(changes: dict[str, object] | None = None, *absent: str, eagle: object = None) -> Fault:
    def fault(folder: Path) -> None:
        path = folder / "config.json"
        fields = {**json.loads(path.read_text()), **(changes or {})}
        if eagle is not None:
            fields["eagle_config"] = eagle
        path.write_text(json.dumps({name: value for name, value in fields.items() if name not in absent}))

    return fault


def weights(change: Callable[[Tensors], object]) -> Fault:
    """A change of the tensors; the metadata stays."""

    def fault(folder: Path) -> None:
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, metadata)

    return fault


def rename(old: str, new: str) -> Fault:
    return weights(
        lambda t: [t.update({name.replace(old, new, 1): t.pop(name)}) for name in list(t) if name.startswith(old)]
    )


def record(change: Callable[[dict[str, Any]], object]) -> Fault:
    def fault(folder: Path) -> None:
        fields = json.loads((folder / "redraft.json").read_text())
        change(fields)
        (folder / "redraft.json").write_text(json.dumps(fields))

    return fault


def foreign(folder: Path) -> None:
    """As if another tool had written it."""
    (folder / "redraft.json").unlink()
    path = folder / "model.safetensors"
    save_file(load_file(path), path)


def both(*faults: Fault) -> Fault:
    return lambda folder: [fault(folder) for fault in faults]


def offsets(values: object) -> Fault:
    return weights(lambda t: t.update({"d2t": torch.as_tensor(values)}))


def edit_d2t(slot: int, id_: int) -> Fault:
    return weights(lambda t: t["d2t"].__setitem__(slot, id_ - slot))


IDS = some_mapping(0).ids
OTHER = some_mapping(7)
SHIFTED = some_checkpoint().mapping.d2t
IN_EAGLE = {"use_aux_hidden_state": True}


def nested(*ids: int) -> Fault:
    return config(eagle={**IN_EAGLE, "eagle_aux_hidden_state_layer_ids": list(ids)})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def with_embedding(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    embed = change(llama().bfloat16().get_input_embeddings().weight.detach().clone())
    return weights(lambda t: t.update({"embed_tokens.weight": embed}))


def cast(dtype: torch.dtype) -> Fault:
    return weights(lambda t: t.update({n: x.to(dtype) for n, x in t.items() if x.is_floating_point()}))


NO_D2T = weights(lambda t: [t.pop("d2t"), t.pop("t2d")])
FULL = {"draft_vocab_size": None}
Row = tuple[str, Fault, dict[str, Any], set[tuple[str, str]]]


def fails(rule: str, fault: Fault, *also: str, **asked: Any) -> Row:
    """`layers-untold` and the like are notes wherever they come."""
    notes = {"layers-untold", "tp-capture"} | ({"rope-scaled"} if rule == "rope-conflict" else set())
    return rule, fault, asked, {("note" if name in notes else "error", name) for name in (rule, *also)}


def tells(rule: str, fault: Fault, *also: str, **asked: Any) -> Row:
    return rule, fault, asked, {("note", name) for name in (rule, *also)}


def nothing(folder: Path) -> None:
    pass


UNTOLD = ("layers-untold",)
FAULTS: list[Row] = [
    # files
    fails("config-unreadable", lambda f: (f / "config.json").write_text("{")),
    fails("config-unreadable", lambda f: (f / "config.json").write_text("[]")),
    fails("config-unreadable", lambda f: (f / "config.json").unlink()),
    fails("weights-missing", lambda f: (f / "model.safetensors").unlink()),
    fails(
        "weights-missing",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "gone.safetensors"}}'),
    ),
    fails("weights-format", pickled),
    fails("weights-format", both(pickled, lambda f: (f / "model.safetensors").unlink())),
    fails("weights-unreadable", lambda f: (f / "model.safetensors").write_bytes(b"1234")),
    fails("weights-unreadable", lambda f: (f / "model.safetensors.index.json").write_text("[]")),
    # class and sizes
    fails("architecture", config({"architectures": ["LlamaForCausalLM"]})),
    fails("architecture", config(None, "architectures")),
    fails("architecture", config({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}), version="0.5.11"),
    tells("architecture", config({"architectures": ["Eagle3DeepseekV2ForCausalLM"]})),
    fails("architecture", as_speculators, "embed-differs"),
    fails("model-type", config({"model_type": "kimi_k2"})),
    fails("model-type", config(None, "model_type")),
    fails("hidden-act", config({"hidden_act": "gelu"})),
    fails("num-layers", config({"num_hidden_layers": 2}), version="0.5.11"),
    fails("num-layers", config({"num_hidden_layers": 2})),
    fails("num-layers", config(None, "num_hidden_layers")),
    fails("config-field", config(None, "intermediate_size")),
    fails("config-field", config({"hidden_size": None})),
    fails("config-field", config(None, "rms_norm_eps")),
    fails("vocab-size", config({"vocab_size": VOCAB - 4})),
    fails("hidden-size", config({"hidden_size": HIDDEN + 4}), "shape"),
    fails("target-hidden-size", config({"target_hidden_size": None})),
    fails("target-hidden-size", config({"target_hidden_size": 48}), "layers-count"),
    tells("target-hidden-size", config({"target_hidden_size": HIDDEN})),
    tells("dtype-config", config({"dtype": "float32"})),
    tells("dtype-config", config(None, "dtype", "torch_dtype")),
    # head
    fails("draft-vocab-size", config(None, "draft_vocab_size")),
    fails("draft-vocab-size", config(FULL), "d2t-length"),
    fails("tied-head", config({"tie_word_embeddings": True})),
    fails("head-rows", config({"draft_vocab_size": SLOTS + 8})),
    # names
    fails("lm-head-missing", weights(lambda t: t.pop(LM_HEAD))),
    fails("name-missing", weights(lambda t: t.pop("midlayer.hidden_norm.weight"))),
    fails("name-missing", weights(lambda t: t.pop(FC))),
    fails("name-prefix", rename("", "module.")),
    fails("name-prefix", rename(LM_HEAD, f"draft_model.{LM_HEAD}")),
    fails("name-prefix", rename("midlayer.", "model.model.layers.0.")),
    fails("name-layers0", rename("midlayer.", "layers.0."), version="0.5.11"),
    fails("name-layers0", rename("midlayer.", "model.layers.0."), version="0.5.10.post1"),
    fails("name-unknown", weights(lambda t: t.update({"input_norm.weight": torch.ones(3 * HIDDEN)}))),
    fails("name-twice", weights(lambda t: t.update({f"model.{FC}": t[FC].clone()}))),
    fails("qkv-bias", weights(lambda t: t.update({f"{Q}.bias": torch.ones(32).bfloat16()}))),
    fails("bias", config({"attention_bias": True})),
    fails("bias", config({"bias": True})),
    # shapes and values
    fails("shape", weights(lambda t: t.update({f"{Q}.weight": torch.ones(32, HIDDEN).bfloat16()}))),
    fails("shape", weights(lambda t: t.update({FC: torch.ones(HIDDEN, 36).bfloat16()}))),
    fails("shape", weights(lambda t: t.update({LM_HEAD: torch.ones(SLOTS, 8).bfloat16()}))),
    fails("layers-count", weights(lambda t: t.update({FC: t[FC][:, : 2 * HIDDEN].clone()}))),
    fails("dtype", weights(lambda t: t.update({FC: t[FC].to(torch.float8_e4m3fn)}))),
    fails("dtype", weights(lambda t: t.update({FC: t[FC].double()}))),
    tells("dtype", cast(torch.float16)),
    fails("not-finite", weights(lambda t: t[FC].__setitem__((3, 4), float("nan")))),
    fails("not-finite", weights(lambda t: t[LM_HEAD].__setitem__((3, 4), float("-inf")))),
    fails("embed-differs", with_embedding(lambda e: e.flip(0))),
    fails("embed-differs", with_embedding(lambda e: e[:-4]), "shape"),
    tells("embed-unread", with_embedding(lambda e: e), family="deepseek"),
    # mapping
    fails("d2t-missing", NO_D2T),
    fails("d2t-dtype", weights(lambda t: t.update({"d2t": t["d2t"].float()}))),
    fails("d2t-dtype", weights(lambda t: t.update({"d2t": t["d2t"][None]}))),
    tells("d2t-dtype", weights(lambda t: t.update({"d2t": t["d2t"].int()}))),
    fails("d2t-length", offsets(SHIFTED[:-1]), "t2d-differs", "mapping-hash"),
    fails("d2t-zeros", offsets(np.zeros(SLOTS, int)), "t2d-differs", "mapping-hash"),
    fails("d2t-absolute", offsets(IDS)),
    ("d2t-absolute", both(offsets(IDS), weights(lambda t: t.pop("t2d"))), {},
     {("error", "d2t-absolute"), ("note", "t2d-missing")}),
    fails("d2t-range", edit_d2t(SLOTS - 1, VOCAB), "t2d-differs"),
    fails("d2t-range", edit_d2t(0, -1), "t2d-differs"),
    fails("d2t-repeated", edit_d2t(3, int(IDS[2])), "t2d-differs"),
    tells("t2d-missing", weights(lambda t: t.pop("t2d"))),
    fails("t2d-form", weights(lambda t: t.update({"t2d": t["t2d"][:-1].clone()}))),
    fails("t2d-form", weights(lambda t: t.update({"t2d": t["t2d"].long()}))),
    fails("t2d-form", weights(lambda t: t.update({"t2d": 2 * t["t2d"].to(torch.uint8)}))),
    fails("t2d-differs", weights(lambda t: t.update({"t2d": t["t2d"].flip(0)}))),
    fails(
        "mapping-hash",
        weights(lambda t: t.update({"d2t": torch.from_numpy(OTHER.d2t), "t2d": torch.from_numpy(OTHER.t2d)})),
    ),
    fails("mapping-hash", record(lambda r: r.update(mapping=OTHER.hash))),
    # layers
    fails("layers-off", config(eagle={"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]})),
    tells("layers-absent", config(eagle=IN_EAGLE)),
    tells("layers-absent", config(None, "eagle_config")),
    tells("layers-top-level", config({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, eagle=IN_EAGLE)),
    fails("layers-top-level", config({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, eagle=IN_EAGLE)),
    fails("layers-count", nested(1, 4), "layers-shifted"),
    fails("layers-count", nested(), "layers-shifted"),
    fails("layers-range", nested(1, 3, LAYERS - 1), "layers-shifted"),
    fails("layers-range", nested(1, 3, 3), "layers-shifted"),
    fails("layers-range", config(eagle={"eagle_aux_hidden_state_layer_ids": "1,3,4"})),
    fails("layers-shifted", nested(2, 4, 5)),
    fails("layers-shifted", nested(2, 4, 5), family="deepseek", version="0.5.12"),
    fails("layers-shifted", record(lambda r: r.update(aux_layers=[3, 4, 5]))),
    fails("layers-shifted", nothing, trained=(1, 3, 4)),
    fails(
        "layers-shifted",
        both(nested(2, 3, 4), record(lambda r: r.update(aux_layers=[3, 4, 5]))),
        version="0.5.10.post1",
    ),
    tells("layers-untold", foreign),
    fails(
        "fc-skipped",
        both(weights(lambda t: t.update({FC: t[FC][:, :HIDDEN].clone()})), nested(3)),
        trained=(4,),
    ),
    # positions and rope
    fails("positions", nothing, context=8192),
    fails("positions", config(None, "max_position_embeddings"), context=4096),
    fails("positions", config({"max_position_embeddings": 255})),
    fails("positions", config({"model_max_length": 255})),
    tells("trained-length", record(lambda r: r.update(training={"row_tokens": 128}))),
    fails("rope-theta", config(None, "rope_theta")),
    tells("rope-theta", config({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_theta")),
    fails("rope-theta", config({"rope_parameters": {"rope_theta": 5e4}}, "rope_theta"), version="0.5.9"),
    tells("rope-theta", config({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta"), "tp-capture", version="0.5.9"),
    fails("rope-theta", config({"rope_theta": "10000"})),
    fails("rope-conflict", config({"rope_parameters": {"rope_theta": 5e4}}), "config-edited"),
    fails("rope-conflict", config({"rope_parameters": {"rope_theta": 5e4}}), version="0.5.9"),
    fails("rope-conflict", both(foreign, config({"rope_parameters": {"rope_type": "yarn", "factor": 2.0},
                                                 "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})),
          "layers-untold", "rope-scaled"),
    fails("rope-scaled", both(foreign, config({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}})),
          "layers-untold", version="0.5.9"),
    fails("rope-scaled", config({"rope_scaling": {"type": "yarn", "factor": 4}})),
    fails("rope-scaled", config({"rope_is_neox_style": False})),
    tells("rope-scaled", both(foreign, config({"partial_rotary_factor": 0.5})), *UNTOLD),
    # what redraft.json remembers
    fails("config-edited", config({"rope_theta": 500000.0})),
    fails("config-edited", config({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4})),
    tells("record-unreadable", lambda f: (f / "redraft.json").write_text("{"), *UNTOLD),
    tells("record-unreadable", lambda f: (f / "redraft.json").write_text("[]"), *UNTOLD),
    tells("target-untold", record(lambda fields: fields.update(target="a")), family="deepseek"),
    fails("draft-quantised", config({"quantization_config": {"quant_method": "fp8"}})),
    tells("draft-window", config({"sliding_window": 2048})),
    fails("other-target", record(lambda fields: fields.update(target="of another"))),
    # norms
    fails("norm-output", config({"norm_output": True})),
    tells("norm-output", config({"norm_output": True}), "tp-capture", version="0.5.11"),
    tells("norm-output", both(foreign, config({"norm_output": True})), *UNTOLD),
    tells("norm-before-residual", config({"norm_before_residual": True})),
    fails("norm-flag", config({"fc_norm": True}), "name-missing"),
    fails("norm-flag", config({"use_aux_norm": True}), version="0.5.11"),
    fails("norm-flag", config(eagle={"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
          version="0.5.22"),
    # server and target
    fails("algorithm", nothing, algorithm="EAGLE"),
    fails("target-hooks", nothing, family="kimi", version="0.5.9"),
    fails("target-hooks", nothing, family="deepseek", version="0.5.3"),
    tells("release-unread", nothing, version="0.6.0"),
    tells("release-unread", nothing, version="0.0.0.dev1+gf97c09dac"),
    tells("release-unread", nothing, version="nightly-20261101"),
    fails("tp-heads", nothing, tp=3),
    fails("tp-heads", nothing, tp=8),
    tells("tp-capture", nothing, version="0.5.13"),
]  # fmt: skip


def asked_of(targets: dict[str, Path], asked: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in asked.items() if name not in ("family", "version")}
    return {"target": targets[asked.get("family", "llama")], "version": asked.get("version", NEW), **rest}


@pytest.mark.parametrize(
    ("rule", "fault", "asked", "expected"), FAULTS, ids=[f"{i}-{row[0]}" for i, row in enumerate(FAULTS)]
)
def test_each_fault_gives_its_finding_and_no_other(
    rule: str,
    fault: Fault,
    asked: dict[str, Any],
    expected: set[tuple[str, str]],
    folder: Path,
    targets: dict[str, Path],
) -> None:
    fault(folder)
    asked = asked_of(targets, asked)
    if Release.parse(asked["version"]) < (0, 5, 14):
        expected = expected | {("note", "tp-capture")}
    if Release.parse(asked["version"]) < (0, 5, 5):
        expected = expected | {("note", "release-unread")}
    found = lint(folder, **asked)
    assert levels(found) == expected, describe(found)
    assert len({(f.rule, f.found) for f in found}) == len(found)


def copy_of(target: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(target, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


TARGET_FAULTS: list[tuple[str, str, dict[str, object]]] = [
    ("target-unread", "llama", {"architectures": ["PhiForCausalLM"]}),
    ("target-quantised", "llama", {"quantization_config": {"quant_method": "compressed-tensors"}}),
    ("target-quantised", "kimi", {"quantization_config": {"quant_method": "compressed-tensors"}}),
]


@pytest.mark.parametrize(("rule", "family", "changes"), TARGET_FAULTS)
def test_a_target_worth_a_note(
    rule: str, family: str, changes: dict[str, object], good: Path, targets: dict[str, Path], tmp_path: Path
) -> None:
    assert levels(lint(good, copy_of(targets[family], tmp_path / "target", **changes), NEW)) == {("note", rule)}


@pytest.mark.parametrize(
    ("heads", "shared", "inner", "tp", "fits"),
    [
        (64, 8, 128, 8, True),
        (64, 8, 128, 16, True),  # fewer key heads than GPUs: each is on two of them
        (64, 6, 128, 8, False),
        (6, 6, 128, 4, False),
        (8, 8, 100, 8, False),
        (64, 64, 128, 3, False),
        (8, 2, 128, 1, True),
    ],
)
def test_what_tensor_parallelism_has_to_divide(
    heads: int, shared: int, inner: int, tp: int, fits: bool, folder: Path, targets: dict[str, Path]
) -> None:
    config({"num_attention_heads": heads, "num_key_value_heads": shared, "intermediate_size": inner})(folder)
    assert ("tp-heads" in errors(lint(folder, targets["llama"], NEW, tp=tp))) != fits
    assert "tp-heads" not in errors(lint(folder, targets["llama"], NEW))


def test_one_gpu_captures_whole_sums(good: Path, targets: dict[str, Path]) -> None:
    assert levels(lint(good, targets["llama"], "0.5.13", tp=1)) == set()
    assert levels(lint(good, targets["llama"], "0.5.13", tp=2)) == {("note", "tp-capture")}
    with pytest.raises(RedraftError, match="--tp-size"):
        lint(good, targets["llama"], NEW, tp=0)


SCALED: list[tuple[dict[str, object], int, int]] = [
    # rope fields of the target, positions of 256 on transformers 4, on transformers 5
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024, 1024),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512, 512),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256, 256),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256, 256),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1024, 256),
    ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 256, 1024),
    ({"rope_scaling": None}, 256, 256),
    ({"model_max_length": 512}, 512, 512),
]


@pytest.mark.parametrize(("fields", "old", "new"), SCALED)
def test_the_context_that_a_release_derives_from_the_target(
    fields: dict[str, object], old: int, new: int, good: Path, targets: dict[str, Path], tmp_path: Path
) -> None:
    target = copy_of(targets["llama"], tmp_path / "target", **{"rope_parameters": None, **fields})
    for version, context in (("0.5.9", old), (NEW, new)):
        found = {each.rule: each.found for each in lint(good, target, version)}
        assert ("positions" in found) == (context > 256), version
        assert f"served context {context}" in found.get("positions", f"served context {context}")
        assert "positions" not in errors(lint(good, target, version, context=256))


def test_the_positions_of_a_scaled_drafter_are_multiplied_too(folder: Path, targets: dict[str, Path]) -> None:
    both(foreign, config({"rope_scaling": {"type": "linear", "factor": 4.0}}))(folder)
    assert "positions" not in errors(lint(folder, targets["llama"], NEW, context=1024))
    assert "positions" in errors(lint(folder, targets["llama"], NEW, context=1025))


@pytest.mark.parametrize(
    "text", ["0.0.0.dev1+gf97c09dac", "0.0.0", "main", "latest", "0.5.23-12-gabcdef", "0.5.22.dev3+g12"]
)
def test_a_build_without_a_number_is_taken_for_the_newest_with_a_note(
    text: str, good: Path, targets: dict[str, Path]
) -> None:
    for family in ("llama", "kimi"):
        found = lint(good, targets[family], text)
        assert levels(found) == {("note", "release-unread")}
        assert "taken for" in found[0].effect


def test_a_candidate_is_older_than_its_release(good: Path, targets: dict[str, Path]) -> None:
    assert errors(lint(good, targets["kimi"], "0.5.10rc0")) == {"target-hooks"}
    assert errors(lint(good, targets["kimi"], "0.5.10")) == set()
    order = ["0.5.9", "0.5.10rc0", "0.5.10", "0.5.10.post1", "0.5.11.dev2", "0.5.11"]
    assert sorted(map(Release.parse, reversed(order))) == list(map(Release.parse, order))


def test_a_draft_path_that_is_none(good: Path, targets: dict[str, Path], tmp_path: Path) -> None:
    target = targets["llama"]
    elsewhere = copy_of(target, tmp_path / "elsewhere")
    (elsewhere / "target.json").write_text(json.dumps({"source": "x", "weights": str(target), "revision": None}))
    for checkpoint, served in (("", target), (tmp_path / "gone", target), (target, target), (target, elsewhere)):
        assert levels(lint(checkpoint, served, NEW)) == {("error", "draft-path")}
    assert lint(good, elsewhere, NEW) == []


def test_an_order_of_ids_other_than_ascending_is_only_told(targets: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint(some_checkpoint().drafter, Mapping(IDS[::-1].copy(), VOCAB))
    write_checkpoint(tmp_path / "drafter", checkpoint, AUX)
    assert levels(lint(tmp_path / "drafter", targets["llama"], NEW)) == {("note", "d2t-order")}


def test_a_foreign_drafter_without_norms_that_it_was_trained_with(folder: Path, targets: dict[str, Path]) -> None:
    both(foreign, config({"norm_before_residual": True}))(folder)
    found = levels(lint(folder, targets["llama"], NEW))
    assert found == {("error", "norm-before-residual"), ("note", "layers-untold")}


def test_a_foreign_drafter_with_norms_that_the_release_computes(folder: Path, targets: dict[str, Path]) -> None:
    norms = {f"aux_norm_{part}.weight": torch.ones(HIDDEN).bfloat16() for part in ("low", "mid", "high")}
    norms |= {"input_norm.weight": torch.ones(3 * HIDDEN).bfloat16()}
    flags = {"use_aux_norm": True, "norm_before_fc": True}
    both(foreign, config(flags), weights(lambda t: t.update(norms)))(folder)
    assert levels(lint(folder, targets["llama"], NEW)) == {("note", "layers-untold")}
    assert errors(lint(folder, targets["llama"], "0.5.22")) == {"norm-flag", "name-unknown"}
    assert errors(lint(folder, targets["llama"], "0.5.11")) == {"norm-flag", "name-unknown"}


def test_a_full_vocabulary_needs_no_mapping(targets: dict[str, Path], tmp_path: Path) -> None:
    folder, target = tmp_path / "full", targets["llama"]
    write_checkpoint(folder, some_checkpoint(slots=VOCAB), AUX)
    assert lint(folder, target, NEW) == []
    NO_D2T(folder)
    assert lint(folder, target, NEW) == []
    config(FULL)(folder)
    assert errors(lint(folder, target, NEW)) == {"draft-vocab-size"}
    weights(lambda t: t.pop(LM_HEAD))(folder)
    assert lint(folder, target, NEW) == []
    config({"tie_word_embeddings": True, "draft_vocab_size": VOCAB})(folder)
    assert lint(folder, target, NEW) == []
    record(lambda r: r.update(mapping=OTHER.hash))(folder)
    assert "mapping-hash" in errors(lint(folder, target, NEW))


@pytest.mark.parametrize("form", ["model.", "layers.0", "shards", "embedding", "inv_freq", "no metadata"])
def test_what_is_served_well_is_let_pass(form: str, folder: Path, targets: dict[str, Path]) -> None:
    if form == "model.":
        rename("", "model.")(folder)
    elif form == "layers.0":
        rename("midlayer", "layers.0")(folder)
    elif form == "embedding":
        with_embedding(lambda e: e)(folder)
    elif form == "inv_freq":
        weights(lambda t: t.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}))(folder)
    elif form == "no metadata":
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    else:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        for file, own in parts.items():
            save_file({name: tensors[name] for name in own}, folder / file)
        save_file({FC: torch.zeros(1)}, folder / "unlisted.safetensors")
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert lint(folder, targets["llama"], NEW) == []


def test_a_foreign_drafter_of_two_layers(folder: Path, targets: dict[str, Path]) -> None:
    second = weights(lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(4, 4).bfloat16()}))
    both(foreign, config({"num_hidden_layers": 2}), second)(folder)
    assert levels(lint(folder, targets["llama"], NEW)) == {("note", "layers-untold")}
    assert "num-layers" in errors(lint(folder, targets["llama"], "0.5.11"))


def test_an_ordinary_target_is_read_without_transformers(good: Path, targets: dict[str, Path]) -> None:
    code = "import sys; from redraft.cli import main; main(); print('transformers' in sys.modules)"
    arguments = ["lint", good, "--target", targets["kimi"], "--version", NEW]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["nothing found", "False"]


def test_everything_is_told_at_once(folder: Path, targets: dict[str, Path]) -> None:
    chosen = ["lm-head-missing", "model-type", "d2t-absolute", "rope-theta", "algorithm", "not-finite", "norm-output"]
    rows = [next(row for row in FAULTS if row[0] == rule) for rule in chosen]
    for _, fault, _, _ in rows:
        fault(folder)
    found = lint(folder, targets["llama"], NEW, algorithm="EAGLE", context=300)
    assert errors(found) == {*chosen, "positions"}
    with pytest.raises(RedraftError) as caught:
        require_clean(found, folder)
    assert all(f"    {rule}: " in str(caught.value) for rule in (*chosen, "positions"))
    assert describe(found).splitlines()[-1] == "8 errors, 0 notes"


def test_notes_pass_and_errors_come_first(folder: Path, targets: dict[str, Path]) -> None:
    require_clean(lint(folder, targets["llama"], "0.5.12"))
    config({"model_type": "x"})(folder)
    assert [finding.level for finding in lint(folder, targets["llama"], "0.5.12")] == ["error", "note"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = sorted({*json.loads(json.dumps(some_checkpoint().drafter.config.to_dict())), "architectures", "model_type"})
FIELDS += ["eagle_config", "rope_scaling", "rope_parameters", "num_hidden_layers", "tie_word_embeddings", "bias"]
FIELDS += ["target_hidden_size", "num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "dtype", "hidden_act"]
FIELDS += ["quantization_config", "sliding_window", "layer_types", "use_sliding_window", "model_max_length"]
FIELDS += ["transformer_layer_config", "text_config", "partial_rotary_factor", "torch_dtype", "attention_bias"]


@settings(deadline=None, max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1), ids=JSON)
def test_no_config_makes_it_stumble(
    changes: dict[str, object], ids: object, good: Path, targets: dict[str, Path], tmp_path_factory: Any
) -> None:
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("any") / "drafter"))
    config(changes)(folder)
    if "eagle_config" not in changes:
        config(eagle={"eagle_aux_hidden_state_layer_ids": ids})(folder)
    for version in ("0.5.9", NEW):
        assert isinstance(describe(lint(folder, targets["deepseek"], version)), str)


@pytest.mark.parametrize("text", ["", "0.5", "0.5.x", "v0.5"])
def test_what_is_no_version_is_refused(text: str, good: Path, targets: dict[str, Path]) -> None:
    with pytest.raises(RedraftError, match="no version"):
        lint(good, targets["llama"], text)


def test_a_target_that_leaves_its_depth_to_a_default_is_asked_of_transformers(folder: Path, tmp_path: Path) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "hidden_size": HIDDEN}))
    config(None, "eagle_config")(folder)
    found = {finding.rule: finding.found for finding in lint(folder, tmp_path, NEW, context=128)}
    assert "[2, 16, 29]" in found["layers-shifted"]  # the default layers of a Llama of 32


def test_a_target_that_cannot_be_read_is_an_error_of_its_own(good: Path, tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"no readable config\.json"):
        lint(good, tmp_path, NEW)


# --- the commands


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `redraft ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["redraft", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def test_lint_from_the_command_line(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["lint", folder, "--target", targets["llama"], "--engine", "sglang", "--version"]
    assert run(monkeypatch, *asked, NEW) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert run(monkeypatch, *asked, "0.5.12", "--json") == 0
    assert [finding["rule"] for finding in json.loads(capsys.readouterr().out)] == ["tp-capture"]
    assert run(monkeypatch, *asked, NEW, "--context-length", 8192) == 1
    shown = capsys.readouterr().out
    assert "error: positions" in shown
    assert shown.splitlines()[-1] == "1 error, 0 notes"
    weights(lambda t: t.pop(LM_HEAD))(folder)
    assert run(monkeypatch, *asked, NEW, "--json") == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert set(finding) == {"rule", "level", "found", "effect", "fix"}
    assert "1.00" in finding["effect"]
    assert run(monkeypatch, "lint", "", "--target", targets["llama"], "--version", NEW) == 1
    assert "draft-path" in capsys.readouterr().out


# --- the table


def rules_in_code() -> set[str]:
    """Every rule id that the modules of the preflight can give."""
    found = set(rules_weights._DROPPED)
    for module in (linting, *linting.MODULES):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call):
                told = {keyword.arg for keyword in node.keywords} & {"found", "fix"}
                plain = getattr(node.func, "id", "") == "Finding"
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found |= set(texts[:1]) if told or plain else set()
    return found


def test_every_rule_has_a_planted_fault_and_a_line_in_the_docs() -> None:
    rules = rules_in_code()
    planted = {row[0] for row in (*FAULTS, *TARGET_FAULTS)} | {"draft-path", "d2t-order"}
    assert planted == rules
    table = (Path(__file__).parent.parent / "docs" / "preflight.md").read_text()
    listed = re.findall(r"^\|.*\| `([a-z0-9-]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(rules)
    assert exporting.lint is lint
