"""Layers by release and family, exports for SGLang, and their model card (cases C16, C18)."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from conftest import LAYERS, SLOTS, some_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_drafter import as_speculators, same_weights
from test_lint import (
    AUX,
    LM_HEAD,
    NEW,
    OTHER,
    VERSIONS,
    Fault,
    both,
    config,
    copy_of,
    errors,
    foreign,
    make_targets,
    nothing,
    record,
    rename,
    run,
    weights,
    with_embedding,
)

from redraft.drafter.checkpoint import read_checkpoint, write_checkpoint
from redraft.frame.errors import RedraftError
from redraft.preflight.lint import lint
from redraft.preflight.releases import Captured, Release, captured, ids_that_capture


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), AUX)
    return tmp_path / "drafter"


def literal(ids: list[int] | None, depth: int, deepseek: bool, version: str) -> tuple[list[int], list[int]]:
    """What the contract says, in its own order: eager, then in CUDA graphs."""
    place = VERSIONS.index(version)
    default = [2, depth // 2, depth - 3]
    if ids is None:
        return default, default
    if deepseek and place >= VERSIONS.index("0.5.13"):
        eager = [i + 1 for i in ids] if ids and ids[0] == 1 else ids
    else:
        eager = [i + 1 for i in ids]
    eager = sorted(eager)
    return eager, default if place <= VERSIONS.index("0.5.10.post1") else eager


SOME_IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.none() | SOME_IDS, st.integers(7, 70), st.booleans(), st.sampled_from(VERSIONS))
def test_layers_are_read_as_the_release_reads_them(
    ids: list[int] | None, depth: int, deepseek: bool, version: str
) -> None:
    found = captured(ids, depth, deepseek, Release.parse(version))
    assert (list(found.eager), list(found.graphs)) == literal(ids, depth, deepseek, version)


def test_the_known_lists_of_kimi() -> None:
    def of(ids: list[int], version: str) -> tuple[int, ...]:
        return captured(ids, 61, True, Release.parse(version)).eager

    assert {of([1, 29, 57], version) for version in VERSIONS} == {(2, 30, 58)}
    assert of([2, 30, 58], "0.5.12") == (3, 31, 59)
    assert of([2, 30, 58], "0.5.13") == (2, 30, 58)
    assert captured([2, 30, 58], 61, True, Release.parse("0.5.9")) == Captured((3, 31, 59), (2, 30, 58))
    assert of([3, 31, 59], "0.5.13") == (3, 31, 59)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=3, max_size=3, unique=True).map(sorted),
    st.integers(7, 8),
    st.booleans(),
    st.sampled_from(VERSIONS),
)
def test_exported_ids_capture_what_was_trained_or_nothing_would(
    layers: list[int], depth: int, deepseek: bool, version: str
) -> None:
    try:
        ids = ids_that_capture(layers, depth, deepseek, Release.parse(version))
    except RedraftError:
        every = itertools.combinations(range(depth), 3)
        able = [ids for ids in every if literal(list(ids), depth, deepseek, version) == (layers, layers)]
        assert not able or layers[-1] >= depth
    else:
        assert literal(ids, depth, deepseek, version) == (layers, layers)
        assert min(ids) >= 0


@pytest.mark.parametrize("text", ["0.5.23", "v0.5.23", "0.5.23rc1", "0.5.23.dev12+g12ab"])
def test_versions(text: str) -> None:
    assert Release.parse(text) == (0, 5, 23, 0)
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
    assert literal(ids, LAYERS, family == "deepseek", version) == ([*layers], [*layers])
    assert errors(lint(out, targets[family], version)) == set()
    assert same_weights(read_checkpoint(out), some_checkpoint())
    assert all(name.split(".")[0] in ("midlayer", "fc", "norm", "lm_head", "d2t", "t2d") for name in
               load_file(out / "model.safetensors"))  # fmt: skip
    assert json.loads((out / "redraft.json").read_text())["aux_layers"] == list(layers)


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


def metrics_for(folder: Path, heldout: dict[str, float], mapping: str) -> None:
    folder.mkdir()
    files = {
        "train": {"heldout": heldout},
        "vocab": {"slots": SLOTS, "coverage_train": 0.99, "coverage_heldout": 0.912},
        "probe": {"mapping": mapping, "accept_length": 1.663, "engine": {"engine": "sglang", "version": NEW,
                                                                          "spec_steps": 5}},
    }  # fmt: skip
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize("own", [True, False])
def test_the_card_says_what_is_known_of_this_drafter(
    own: bool, folder: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = {"accept_length": 1.5739}
    record(lambda r: r.update(heldout=heldout, training={"row_tokens": 256}))(folder)
    mine = some_checkpoint().mapping.hash
    metrics_for(folder.parent / "m", heldout if own else {"accept_length": 2.0}, mine if own else OTHER.hash)
    target = copy_of(targets["llama"], folder.parent / "target", quantization_config={}, auto_map={})
    source = {"source": "org/name", "revision": "abc", "weights": "."}
    (target / "target.json").write_text(json.dumps(source))
    out = folder.parent / "out"
    assert export(monkeypatch, folder, target, out, "--context-length", 512) == 0
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("org/name", "sglang")
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
    told = ("`abc`", mine, "inputs of layers 2, 4, 5, written as 1, 3, 4", "24 of 96 ids", "raised from 256")
    told += ("at most 256 tokens", "1.57 tokens a verify step", "--context-length 512", "--trust-remote-code")
    told += ("--model-path org/name", f"--speculative-draft-model-path {out}", "`trained-length`")
    for said in told:
        assert said in text, said
    known = ("99.0%", "1.66 tokens a verify step, 5 drafted, engine sglang 0.5.23", "draft-tokens 6")
    assert [said in text for said in known] == [own] * 3
    assert ("draft-tokens 4" in text) != own


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


def test_export_for_speculators_stays_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out"
    assert run(monkeypatch, "export", folder, "--target", "some/target", "--output", out) == 0
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "eagle3"
    for_ = ("--for", "vllm", "--output", folder.parent / "other")
    assert run(monkeypatch, "export", folder, "--target", "some/target", *for_) == 1
