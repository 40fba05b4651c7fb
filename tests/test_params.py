"""Parameters: YAML 1.2 scalars, typed sections, clear refusals."""

import io
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from redraft.frame.errors import RedraftError
from redraft.frame.params import FitParams, load_config, load_profile, load_yaml

ROOT = Path(__file__).parent.parent


def dumped_as_dvc_does(value: object) -> str:
    text = io.StringIO()
    YAML().dump({"value": value}, text)
    return text.getvalue()


@given(st.floats(allow_nan=False))
@example(5e-05)
@example(1e-06)
@example(3e-05)
@example(1e22)
def test_any_float_that_dvc_writes_is_read_as_the_same_float(value: float) -> None:
    text = dumped_as_dvc_does(value)
    read = load_yaml(text)["value"]
    assert isinstance(read, float)
    assert read == value or math.isinf(value)
    assert read == YAML(typ="safe").load(text)["value"]


@pytest.mark.parametrize(
    "text",
    [
        "5e-05",
        "5.0e-5",
        "1e3",
        ".5",
        "+1",
        "on",
        "yes",
        "null",
        "~",
        "true",
        "012",
        "1_000",
        "2026-01-01",
        "a",
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str) -> None:
    expected = {
        "-0x10": -16,
        "012": 12,
        "1_000": "1_000",
        "2026-01-01": "2026-01-01",
    }  # where ruamel goes beyond the core
    assert load_yaml(f"value: {text}")["value"] == expected.get(text, YAML(typ="safe").load(f"value: {text}")["value"])


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("lr: 1\nlr: 2\n")
    with pytest.raises(RedraftError, match="stands twice"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_every_profile_validates(name: str) -> None:
    load_profile(name, ROOT)


def test_the_kimi_profile_has_the_figures_of_the_real_target() -> None:
    profile = load_profile("kimi-k25", ROOT)
    assert profile.vocab.slots == 32_000
    assert profile.target.aux_layers == (2, 30, 58)
    assert profile.donor.source == "AQ-MedAI/Kimi-K2-Instruct-eagle3"


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = (ROOT / "params.yaml").read_text()
    assert old in text
    (tmp_path / "params.yaml").write_text(text.replace(old, new))
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    return tmp_path


def test_the_knobs_reach_the_training(tmp_path: Path) -> None:
    fit = load_config(changed(tmp_path, "lr: 2.0e-3", "lr: 5e-05")).fit()
    assert fit.lr == 5e-5
    assert fit.row_tokens == load_profile("smollm", ROOT).train.row_tokens


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("lr: 2.0e-3", "lr: fast", "`lr`"),
        ("lr: 2.0e-3", "lr: -1", "`lr`"),
        ("seed: 0", "sead: 0", "`sead`"),
        ("ttt_steps: 3", "ttt_steps: 1.5", "`ttt_steps`"),
        ("init: remap", "init: magic", "`init`"),
        ("mask: served", "mask: both", "`loss.mask`"),
        ("freeze: []", "freeze: [embed_tokens]", "`loss.freeze.0`"),
        ("profile: smollm", "profile: nowhere", "nowhere.yaml"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(RedraftError) as caught:
        load_config(changed(tmp_path, old, new))
    assert named in str(caught.value)


def test_a_whole_float_is_an_integer(tmp_path: Path) -> None:
    assert load_config(changed(tmp_path, "ttt_steps: 3", "ttt_steps: 1e1")).params.ttt_steps == 10


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("  precision: fp32", "  precision: fp16", "`train.precision`"),  # case C14: bf16 or fp32
        ("  micro_tokens: 512", "  micro_tokens: 500", "multiple of row_tokens"),
    ],
)
def test_a_profile_that_cannot_train_is_refused_when_it_is_read(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (ROOT / "profiles" / "tiny.yaml").read_text()
    assert old in text
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").write_text(text.replace(old, new))
    with pytest.raises(RedraftError, match=named):
        load_profile("tiny", tmp_path)


def test_rows_must_fill_a_batch() -> None:
    good = load_config(ROOT).fit().model_dump()
    with pytest.raises(ValueError, match="multiple"):
        FitParams(**{**good, "batch_tokens": 1000, "row_tokens": 512})
