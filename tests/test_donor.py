"""A drafter of somebody else: its mapping, layers, embedding and configuration (cases C34, C35, C63 to C66)."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HIDDEN, LAYERS, SLOTS, VOCAB, llama, save_target, some_checkpoint, some_mapping
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_drafter import as_speculators
from test_mapping import mappings

from redraft.drafter.checkpoint import (
    export_speculators,
    read_checkpoint,
    read_donor,
    read_parts,
    weights_sha256,
    write_checkpoint,
)
from redraft.drafter.mapping_of import read_mapping
from redraft.frame.errors import RedraftError
from redraft.frame.profile import DonorParams
from redraft.preflight.lint import lint
from redraft.remap.remap import remap_folder
from redraft.target.config import read_config
from redraft.target.ends import read_ends
from redraft.vocab.build import Vocabulary, write_vocab
from redraft.vocab.mapping import Mapping, holds_ids, readings

AUX, NEW = (2, 4, 5), "0.5.23"
PREFIX = Mapping(np.arange(SLOTS), VOCAB)


@pytest.fixture(scope="module")
def llama_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(llama().bfloat16(), tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), AUX)
    return tmp_path / "drafter"


def edit(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def without(folder: Path, *names: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in names}))
    return folder


def tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Change tensors as another tool would: no metadata is left; None takes one out."""
    path = folder / "model.safetensors"
    found = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)
    return folder


def foreign(folder: Path) -> Path:
    (folder / "redraft.json").unlink()
    return tensors(folder)


def rules(folder: Path, target: Path, version: str = NEW, **more: Any) -> list[tuple[str, str]]:
    return [(each.level, each.rule) for each in lint(folder, target, version, **more)]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from redraft.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


# --- offsets or ids, and zeros (C34, C35)


def zeroed(folder: Path, mask: bool) -> Path:
    """A drafter of another tool whose d2t was never filled; its `t2d`, if it has one, was made from that."""
    zeros = torch.zeros(SLOTS, dtype=torch.int64)
    return tensors(foreign(folder), d2t=zeros, t2d=torch.from_numpy(PREFIX.t2d) if mask else None)


@pytest.mark.parametrize("mask", [True, False])
def test_c34_zero_offsets_of_another_tool_are_refused_unless_they_are_meant(
    mask: bool, folder: Path, llama_target: Path, tmp_path: Path
) -> None:
    zeroed(folder, mask)
    config = read_config(llama_target).get_text_config()
    for read in (
        lambda: read_mapping(str(folder)),
        lambda: read_parts(folder),
        lambda: read_donor(folder, config, AUX),
        lambda: remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out"),
    ):
        with pytest.raises(RedraftError, match="prefix vocabulary, ids 0 to 23 of 96"):
            read()
    assert not (tmp_path / "out").exists()
    assert ("error", "d2t-zeros") in rules(folder, llama_target)
    assert read_mapping(str(folder), prefix=True).hash == PREFIX.hash
    donor = read_donor(folder, config, AUX, prefix=True)
    write_checkpoint(tmp_path / "donor", donor, AUX)  # redraft's own record vouches for it from here on
    assert read_checkpoint(tmp_path / "donor").mapping.prefix
    assert "d2t-zeros" not in {rule for _, rule in rules(tmp_path / "donor", llama_target)}
    remap_folder(tmp_path / "donor", some_mapping(3), "zero", None, tmp_path / "out")


@pytest.mark.parametrize("size", ["t2d", "config", "both"])
def test_c34_zero_offsets_in_any_file(size: str, folder: Path, tmp_path: Path) -> None:
    zeroed(folder, size != "config")
    if size == "t2d":
        shutil.move(folder / "model.safetensors", tmp_path / "alone.safetensors")
        place = tmp_path / "alone.safetensors"
    else:
        place = folder / "model.safetensors"
    refused = command("audit", place)
    assert refused.returncode == 1
    assert "prefix vocabulary" in refused.stderr
    assert "--prefix-vocabulary" in refused.stderr
    assert refused.stdout == ""
    told = command("audit", place, "--prefix-vocabulary")
    assert told.returncode == 0, told.stderr
    assert "prefix vocabulary" in told.stdout


def test_c34_the_commands_take_the_flag(folder: Path, tmp_path: Path) -> None:
    zeroed(folder, True)
    write_checkpoint(tmp_path / "new", some_checkpoint(3), AUX)
    remap = ("remap", folder, "--vocab", tmp_path / "new", "--output", tmp_path / "out")
    assert "prefix vocabulary" in command(*remap).stderr
    assert not (tmp_path / "out").exists()
    done = command(*remap, "--prefix-vocabulary")
    assert done.returncode == 0, done.stderr
    shared = np.intersect1d(PREFIX.ids, some_checkpoint(3).mapping.ids)
    row = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    kept = load_file(folder / "model.safetensors")["lm_head.weight"]
    slots = some_checkpoint(3).mapping.slots[shared]
    assert torch.equal(row[slots], kept[shared])


def test_a_prefix_vocabulary_that_redraft_built_needs_no_flag(tmp_path: Path) -> None:
    counts = np.zeros(VOCAB, np.int64)
    write_vocab(tmp_path / "vocab", Vocabulary(PREFIX, 0, 0), {"train": counts}, {})
    checkpoint = some_checkpoint()
    checkpoint.mapping = PREFIX
    write_checkpoint(tmp_path / "drafter", checkpoint, AUX)
    export_speculators(tmp_path / "vllm", checkpoint, AUX, "some/target")  # no redraft.json: the metadata vouches
    for place in ("vocab", "vocab/mapping.safetensors", "drafter", "drafter/model.safetensors", "vllm"):
        assert read_mapping(str(tmp_path / place)).hash == PREFIX.hash, place
    assert read_checkpoint(tmp_path / "vllm").mapping.prefix


@given(mappings(), st.booleans())
def test_the_reading_is_told_by_the_mask(mapping: Mapping, written_as_ids: bool) -> None:
    values = mapping.ids if written_as_ids else mapping.d2t
    fit = readings(values, mapping.vocab_size, mapping.t2d)
    own = "ids" if written_as_ids else "offsets"
    assert list(fit[own]) == list(mapping.ids)
    other = {"ids": mapping.d2t, "offsets": mapping.ids + np.arange(len(mapping))}[
        "ids" if own == "offsets" else "offsets"
    ]
    assert (len(fit) == 2) == (sorted(other) == sorted(mapping.ids))
    assert holds_ids(values, mapping.vocab_size, mapping.t2d) == (list(fit) == ["ids"])


@given(mappings())
def test_ids_without_a_mask_are_never_taken_for_offsets(mapping: Mapping) -> None:
    if len(mapping) > 2:
        assert holds_ids(mapping.ids, mapping.vocab_size)
        with pytest.raises(RedraftError, match="ids rather than offsets"):
            Mapping.from_offsets(mapping.ids, None, mapping.vocab_size)


@given(mappings())
def test_what_redraft_wrote_is_no_guess(mapping: Mapping) -> None:
    assert Mapping.from_offsets(mapping.d2t, None, mapping.vocab_size, hashes=[mapping.hash]).hash == mapping.hash


ODD = np.array([8, 3, 5, 20, 21, 34, 15, 13])


def test_c35_ids_that_do_not_ascend_are_suspicious_too(folder: Path, llama_target: Path) -> None:
    assert sorted(ODD + np.arange(8))[-1] < 64  # the offsets would fit
    with pytest.raises(RedraftError, match="ids rather than offsets"):
        Mapping.from_offsets(ODD, None, 64)
    assert list(Mapping.from_offsets(ODD - np.arange(8), None, 64).ids) == list(ODD)
    ids = np.random.default_rng(1).permutation(some_checkpoint().mapping.ids)
    tensors(foreign(folder), d2t=torch.from_numpy(ids), t2d=None)
    assert ("error", "d2t-absolute") in rules(folder, llama_target)
    with pytest.raises(RedraftError, match="rather than offsets"):
        read_mapping(str(folder))


@pytest.mark.parametrize("order", ["ascending", "other"])
def test_reader_and_preflight_agree(order: str, folder: Path, llama_target: Path) -> None:
    """A d2t that one of them refuses, the other one refuses as well."""
    generator = np.random.default_rng(5)
    for _ in range(20):
        ids = np.sort(generator.choice(VOCAB, SLOTS, replace=False))
        ids = ids if order == "ascending" else generator.permutation(ids)
        for values in (ids, ids - np.arange(SLOTS), np.zeros(SLOTS, np.int64)):
            for mask in (None, np.isin(np.arange(VOCAB), ids)):
                shutil.rmtree(folder)
                write_checkpoint(folder, some_checkpoint(), AUX)
                table = None if mask is None else torch.from_numpy(mask)
                tensors(foreign(folder), d2t=torch.from_numpy(values), t2d=table)
                wrong = {rule for level, rule in rules(folder, llama_target) if level == "error"}
                try:
                    read_mapping(str(folder))
                except RedraftError:
                    assert wrong
                else:
                    assert not wrong


def test_the_metadata_of_the_weights_vouches_as_redraft_json_does(folder: Path) -> None:
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    other = some_mapping(7)
    swapped = {"d2t": torch.from_numpy(other.d2t), "t2d": torch.from_numpy(other.t2d)}
    save_file({**load_file(path), **swapped}, path, metadata)
    (folder / "redraft.json").unlink()
    for read in (read_mapping, lambda source: read_parts(Path(source))):
        with pytest.raises(RedraftError, match="not the one it was written with"):
            read(str(folder))


# --- quantised or windowed by its configuration (C63)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.13", NEW])
@pytest.mark.parametrize(
    ("fields", "side", "wrong"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, None, True),
        ({"quantization_config": {}}, None, True),
        ({"quantization_config": None}, None, False),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, True),
        ({}, {"quantization": {"quant_algo": "FP8"}}, True),
        ({}, {"quant_algo": "NVFP4"}, True),
        ({}, {"quantization": {"quant_algo": None}}, False),
        ({}, {"quantization": None}, False),
        ({}, [], True),
    ],
)
def test_c63_a_configuration_that_says_quantised(
    fields: dict[str, object], side: object, wrong: bool, version: str, folder: Path, llama_target: Path, tmp_path: Path
) -> None:
    edit(folder, **fields)
    if side is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(side))
    assert (("error", "draft-quantised") in rules(folder, llama_target, version)) == wrong
    remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out")  # writes a clean config.json: it heals it
    assert ("error", "draft-quantised") not in rules(tmp_path / "out", llama_target, version)


WINDOWS: list[dict[str, object]] = [
    {"sliding_window": 2048},
    {"sliding_window": 2048, "use_sliding_window": True},
    {"sliding_window": 2048, "layer_types": ["sliding_attention"]},
    {"layer_types": ["chunked_attention"]},
    {"use_sliding_window": True},
    {"sliding_window_size": 512},
    {"window_size": 512},
    {"attention_chunk_size": 8192},
]
WHOLE: list[dict[str, object]] = [
    {"sliding_window": None},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"layer_types": ["full_attention"]},
]


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize("fields", WINDOWS)
def test_c63_a_window_in_any_spelling(fields: dict[str, object], form: str, folder: Path, llama_target: Path) -> None:
    edit(folder, **fields)
    if form == "speculators":
        as_speculators(folder)
    else:
        (found,) = [each for each in lint(folder, llama_target, NEW) if each.rule == "draft-window"]
        assert found.level == "note"
        foreign(folder)
        (found,) = [each for each in lint(folder, llama_target, NEW) if each.rule == "draft-window"]
        assert "--speculative-draft-window-size" in found.fix
        assert ("error", "draft-window") in rules(folder, llama_target, "0.5.11")  # no flag to give
    with pytest.raises(RedraftError, match="window"):
        read_parts(folder)


@pytest.mark.parametrize("fields", WHOLE)
def test_c63_what_is_no_window(fields: dict[str, object], folder: Path, llama_target: Path) -> None:
    edit(folder, **fields)
    assert rules(folder, llama_target) == []
    read_parts(folder)


# --- layer ids by family (C64), and none (C65)


def family(tmp_path: Path, source: Path, name: str) -> Path:
    return edit(Path(shutil.copytree(source, tmp_path / f"target-{name}")), architectures=[name])


def with_ids(folder: Path, ids: list[int]) -> Path:
    part = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return foreign(edit(folder, eagle_config=part))


def test_c64_gpt_oss(folder: Path, llama_target: Path, tmp_path: Path) -> None:
    target = family(tmp_path, llama_target, "GptOssForCausalLM")
    with_ids(folder, [4, 6, 8])
    assert {level for level, _ in rules(folder, target)} == {"note"}
    (told,) = [each for each in lint(folder, target, NEW) if each.rule == "layers-untold"]
    assert "[4, 6, 8]" in told.found
    assert rules(folder, target, trained=[4, 6, 8]) == []
    assert "error" in {level for level, _ in rules(folder, target, "0.5.13")}
    with_ids_again = edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    assert rules(with_ids_again, target, trained=[2, 4, 5]) == []  # the usual ids stay outputs


@pytest.mark.parametrize("name", ["Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM"])
def test_c64_families_whose_first_id_decides(name: str, folder: Path, llama_target: Path, tmp_path: Path) -> None:
    target = family(tmp_path, llama_target, name)
    with_ids(folder, [2, 4, 5])
    assert rules(folder, target, trained=[2, 4, 5]) == []
    assert rules(folder, target, trained=[3, 5, 6]) == [("error", "layers-shifted")]
    old = {rule for _, rule in rules(folder, target, "0.5.12", trained=[3, 5, 6])}
    assert "layers-shifted" not in old
    assert read_donor(folder, read_config(target), AUX).mapping.hash
    with pytest.raises(RedraftError, match=r"\(2, 4, 5\)"):
        read_donor(folder, read_config(target), (3, 5, 6))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_c64_a_donor_of_a_llama_target_names_outputs(
    name: str, folder: Path, llama_target: Path, tmp_path: Path
) -> None:
    target = family(tmp_path, llama_target, name)
    with_ids(folder, [2, 4, 5])
    config = read_config(llama_target).get_text_config()
    config.architectures = [name]
    with pytest.raises(RedraftError, match=r"\(3, 5, 6\)[\s\S]*aux_layers: \[3, 5, 6\][\s\S]*aux_layers: \[2, 4, 5\]"):
        read_donor(folder, config, AUX)
    assert ("error", "layers-shifted") in rules(folder, target, trained=AUX)
    read_donor(edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}), config, AUX)


def test_c64_a_target_that_did_not_have_hooks_yet(folder: Path, llama_target: Path, tmp_path: Path) -> None:
    for name, before, since in (
        ("Glm4MoeLiteForCausalLM", "0.5.7", "0.5.8"),
        ("Gemma3ForCausalLM", "0.5.11", "0.5.12"),
        ("KimiK25ForConditionalGeneration", "0.5.10rc0", "0.5.10"),
        ("Qwen3_5ForCausalLM", "0.5.21", "0.5.22"),
    ):
        target = family(tmp_path, llama_target, name)
        assert ("error", "target-hooks") in rules(folder, target, before), name
        assert ("error", "target-hooks") not in rules(folder, target, since), name


def test_c65_layers_that_were_not_named_stay_not_named(
    folder: Path, llama_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign(without(folder, "eagle_config"))
    before = rules(folder, llama_target)
    remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out")
    assert "does not name the layers" in capsys.readouterr().out
    part = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    assert "eagle_aux_hidden_state_layer_ids" not in part
    assert "aux_layers" not in json.loads((tmp_path / "out" / "redraft.json").read_text())
    assert rules(tmp_path / "out", llama_target) == before
    assert {level for level, _ in before} == {"note"}


def test_c65_an_empty_list_is_none(folder: Path, llama_target: Path, tmp_path: Path) -> None:
    with_ids(folder, [])
    remap_folder(folder, some_mapping(3), "zero", llama_target, tmp_path / "out")
    assert not any(level == "error" for level, _ in rules(tmp_path / "out", llama_target))


def test_c65_layers_can_be_given(folder: Path, llama_target: Path, tmp_path: Path) -> None:
    foreign(without(folder, "eagle_config"))
    remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out", aux_layers=AUX)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert rules(tmp_path / "out", llama_target) == []
    for wrong in ((2, 4), (4, 2, 5), (2, 2, 5)):
        with pytest.raises(RedraftError, match="ascending"):
            remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "no", aux_layers=wrong)


@pytest.mark.parametrize(
    ("name", "ids", "given", "kept", "layers"),
    [
        (None, [2, 4, 5], None, [2, 4, 5], None),  # what they mean depends on the family
        (None, [1, 3, 4], None, [1, 3, 4], [2, 4, 5]),
        (None, [2, 4, 5], (3, 5, 6), [2, 4, 5], [3, 5, 6]),
        ("LlamaForCausalLM", [2, 4, 5], None, [2, 4, 5], [3, 5, 6]),
        ("DeepseekV3ForCausalLM", [2, 4, 5], None, [1, 3, 4], [2, 4, 5]),  # the same, for every release
        ("DeepseekV3ForCausalLM", [3, 5, 6], None, [3, 5, 6], [3, 5, 6]),
        ("GptOssForCausalLM", [4, 6, 8], None, [4, 6, 8], [4, 6, 8]),
    ],
)
def test_c64_c65_what_a_remap_carries_over(
    name: str | None,
    ids: list[int],
    given: tuple[int, ...] | None,
    kept: list[int],
    layers: list[int] | None,
    folder: Path,
    llama_target: Path,
    tmp_path: Path,
) -> None:
    target = family(tmp_path, llama_target, name) if name else None
    told: list[str] = []
    remap_folder(
        with_ids(folder, ids), some_mapping(3), "zero", target, tmp_path / "out", aux_layers=given, tell=told.append
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == kept
    assert json.loads((tmp_path / "out" / "redraft.json").read_text()).get("aux_layers") == layers
    assert bool(told) == (layers is None)
    if target:
        assert ("error", "layers-shifted") not in rules(tmp_path / "out", target)


def test_given_layers_that_contradict_the_donor_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match="other layers"):
        remap_folder(folder, some_mapping(3), "zero", None, tmp_path / "out", aux_layers=(3, 4, 5))


# --- an embedding of its own (C66)


def embedded(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    embed = change(llama().bfloat16().get_input_embeddings().weight.detach().clone())
    return tensors(folder, **{"embed_tokens.weight": embed})


def some_rows(embed: torch.Tensor) -> torch.Tensor:
    embed[[3, 50, 95]] += 1
    return embed


@pytest.mark.parametrize(
    ("change", "share"),
    [(some_rows, "3 of 96 rows"), (lambda e: e.flip(0), "96 of 96 rows"), (lambda e: e[:-4], "all rows")],
)
def test_c66_an_embedding_of_its_own_is_refused_or_told(
    change: Callable[[torch.Tensor], torch.Tensor],
    share: str,
    folder: Path,
    llama_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embedded(folder, change)
    assert ("error", "embed-differs") in rules(folder, llama_target) or share.startswith("3 ")  # lint looks at a sample
    config, ends = read_config(llama_target), read_ends(llama_target)
    read_donor(folder, config, AUX)
    assert "was not compared" in capsys.readouterr().out
    with pytest.raises(RedraftError, match=share):
        read_donor(folder, config, AUX, target_embed=ends.embed)
    read_donor(folder, config, AUX, target_embed=ends.embed, embedding="target")
    assert share in capsys.readouterr().out
    for target, told in ((None, "was not compared"), (llama_target, share)):
        remap_folder(folder, some_mapping(3), "zero", target, tmp_path / f"out{target is None}")
        assert told in capsys.readouterr().out
        assert "embed_tokens.weight" not in load_file(tmp_path / f"out{target is None}" / "model.safetensors")


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float32])
def test_c66_the_targets_own_embedding_is_fine(
    cast: torch.dtype, folder: Path, llama_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded(folder, lambda embed: embed.to(cast))
    read_donor(folder, read_config(llama_target), AUX, target_embed=read_ends(llama_target).embed)
    remap_folder(folder, some_mapping(3), "zero", llama_target, tmp_path / "out")
    assert capsys.readouterr().out == ""


# --- identity of what is served


def test_weights_have_one_hash_wherever_they_lie(folder: Path, llama_target: Path, tmp_path: Path) -> None:
    own = weights_sha256(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    embedded(copy, lambda embed: embed)  # no metadata, another name before each tensor, an embedding, a pickle
    found = load_file(copy / "model.safetensors")
    save_file({f"model.{name}" if "." in name else name: t for name, t in found.items()}, copy / "model.safetensors")
    assert weights_sha256(copy) == own
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    assert weights_sha256(copy) == own
    tensors(folder, **{"norm.weight": load_file(folder / "model.safetensors")["norm.weight"].flip(0)})
    assert weights_sha256(folder) != own
    write_checkpoint(tmp_path / "other", some_checkpoint(4), AUX)
    assert weights_sha256(tmp_path / "other") != own


def test_one_more_or_less_bit_counts(folder: Path) -> None:
    own = weights_sha256(folder)
    head = load_file(folder / "model.safetensors")["lm_head.weight"].clone()
    head.view(torch.int16)[3, 4] ^= 1
    tensors(folder, **{"lm_head.weight": head})
    assert weights_sha256(folder) != own


def test_a_config_of_transformers_without_architectures_is_read_like_a_llama(folder: Path) -> None:
    target = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, model_type="llama", num_hidden_layers=LAYERS)
    read_donor(folder, target, AUX)
    with pytest.raises(RedraftError, match="without a name"):
        read_donor(with_ids(folder, [2, 4, 5]), target, AUX)


# --- the stage


def stage(
    folder: Path,
    target: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: tuple[int, ...] | None = None,
    **donor: object,
) -> dict[str, Any]:
    """The metrics of the donor stage for a drafter in `folder`, with `target.aux_layers`."""
    place.mkdir()
    (place / "artifacts").mkdir()
    (place / "artifacts/target").symlink_to(target)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "stages")
    params = DonorParams(source=str(folder), **donor)
    profile = SimpleNamespace(donor=params, target=SimpleNamespace(trust_remote_code=False, aux_layers=layers))
    body = importlib.import_module("donor").main
    metrics = body(SimpleNamespace(profile=profile, params=SimpleNamespace(resume="auto"))).metrics
    assert read_checkpoint(place / "artifacts/donor").mapping
    return metrics


def test_the_stage_says_whether_tokenizers_were_compared(
    folder: Path, llama_target: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(folder, llama_target, tmp_path / "a", monkeypatch)["foreign_ids"] is None
    assert not read_checkpoint(tmp_path / "a/artifacts/donor").compared
    target = Path(shutil.copytree(llama_target, tmp_path / "target"))
    for file in tiny_folder.glob("*token*"):
        shutil.copy(file, target)
    for file in tiny_folder.glob("*.jinja"):
        shutil.copy(file, target)
    compared = stage(folder, target, tmp_path / "b", monkeypatch, tokenizer=str(tiny_folder))
    assert compared["foreign_ids"] == 0
    assert read_checkpoint(tmp_path / "b/artifacts/donor").compared


def test_the_stage_refuses_what_the_profile_does_not_allow(
    folder: Path,
    llama_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    zeroed(folder, True)
    with pytest.raises(RedraftError, match="prefix_vocabulary"):
        stage(folder, llama_target, tmp_path / "a", monkeypatch)
    stage(folder, llama_target, tmp_path / "b", monkeypatch, prefix_vocabulary=True)
    embedded(folder, some_rows)
    with pytest.raises(RedraftError, match=r"donor\.embedding: target"):
        stage(folder, llama_target, tmp_path / "c", monkeypatch, prefix_vocabulary=True)
    assert not (tmp_path / "c/artifacts/donor").exists()
    stage(folder, llama_target, tmp_path / "d", monkeypatch, prefix_vocabulary=True, embedding="target")
    assert "3 of 96 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "ids", "layers", "written", "told"),
    [
        ("LlamaForCausalLM", [2, 4, 5], (3, 5, 6), [2, 4, 5], False),  # its ids say so
        ("DeepseekV3ForCausalLM", [3, 5, 6], (3, 5, 6), [3, 5, 6], False),
        ("DeepseekV3ForCausalLM", [2, 4, 5], (3, 5, 6), [3, 5, 6], True),  # the ids of Kimi-K2's donor, as outputs
        ("LlamaForCausalLM", [2, 4, 5], (2, 4, 5), [1, 3, 4], True),
        ("DeepseekV3ForCausalLM", [2, 4, 5], (1, 3, 4), None, True),  # no release captures these: an export says so
        ("DeepseekV3ForCausalLM", [2, 4, 5], (2, 4, 5), [1, 3, 4], False),
    ],
)
def test_a_donor_of_the_other_convention_is_used_where_the_profile_names_the_layers(
    name: str,
    ids: list[int],
    layers: tuple[int, ...],
    written: list[int] | None,
    told: bool,
    folder: Path,
    llama_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A12: the donor stage refused layers that do not start with 2, and the other reading of a donor's ids."""
    target = family(tmp_path, llama_target, name)
    stage(with_ids(folder, ids), target, tmp_path / "a", monkeypatch, layers)
    out = tmp_path / "a/artifacts/donor"
    part = json.loads((out / "config.json").read_text())["eagle_config"]
    assert part.get("eagle_aux_hidden_state_layer_ids") == written
    assert read_checkpoint(out).record["aux_layers"] == list(layers)
    assert (f"taken to be trained on {list(layers)}" in capsys.readouterr().out) == told
    if written:
        assert not [rule for _, rule in rules(out, target) if rule.startswith("layers")]


def test_layers_that_are_no_reading_of_the_ids_are_refused(
    folder: Path, llama_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ids(folder, [2, 5, 6])
    for number, layers in enumerate([None, (2, 4, 6), (3, 4, 5), (4, 6, 7)]):
        with pytest.raises(RedraftError, match="other layers"):
            stage(folder, llama_target, tmp_path / str(number), monkeypatch, layers)


def test_what_redraft_recorded_is_asked_before_the_ids(folder: Path, llama_target: Path) -> None:
    """Files without ids, since none were known to mean these layers, are no donor of other layers."""
    config = read_config(llama_target)
    write_checkpoint(folder, some_checkpoint(), (3, 5, 6))
    assert read_donor(folder, config, (3, 5, 6)).record["aux_layers"] == [3, 5, 6]
    with pytest.raises(RedraftError, match=r"redraft\.json[\s\S]*\(3, 5, 6\)"):
        read_donor(folder, config, AUX)
    told: list[str] = []
    read_donor(folder, config, AUX, named=True, tell=told.append)
    assert "remap.json" in told[0]


@pytest.mark.parametrize(("name", "ids"), [(None, None), ("DeepseekV3ForCausalLM", [3, 5, 6])])
def test_a_remap_takes_the_other_reading_from_its_caller(
    name: str | None, ids: list[int] | None, folder: Path, llama_target: Path, tmp_path: Path
) -> None:
    target = family(tmp_path, llama_target, name) if name else None
    told: list[str] = []
    given = {"aux_layers": (3, 5, 6), "tell": told.append}
    remap_folder(with_ids(folder, [1, 3, 4]), some_mapping(3), "zero", target, tmp_path / "out", **given)
    part = json.loads((tmp_path / "out/config.json").read_text())["eagle_config"]
    assert part.get("eagle_aux_hidden_state_layer_ids") == ids
    assert json.loads((tmp_path / "out/redraft.json").read_text())["aux_layers"] == [3, 5, 6]
    assert "names inputs of layers [2, 4, 5]" in told[0]
    assert ("redraft export" in told[-1]) == (ids is None)
