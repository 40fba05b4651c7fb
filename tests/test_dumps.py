"""The engine `import`: dumps as SpecForge and speculators write them, and what must not pass for one."""

import gzip
import io
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HIDDEN, LAYERS, ROOT, VOCAB, llama, save_target
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_hidden import corpus_from
from torch import Tensor

from redraft.corpus.build import tokenize_file
from redraft.corpus.corpus import Corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.profile import Profile, load_profile
from redraft.frame.section import validate
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.dump_files import dump_files, read_dump
from redraft.hidden.dump_index import DumpIndex
from redraft.hidden.dumps import opening
from redraft.hidden.engine import States
from redraft.hidden.extract import extract_folder, summary
from redraft.hidden.in_process import forward
from redraft.hidden.rows import HiddenStates
from redraft.target.model import Target, load_target

AUX = (2, 4, 5)


@dataclass
class DataPoint:
    """As in SpecForge's scripts/prepare_hidden_states.py."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden_state: Tensor | None
    aux_hidden_state: Tensor | None = None


def states_of(target: Target, ids: Tensor, layers: Sequence[int]) -> tuple[list[Tensor], States]:
    states = forward(target, [ids], layers, around=True)[0]
    return [states[f"layer_{layer}"] for layer in layers], states


def specforge(
    target: Target, folder: Path, documents: Sequence[Tensor], layers: Sequence[int] = AUX, pad: int = 0,
    packed: bool = False, group: int = 2,
) -> Path:  # fmt: skip
    """A file for each document, ids and states padded on the right to the longest one if `pad` is a batch's size."""
    for number, ids in enumerate(documents):
        batch = documents[number // pad * pad : number // pad * pad + pad] if pad else [ids]
        padded = torch.nn.functional.pad(ids.long(), (0, max(map(len, batch)) - len(ids)))
        aux, states = states_of(target, padded, layers)
        point = DataPoint(
            padded, torch.ones(len(padded), dtype=torch.long), states["final"][None].clone(), torch.cat(aux, -1)[None]
        )
        start = number // group * group
        path = folder / f"rows_{start}-{start + group}" / f"data_{number}.ckpt{'.gz' if packed else ''}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with (gzip.open if packed else open)(path, "wb") as file:
            torch.save(asdict(point), file)
    return folder


def speculators(target: Target, folder: Path, documents: Sequence[Tensor], layers: Sequence[int] = AUX) -> Path:
    """Files of vLLM's connector, as `generate-offline-data` names them."""
    folder.mkdir(exist_ok=True)
    for number, ids in enumerate(documents):
        aux, states = states_of(target, ids, layers)
        tensors = {"hidden_states": torch.stack([*aux, states["unnormed"]], 1), "token_ids": ids.long()}
        save_file(tensors, folder / f"hs_{number}.safetensors")
    return folder


def speculators_old(target: Target, folder: Path, documents: Sequence[Tensor], layers: Sequence[int] = AUX) -> Path:
    """Files of speculators' own generator, before it asked a server."""
    folder.mkdir(exist_ok=True)
    for number, ids in enumerate(documents):
        aux, states = states_of(target, ids, layers)
        held = {
            "input_ids": ids.long(),
            "hidden_states": [each.contiguous() for each in (*aux, states["unnormed"])],
            "loss_mask": torch.ones(len(ids)),
        }
        torch.save(held, folder / f"data_{number}.pt")
    torch.save(torch.ones(VOCAB), folder / "token_freq.pt")
    return folder


WRITERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "specforge": (specforge, {"final": "normed"}),
    "speculators": (speculators, {"final": "unnormed"}),
    "speculators, old": (speculators_old, {"final": "unnormed"}),
}


def profile_of(dump: Path, law: str = "states", name: str = "tiny", **changes: Any) -> Profile:
    values = load_profile(name, ROOT).model_dump()
    dumps = {"folder": str(dump), "layers": list(AUX), "final": "normed", "release": "SpecForge 0.2"}
    values["extract"] |= {"engine": "import", "law": law, "dumps": {**dumps, "dtype": "fp32", **changes}}
    return validate(Profile, values, Path("tiny"))


def imported(target_folder: Path, dump: Path, documents: Sequence[Tensor], **changes: Any) -> list[States]:
    opened = opening(target_folder, profile_of(dump, **changes)).open(AUX)
    with opened as engine:
        found = list(engine.states([documents[:2], documents[2:]], AUX))
    places = [(group, place) for group, place, _ in found]
    assert places == [(0, n) for n in range(len(documents[:2]))] + [(1, n) for n in range(len(documents[2:]))]
    return [states for _, _, states in found]


def random_documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=drawn, dtype=torch.int32) for length in lengths]


DOCUMENTS = random_documents(9, 4, 17, 6, 1)


@pytest.fixture(scope="module")
def dumps(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return {name: writer(target, folder / name, DOCUMENTS) for name, (writer, _) in WRITERS.items()}


@pytest.fixture
def dump(dumps: dict[str, Path], tmp_path: Path) -> Path:
    """One of SpecForge, to be spoilt."""
    return Path(shutil.copytree(dumps["specforge"], tmp_path / "dump"))


@pytest.mark.parametrize("tool", WRITERS)
def test_a_dump_gives_the_states_of_the_target(
    tool: str, target: Target, llama_folder: Path, dumps: dict[str, Path]
) -> None:
    for ids, states in zip(DOCUMENTS, imported(llama_folder, dumps[tool], DOCUMENTS, **WRITERS[tool][1]), strict=True):
        alone = forward(target, [ids], AUX)[0]
        assert states.keys() == alone.keys()
        for name, each in alone.items():
            assert states[name].dtype == each.dtype
            assert torch.allclose(states[name].float(), each.float(), rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_found_whatever_pads_them_and_in_any_order(
    packed: bool, target: Target, llama_folder: Path, tmp_path: Path
) -> None:
    dump = specforge(target, tmp_path / "dump", DOCUMENTS, pad=3, packed=packed)
    for ids, states in zip(DOCUMENTS[::-1], imported(llama_folder, dump, DOCUMENTS[::-1]), strict=True):
        alone = forward(target, [ids], AUX)[0]
        assert torch.allclose(states["final"], alone["final"], rtol=1e-4, atol=1e-4)
        assert len(states["layer_2"]) == len(ids)


def test_a_diagnosis_gets_what_the_dump_holds(target: Target, llama_folder: Path, tmp_path: Path) -> None:
    dump = speculators(target, tmp_path / "dump", DOCUMENTS, layers=(2, 3, 4, 5))
    profile = profile_of(dump, final="unnormed", layers=[2, 3, 4, 5])
    with opening(llama_folder, profile).open(range(LAYERS)) as engine:
        (_, _, states), *_ = engine.states([DOCUMENTS], range(1, LAYERS), around=True)
    assert states.keys() == {"layer_2", "layer_3", "layer_4", "layer_5", "unnormed", "final", "greedy"}


def test_the_identity_is_of_files_and_of_what_the_profile_says(llama_folder: Path, dump: Path) -> None:
    def identity(**changes: Any) -> dict[str, Any]:
        return opening(llama_folder, profile_of(dump, **changes)).identity

    one = identity()
    assert one["name"] == "import"
    moved = dump.rename(dump.parent / "moved")
    assert identity(folder=str(moved)) == one
    moved.rename(dump)
    for changes in ({"layers": [1, 2, 4, 5]}, {"final": "unnormed"}, {"release": "SpecForge 0.1"}):
        assert identity(**changes) != one
    path = dump_files(dump)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert identity() != one
    path.unlink()
    assert identity() != one


# what must not pass


def refused(
    target_folder: Path, dump: Path, *told: str, documents: Sequence[Tensor] = DOCUMENTS, **changes: Any
) -> str:
    with pytest.raises(RedraftError) as caught:
        imported(target_folder, dump, documents, **changes)
    for each in told:
        assert each in str(caught.value)
    return str(caught.value)


def test_missing_documents_are_counted_and_the_first_is_named(llama_folder: Path, dump: Path) -> None:
    absent = torch.cat([DOCUMENTS[2][:5], (DOCUMENTS[2][5:] + 1) % VOCAB])
    told = refused(llama_folder, dump, "1 are missing, 0 of them cut short", documents=[*DOCUMENTS, absent])
    assert "data_2.ckpt has its first 5, then goes on with other ones (17 in all)" in told
    told = refused(llama_folder, dump, "1 are missing, 1 of them cut short", documents=[torch.cat(DOCUMENTS[2:4])])
    assert "has its first 17, and ends there" in told
    assert "corpus.max_length: 17" in told


def test_other_tokens_are_told(target: Target, llama_folder: Path, dump: Path) -> None:
    for path in dump_files(dump):
        held = torch.load(path)
        torch.save({**held, "input_ids": held["input_ids"] + VOCAB}, path)
    refused(llama_folder, dump, "5 are missing", f"the target {VOCAB} in all")


def test_two_dumps_of_the_same_ids_must_agree(target: Target, llama_folder: Path, dump: Path) -> None:
    path = dump_files(dump)[0]
    shutil.copy(path, dump / "data_again.ckpt")
    imported(llama_folder, dump, DOCUMENTS)
    held = torch.load(path)
    torch.save({**held, "aux_hidden_state": held["aux_hidden_state"].flip(-1)}, dump / "data_again.ckpt")
    refused(llama_folder, dump, "Two dumps of the same token ids", "data_again.ckpt")


@pytest.mark.parametrize("tool", WRITERS)
def test_the_other_reading_of_the_last_state_is_refused(tool: str, llama_folder: Path, dumps: dict[str, Path]) -> None:
    wrong = {"normed": "unnormed", "unnormed": "normed"}[WRITERS[tool][1]["final"]]
    refused(llama_folder, dumps[tool], "not what the profile says", "extract.dumps", final=wrong)


def test_a_norm_with_weights_tells_dumps_of_another_target(target: Target, tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0, 3, HIDDEN))  # one weight is 0
    folder = save_target(model, tmp_path / "target")
    mine = load_target(folder, dtype="fp32", device="cpu")
    imported(folder, specforge(mine, tmp_path / "mine", DOCUMENTS), DOCUMENTS)
    refused(folder, specforge(target, tmp_path / "other", DOCUMENTS), "not what the profile says")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": [2, 4]}, "lacks aux layers"),
        ({"layers": [1, 3, 4]}, "the input of a layer is one more"),
        ({"layers": [2, 4, 5, LAYERS]}, "what vLLM calls the last state"),
        ({"layers": [2, 3, 4, 5]}, "lacks the last state"),
        ({"layers": [1, 2, 3, 4, 5]}, "another number of states"),
        ({"dtype": "bf16"}, "another dtype"),
    ],
)
def test_layers_and_dtype_are_held_against_the_dump(
    changes: dict[str, Any], told: str, llama_folder: Path, dump: Path
) -> None:
    refused(llama_folder, dump, told, "extract.dumps", **changes)


@pytest.mark.parametrize("layers", [[4, 2, 5], [2, 2, 4], []])
def test_layers_out_of_order_are_refused_with_the_profile(layers: list[int], dump: Path) -> None:
    with pytest.raises(RedraftError, match=r"extract\.dumps\.layers"):
        profile_of(dump, layers=layers)


def test_the_engine_needs_its_section() -> None:
    values = load_profile("tiny", ROOT).model_dump()
    values["extract"]["engine"] = "import"
    with pytest.raises(RedraftError, match="needs the section dumps"):
        validate(Profile, values, Path("tiny"))


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran-code"),))


def _spoilt(held: dict[str, Any], **changes: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({name: each for name, each in {**held, **changes}.items() if each is not ...}, stream)
    return stream.getvalue()


SPOILT: dict[str, tuple[Callable[[bytes, dict[str, Any]], bytes], str]] = {
    "code": (lambda _, held: _spoilt(held, more=_Evil()), "other things than tensors"),
    "a plain pickle": (lambda _, held: pickle.dumps(_Evil(), 2), "cannot be read"),
    "cut": (lambda raw, _: raw[: len(raw) // 2], "cannot be read"),
    "cut at the end": (lambda raw, _: raw[:-10], "cannot be read"),
    "empty": (lambda raw, _: b"", "cannot be read"),
    "a list": (lambda _, held: _spoilt_list(held), "a dict of tensors"),
    "no ids": (lambda _, held: _spoilt(held, input_ids=...), "lacks a tensor"),
    "no aux": (lambda _, held: _spoilt(held, aux_hidden_state=None), "--enable-aux-hidden-states"),
    "no last": (lambda _, held: _spoilt(held, hidden_state=None), "lacks the last state"),
    "text": (lambda _, held: _spoilt(held, hidden_state="x"), "lacks a tensor"),
    "long": (lambda _, held: _spoilt(held, hidden_state=held["hidden_state"].repeat(1, 2, 1)), "[9, H]"),
    "narrow": (lambda _, held: _spoilt(held, hidden_state=held["hidden_state"][..., :-1].clone()), "another width"),
    "nan": (lambda _, held: _spoilt(held, hidden_state=held["hidden_state"] * torch.nan), "in the last state"),
    "inf": (lambda _, held: _spoilt(held, aux_hidden_state=held["aux_hidden_state"] / 0), "input of layer 2"),
    "whole numbers": (lambda _, held: _spoilt(held, hidden_state=held["hidden_state"].long()), "torch.int64"),
    "huge": (lambda _, held: _spoilt(held, input_ids=torch.zeros(1).long().expand(10**12)), "all of its bytes"),
    "ids that are no numbers": (lambda _, held: _spoilt(held, input_ids=torch.rand(9)), "whole numbers"),
    "fp8": (
        lambda _, held: _spoilt(held, hidden_state=held["hidden_state"].to(torch.float8_e4m3fn)), "quantised"
    ),
}  # fmt: skip


def _spoilt_list(held: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(list(held.values()), stream)
    return stream.getvalue()


@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_no_dump_is_one_clear_error(
    fault: str, packed: bool, llama_folder: Path, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = dump / "rows_0-2/data_0.ckpt"
    spoil, told = SPOILT[fault]
    raw = spoil(path.read_bytes(), torch.load(path))
    path.unlink()
    path = path.with_name(f"data_0.ckpt{'.gz' if packed else ''}")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    found = refused(llama_folder, dump, str(path.name))
    assert told in found or (packed and fault == "a plain pickle" and "other things than tensors" in found)
    assert not (tmp_path / "ran-code").exists()


def test_a_gz_that_is_cut_is_refused(target: Target, llama_folder: Path, tmp_path: Path) -> None:
    dump = specforge(target, tmp_path / "dump", DOCUMENTS, packed=True)
    path = dump_files(dump)[0]
    for content in (path.read_bytes()[:-30], b"no gz"):
        path.write_bytes(content)
        refused(llama_folder, dump, "cannot be read", path.name)


@pytest.mark.parametrize(
    "tensors",
    [
        {"token_ids": torch.arange(9)},
        {"hidden_states": torch.zeros(9, 4, HIDDEN)},
        {"token_ids": torch.arange(9), "hidden_states": torch.zeros(8, 4, HIDDEN)},
        {"token_ids": torch.arange(9), "hidden_states": torch.zeros(9, HIDDEN)},
        {"token_ids": torch.arange(9), "hidden_states": torch.zeros(9, 4, HIDDEN, dtype=torch.int8)},
        {"token_ids": torch.arange(0), "hidden_states": torch.zeros(0, 4, HIDDEN)},
    ],
)
def test_a_safetensors_file_of_another_shape_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "hs_0.safetensors")
    with pytest.raises(RedraftError, match=r"hs_0\.safetensors"):
        read_dump(tmp_path / "hs_0.safetensors")


def test_a_folder_without_dumps_or_with_two_tools_is_refused(
    llama_folder: Path, dumps: dict[str, Path], tmp_path: Path
) -> None:
    refused(llama_folder, tmp_path / "nowhere", "no such folder")
    refused(llama_folder, tmp_path, "no such files")
    refused(llama_folder, dumps["specforge"].parent, "dumps of two tools", "5 of SpecForge, 5 of speculators")


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_several_files_that_cannot_be_used_are_counted(
    kept: int, llama_folder: Path, dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in dump_files(dump)[kept:]:
        path.write_bytes(b"")
    if kept < len(DOCUMENTS):
        refused(llama_folder, dump, dump_files(dump)[kept].name, "cut short")
        assert f"{len(DOCUMENTS) - kept} of 5 files of the dump cannot be used" in capsys.readouterr().err
    else:
        imported(llama_folder, dump, DOCUMENTS)


# a target that foretells its text


@pytest.fixture(scope="module")
def text(tiny_folder: Path) -> tuple[Target, Corpus]:
    profile = load_profile("tiny", ROOT)
    corpus, _ = tokenize_file(ROOT / "data/tiny/train.jsonl", load_tokenizer(tiny_folder), profile.corpus)
    return load_target(tiny_folder, dtype="fp32", device="cpu"), corpus.part(range(24))


def ids_of(corpus: Corpus) -> list[Tensor]:
    return [corpus.document(index)[0] for index in range(len(corpus))]


def test_states_that_do_not_foretell_the_text_are_refused(
    text: tuple[Target, Corpus], tiny_folder: Path, tmp_path: Path
) -> None:
    target, documents = text[0], ids_of(text[1])
    dump = specforge(target, tmp_path / "dump", documents, target.aux_layers)
    layers = list(target.aux_layers)
    imported(tiny_folder, dump, documents, layers=layers)
    for path in dump_files(dump):
        held = torch.load(path)
        torch.save({**held, "hidden_state": held["hidden_state"].flip(1)}, path)
    refused(tiny_folder, dump, "do not foretell the next tokens", documents=documents, layers=layers)


@pytest.mark.parametrize("law", ["states", "scored", "top64"])
def test_the_stage_makes_the_same_of_a_dump_as_of_the_target(
    law: str, text: tuple[Target, Corpus], tiny_folder: Path, tmp_path: Path, store: Path
) -> None:
    target, corpus = text
    corpora = {"train": corpus.part(range(20)), "heldout": corpus.part(range(20, len(corpus)))}
    dump = speculators(target, tmp_path / "dump", ids_of(corpus), target.aux_layers)
    given = profile_of(dump, law, layers=list(target.aux_layers), final="unnormed")
    values = given.model_dump()
    values["extract"]["engine"] = "transformers"
    made = [
        extract_folder(tiny_folder, corpora, each).manifest for each in (given, validate(Profile, values, Path("tiny")))
    ]
    assert made[0]["states"] != made[1]["states"]
    assert 0 < summary(made[0])["recheck_difference"] < 0.05
    for split, each in corpora.items():
        one, other = (HiddenStates(manifest, split, each) for manifest in made)
        for place in range(len(each)):
            mine, its = one.read(place), other.read(place)
            assert mine.keys() == its.keys()
            for name in mine:
                assert mine[name].shape == its[name].shape
            apart = (mine["aux"].float() - its["aux"].float()).norm() / its["aux"].float().norm()
            assert apart < 2e-2, (split, place)  # bf16 where the machine multiplies it
    assert read_diagnostic(made[0], corpora["heldout"])["unnormed"].ndim == 2


def test_layers_that_are_named_one_too_high_are_found_by_the_target(
    target: Target, llama_folder: Path, tmp_path: Path, store: Path
) -> None:
    dump = specforge(target, tmp_path / "dump", DOCUMENTS, layers=(1, 3, 4))
    corpora = {"train": corpus_from({str(n): (ids, []) for n, ids in enumerate(DOCUMENTS)})}
    with pytest.raises(RedraftError, match="differs"):
        extract_folder(llama_folder, corpora, profile_of(dump))


# the index, for any ids

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(IDS, min_size=1, max_size=8), st.lists(IDS, min_size=1, max_size=4))
def test_a_document_is_found_where_a_file_begins_with_it(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], documents: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("index")
    paths = []
    for number, ids in enumerate(files):
        paths.append(folder / f"hs_{number}.safetensors")
        save_file({"token_ids": torch.tensor(ids), "hidden_states": torch.zeros(len(ids), 1, 1)}, paths[-1])
    index = DumpIndex(folder, paths, 4)
    missing = []
    for document in documents:
        begins = [ids for ids in files if ids[: len(document)] == document]
        found = [files[int(path.stem[3:])] for path in index.find(torch.tensor(document, dtype=torch.int32))]
        assert found == sorted(begins)[:2]
        missing += [] if begins else [document]
    asked = [torch.tensor(document, dtype=torch.int32) for document in documents]
    if not missing:
        index.find_all(asked)
        return
    with pytest.raises(RedraftError, match=f"{len(missing)} are missing") as caught:
        index.find_all(asked)
    common = max(sum(1 for n in range(len(missing[0])) if ids[: n + 1] == missing[0][: n + 1]) for ids in files)
    assert f"has its first {common}," in str(caught.value)
