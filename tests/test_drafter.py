"""Checkpoints and the remap of the head (cases C01, C04, C07, C09, C10, C18, C32, C33)."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HIDDEN, SLOTS, VOCAB, some_checkpoint, some_mapping
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_vocab import pairs

from redraft.drafter.checkpoint import Checkpoint, exported_layer_ids, read_checkpoint, write_checkpoint
from redraft.drafter.model import Drafter
from redraft.drafter.remap import FRESH, TARGET, ZERO, count_sources, initial, remap
from redraft.errors import RedraftError
from redraft.vocab.mapping import Mapping

HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
AUX = (2, 4, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), AUX)
    return tmp_path / "drafter"


def test_a_drafter_is_read_as_it_was_written(folder: Path) -> None:
    one, two = some_checkpoint(), read_checkpoint(folder)
    assert one.mapping.hash == two.mapping.hash == two.record["mapping"]
    assert one.drafter.config == two.drafter.config
    for name, tensor in one.drafter.state_dict().items():
        assert torch.equal(tensor, two.drafter.state_dict()[name]), name


def test_the_file_is_what_sglang_reads(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = [
        "input_layernorm",
        "hidden_norm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == names
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == SLOTS
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert not {"norm_output", "target_hidden_size", "norm_before_residual"} & config.keys()


def test_the_same_drafter_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "again", some_checkpoint(), AUX)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_aux_layers_that_releases_read_differently_are_refused() -> None:
    assert exported_layer_ids((2, 30, 58)) == [1, 29, 57]
    with pytest.raises(RedraftError, match="releases"):
        exported_layer_ids((3, 30, 58))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing here: lm_head.weight"),
        (lambda t: t.update({"input_norm.weight": torch.ones(4)}), "not known: input_norm.weight"),
        (lambda t: t.update({"module.fc.weight": t.pop("fc.weight")}), "not known: module.fc.weight"),
        (lambda t: t.update({"fc.weight": torch.ones(HIDDEN, 36)}), r"fc.weight.*\n.*\[32, 96\]"),
        (lambda t: t.update({"norm.weight": torch.full((HIDDEN,), float("nan"))}), "NaN"),
        (lambda t: t.update({"norm.weight": torch.ones(HIDDEN, dtype=torch.int64)}), "int64"),
        (lambda t: t.pop("d2t"), "mapping is not complete"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "mapping is not complete"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "float32"),
        (lambda t: t.update({"d2t": torch.from_numpy(some_mapping(7).d2t)}), "different ids"),
    ],
)
def test_a_tensor_that_is_not_right_is_named(folder: Path, change: Callable[..., object], named: str) -> None:
    edit(folder, change)
    with pytest.raises(RedraftError, match=named):
        read_checkpoint(folder)


def test_a_mapping_swapped_after_training_is_caught(folder: Path) -> None:
    other = some_mapping(7)
    edit(folder, lambda t: t.update({"d2t": torch.from_numpy(other.d2t), "t2d": torch.from_numpy(other.t2d)}))
    with pytest.raises(RedraftError, match="not the one it was written with"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"draft_vocab_size": "absent"}, "draft_vocab_size"),
        ({"max_position_embeddings": "absent"}, "max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"draft_vocab_size": SLOTS + 1}, "another shape"),
    ],
)
def test_a_config_that_is_not_right_is_named(folder: Path, change: dict[str, object], named: str) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    with pytest.raises(RedraftError, match=named):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:-4],
        lambda data: data + b"12345678",
        lambda data: (2**60).to_bytes(8, "little") + data[8:],
    ],
)
def test_a_damaged_file_is_told_as_such(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RedraftError, match="incomplete download"):
        read_checkpoint(folder)


def test_a_full_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    whole = some_checkpoint(slots=VOCAB)
    write_checkpoint(tmp_path / "full", whole, AUX)
    edit(tmp_path / "full", lambda t: (t.pop("d2t"), t.pop("t2d")))
    assert read_checkpoint(tmp_path / "full").mapping.is_full


def test_head_and_mapping_must_agree(tmp_path: Path) -> None:
    wrong = Checkpoint(some_checkpoint().drafter, some_mapping(slots=SLOTS - 1))
    with pytest.raises(RedraftError, match="do not agree"):
        write_checkpoint(tmp_path / "drafter", wrong, AUX)
    assert not list(tmp_path.iterdir())


def checkpoint_of(mapping: Mapping) -> Checkpoint:
    config = some_checkpoint().drafter.config
    shape = {**config.to_dict(), "vocab_size": mapping.vocab_size, "draft_vocab_size": len(mapping)}
    return Checkpoint(Drafter.fresh(type(config)(**shape), 0), mapping)


@settings(deadline=None, max_examples=60)
@given(pairs(), st.sampled_from(["zero", "target"]))
def test_rows_of_shared_ids_move_unchanged(pair: tuple[Mapping, Mapping], fill: str) -> None:
    donor, new = checkpoint_of(pair[0]), pair[1]
    head = torch.arange(new.vocab_size * HIDDEN).float().view(-1, HIDDEN)
    made = remap(donor, new, fill, head)
    rows, old = made.drafter.lm_head.weight, donor.drafter.lm_head.weight
    assert made.row_source is not None
    for slot, number in enumerate(new.ids):
        at = int(donor.mapping.slots[number])
        if at >= 0:
            assert torch.equal(rows[slot], old[at])
            assert made.row_source[slot] == at
        else:
            assert torch.equal(rows[slot], head[number] if fill == "target" else torch.zeros(HIDDEN))
            assert made.row_source[slot] == (TARGET if fill == "target" else ZERO)
    counts = count_sources(made)
    assert sum(counts.values()) == len(new)
    assert counts["kept"] == sum(a == b for a, b in zip(donor.mapping.ids, new.ids, strict=False))
    there = remap(made, donor.mapping, "zero", head).drafter.lm_head.weight
    shared = np.isin(donor.mapping.ids, new.ids)
    assert torch.equal(there[shared], old[shared])


def test_logits_of_shared_ids_are_the_same_for_any_state() -> None:
    donor, new = some_checkpoint(0), some_mapping(3)
    made = remap(donor, new, "zero", HEAD)
    states = torch.randn(50, HIDDEN)
    before, after = donor.drafter.logits(states), made.drafter.logits(states)
    shared = np.intersect1d(donor.mapping.ids, new.ids)
    assert len(shared) > 2
    assert torch.allclose(before[:, donor.mapping.slots[shared]], after[:, new.slots[shared]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("init", ["remap", "keep_donor_vocab", "naive", "scratch"])
def test_every_init(init: str) -> None:
    donor, new = some_checkpoint(0), some_mapping(3, slots=SLOTS + 4)
    before = donor.drafter.lm_head.weight.clone()
    made = initial(init, "zero", donor, new, HEAD, seed=0)
    assert torch.equal(before, donor.drafter.lm_head.weight)
    assert made.mapping.hash == (donor.mapping if init == "keep_donor_vocab" else new).hash
    same_body = torch.equal(made.drafter.fc.weight, donor.drafter.fc.weight)
    assert same_body == (init != "scratch")
    if init == "naive":
        assert torch.equal(made.drafter.lm_head.weight[:SLOTS], before)
        assert made.row_source is not None
        assert set(made.row_source[SLOTS:]) == {FRESH}
    assert made.record["init"] == init
