"""The small target of Kimi-K2.5's classes: files as on the hub, read and run by everything before a server."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams, load_profile
from redraft.target.ends import read_ends, same, target_hash
from redraft.target.facts import read_facts
from redraft.target.kimi_tiny import CONFIG, GROUP, TEXT, VOCAB, pack_experts
from redraft.target.model import load_target
from redraft.target.sources import make_target

FILE = "model.safetensors"
OF_THE_HUB = (
    "language_model.lm_head.weight", "language_model.model.embed_tokens.weight", "language_model.model.norm.weight",
    "language_model.model.layers.1.mlp.experts.0.down_proj.weight",
    "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
    "language_model.model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "mm_projector.pre_norm.weight",
    "mm_projector.proj.0.weight", "vision_tower.encoder.blocks.0.wqkv.weight",
    "vision_tower.encoder.final_layernorm.weight", "vision_tower.patch_embed.pos_emb.weight",
    "vision_tower.patch_embed.proj.weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly fitted, which takes seconds rather than half a minute."""
    folder = tmp_path_factory.mktemp("kimi") / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.target.tiny.STEPS", 11)
        make_target(load_profile("kimi-tiny", Path(__file__).parent.parent).target, folder)
    return folder


@pytest.fixture(scope="module")
def packed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in four bits: what `fit:kimi-int4` makes, without another fit."""
    folder = tmp_path_factory.mktemp("int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.target.kimi_tiny.fit_rows", lambda model, *_: model.load_state_dict(_weights(made)))
        make_target(TargetParams(source="fit:kimi-int4"), folder / "target")
    return folder / "target"


def _weights(folder: Path) -> dict[str, Any]:
    return load_target(folder, dtype="fp32", device="cpu").model.state_dict()


def test_names_and_keys_are_those_of_the_hub(made: Path) -> None:
    names = set(load_file(made / FILE))
    assert names >= set(OF_THE_HUB)
    assert {name.split(".")[0] for name in names} == {"language_model", "mm_projector", "vision_tower"}
    facts = read_facts(made)
    assert (facts.architecture, facts.hidden, facts.vocab, facts.depth) == (*CONFIG["architectures"], 128, VOCAB, 8)
    assert not facts.quantised
    assert json.loads((made / "target.json").read_text())["source"] == "fit:kimi-tiny"


def test_both_ends_and_every_tensor_are_read(made: Path) -> None:
    ends, files = read_ends(made), load_file(made / FILE)
    target = load_target(made, dtype="fp32", device="cpu")  # refuses missing tensors and other ends
    assert same(ends.head, files["language_model.lm_head.weight"])
    assert not same(ends.head, ends.embed)
    assert len(target.decoder.layers) == TEXT["num_hidden_layers"]
    assert target.aux_layers == (2, 4, 5)
    bias = files["language_model.model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bool((bias != 0).all())


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 9), scale=st.floats(1e-3, 30.0))
def test_four_bits_hold_what_they_can(
    rows: int, groups: int, seed: int, scale: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unpacked as compressed-tensors does, no weight is more than rounding from its own."""
    weight = scale * torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    path, stem = tmp_path_factory.mktemp("pack") / FILE, "model.layers.1.mlp.experts.0.up_proj."
    save_file({f"{stem}weight": weight, "other": weight.clone()}, path)
    pack_experts(path)
    files = load_file(path)
    assert set(files) == {f"{stem}weight_packed", f"{stem}weight_scale", f"{stem}weight_shape", "other"}
    assert files[f"{stem}weight_shape"].tolist() == list(weight.shape)
    nibbles = (files[f"{stem}weight_packed"][..., None] >> torch.arange(0, 32, 4)) & 15
    steps = files[f"{stem}weight_scale"].float()[..., None]
    found = (nibbles.flatten(1) - 8).unflatten(1, (-1, GROUP)) * steps
    assert bool(((found - weight.unflatten(1, (-1, GROUP))).abs() <= 0.54 * steps).all())


def test_four_bits_are_another_target_with_the_same_ends(made: Path, packed: Path) -> None:
    files, ends = load_file(packed / FILE), read_ends(packed)
    assert {tensor.dtype for name, tensor in files.items() if name.endswith("weight_packed")} == {torch.int32}
    assert (packed / FILE).stat().st_size < (made / FILE).stat().st_size / 2
    assert read_facts(packed).quantised
    assert same(ends.head, read_ends(made).head)
    assert target_hash(packed) != target_hash(made)


def test_what_four_bits_need_is_named(packed: Path, made: Path) -> None:
    """transformers unpacks them to bf16 with a package of its own; without it, one error that names it."""
    if find_spec("compressed_tensors") is None:
        with pytest.raises(RedraftError, match="pip install compressed-tensors"):
            load_target(packed, device="cpu")
        return
    mine, its = (load_target(folder, device="cpu").decoder.layers[1].mlp.experts for folder in (packed, made))
    for name, weight in its.named_parameters():
        assert float((mine.get_parameter(name) - weight).float().norm() / weight.float().norm()) < 0.15, name


def test_a_plain_head_is_required_as_of_any_other(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "target")
    files = load_file(tmp_path / "target" / FILE)
    head = files.pop("language_model.lm_head.weight")
    save_file({**files, "language_model.lm_head.weight_packed": head.int()}, tmp_path / "target" / FILE)
    with pytest.raises(RedraftError, match=r"(?s)more than a matrix.*weight_packed"):
        read_ends(tmp_path / "target")
