"""A target of one's own: a profile that is written for it, and faults that are told in seconds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DONOR_SLOTS as SLOTS
from kimi.folder import kimi_folder
from ruamel.yaml import YAML

from redraft.cli import main
from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError
from redraft.frame.params import load_config
from redraft.preflight.check import check

ROOT = Path(__file__).parent.parent


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one's own: parameters, prompts that were answered, and git."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "profiles").mkdir()
    shutil.copytree(ROOT / "data/tiny", tmp_path / "data/mine")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def redraft(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["redraft", *map(str, arguments)])
    main()


def edit(workspace: Path, **changes: object) -> None:
    """Set keys of profiles/mine.yaml; `donor__source` is `source` of `donor`."""
    path = workspace / "profiles/mine.yaml"
    yaml = YAML()
    values = yaml.load(path.read_text())
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    with path.open("w") as file:
        yaml.dump(values, file)


@pytest.mark.parametrize("start", ["donor", "train"])
def test_a_profile_is_written_that_would_run(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Path,
    donor_folder: Path,
    start: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    donor = donor_folder if start == "donor" else "train"
    redraft(monkeypatch, "init", "mine", "--target", tiny_folder, "--donor", donor)
    told = capsys.readouterr().out
    assert "git add profiles/mine.yaml data/mine params.yaml" in told
    redraft(monkeypatch, "check", "--profile", "mine")
    told = capsys.readouterr().out
    assert told.endswith("nothing would stop a run here\n")
    assert "not in git" in told
    profile = load_config(profile="mine").profile
    assert profile.vocab.slots == (SLOTS if start == "donor" else 640)
    assert Path(profile.target.source).is_absolute()
    with pytest.raises(SystemExit, match="there already"):
        redraft(monkeypatch, "init", "mine", "--target", tiny_folder, "--donor", "train")


def faults(workspace: Path, deep: bool = True) -> str:
    return "\n".join(map(str, check(load_config(profile="mine"), workspace, deep=deep).faults))


@pytest.fixture
def mine(workspace: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, donor_folder: Path) -> Path:
    """A sound project, with copies of target and donor that a test may spoil."""
    for name, folder in (("target", tiny_folder), ("donor", donor_folder)):
        shutil.copytree(folder, workspace / "models" / name)
    models = workspace / "models"
    redraft(monkeypatch, "init", "mine", "--target", models / "target", "--donor", models / "donor")
    assert faults(workspace) == ""
    return workspace


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab__slots": 641}, "larger than the target's"),
        ({"vocab__slots": 100}, "smaller than what is forced in"),
        ({"target__aux_layers": [2, 4, 8]}, "aux layers do not fit"),
        ({"target__source": "nowhere/to/be/found"}, "neither a folder nor a hub id"),
        ({"target__source": "~/nowhere"}, "neither a folder nor a hub id"),
        ({"target__sha256": "0" * 64}, "sha256 has no effect"),
        ({"target__revision": "abc"}, "revision has no effect"),
        ({"donor__source": "ORG/NAME"}, "needs a revision"),
    ],
)
def test_what_does_not_go_together_is_told(mine: Path, changes: dict[str, object], told: str) -> None:
    edit(mine, **changes)
    assert told in faults(mine)


def test_spoilt_files_are_told_and_all_of_them_at_once(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "data/mine/train.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\n')
    (mine / "data/mine/heldout.jsonl").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mine / "models/target" / name).unlink()
    config = mine / "models/donor/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    with pytest.raises(SystemExit) as caught:
        redraft(monkeypatch, "check", "--profile", "mine")
    told = str(caught.value)
    assert "No chat has an answer" in told
    assert "no tokenizer" in told
    assert "models/donor" in told


def test_a_tokenizer_of_the_same_size_is_compared_or_said_not_to_be(mine: Path, tiny_folder: Path) -> None:
    assert any("not compared" in note for note in check(load_config(profile="mine"), mine).notes)
    shutil.copytree(tiny_folder, mine / "models/old")
    edit(mine, donor__tokenizer=str(mine / "models/old"))
    found = check(load_config(profile="mine"), mine, deep=True)
    assert "tokenizer: the donor's is the target's" in found.lines
    path = mine / "models/old/tokenizer.json"
    fields = json.loads(path.read_text())
    words = [word for word in fields["model"]["vocab"] if len(word) > 3][:2]
    swapped = dict(zip(words, reversed(words), strict=True))
    fields["model"]["vocab"] = {swapped.get(word, word): number for word, number in fields["model"]["vocab"].items()}
    path.write_text(json.dumps(fields))
    found = check(load_config(profile="mine"), mine, deep=True)
    assert "tokenizer: 2 ids mean another token to the donor" in found.lines


def test_other_layers_are_told_and_no_fault(mine: Path) -> None:
    def notes(*layers: int) -> str:
        edit(mine, target__aux_layers=list(layers))
        found = check(load_config(profile="mine"), mine)
        assert found.faults == []
        return "\n".join(found.notes)

    assert "SGLang" not in notes(2, 4, 5)
    assert "taken to be trained on [3, 5, 6]" in notes(3, 5, 6)
    assert "SGLang" not in notes(3, 5, 6)
    config = mine / "models/target/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["DeepseekV3ForCausalLM"]}))
    assert "SGLang 0.5.11 to 0.5.12 alone captures" in notes(1, 3, 4)
    assert "SGLang" not in notes(3, 5, 6)


def test_keys_without_effect_are_told(mine: Path) -> None:
    edit(mine, donor__slots=300)
    notes = "\n".join(check(load_config(profile="mine"), mine).notes)
    assert "donor.slots in the profile has no effect" in notes


def test_a_profile_outside_git_is_told_until_it_is_in(mine: Path) -> None:
    def notes() -> str:
        return "\n".join(check(load_config(profile="mine"), mine).notes)

    assert "git add data/mine profiles/mine.yaml" in notes()
    subprocess.run(["git", "add", "data", "profiles", "params.yaml"], cwd=mine, check=True)
    assert "not in git" not in notes()


def test_a_queued_run_is_told_that_git_lacks_the_profile(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = mine / "copy"
    (copy / "profiles").mkdir(parents=True)
    shutil.copy(mine / "params.yaml", copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("DVC_ROOT", str(mine))
    with pytest.raises(RedraftError, match="not in git"):
        load_config(profile="mine")


def test_advice_inside_an_experiment_names_the_profile(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rerun("target") == "dvc repro --force --single-item target, then dvc repro"
    monkeypatch.setenv("DVC_EXP_NAME", "odd-name")
    assert "profile: smollm" in rerun("target")


def test_the_default_project_has_nothing_to_tell() -> None:
    found = check(load_config(ROOT), ROOT)
    assert found.faults == []
    assert found.notes == []


def test_a_tokenizer_of_python_code_runs_if_the_profile_lets_it(mine: Path) -> None:
    kimi_folder(mine / "models/target")
    assert "Python code of its own" in faults(mine)
    edit(mine, target__trust_remote_code=True)
    found = check(load_config(profile="mine"), mine, deep=True)
    assert (found.faults, found.lines[-1]) == ([], f"draft vocabulary: {SLOTS} slots, 276 of them forced in")
    (mine / "models/target/tokenization_small.py").unlink()
    assert "tokenization_small.py" in faults(mine, deep=False)
