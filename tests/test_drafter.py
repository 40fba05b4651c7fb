"""Checkpoints and the remap of the head (cases C01, C04, C07, C09, C10, C18, C32, C33)."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HIDDEN, SLOTS, VOCAB, llama, save_target, some_checkpoint, some_mapping
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_vocab import pairs

from redraft.drafter.checkpoint import (
    Checkpoint,
    export_speculators,
    read_checkpoint,
    read_donor,
    read_parts,
    write_checkpoint,
    write_parts,
)
from redraft.drafter.config import written_ids
from redraft.drafter.model import Drafter
from redraft.drafter.parts import FLOATS
from redraft.frame.errors import RedraftError
from redraft.remap.fills import FILLS, Shared, fill_rows
from redraft.remap.heads import compare_heads
from redraft.remap.remap import SOURCES, carry_head, count_sources, initial, prove, remap, remap_folder
from redraft.target.ends import read_ends
from redraft.vocab.mapping import Mapping

HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
AUX = (2, 4, 5)


def twice(data: bytes) -> bytes:
    """The same file with the name of its last tensor repeated in the header."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name, spec = max(((n, s) for n, s in header.items() if n != "__metadata__"), key=lambda x: x[1]["data_offsets"][1])
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(spec)}}}"
    return len(text).to_bytes(8, "little") + text.encode() + data[8 + size :]


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


@pytest.mark.parametrize(
    ("architecture", "layers", "ids"),
    [
        (None, (2, 4, 5), [1, 3, 4]),
        (None, (3, 5, 6), None),
        ("DeepseekV3ForCausalLM", (2, 4, 5), [1, 3, 4]),
        ("DeepseekV3ForCausalLM", (3, 5, 6), [3, 5, 6]),
        ("DeepseekV3ForCausalLM", (1, 4, 5), None),  # a first id of 1 stands for layer 2, and 0 for layer 0
        ("LlamaForCausalLM", (3, 5, 6), [2, 4, 5]),
        ("LlamaForCausalLM", (0, 4, 5), None),  # no output of a layer
    ],
)
def test_ids_are_written_where_it_is_known_what_they_mean(
    architecture: str | None, layers: tuple[int, ...], ids: list[int] | None, llama_folder: Path, tmp_path: Path
) -> None:
    target = None
    if architecture:
        target = Path(shutil.copytree(llama_folder, tmp_path / "target"))
        edit_config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**edit_config, "architectures": [architecture]}))
    assert written_ids(layers, target) == ids
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), layers, target)
    part = json.loads((tmp_path / "drafter/config.json").read_text())["eagle_config"]
    assert part.get("eagle_aux_hidden_state_layer_ids") == ids
    assert read_checkpoint(tmp_path / "drafter").record["aux_layers"] == list(layers)


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
        (lambda t: t.update({"norm.weight": torch.ones(HIDDEN).double()}), "float64"),
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
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "two bases"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "turns positions otherwise"),
        ({"rope_is_neox_style": False}, "turns positions otherwise"),
        ({"hidden_size": "32"}, "no number that can be"),
        ({"hidden_size": 10**9}, "no number that can be"),
        ({"num_attention_heads": 0}, "no number that can be"),
        ({"num_key_value_heads": 3}, "heads of the drafter cannot be"),
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
        twice,
    ],
)
def test_a_damaged_file_is_told_as_such(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RedraftError, match="incomplete download"):
        read_checkpoint(folder)


def test_a_tied_head_is_the_embedding_and_is_written_as_its_own(tmp_path: Path) -> None:
    whole = some_checkpoint(slots=VOCAB)
    write_checkpoint(tmp_path / "full", whole, AUX)
    edit(
        tmp_path / "full",
        lambda t: (t.pop("d2t"), t.pop("t2d"), t.update({"embed_tokens.weight": t.pop("lm_head.weight")})),
    )
    path = tmp_path / "full" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    read = read_checkpoint(tmp_path / "full")
    assert same_weights(whole_in_order(whole), read)
    remap_folder(tmp_path / "full", read.mapping, "zero", None, tmp_path / "out")
    assert same_weights(read, read_checkpoint(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def whole_in_order(whole: Checkpoint) -> Checkpoint:
    """`some_checkpoint` of all slots has ascending ids, so slot and id are the same."""
    assert list(whole.mapping.ids) == list(range(VOCAB))
    return whole


def test_a_view_into_a_bigger_tensor_writes_only_itself(tmp_path: Path) -> None:
    drafter = some_checkpoint()
    big = torch.randn(50 * SLOTS, HIDDEN)
    drafter.drafter.lm_head.weight.data = big[:SLOTS]
    write_checkpoint(tmp_path / "out", drafter, AUX)
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    assert path.stat().st_size < sum(t.nbytes for t in tensors.values()) + 4096


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: torch.stack([tensor, tensor + 1], -1)[..., 0],
    "sliced": lambda tensor: torch.cat([tensor + 1, tensor, tensor + 2])[len(tensor) : 2 * len(tensor)],
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
}


@settings(deadline=None, max_examples=40)
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    dtype=st.sampled_from(FLOATS),
    names=st.sets(st.sampled_from(sorted(some_checkpoint().drafter.state_dict())), min_size=1),
)
def test_any_layout_and_dtype_comes_back_as_it_was(
    layout: str, dtype: torch.dtype, names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """C50: a tensor that is not contiguous goes through the writer as well."""
    folder = tmp_path_factory.mktemp("any")
    write_checkpoint(folder / "one", some_checkpoint(), AUX)
    parts = read_parts(folder / "one")
    changed = {
        name: LAYOUTS[layout if each.ndim == 2 else "plain"](each.to(dtype)) if name in names else each
        for name, each in parts.tensors.items()
    }
    write_parts(folder / "two", replace(parts, tensors=changed), {}, None)
    again = load_file(folder / "two" / "model.safetensors")
    for name, tensor in changed.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor), name
    sizes = sum(tensor.nbytes for tensor in again.values())
    assert sizes < (folder / "two" / "model.safetensors").stat().st_size < sizes + 4096


def test_a_full_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    whole = some_checkpoint(slots=VOCAB)
    write_checkpoint(tmp_path / "full", whole, AUX)
    edit(tmp_path / "full", lambda t: (t.pop("d2t"), t.pop("t2d")))
    assert list(read_checkpoint(tmp_path / "full").mapping.ids) == list(range(VOCAB))


SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
}


def as_speculators(folder: Path, **changes: object) -> None:
    """Rewrite a drafter in SGLang's form as the trainer of speculators 0.9.0 writes it, from captured files."""
    config = json.loads((folder / "config.json").read_text())
    shape = {
        name: value for name, value in config.items() if name not in ("architectures", "eagle_config", "rope_theta")
    }
    shape["rope_parameters"] = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    top = {
        **SPECULATORS,
        "draft_vocab_size": shape.pop("draft_vocab_size"),
        "transformer_layer_config": shape,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(top))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}, folder / "model.safetensors")


def same_weights(one: Checkpoint, two: Checkpoint) -> bool:
    other = two.drafter.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.drafter.state_dict().items())


def test_a_drafter_of_speculators_is_the_same_drafter(folder: Path) -> None:
    as_speculators(folder)
    assert same_weights(some_checkpoint(), read_checkpoint(folder))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
    ],
)
def test_the_defaults_of_speculators_are_refused_by_name(folder: Path, change: dict[str, object], named: str) -> None:
    as_speculators(folder, **change)
    with pytest.raises(RedraftError, match=named):
        read_checkpoint(folder)


def test_an_export_for_vllm_reads_back_and_says_every_norm_flag(tmp_path: Path) -> None:
    export_speculators(tmp_path / "out", some_checkpoint(), AUX, "some/target")
    assert same_weights(some_checkpoint(), read_checkpoint(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    assert [config[flag] for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")] == [
        False
    ] * 4
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("form", ["prefix", "bin", "shards", "fp16", "text_config", "narrow"])
def test_other_forms_of_the_same_drafter(folder: Path, form: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    if form == "prefix":
        save_file(
            {f"model.{name}" if "." in name else name: t for name, t in tensors.items()}, folder / "model.safetensors"
        )
    elif form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "shards":
        names = sorted(tensors)
        parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        for file, own in parts.items():
            save_file({name: tensors[name] for name in own}, folder / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif form == "fp16":
        cast = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(cast, folder / "model.safetensors")
    elif form == "text_config":
        own = {"architectures", "eagle_config", "draft_vocab_size"}
        nested = {name: value for name, value in config.items() if name not in own}
        (folder / "config.json").write_text(json.dumps({**{name: config[name] for name in own}, "text_config": nested}))
        save_file(tensors, folder / "model.safetensors")
    else:
        narrow = {**tensors, "d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
        save_file(narrow, folder / "model.safetensors")
    assert same_weights(some_checkpoint(), read_checkpoint(folder))


def test_an_absent_shard_and_two_formats_are_told(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RedraftError, match=r"pytorch_model\.bin"):
        read_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    with pytest.raises(RedraftError, match=r"gone\.safetensors"):
        read_checkpoint(folder)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code of a checkpoint ran",))


def test_a_pickle_with_code_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(RedraftError, match="more than tensors"):
        read_checkpoint(folder)
    assert capsys.readouterr().out == ""


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
            assert made.row_source[slot] == SOURCES[fill]
    counts = count_sources(made)
    assert sum(counts.values()) == len(new)
    assert counts["kept"] == sum(a == b for a, b in zip(donor.mapping.ids, new.ids, strict=False))
    there = remap(made, donor.mapping, "zero", head).drafter.lm_head.weight
    shared = np.isin(donor.mapping.ids, new.ids)
    assert torch.equal(there[shared], old[shared])


def test_logits_of_shared_ids_are_the_same_for_any_state() -> None:
    donor, new = some_checkpoint(0), some_mapping(3)
    made = remap(donor, new, "zero", HEAD)
    shared = np.intersect1d(donor.mapping.ids, new.ids)
    for seed in range(5):
        states = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(seed))
        before, after = (each.drafter.logits(states).detach() for each in (donor, made))
        one, two = before[:, donor.mapping.slots[shared]], after[:, new.slots[shared]]
        assert float((one - two).abs().max() / one.abs().max()) < 1e-6
    assert prove(donor, made) == {"shared_rows": len(shared), "largest_difference": pytest.approx(0, abs=1e-6)}
    assert len(shared) > 2
    with torch.no_grad():
        made.drafter.lm_head.weight[new.slots[shared[1]]] += 1e-3
    with pytest.raises(RedraftError, match=str(shared[1])):
        prove(donor, made)


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
        assert set(made.row_source[SLOTS:]) == {SOURCES["fresh"]}
    assert made.record["init"] == init


def heads(linear: bool) -> tuple[Shared, torch.Tensor, torch.Tensor]:
    """Shared rows, wanted target rows, and what the donor's rows for them would be, under a known relation."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(400, HIDDEN, generator=generator)
    turn = torch.randn(HIDDEN, HIDDEN, generator=generator) if linear else 0.3 * torch.eye(HIDDEN)
    donor = rows @ turn + (2.0 if linear else 0.0)
    return Shared(donor[:300], rows, torch.arange(300)), rows[300:], donor[300:]


def test_fills_recover_the_relation_that_they_assume() -> None:
    shared, wanted, truth = heads(linear=False)
    assert torch.allclose(fill_rows("scaled", shared, wanted), truth, atol=1e-5)
    assert torch.equal(fill_rows("target", shared, wanted), wanted)
    assert not fill_rows("zero", shared, wanted).any()
    assert torch.allclose(fill_rows("mean", shared, wanted)[7], shared.donor.mean(0))
    shared, wanted, truth = heads(linear=True)
    error = {kind: float((fill_rows(kind, shared, wanted) - truth).norm() / truth.norm()) for kind in FILLS}
    assert error["fitted"] < 0.01
    assert min(error, key=error.__getitem__) == "fitted"


def test_a_fit_ignores_noise_rather_than_follow_it() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(60, HIDDEN, generator=generator)
    noise = Shared(torch.randn(60, HIDDEN, generator=generator), rows, torch.arange(60))
    wanted = torch.randn(50, HIDDEN, generator=generator)
    assert float(fill_rows("fitted", noise, wanted).square().mean()) < 1.5


def test_the_donors_own_ids_teach_the_fit_even_if_the_new_mapping_lacks_them() -> None:
    donor = some_checkpoint(0)
    free = np.setdiff1d(np.arange(VOCAB), donor.mapping.ids)
    made = remap(donor, Mapping(free, VOCAB), "scaled", HEAD)
    assert made.drafter.lm_head.weight.abs().sum() > 0


def test_no_shared_id_leaves_nothing_to_fit() -> None:
    nothing = Shared(torch.zeros(0, HIDDEN), HEAD, torch.zeros(0, dtype=torch.int64))
    with pytest.raises(RedraftError, match="zero or target"):
        fill_rows("fitted", nothing, HEAD[:3])


def test_heads_are_compared_row_by_row() -> None:
    ids = np.array([5, 1, 7])
    found = compare_heads(2 * HEAD[ids], HEAD, ids)
    assert found["norm_ratio"] == pytest.approx(2, abs=1e-4)
    assert found["cosine"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("fill", list(FILLS))
def test_a_checkpoint_remapped_on_disk_is_the_one_remapped_in_memory(fill: str, folder: Path, tmp_path: Path) -> None:
    donor, new = some_checkpoint(), some_mapping(3, slots=SLOTS + 4)
    target = save_target(llama(), tmp_path / "target")
    rows = remap_folder(folder, new, fill, target, tmp_path / "out")
    made, kept = read_checkpoint(tmp_path / "out"), remap(donor, new, fill, read_ends(target).head)
    assert made.mapping.hash == new.hash
    assert rows == count_sources(kept)
    assert made.row_source is not None
    assert list(made.row_source) == list(kept.row_source if kept.row_source is not None else [])
    for name, tensor in kept.drafter.state_dict().items():
        assert torch.allclose(made.drafter.state_dict()[name], tensor, rtol=1e-2, atol=1e-2), name
        if name != "lm_head.weight":
            assert torch.equal(made.drafter.state_dict()[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**json.loads((folder / "config.json").read_text()), "draft_vocab_size": SLOTS + 4}
    swapped = load_file(tmp_path / "out" / "model.safetensors")
    other = some_mapping(5, slots=SLOTS + 4)
    swapped |= {"d2t": torch.from_numpy(other.d2t), "t2d": torch.from_numpy(other.t2d)}
    save_file(swapped, tmp_path / "out" / "model.safetensors")
    with pytest.raises(RedraftError, match="not the one it was written with"):
        remap_folder(tmp_path / "out", new, "zero", None, tmp_path / "again")


def test_a_donor_without_a_head_is_refused_unless_it_may_borrow(folder: Path) -> None:
    edit(folder, lambda t: t.pop("lm_head.weight"))
    target = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, model_type="llama")
    with pytest.raises(RedraftError, match=r"donor\.head: target"):
        read_donor(folder, target, AUX)
    borrowed = read_donor(folder, target, AUX, HEAD)
    assert torch.equal(borrowed.drafter.lm_head.weight, HEAD[borrowed.mapping.ids])


def test_rows_of_ids_that_mean_another_token_are_filled(folder: Path, tmp_path: Path) -> None:
    mapping = some_checkpoint().mapping
    foreign = [int(mapping.ids[3])]
    rows = remap_folder(folder, mapping, "zero", None, tmp_path / "out", foreign)
    assert (rows["kept"], rows["zero"]) == (SLOTS - 1, 1)
    assert not read_checkpoint(tmp_path / "out").drafter.lm_head.weight[3].any()
    head = some_checkpoint().drafter.lm_head.weight.detach()
    mean, _ = carry_head(head, mapping, mapping, "mean", None, foreign)
    others = torch.arange(SLOTS) != 3
    assert torch.allclose(mean[3], head[others].mean(0), atol=1e-6)


def test_a_donor_with_another_tokenizer_moves_no_row_of_a_differing_id(tmp_path: Path) -> None:
    donor = some_checkpoint()
    number = int(donor.mapping.ids[3])
    donor.record["foreign"] = {number: ("old", "new")}
    write_checkpoint(tmp_path / "donor", donor, AUX)
    read = read_checkpoint(tmp_path / "donor")
    assert read.foreign == {number: ("old", "new")}
    made = initial("remap", "zero", read, donor.mapping, HEAD, 0)
    assert made.record["rows"]["zero"] == 1
    assert not made.drafter.lm_head.weight[3].any()
    assert prove(read, made)["shared_rows"] == SLOTS - 1


def test_a_drafter_of_speculators_is_remapped_to_what_sglang_reads(folder: Path, tmp_path: Path) -> None:
    as_speculators(folder, eagle_aux_hidden_state_layer_ids=list(AUX))
    remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["rope_theta"] == 10000.0
    assert read_checkpoint(tmp_path / "out").record["aux_layers"] == list(AUX)


def test_a_full_vocabulary_is_cut_to_a_reduced_one_and_back(tmp_path: Path) -> None:
    whole, new = some_checkpoint(slots=VOCAB), some_mapping(3)
    write_checkpoint(tmp_path / "full", whole, AUX)
    remap_folder(tmp_path / "full", new, "zero", None, tmp_path / "cut")
    remap_folder(tmp_path / "cut", whole.mapping, "mean", None, tmp_path / "back")
    back = read_checkpoint(tmp_path / "back").drafter.lm_head.weight
    assert torch.equal(back[new.ids], whole.drafter.lm_head.weight[new.ids])


@pytest.mark.parametrize(
    ("mapping", "fill", "named"),
    [(some_mapping(3), "scaled", "reads the target's head"), (some_mapping(3, vocab=VOCAB + 1), "zero", "V = 97")],
)
def test_a_remap_that_cannot_be_leaves_nothing(
    mapping: Mapping, fill: str, named: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RedraftError, match=named):
        remap_folder(folder, mapping, fill, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "layers", "named"),
    [
        ({"hidden_size": HIDDEN + 4}, AUX, "hidden size"),
        ({"vocab_size": VOCAB + 1}, AUX, "another target"),
        ({}, (2, 4, 6), "other layers"),
    ],
)
def test_a_donor_must_fit_the_target(target: dict[str, int], layers: tuple[int, ...], named: str, folder: Path) -> None:
    fits = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "model_type": "llama"}
    assert same_weights(some_checkpoint(), read_donor(folder, SimpleNamespace(**fits), AUX))
    with pytest.raises(RedraftError, match=named):
        read_donor(folder, SimpleNamespace(**{**fits, **target}), layers)
