"""Files of a target: every reader takes the same tensors, or the folder is refused (cases C32, C61 and their kin)."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import HIDDEN, VOCAB, llama, save_target, some_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlavaConfig

from redraft.drafter.checkpoint import write_checkpoint
from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams
from redraft.target import folder as target_folder
from redraft.target.config import read_config
from redraft.target.ends import read_ends, target_hash
from redraft.target.folder import contents, weights_folder
from redraft.target.model import load_target
from redraft.target.sources import make_target
from redraft.target.weights import INDEX, SINGLE, tensor_files, weight_files

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Tensor]
PIECES = ("single", "two", "three", "consolidated", "variant", "stray", "pickle", "original")
PARTS = ("lm_head.weight_scale", "lm_head.bias", "lm_head.qweight", "model.embed_tokens.scales")


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama_folder, tmp_path / "copy")


@pytest.fixture(scope="module")
def tensors(llama_folder: Path) -> Tensors:
    return load_file(llama_folder / SINGLE)


def edit(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def resave(folder: Path, **changes: Tensor | None) -> Path:
    """`folder` with tensors in place of its own, named with `__` for a dot; None removes one."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    given = {name: tensor for name, tensor in (load_file(folder / SINGLE) | named).items() if tensor is not None}
    save_file(given, folder / SINGLE, {"format": "pt"})
    return folder


def shards(folder: Path, tensors: Tensors, of: int, head: float) -> dict[str, str]:
    """Write `of` shards whose head is `head` everywhere; the table of an index."""
    named = {**tensors, HEAD: torch.full_like(tensors[HEAD], head)}
    table = {key: f"model-{number % of + 1:05d}-of-{of:05d}.safetensors" for number, key in enumerate(sorted(named))}
    for name in set(table.values()):
        save_file({key: named[key] for key in named if table[key] == name}, folder / name, {"format": "pt"})
    return table


def served(folder: Path, seed: int) -> Tensor | None:
    """The head by the rule of SGLang's and vLLM's loaders: the indexed or all files, in any order, the last counts."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_text())["weight_map"].values()
        files = [file for file in files if file.name in named]
    found: Tensors = {}
    for file in files if seed else reversed(files):
        found |= load_file(file)
    return found.get(HEAD)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.sets(st.sampled_from(PIECES)), index=st.sampled_from([None, "single", "two", "three", "both", "stale"])
)
@example(pieces={"two", "three"}, index="both")
@example(pieces={"two", "three"}, index="two")
@example(pieces={"single", "two"}, index="two")
@example(pieces={"single", "consolidated"}, index=None)
def test_all_readers_take_the_same_head_or_the_folder_is_refused(
    pieces: set[str], index: str | None, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, tensors = tmp_path_factory.mktemp("target"), load_file(llama_folder / SINGLE)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(llama_folder / name, folder)

    def write(name: str, head: float) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({**tensors, HEAD: torch.full_like(tensors[HEAD], head)}, folder / name, {"format": "pt"})

    tables = {"single": dict.fromkeys(tensors, SINGLE)}
    tables["two"] = shards(folder, tensors, 2, 2.0) if "two" in pieces else {}
    tables["three"] = shards(folder, tensors, 3, 3.0) if "three" in pieces else {}
    tables["both"] = {**tables["two"], **dict(list(tables["three"].items())[1::5])}
    tables["stale"] = {**tables["two"], "model.layers.99.weight": next(iter(tables["two"].values()), SINGLE)}
    for piece, (name, head) in {
        "single": (SINGLE, 1.0),
        "consolidated": ("consolidated.safetensors", 4.0),
        "variant": ("model.fp16.safetensors", 5.0),
        "stray": ("extra.safetensors", 6.0),
        "original": ("original/model.safetensors", 7.0),
    }.items():
        if piece in pieces:
            write(name, head)
    if "pickle" in pieces:
        torch.save({**tensors, HEAD: torch.full_like(tensors[HEAD], 8.0)}, folder / "pytorch_model.bin")
    if index and tables[index]:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": tables[index]}))
    try:
        ours = read_ends(folder).head
    except RedraftError:
        # what is one set for everyone is never refused
        assert not (pieces <= {"single", "pickle", "original"} and "single" in pieces and index in (None, "single"))
        assert not (index in ("two", "three") and index in pieces and "single" not in pieces)
        with pytest.raises(RedraftError):
            load_target(folder, dtype="fp32", device="cpu")
        return
    assert torch.equal(load_target(folder, dtype="fp32", device="cpu").head, ours)
    for seed in (0, 1):
        assert torch.equal(served(folder, seed), ours)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("model.fp16.safetensors", "model.fp16.safetensors"),
        ("adapter_model.safetensors", "adapter_model.safetensors"),
        ("adapter_config.json", "adapter_config.json"),
    ],
)
def test_another_set_is_refused_by_name(extra: str, named: str, copy: Path) -> None:
    if extra.endswith("json"):
        (copy / extra).write_text("{}")
    else:
        shutil.copy(copy / SINGLE, copy / extra)
    with pytest.raises(RedraftError, match=f"(?s)two sets of weights.*{named}.*what to do"):
        weight_files(copy)


def test_a_file_that_config_json_names_for_transformers_alone_is_refused(copy: Path) -> None:
    with pytest.raises(RedraftError, match=r"other\.safetensors"):
        weight_files(edit(copy, transformers_weights="other.safetensors"))


def test_an_index_is_held_against_the_headers(copy: Path, tensors: Tensors) -> None:
    (copy / SINGLE).unlink()
    table = shards(copy, tensors, 2, 2.0)
    swapped = {key: next(name for name in table.values() if name != own) for key, own in table.items()}
    (copy / INDEX).write_text(json.dumps({"weight_map": swapped}))
    assert {key: file.name for key, file in tensor_files(copy).items()} == table  # as every loader iterates
    (copy / INDEX).write_text(json.dumps({"weight_map": {**table, "model.norm.bias": next(iter(table.values()))}}))
    with pytest.raises(RedraftError, match=r"(?s)no file holds.*model\.norm\.bias"):
        tensor_files(copy)
    for bad in ({}, {"x": "../model.safetensors"}, {"x": 1}, [], None):
        (copy / INDEX).write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(RedraftError, match="cannot be used"):
            weight_files(copy)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "no weights"),
        (["pytorch_model.bin"], r"pytorch_model\.bin(?s:.*)save_pretrained"),
        (["weights.safetensors"], r"name a single file model\.safetensors"),
        (["model-00001-of-00002.safetensors"], "index"),
    ],
)
def test_a_folder_without_weights_is_refused_by_the_target_stage(
    given: list[str], named: str, copy: Path, tmp_path: Path
) -> None:
    for name in given:
        shutil.copy(copy / SINGLE, copy / name)
    (copy / SINGLE).unlink()
    with pytest.raises(RedraftError, match=named):
        make_target(TargetParams(source=str(copy)), tmp_path / "target")
    assert not (tmp_path / "target").exists()


# C61 and its kin: the flag at the top, nested, in both places, in none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_configuration_beside_another_head_is_refused_at_the_target_stage(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = edit(save_target(llama().to(dtype), tmp_path / "tied"), tie_word_embeddings=True)
    for read in (
        lambda: read_ends(folder),
        lambda: load_target(folder, dtype="fp32", device="cpu"),
        lambda: make_target(TargetParams(source=str(folder)), tmp_path / "target"),
    ):
        with pytest.raises(RedraftError, match=r"(?s)lm_head\.weight.*tie_word_embeddings to false.*remove lm_head"):
            read()
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("place", [0, VOCAB - 1])
def test_one_row_of_difference_is_enough(place: int, copy: Path, tensors: Tensors) -> None:
    head = tensors[EMBED].clone()
    assert torch.equal(read_ends(edit(resave(copy, lm_head__weight=head), tie_word_embeddings=True)).head, head)
    load_target(copy, dtype="fp32", device="cpu")
    head[place, -1] += 1
    with pytest.raises(RedraftError, match="ties the head"):
        read_ends(resave(copy, lm_head__weight=head))


TIE = "tie_word_embeddings"


@pytest.mark.parametrize(
    ("top", "nested", "head", "right"),
    [
        ({TIE: False}, {TIE: False}, "own", True),
        ({TIE: True}, {TIE: True}, "own", False),
        ({TIE: False}, {TIE: True}, "own", False),
        ({TIE: True}, {TIE: False}, "own", False),
        ({TIE: True}, {}, "own", False),
        ({}, {TIE: True}, "own", False),
        ({}, {}, "own", True),  # Llama's default
        ({TIE: True}, {TIE: True}, "none", True),
        ({TIE: False}, {TIE: True}, "none", True),  # Llava passes the nested flag on
        ({}, {TIE: True}, "none", True),
        ({TIE: False}, {TIE: False}, "none", False),
        ({}, {}, "none", False),
        ({TIE: True}, {TIE: False}, "equal", True),
    ],
)
def test_flags_of_nested_configurations(
    top: dict[str, bool], nested: dict[str, bool], head: str, right: bool, copy: Path, tensors: Tensors
) -> None:
    text = json.loads((copy / "config.json").read_text())
    text.pop(TIE)
    plain = LlavaConfig(text_config=text).to_dict()
    plain.pop(TIE)
    plain["text_config"] = {**text, **nested}
    (copy / "config.json").write_text(json.dumps({**plain, **top}, default=str))
    read_config(copy)
    given = {"own": tensors[HEAD], "none": None, "equal": tensors[EMBED].clone()}[head]
    resave(copy, lm_head__weight=given)
    if right:
        assert torch.equal(read_ends(copy).head, tensors[HEAD] if head == "own" else tensors[EMBED])
    else:
        with pytest.raises(RedraftError, match=TIE):
            read_ends(copy)


# dtypes


@pytest.mark.parametrize("name", ["lm_head__weight", "model__embed_tokens__weight", "model__norm__weight"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_quantised_ends_are_refused_by_name(name: str, dtype: torch.dtype, copy: Path, tensors: Tensors) -> None:
    key = name.replace("__", ".")
    with pytest.raises(RedraftError, match=f"(?s){key}.*quantised"):
        read_ends(resave(copy, **{name: tensors[key].to(dtype)}))


@pytest.mark.parametrize("name", PARTS)
def test_other_parts_beside_the_ends_are_refused_by_name(name: str, copy: Path) -> None:
    with pytest.raises(RedraftError, match=name):
        read_ends(resave(copy, **{name: torch.ones(3)}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("computed", ["fp32", "bf16"])
def test_ends_of_any_float_are_read_and_loaded_alike(dtype: torch.dtype, computed: str, tmp_path: Path) -> None:
    folder = save_target(llama().to(dtype), tmp_path)
    ends, loaded = read_ends(folder), load_target(folder, dtype=computed, device="cpu")
    assert ends.head.dtype == dtype
    assert torch.equal(ends.head.to(loaded.head), loaded.head)


def test_a_weight_that_the_files_lack_is_not_left_to_chance(copy: Path) -> None:
    resave(copy, **{"model.layers.3.mlp.up_proj.weight": None})
    with pytest.raises(RedraftError, match=r"layers\.3\.mlp\.up_proj\.weight"):
        load_target(copy, dtype="fp32", device="cpu")


# what a folder holds, and since when


def test_copied_weights_are_the_same_target_and_changed_ones_are_not(copy: Path, tmp_path: Path) -> None:
    record = make_target(TargetParams(source=str(copy)), tmp_path / "target")
    before = target_hash(tmp_path / "target")
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert weights_folder(tmp_path / "target") == copy
    elsewhere = shutil.copytree(copy, tmp_path / "elsewhere")
    assert make_target(TargetParams(source=str(elsewhere)), tmp_path / "again")["files"] == record["files"]
    assert target_hash(tmp_path / "again") == before
    # one bit of one layer, the same size: neither config.json nor the final norm tells
    body = load_file(copy / SINGLE)["model.layers.0.mlp.up_proj.weight"]
    body[0, 0] += 1
    resave(copy, model__layers__0__mlp__up_proj__weight=body)
    with pytest.raises(RedraftError, match=r"(?s)changed after the target stage.*found: model\.safetensors\n"):
        read_ends(tmp_path / "target")
    make_target(TargetParams(source=str(copy)), tmp_path / "target")
    assert target_hash(tmp_path / "target") != before


def test_a_configuration_edited_beside_the_weights_is_a_change(copy: Path, tmp_path: Path) -> None:
    make_target(TargetParams(source=str(copy)), tmp_path / "target")
    edit(copy, rms_norm_eps=0.5)
    with pytest.raises(RedraftError, match=r"config\.json"):
        weights_folder(tmp_path / "target")


@given(size=st.integers(4, 60), data=st.data())
def test_a_change_at_the_ends_or_of_the_length_is_seen_and_any_in_a_short_file(
    size: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_folder, "_BLOCK", 4)
        patch.setattr(target_folder, "_BLOCKS", 4)

        def digest(content: bytes) -> str:
            (folder / "x").write_bytes(content)
            return target_folder._sampled.__wrapped__(folder / "x", len(content), 0)

        plain = bytes(size)
        place = data.draw(st.integers(0, size - 1) if size <= 16 else st.sampled_from([0, 3, size - 4, size - 1]))
        assert digest(plain) == digest(plain)
        assert digest(plain) != digest(plain[:place] + b"x" + plain[place + 1 :])


def test_contents_are_of_what_is_read_alone(copy: Path) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"x")
    assert contents(copy).keys() == {SINGLE, "config.json"}


# what cannot be read


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", b"{", "no JSON"),
        ("config.json", b"[1]", "no object"),
        ("config.json", b'{"hidden_size": 4}', "model_type"),
        ("config.json", b'{"model_type": "nobody knows"}', "nobody knows"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        ("config.json", "{}".encode("utf-16"), "UTF-16"),
        ("config.json", None, "config.json"),
        (SINGLE, b"", "incomplete"),
        (SINGLE, b"x" * 100, "incomplete"),
        (SINGLE, None, "no weights"),
        (INDEX, b"{", "no JSON"),
        ("target.json", b"{", "no JSON"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_a_broken_file_ends_in_one_clear_error(
    name: str, content: bytes | None, named: str, folder: bool, copy: Path
) -> None:
    path = copy / name
    path.unlink(missing_ok=True)
    if folder and content is None:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(RedraftError, match=named):
        load_target(copy, device="cpu")


def test_weights_that_are_cut_short_are_told_with_their_file(copy: Path, tmp_path: Path) -> None:
    data = (copy / SINGLE).read_bytes()
    (copy / SINGLE).write_bytes(data[: len(data) // 2])
    with pytest.raises(RedraftError, match=r"model\.safetensors"):
        make_target(TargetParams(source=str(copy)), tmp_path / "target")


# sources


def test_a_drafter_is_no_target(copy: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), (2, 4, 5))
    speculators = edit(copy, architectures=["Eagle3Speculator"], speculators_model_type="eagle3")
    for folder in (tmp_path / "drafter", speculators):
        with pytest.raises(RedraftError, match=r"(?s)is a drafter.*donor\.source"):
            make_target(TargetParams(source=str(folder)), tmp_path / "target")


@pytest.mark.parametrize(
    "params", [{"sha256": "0" * 64}, {"revision": "abc"}, {"source": "fit:tiny", "revision": "abc"}]
)
def test_a_key_that_has_no_effect_is_told(params: dict[str, str], llama_folder: Path, tmp_path: Path) -> None:
    key = next(name for name in params if name != "source")
    with pytest.raises(RedraftError, match=f"(?si){key}.* has no effect"):
        make_target(TargetParams(**{"source": str(llama_folder), **params}), tmp_path / "target")


def test_home_is_expanded_and_named(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(llama_folder.parent))
    record = make_target(TargetParams(source=f"~/{llama_folder.name}"), tmp_path / "target")
    assert record["weights"] == str(llama_folder)
    with pytest.raises(RedraftError, match=f"{llama_folder.parent}/nothing is not there"):
        make_target(TargetParams(source="~/nothing"), tmp_path / "target")


def test_a_hub_id_asks_for_a_revision_where_a_profile_has_it(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"`revision:` beside the source in the profile"):
        make_target(TargetParams(source="ORG/NAME"), tmp_path / "target")
    with pytest.raises(RedraftError, match=r"(?s)Two revisions.*abc.*def"):
        make_target(TargetParams(source="ORG/NAME@abc", revision="def"), tmp_path / "target")
    (tmp_path / "file").write_text("")
    with pytest.raises(RedraftError, match="file is a file"):
        make_target(TargetParams(source=str(tmp_path / "file")), tmp_path / "target")


def test_templates_beside_the_default_are_brought_along(copy: Path, tmp_path: Path) -> None:
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    make_target(TargetParams(source=str(copy)), tmp_path / "target")
    assert (tmp_path / "target/additional_chat_templates/tool_use.jinja").read_text() == "x"


def test_shapes_are_those_of_the_model(llama_folder: Path) -> None:
    assert read_ends(llama_folder).norm.shape == (HIDDEN,)
