"""Hidden states that other tools wrote: SpecForge's files and speculators', and what is no such file."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HIDDEN
from safetensors.torch import save_file
from test_hidden import PARAMS, corpus_of

from redraft.corpus.corpus import Corpus
from redraft.frame.errors import RedraftError
from redraft.frame.extraction import DumpParams
from redraft.frame.profile import Profile
from redraft.frame.section import load_yaml
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.dumps import Dumps, opening, read_dump
from redraft.hidden.extract import extract_folder, summary
from redraft.hidden.in_process import forward
from redraft.hidden.rows import HiddenStates
from redraft.target.model import Target

ROOT = Path(__file__).parent.parent
AUX = (2, 4, 5)


def dumped(folder: Path, target: Target, corpora: list[Corpus], kind: str) -> None:
    """Write dumps as the tools do: a SpecForge file of a document in a folder of many, a speculators file."""
    for number, ids in enumerate(corpus.document(n)[0] for corpus in corpora for n in range(len(corpus))):
        states = forward(target, [ids], AUX, around=True)[0]
        aux = [states[f"layer_{layer}"].bfloat16() for layer in AUX]
        if kind == "speculators":
            folder.mkdir(exist_ok=True)
            whole = torch.stack([*aux, states["unnormed"].bfloat16()], 1)
            save_file({"hidden_states": whole, "token_ids": ids.long()}, folder / f"hs_{number}.safetensors")
            continue
        rows = folder / "rows_0-5000"
        rows.mkdir(parents=True, exist_ok=True)
        record = {
            "input_ids": ids.long(),
            "loss_mask": torch.ones(len(ids), dtype=torch.long),
            "hidden_state": states["final"].bfloat16()[None],
            "aux_hidden_state": torch.cat(aux, -1)[None],
        }
        if kind == "packed":
            whole_file = io.BytesIO()
            torch.save(record, whole_file)
            (rows / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(whole_file.getvalue()))
        else:
            torch.save(record, rows / f"data_{number}.ckpt")


def profile(folder: Path, kind: str, **changes: Any) -> Profile:
    values = load_yaml((ROOT / "profiles/tiny.yaml").read_text())
    final = "unnormed" if kind == "speculators" else "normed"
    dumps = {"folder": str(folder), "layers": AUX, "final": final, "release": "a test", "dtype": "bf16", **changes}
    values["extract"] |= {**PARAMS.model_dump(exclude={"server"}), "engine": "import", "dumps": dumps, "tolerance": 0.2}
    return Profile.model_validate(values)


@pytest.fixture
def corpora() -> dict[str, Corpus]:
    return {"train": corpus_of([30, 12, 25]), "heldout": corpus_of([9, 8, 30, 16], 3)}


@pytest.mark.parametrize("kind", ["specforge", "packed", "speculators"])
def test_states_are_those_of_the_target_and_some_are_rechecked(
    kind: str, target: Target, llama_folder: Path, tmp_path: Path, store: Path, corpora: dict[str, Corpus]
) -> None:
    dumped(tmp_path / "dumps", target, list(corpora.values()), kind)
    manifest = extract_folder(llama_folder, corpora, profile(tmp_path / "dumps", kind)).manifest
    assert manifest["engine"]["name"] == "import"
    assert 0 < summary(manifest)["recheck_difference"] < 0.2
    for split, corpus in corpora.items():
        states = HiddenStates(manifest, split, corpus)
        for place in range(len(corpus)):
            own = forward(target, [corpus.document(place)[0]], AUX)[0]
            read = states.read(place)
            aux = torch.cat([own[f"layer_{layer}"] for layer in AUX], -1)
            for one, two in ((read["aux"], aux), (read["final"], own["final"])):
                assert float((one.float() - two).norm() / two.norm()) < 0.02
    shard = read_diagnostic(manifest, corpora["heldout"])
    assert {name for name in shard if name.startswith("layer_")} == {"layer_2", "layer_4", "layer_5"}
    assert ("unnormed" in shard) == (kind == "speculators")


def refused(message: str, folder: Path, given: Profile, corpora: dict[str, Corpus]) -> None:
    with pytest.raises(RedraftError, match=message):
        extract_folder(folder, corpora, given)


def test_what_is_not_this_targets_or_not_this_corpus_is_refused(
    target: Target, llama_folder: Path, tmp_path: Path, store: Path, corpora: dict[str, Corpus]
) -> None:
    for kind in ("specforge", "speculators"):
        folder = tmp_path / kind
        dumped(folder, target, [corpora["train"]], kind)
        refused("every document of the corpus(.|\n)*4 are not there", llama_folder, profile(folder, kind), corpora)
        train = {"train": corpora["train"]}
        wrong = "normed" if kind == "speculators" else "unnormed"
        refused(
            f"not what the profile says(.|\n)*expected: {wrong}",
            llama_folder,
            profile(folder, kind, final=wrong),
            train,
        )
        refused("lack an aux layer(.|\n)*no 2", llama_folder, profile(folder, kind, layers=(1, 4, 5)), train)
        refused("another shape|do not agree", llama_folder, profile(folder, kind, layers=(2, 3, 4, 5)), train)
        odd = next(iter(sorted(folder.rglob("*.ckpt")) or sorted(folder.rglob("*.safetensors"))))
        dump = read_dump(odd, 3)
        assert dump.states is not None
        nan = torch.cat([dump.states, dump.states[:, :1] * torch.nan], 1)
        if kind == "speculators":
            save_file({"hidden_states": nan, "token_ids": dump.ids}, odd)
            refused("not finite|not what the profile", llama_folder, profile(folder, kind), train)
        odd.write_bytes(b"x" * 100)
        refused("cannot be read", llama_folder, profile(folder, kind), train)


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"input_ids": torch.ones(3), "hidden_state": Code()}, tmp_path / "x.ckpt")
    with pytest.raises(RedraftError, match="holds more than tensors"):
        read_dump(tmp_path / "x.ckpt", 3)
    assert not (tmp_path / "ran").exists()


def test_a_dump_of_aux_states_alone_says_what_it_lacks(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.ones(3), "aux_hidden_state": torch.ones(1, 3, 3 * HIDDEN)}, tmp_path / "x.ckpt")
    with pytest.raises(RedraftError, match="aux states alone"):
        read_dump(tmp_path / "x.ckpt", 3)


def test_no_dumps_and_two_of_one_document(
    target: Target, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RedraftError, match="no dumps"):
        opening(llama_folder, profile(tmp_path / "none", "specforge"))
    corpus = corpus_of([9])
    dumped(tmp_path / "dumps", target, [corpus, corpus], "specforge")
    given = profile(tmp_path / "dumps", "specforge")
    before = opening(llama_folder, given)
    with before.open(AUX) as engine:
        assert isinstance(engine, Dumps)
        assert len(engine.index) == 1
    assert "1 dumps have the ids of another one" in capsys.readouterr().err
    path = sorted((tmp_path / "dumps").rglob("*.ckpt"))[1]
    torch.save({**torch.load(path), "hidden_state": torch.zeros(1, 9, HIDDEN)}, path)
    assert opening(llama_folder, given).identity != before.identity


def test_the_section_is_needed() -> None:
    values = load_yaml((ROOT / "profiles/tiny.yaml").read_text())
    values["extract"]["engine"] = "import"
    with pytest.raises(ValueError, match="engine: import needs the section dumps"):
        Profile.model_validate(values)
    assert DumpParams.model_fields["layers"].is_required()
