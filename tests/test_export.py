"""Layers by release and family, exports for SGLang, and their model card (cases C16, C18)."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import LAYERS, SHAPE, SLOTS, some_checkpoint
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_drafter import as_speculators, same_weights
from test_lint import (
    AUX,
    LM_HEAD,
    NEW,
    VERSIONS,
    Fault,
    both,
    config,
    copy_of,
    errors,
    foreign,
    levels,
    make_targets,
    nothing,
    record,
    rename,
    run,
    weights,
    with_embedding,
)
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.drafter.checkpoint import read_checkpoint, weights_sha256, write_checkpoint
from redraft.frame.errors import RedraftError
from redraft.preflight.export import for_release
from redraft.preflight.lint import lint
from redraft.preflight.releases import Captured, Release, able_releases, captured, ids_that_capture
from redraft.target.ends import target_hash


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), AUX)
    return tmp_path / "drafter"


FIRST = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM")
FAMILIES = (*FIRST, "LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM", "PhiForCausalLM")


def literal(ids: list[int] | None, depth: int, family: str, version: str) -> tuple[list[int], list[int]]:
    """What the contract says, in its own order: eager, then in CUDA graphs."""
    place = VERSIONS.index(version)
    default = [2, depth // 2, depth - 3]
    if ids is None:
        return default, default
    if family in FIRST and place >= VERSIONS.index("0.5.13"):
        eager = [i + 1 for i in ids] if ids and ids[0] == 1 else ids
    elif family == "GptOssForCausalLM" and place >= VERSIONS.index("0.5.17") and max(ids) == depth:
        eager = ids
    else:
        eager = [i + 1 for i in ids]
    eager = sorted(eager)
    return eager, default if place <= VERSIONS.index("0.5.10.post1") else eager


SOME_IDS = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.none() | SOME_IDS, st.integers(7, 12), st.sampled_from(FAMILIES), st.sampled_from(VERSIONS))
def test_layers_are_read_as_the_release_reads_them(
    ids: list[int] | None, depth: int, family: str, version: str
) -> None:
    found = captured(ids, depth, family, Release.parse(version))
    assert (list(found.eager), list(found.graphs)) == literal(ids, depth, family, version)


def test_the_known_lists_of_kimi() -> None:
    def of(ids: list[int], version: str) -> tuple[int, ...]:
        return captured(ids, 61, "KimiK25ForConditionalGeneration", Release.parse(version)).eager

    assert {of([1, 29, 57], version) for version in VERSIONS} == {(2, 30, 58)}
    assert of([2, 30, 58], "0.5.12") == (3, 31, 59)
    assert of([2, 30, 58], "0.5.13") == (2, 30, 58)
    assert captured([2, 30, 58], 61, "DeepseekV3ForCausalLM", Release.parse("0.5.9")) == Captured(
        (3, 31, 59), (2, 30, 58)
    )
    assert of([3, 31, 59], "0.5.13") == (3, 31, 59)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=3, max_size=3, unique=True).map(sorted),
    st.integers(7, 8),
    st.sampled_from(FAMILIES),
    st.sampled_from(VERSIONS),
)
def test_exported_ids_capture_what_was_trained_or_nothing_would(
    layers: list[int], depth: int, family: str, version: str
) -> None:
    try:
        ids = ids_that_capture(layers, depth, family, Release.parse(version))
    except RedraftError:
        every = itertools.combinations(range(depth), 3)
        able = [ids for ids in every if literal(list(ids), depth, family, version) == (layers, layers)]
        assert not able or layers[-1] >= depth
    else:
        assert literal(ids, depth, family, version) == (layers, layers)
        assert min(ids) >= 0


def test_versions() -> None:
    assert Release.parse("v0.5.23") == Release.parse("0.5.23")
    assert not any(Release.parse(version).note for version in VERSIONS)
    assert [Release.parse(version) for version in VERSIONS] == sorted(map(Release.parse, reversed(VERSIONS)))
    assert str(Release.parse("0.5.10.post1")) == "0.5.10.post1"


def export(
    monkeypatch: pytest.MonkeyPatch, folder: Path, target: Path, out: Path, *more: object, version: str = NEW
) -> int:
    arguments = ["--target", target, "--for", f"sglang=={version}", "--output", out, "--metrics", out.parent / "m"]
    return run(monkeypatch, "export", folder, *arguments, *more)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize(
    ("layers", "version"),
    [(AUX, "0.5.5"), (AUX, NEW), ((3, 4, 5), "0.5.12"), ((3, 4, 5), NEW), ((1, 4, 7), "0.5.11")],
)
def test_an_export_captures_what_was_trained(
    family: str,
    layers: tuple[int, ...],
    version: str,
    folder: Path,
    targets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both(record(lambda r: r.update(aux_layers=list(layers))), rename("midlayer", "layers.0"))(folder)
    out = folder.parent / "out"
    assert export(monkeypatch, folder, targets[family], out, version=version) == 0
    fields = json.loads((out / "config.json").read_text())
    ids = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert literal(ids, LAYERS, FAMILIES[0] if family == "deepseek" else "LlamaForCausalLM", version) == (
        [*layers],
        [*layers],
    )
    assert errors(lint(out, targets[family], version)) == set()
    assert same_weights(read_checkpoint(out), some_checkpoint())
    assert all(name.split(".")[0] in ("midlayer", "fc", "norm", "lm_head", "d2t", "t2d") for name in
               load_file(out / "model.safetensors"))  # fmt: skip
    assert json.loads((out / "redraft.json").read_text())["aux_layers"] == list(layers)


@pytest.mark.parametrize(
    ("layers", "version", "able"),
    [
        ((3, 4, 5), "0.5.9", "serve with 0.5.11 to 0.5.23"),
        ((1, 4, 5), NEW, "serve with 0.5.11 to 0.5.12"),
        ((2, 4, 8), NEW, "no release"),
    ],
)
def test_a_refusal_names_the_releases_that_can(
    layers: tuple[int, ...], version: str, able: str, targets: dict[str, Path]
) -> None:
    with pytest.raises(RedraftError, match=able):
        ids_that_capture(layers, LAYERS, FIRST[0], Release.parse(version))


def test_both_conventions_of_kimi_k2_are_served() -> None:
    """(2, 30, 58) by every release with hooks, (3, 31, 59) by all that heed ids in CUDA graphs."""
    kimi = "KimiK25ForConditionalGeneration"
    assert able_releases((2, 30, 58), 61, kimi) == "0.5.10 to 0.5.23"
    assert able_releases((3, 31, 59), 61, kimi) == "0.5.11 to 0.5.23"
    assert ids_that_capture((3, 31, 59), 61, kimi, Release.parse("0.5.12")) == [2, 30, 58]
    assert ids_that_capture((3, 31, 59), 61, kimi, Release.parse(NEW)) == [3, 31, 59]
    assert able_releases((3, 31, 61), 61, kimi) is None


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("version", ["0.5.11", "0.5.12", "0.5.13", NEW])
def test_a_server_of_any_release_is_given_ids_that_it_reads_right(
    family: str, version: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    """The files name the ids of the newest release; an older server gets its own, and nothing else is changed."""
    drafter = tmp_path / "drafter"
    write_checkpoint(drafter, some_checkpoint(), (3, 5, 6), targets[family])
    given = for_release(drafter, targets[family], version, tmp_path / "served")
    assert (given == drafter) == (family == "llama" or version in ("0.5.13", NEW))
    assert [each for each in lint(given, targets[family], version) if each.rule.startswith("layers")] == []
    assert same_weights(read_checkpoint(given), some_checkpoint())
    assert weights_sha256(given) == weights_sha256(drafter)
    assert for_release(drafter, targets[family], version, tmp_path / "served") == given


def test_files_that_say_something_else_are_left_to_the_preflight(targets: dict[str, Path], tmp_path: Path) -> None:
    def given(*faults: Fault) -> Path:
        write_checkpoint(tmp_path / "drafter", some_checkpoint(), (3, 5, 6), targets["deepseek"])
        both(*faults)(tmp_path / "drafter")
        return for_release(tmp_path / "drafter", targets["deepseek"], "0.5.12", tmp_path / "served")

    edited = config(eagle={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]})
    for faults in ((edited,), (foreign,), (lambda folder: (folder / "config.json").write_text("no"),)):
        assert given(*faults) == tmp_path / "drafter"
    assert given() != tmp_path / "drafter"


@pytest.mark.parametrize(
    ("fault", "version", "named"),
    [
        (record(lambda r: r.update(aux_layers=[3, 4, 5])), "0.5.9", "cannot capture"),
        (record(lambda r: r.update(aux_layers=[1, 4, 5])), NEW, "cannot capture"),
        (record(lambda r: r.update(aux_layers=[2, 4, 8])), NEW, "cannot capture"),
        (foreign, NEW, "--aux-layers"),
        (with_embedding(lambda e: e.flip(0)), NEW, "embed-differs"),
        (config({"max_position_embeddings": 128}), NEW, "positions"),
        (weights(lambda t: t.pop(LM_HEAD)), NEW, LM_HEAD),
        (nothing, "x", "no version"),
        (nothing, "", "sglang==VERSION"),
        (nothing, "main", "no version"),
    ],
)
def test_what_cannot_be_served_is_not_exported(
    fault: Fault, version: str, named: str, folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(folder)
    monkeypatch.setenv("REDRAFT_DEBUG", "1")
    family = "deepseek" if "capture" in named else "llama"  # whose first id 1 stands for layer 2
    with pytest.raises(RedraftError, match=named):
        export(monkeypatch, folder, targets[family], folder.parent / "out", version=version)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["drafter"]


def test_an_export_of_a_drafter_of_speculators(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(foreign, as_speculators, weights(lambda t: t.pop("embed_tokens.weight")))(folder)
    out = folder.parent / "out"
    assert export(monkeypatch, folder, targets["llama"], out, "--aux-layers", 2, 4, 5) == 0
    assert lint(out, targets["llama"], NEW) == []


def metrics_for(
    folder: Path, heldout: dict[str, float], mapping: str, drafter: str | None = None, engine: str = "sglang"
) -> None:
    """Metrics of a run: the probe drafted 5 and the bench found 2 best; `drafter` is the hash that both were told."""
    folder.mkdir()
    hash_ = {} if drafter is None else {"drafter": drafter}
    served = {"engine": engine, "version": NEW, "spec_steps": 5}
    files = {
        "train": {"heldout": heldout},
        "vocab": {"slots": SLOTS, "coverage_train": 0.99, "coverage_heldout": 0.912},
        "probe": {"mapping": mapping, "accept_length": 1.663, "engine": served, **hash_},
        "bench": {"levels": {"1": {"best": "2", "word": "ship"}, "16": {"best": "1", "word": "ship"}}, **hash_},
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("hashed", [True, False])
def test_the_card_says_what_is_known_of_this_drafter(
    own: bool, hashed: bool, folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout, mapping = {"accept_length": 1.5739}, some_checkpoint().mapping.hash
    record(lambda r: r.update(heldout=heldout, training={"row_tokens": 256}))(folder)
    # another run of a sweep has the same mapping; its training, and the weights that came of it, differ
    other = weights_sha256(folder) if own else "another's"
    found = heldout if own else {"accept_length": 2.0}
    metrics_for(folder.parent / "m", found, mapping, other if hashed else None)
    target = copy_of(targets["llama"], folder.parent / "target", quantization_config={"bits": 4}, auto_map={})
    source = {"source": "org/name", "revision": "abc", "weights": "."}
    (target / "target.json").write_text(json.dumps(source))
    out = folder.parent / "out"
    assert export(monkeypatch, folder, target, out, "--context-length", 512) == 0
    text = (out / "README.md").read_text()
    front = ModelCard(text).data
    assert (front.base_model, front.library_name, front.tags) == (
        "org/name",
        "sglang",
        ["eagle3", "speculative-decoding"],
    )
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
    told = ("`abc`", mapping, "inputs of layers 2, 4, 5, written as 1, 3, 4", "24 of 96 ids", "raised from 256")
    told += ("at most 256 tokens", "1.57 tokens a verify step", "--context-length 512", "--trust-remote-code")
    told += ("--model-path org/name", "--revision abc", f"--speculative-draft-model-path {out}", "`trained-length`")
    told += ("The embedding is the target's",)
    for said in told:
        assert said in text, said
    known = (
        "99.0%",
        "1.66 tokens a verify step, 5 drafted, engine sglang 0.5.23",
        "accept length, served",
        "draft-tokens 3",
    )
    assert [said in text for said in known] == [own] * 4
    assert ("draft-tokens 4" in text) != own
    assert weights_sha256(out) == weights_sha256(folder)


def test_figures_of_a_stale_probe_are_not_this_drafters(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained anew, and the probe of the new weights failed: the file is that of the weights before."""
    heldout = {"accept_length": 1.5739}
    record(lambda r: r.update(heldout=heldout))(folder)
    metrics_for(folder.parent / "m", heldout, some_checkpoint().mapping.hash, "of the weights before")
    assert export(monkeypatch, folder, targets["llama"], folder.parent / "out") == 0
    text = (folder.parent / "out" / "README.md").read_text()
    assert "1.66" not in text
    assert "draft-tokens 4" in text


def test_what_one_process_computes_is_not_called_served(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics_for(folder.parent / "m", {}, "", weights_sha256(folder), "torch")
    bench = folder.parent / "m" / "bench.json"
    bench.write_text(json.dumps({"drafter": weights_sha256(folder), "levels": {"1": {"best": "3x4x8"}}}))
    assert export(monkeypatch, folder, targets["llama"], folder.parent / "out") == 0
    text = (folder.parent / "out" / "README.md").read_text()
    assert "1.66 tokens a verify step" in text
    assert "accept length, served" not in text
    for said in ("num-steps 3", "eagle-topk 4", "num-draft-tokens 8"):
        assert f"--speculative-{said}" in text


def local_target(target: Path, folder: Path) -> Path:
    """What the target stage makes of a local folder: configuration and record, no weights."""
    folder.mkdir()
    shutil.copy(target / "config.json", folder / "config.json")
    written = {"source": str(target), "revision": None, "weights": str(target)}
    (folder / "target.json").write_text(json.dumps(written))
    return folder


def test_card_and_forms_name_the_real_target(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy_of(targets["llama"], folder.parent / "My-Model")
    made = local_target(real, folder.parent / "target")
    assert export(monkeypatch, folder, made, folder.parent / "out") == 0
    text = (folder.parent / "out" / "README.md").read_text()
    assert f"--model-path {real}" in text
    assert ModelCard(text).data.base_model == "My-Model"
    assert "EAGLE-3 drafter for My-Model" in text
    snapshot = copy_of(targets["llama"], folder.parent / "models--org--name" / "snapshots" / "0123456789abcdef")
    for target, name in ((made, str(real)), (real, str(real)), (snapshot, "org/name"), ("some/name", "some/name")):
        out = folder.parent / "vllm"
        assert run(monkeypatch, "export", folder, "--target", target, "--output", out) == 0
        verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
        assert verifier["name_or_path"] == name
        shutil.rmtree(out)


def test_a_target_without_a_name_of_the_hub_has_no_base_model(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copy_of(targets["llama"], folder.parent / "target")
    (target / "target.json").write_text(json.dumps({"source": "wheel:x==1", "revision": "f" * 64, "weights": "."}))
    assert export(monkeypatch, folder, target, folder.parent / "out") == 0
    text = (folder.parent / "out" / "README.md").read_text()
    assert ModelCard(text).data.base_model is None
    assert f"--model-path {target}" in text


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize("given", ["served", "made"])
def test_the_wrong_target_is_told_by_the_folder_that_is_served(
    given: str, form: str, folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    other = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.2})).bfloat16()
    with torch.no_grad():
        other.model.norm.weight += 0.1  # a fine-tuned model: other numbers in the same shapes
    places = {"right": copy_of(targets["llama"], folder.parent / "right")}
    other.save_pretrained(folder.parent / "wrong")
    places["wrong"] = folder.parent / "wrong"
    record(lambda r: r.update(target=target_hash(places["right"])))(folder)
    (places["right"] / "target.json").unlink()
    monkeypatch.setenv("REDRAFT_DEBUG", "1")
    for name, place in places.items():
        target = local_target(place, folder.parent / f"made-{name}") if given == "made" else place
        assert ("other-target" in errors(lint(folder, target, NEW))) == (name == "wrong")
        out = folder.parent / f"out-{name}"
        more = ("--for", f"sglang=={NEW}") if form == "sglang" else ()
        command = ("export", folder, "--target", target, "--output", out, *more)
        if name == "wrong":
            with pytest.raises(RedraftError, match=r"other-target|another target"):
                run(monkeypatch, *command)
            assert not out.exists()
        else:
            assert run(monkeypatch, *command) == 0


def test_a_target_that_cannot_be_compared_is_said_not_to_be(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(lambda r: r.update(target="a hash"))(folder)
    assert levels(lint(folder, targets["kimi"], NEW)) == {("note", "target-untold")}
    assert run(monkeypatch, "export", folder, "--target", targets["kimi"], "--output", folder.parent / "out") == 0
    assert "was not compared" in capsys.readouterr().out


def test_an_export_for_speculators_with_another_embedding(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_embedding(lambda e: e.flip(0))(folder)
    assert run(monkeypatch, "export", folder, "--target", "some/name", "--output", folder.parent / "out") == 0
    assert "was not compared" in capsys.readouterr().out
    assert run(monkeypatch, "export", folder, "--target", targets["llama"], "--output", folder.parent / "no") == 1
    assert not (folder.parent / "no").exists()


def test_the_card_of_a_drafter_of_which_little_is_known(
    folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder.parent / "out"
    assert export(monkeypatch, folder, targets["llama"], out) == 0
    text = (out / "README.md").read_text()
    assert "None" not in text
    assert "raised" not in text
    assert "accept length" not in text
    assert f"--model-path {targets['llama']}" in text


def test_an_export_for_speculators_names_inputs_of_any_layers(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), (3, 5, 6), targets["deepseek"])
    assert (
        run(monkeypatch, "export", tmp_path / "drafter", "--target", "some/target", "--output", tmp_path / "out") == 0
    )
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    assert same_weights(read_checkpoint(tmp_path / "out"), some_checkpoint())


def test_export_for_speculators_stays_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out"
    assert run(monkeypatch, "export", folder, "--target", "some/target", "--output", out) == 0
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "eagle3"
    for_ = ("--for", "vllm", "--output", folder.parent / "other")
    assert run(monkeypatch, "export", folder, "--target", "some/target", *for_) == 1
