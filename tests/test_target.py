"""Targets: chat and loss mask, sources, both ends, aux layers (cases C06, C08, C11, C16)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import HIDDEN, LAYERS, VOCAB, deepseek, deepseek_config, llama, save_target
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from redraft.corpus.chat import prompt_ids, show_sample
from redraft.corpus.samples import tokenize
from redraft.corpus.tokenizer import (
    byte_ids,
    decodable_ids,
    differing_ids,
    load_tokenizer,
    require_markers,
    special_ids,
)
from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams
from redraft.hidden.in_process import forward
from redraft.target.checkout import checkout
from redraft.target.config import default_aux_layers
from redraft.target.ends import read_ends
from redraft.target.folder import weights_folder
from redraft.target.model import Target, load_target
from redraft.target.sources import make_target


def kimi() -> Kimi_K25ForConditionalGeneration:
    torch.manual_seed(3)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "pos_emb_time": 1,
    }
    config = Kimi_K25Config(
        text_config=deepseek_config().to_dict(),
        vision_config=vision,
        projection_hidden_size=16,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        tie_word_embeddings=False,
    )
    return Kimi_K25ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("make", [llama, deepseek, kimi])
def test_aux_states_are_inputs_of_layers_whatever_the_architecture(make: object, tmp_path: Path) -> None:
    model = make()  # type: ignore[operator]
    target = load_target(save_target(model, tmp_path), dtype="fp32", device="cpu")
    assert target.aux_layers == (2, LAYERS // 2, LAYERS - 3)
    ids = torch.arange(10)[None] % VOCAB
    with torch.no_grad(), target.capture(target.aux_layers) as captured:
        final = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
        whole = model(input_ids=ids, output_hidden_states=True)  # type: ignore[operator]
    for layer in target.aux_layers:
        assert torch.allclose(captured.inputs[layer], whole.hidden_states[layer], atol=1e-5), layer
    assert torch.allclose(final @ target.head.T, whole.logits, atol=1e-4)
    assert captured.unnormed is not None
    assert torch.allclose(target.decoder.norm(captured.unnormed), final, atol=1e-5)
    assert target.aux(captured).shape == (1, 10, 3 * HIDDEN)
    ends = read_ends(tmp_path)
    assert torch.equal(ends.embed, target.embed)
    assert torch.equal(ends.head, target.head)
    assert torch.equal(ends.norm, target.decoder.norm.weight)


def test_hooks_are_gone_after_the_block(target: Target) -> None:
    with target.capture(target.aux_layers):
        pass
    assert not any(layer._forward_pre_hooks for layer in target.decoder.layers)


def test_default_aux_layers() -> None:
    assert default_aux_layers(61) == (2, 30, 58)
    assert default_aux_layers(30) == (2, 15, 27)
    with pytest.raises(RedraftError, match="too shallow"):
        default_aux_layers(4)


@pytest.mark.parametrize("layers", [(5, 4, 3), (2, 2, 5), (2, 4, LAYERS), (-1, 4, 5)])
def test_aux_layers_must_fit(layers: tuple[int, ...], llama_folder: Path) -> None:
    with pytest.raises(RedraftError, match="do not fit"):
        load_target(llama_folder, aux_layers=layers)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    ends = read_ends(save_target(llama(tie_word_embeddings=True), tmp_path))
    assert ends.head is ends.embed


def test_an_untied_head_must_be_there(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RedraftError, match="no head"):
        read_ends(folder)


def test_two_candidates_are_listed(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors["vision.embed_tokens.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RedraftError, match=r"vision\.embed_tokens\.weight"):
        read_ends(folder)


def test_a_sharded_target_and_its_missing_shard(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(read_ends(tmp_path).embed, model.get_input_embeddings().weight)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / index["model.embed_tokens.weight"]).unlink()
    with pytest.raises(RedraftError, match="missing"):
        read_ends(tmp_path)


def test_a_local_folder_is_a_source_and_its_weights_stay_there(llama_folder: Path, tmp_path: Path) -> None:
    record = make_target(TargetParams(source=str(llama_folder)), tmp_path / "target")
    assert record["weights"] == str(llama_folder)
    assert weights_folder(tmp_path / "target") == llama_folder
    assert not list((tmp_path / "target").glob("*.safetensors"))
    assert read_ends(tmp_path / "target").embed.shape == (VOCAB, HIDDEN)


def test_weights_that_changed_in_place_are_told(llama_folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama_folder, tmp_path / "source")
    make_target(TargetParams(source=str(source)), tmp_path / "target")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, source / "model.safetensors")
    with pytest.raises(RedraftError, match="changed after the target stage"):
        read_ends(tmp_path / "target")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"source": "/nowhere/at/all"}, "neither a folder nor a hub id"),
        ({"source": "ORG/NAME"}, "revision"),
        ({"source": "wheel:x==1"}, "sha256"),
    ],
)
def test_a_source_that_cannot_be_had_leaves_nothing(params: dict[str, str], named: str, tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=named):
        make_target(TargetParams(**params), tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_its_own_checkout(tmp_path: Path) -> None:
    assert checkout(str(tmp_path), None) == tmp_path


CHAT = [
    {"role": "user", "content": "What is a saw?"},
    {"role": "assistant", "content": "The saw is a tool."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "In the box."},
]


def test_only_answers_and_their_end_are_supervised(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    sample = tokenize(tokenizer, CHAT, 200)
    supervised = tokenizer.decode([number for number, flag in zip(sample.ids, sample.mask, strict=True) if flag])
    assert supervised == "The saw is a tool.<|end|>In the box.<|end|>"
    assert sample.dropped is None
    first = sample.mask.index(1)
    assert sample.ids[:first] == prompt_ids(tokenizer, CHAT[:1])
    assert f"+ {sample.ids[first]:>7} 'The'" in show_sample(tokenizer, sample.ids, sample.mask)


def test_a_cut_answer_and_no_answer_are_dropped_with_their_reason(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert tokenize(tokenizer, CHAT, 10).dropped.startswith("truncated")
    assert tokenize(tokenizer, CHAT[:1], 100).dropped == "no answer"


def test_ids_whose_tokens_differ_are_listed(tiny_folder: Path) -> None:
    one, two = load_tokenizer(tiny_folder), load_tokenizer(tiny_folder)
    two.add_tokens(["<think>"])
    assert differing_ids(one, two) == {640: (None, "<think>")}
    assert differing_ids(one, one) == {}


def test_a_marker_that_is_cut_into_other_tokens_is_refused(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    require_markers(tokenizer)

    class Broken:
        all_special_ids, added_tokens_decoder = [2], {}
        convert_ids_to_tokens = staticmethod(lambda number: "<|end|>")

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [30, 90]}

    with pytest.raises(RedraftError, match=r"<\|end\|>"):
        require_markers(Broken())


def test_special_and_byte_tokens_are_found(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert special_ids(tokenizer) == {0, 1, 2}
    assert len(byte_ids(tokenizer)) == 256
    assert len(decodable_ids(tokenizer)) == len(tokenizer)
    for marker in ("<|start|>", "<|end|>"):
        assert len(tokenizer(marker, add_special_tokens=False)["input_ids"]) == 1


def test_the_embedding_of_a_prediction_layer_is_not_the_targets(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.8.embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(read_ends(folder).embed, read_ends(llama_folder).embed)


def test_a_target_that_is_spread_gives_the_states_of_one_that_is_not(llama_folder: Path, tmp_path: Path) -> None:
    """Over several places: layers on the disk here, on other GPUs elsewhere; states are gathered wherever they lie."""
    ids = [torch.arange(9) * 5 % 96, torch.arange(4)]
    whole = load_target(llama_folder, dtype="fp32", device="cpu")
    places = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(8)}
    places |= {"model.embed_tokens": "disk", "model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
    spread = load_target(
        llama_folder,
        dtype="fp32",
        device_map={
            "model.embed_tokens": "disk",
            "model.norm": "cpu",
            "lm_head": "disk",
            "model.rotary_emb": "cpu",
            **places,
        },
    )
    assert spread.model.hf_device_map["lm_head"] == "disk"  # type: ignore[union-attr, index]
    for one, two in zip(*(forward(each, ids, (2, 4, 5), around=True) for each in (whole, spread)), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert torch.equal(one[name], two[name]), name
    assert torch.equal(spread.head, whole.head)
