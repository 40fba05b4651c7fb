"""`redraft audit` as a user runs it, on the case that redraft was built for."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import some_checkpoint
from safetensors.numpy import save_file

from redraft.drafter.checkpoint import write_checkpoint
from redraft.drafter.mapping_of import read_mapping
from redraft.vocab.audit import audit
from redraft.vocab.build import Vocabulary, write_vocab
from redraft.vocab.mapping import Mapping

SLOTS, VOCAB, SHARED, SAME = 32_000, 163_840, 25_750, 252
LAST = (163_586, 163_607)
"""Highest ids: d2t ends at 131,587 and 131,608, each plus slot 31,999."""
MARKERS = {163_606: "<think>", 163_607: "</think>"}
SEED = 122
"""The first seed with exactly 252 same slots."""


def pair(seed: int) -> tuple[Mapping, Mapping]:
    """Two random ascending mappings with the set sizes, the common start and the ends of the known case."""
    generator = np.random.default_rng(seed)
    free = generator.permutation(np.arange(20, LAST[0]))
    inner, own = SHARED - 20, SLOTS - SHARED
    start, both = np.arange(20), free[:inner]
    one = [*free[inner : inner + own - 1], LAST[0]]
    two = [*free[inner + own : inner + 2 * own - 2], *MARKERS]
    ids = (np.concatenate([start, both, mine]) for mine in (one, two))
    donor, new = (Mapping(np.sort(chosen), VOCAB) for chosen in ids)
    return donor, new


@pytest.fixture(scope="module")
def known() -> tuple[Mapping, Mapping]:
    return pair(SEED)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from redraft.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "audit", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_known_case(known: tuple[Mapping, Mapping]) -> None:
    donor, new = known
    assert (int(donor.d2t.max()), int(new.d2t.max())) == (131_587, 131_608)
    found = audit(donor, new, special=MARKERS)
    assert (found.same_slot, found.differing_slots, found.shared) == (252, 31_748, 25_750)
    assert (found.donor_only, found.new_only) == (6_250, 6_250)
    assert found.kind == "drift"
    assert found.first_divergence >= 20
    assert found.recommended_init == "remap"
    for text in ("252 of 32,000", "25,750", "6,250", "nothing is scrambled", "end at 163,586", "163,606 (<think>)"):
        assert text in found.verdict


def test_the_known_case_from_the_command_line(known: tuple[Mapping, Mapping], tmp_path: Path) -> None:
    for name, mapping in zip("ab", known, strict=True):
        save_file({"d2t": mapping.d2t, "t2d": mapping.t2d}, tmp_path / f"{name}.safetensors")
    done = command(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--plot", tmp_path / "drift.svg")
    assert done.returncode == 0, done.stderr
    for text in ("252", "31,748", "25,750", "6,250", "drift:", "recommended init: remap"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:])) <= 100
    assert (tmp_path / "drift.svg").read_text().startswith("<svg")
    as_json = json.loads(command(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").stdout)
    assert as_json["same_slot"] == 252


def test_an_audit_needs_no_torch(tmp_path: Path) -> None:
    mapping = Mapping(np.array([0, 1, 2, 5]), 8)
    save_file({"d2t": mapping.d2t, "t2d": mapping.t2d}, tmp_path / "a.safetensors")
    code = (
        "import sys; from redraft.cli import main; main(); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "audit", str(tmp_path / "a.safetensors"), str(tmp_path / "a.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"


def test_mappings_are_read_from_wherever_they_lie(tmp_path: Path) -> None:
    drafter = some_checkpoint()
    write_checkpoint(tmp_path / "drafter", drafter, (2, 4, 5))
    counts = np.zeros(drafter.mapping.vocab_size, np.int64)
    write_vocab(tmp_path / "vocab", Vocabulary(drafter.mapping, 0, 0), {"train": counts}, {})
    places = ("drafter", "drafter/model.safetensors", "vocab", "vocab/mapping.safetensors")
    assert {read_mapping(str(tmp_path / place)).hash for place in places} == {drafter.mapping.hash}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "neither a folder nor a hub id"),
        (b"", "incomplete download"),
        ({"fc.weight": np.ones((2, 2))}, "not complete"),
        ({"d2t": np.arange(4)}, "not complete"),
        ({"d2t": np.zeros(7, int), "t2d": np.arange(8) < 7, "lm_head.weight": np.ones((6, 2))}, "6 (rows of lm_head"),
        ({"d2t": np.arange(4) * 0.5, "t2d": np.ones(8, bool)}, "float64"),
    ],
)
def test_what_holds_no_mapping_ends_in_one_clear_error(content: object, named: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path)
    done = command(path, path)
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_one_mapping_by_itself_with_the_targets_tokens(tiny_folder: Path, tmp_path: Path) -> None:
    ids = np.arange(3, 303)
    save_file({"d2t": ids - np.arange(300), "t2d": np.isin(np.arange(640), ids)}, tmp_path / "a.safetensors")
    done = command(tmp_path / "a.safetensors", "--target", tiny_folder)
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0]: line.split()[-1] for line in done.stdout.splitlines() if line}
    assert lines["special tokens, of 3"] == "0"
    assert lines["byte tokens, of 256"] == "256"


def test_a_config_that_disagrees_with_the_mapping_is_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), (2, 4, 5))
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    for change, named in (({"vocab_size": 97}, r"\[97\]"), ({"draft_vocab_size": 9}, "9 (draft_vocab_size")):
        path.write_text(json.dumps({**config, **change}))
        done = command(tmp_path / "drafter")
        assert done.returncode == 1
        assert named.replace("\\", "") in done.stderr


def test_an_output_that_is_there_is_never_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), (2, 4, 5))
    code = "from redraft.cli import main; main()"
    arguments = ("remap", tmp_path / "drafter", "--vocab", tmp_path / "drafter", "--output", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is there already" in done.stderr
    assert (tmp_path / "drafter" / "config.json").is_file()


def redraft(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from redraft.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_tokenizers_that_nobody_compared_are_said_not_to_be(tiny_folder: Path, tmp_path: Path) -> None:
    for name, seed, record in (
        ("a", 0, {}),
        ("b", 3, {}),
        ("made", 0, {"source": "train"}),
        ("told", 0, {"foreign": {}}),
    ):
        checkpoint = some_checkpoint(seed)
        checkpoint.record = record
        write_checkpoint(tmp_path / name, checkpoint, (2, 4, 5))
    said = "the donor's tokenizer was not compared"
    two = (tmp_path / "a", tmp_path / "b")
    assert said in command(*two).stdout
    assert said not in command(tmp_path / "a").stdout
    asked = json.loads(command(*two, "--json").stdout)
    assert asked["foreign_ids"] is None
    assert said in asked["notes"][0]
    for known in ("made", "told"):
        assert said not in command(tmp_path / known, tmp_path / "b").stdout
    given = ("--target", tiny_folder, "--donor-tokenizer", tiny_folder)
    ids = np.arange(3, 303)
    save_file({"d2t": ids - np.arange(300), "t2d": np.isin(np.arange(640), ids)}, tmp_path / "x.safetensors")
    compared = json.loads(command(*[tmp_path / "x.safetensors"] * 2, *given, "--json").stdout)
    assert compared["foreign_ids"] == 0
    assert compared["notes"] == []


def test_a_whole_model_is_called_one(llama_folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", some_checkpoint(), (2, 4, 5))
    for places in ((llama_folder,), (llama_folder, tmp_path / "drafter"), (tmp_path / "drafter", llama_folder)):
        told = " ".join(command(*places).stdout.split())
        assert "is a whole model (LlamaForCausalLM), no drafter" in told
        assert "0 of the new ids" not in told
    remap = ("remap", tmp_path / "drafter", "--vocab", llama_folder, "--output", tmp_path / "out")
    assert "a whole model (LlamaForCausalLM)" in " ".join(redraft(*remap).stdout.split())


def test_a_remap_says_that_zeros_are_not_what_the_pipeline_takes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 3)):
        write_checkpoint(tmp_path / name, some_checkpoint(seed), (2, 4, 5))
    arguments = ("remap", tmp_path / "a", "--vocab", tmp_path / "b")
    done = redraft(*arguments, "--output", tmp_path / "out")
    assert "14 rows that the donor lacks are zeros" in " ".join(done.stdout.split())
    as_json = redraft(*arguments, "--output", tmp_path / "json", "--json")
    assert json.loads(as_json.stdout)["zero"] == 14
    assert "are zeros" in as_json.stderr
    assert "are zeros" not in redraft(*arguments, "--output", tmp_path / "mean", "--fill", "mean").stdout


def test_heads_of_vocabularies_that_share_nothing(llama_folder: Path, tmp_path: Path) -> None:
    one = some_checkpoint()
    free = np.setdiff1d(np.arange(96), one.mapping.ids)[:24]
    two = some_checkpoint()
    two.mapping = Mapping(free, 96)
    write_checkpoint(tmp_path / "a", one, (2, 4, 5))
    write_checkpoint(tmp_path / "b", two, (2, 4, 5))
    done = command(tmp_path / "a", tmp_path / "b", "--heads", "--target", llama_folder)
    assert "share no id" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_drift_that_few_ids_have_is_not_called_zero() -> None:
    one = Mapping(np.array([0, 1, 2, 3, 4, 5, 7, 8]), 16)
    two = Mapping(np.array([0, 1, 2, 3, 4, 5, 6, 7, 8]), 16)
    verdict = audit(one, two).verdict
    assert "by 0" not in verdict
    assert "most not at all, none by more than 1" in verdict
