"""Parameters: YAML 1.2 scalars, typed sections, clear refusals."""

import io
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from redraft.frame.errors import RedraftError
from redraft.frame.keys import page, profile_text
from redraft.frame.params import load_config
from redraft.frame.profile import FitParams, Knobs, Profile, load_profile
from redraft.frame.section import load_yaml

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
        "a",
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str) -> None:
    core = {
        "5e-05": 5e-5,
        "5.0e-5": 5e-5,
        "1e3": 1000.0,
        ".5": 0.5,
        "+1": 1,
        "null": None,
        "~": None,
        "true": True,
        "012": 12,
    }
    assert load_yaml(f"value: {text}")["value"] == core.get(text, text)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("lr: 1\nlr: 2\n")
    with pytest.raises(RedraftError, match=r"duplicate key \"lr\""):
        load_config(tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_every_profile_validates(name: str) -> None:
    load_profile(name, ROOT)


def test_the_kimi_profile_has_the_figures_of_the_real_target() -> None:
    profile = load_profile("kimi-k25", ROOT)
    assert profile.vocab.slots == 32_000
    assert profile.target.aux_layers == (2, 30, 58)
    assert profile.donor.source == "AQ-MedAI/Kimi-K2-Instruct-eagle3"


def with_knobs(tmp_path: Path, **knobs: object) -> Path:
    """A project whose params.yaml has other values, written as `dvc exp run -S` writes them; None takes a key away."""
    yaml = YAML()
    values = yaml.load((ROOT / "params.yaml").read_text())
    for name, value in knobs.items():
        place = values
        *path, last = name.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    with (tmp_path / "params.yaml").open("w") as file:
        yaml.dump(values, file)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    return tmp_path


def test_the_knobs_reach_the_training(tmp_path: Path) -> None:
    fit = load_config(with_knobs(tmp_path, lr=5e-05)).fit()
    assert fit.lr == 5e-5
    assert fit.row_tokens == load_profile("smollm", ROOT).train.row_tokens


@pytest.mark.parametrize("profile", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_a_profile_brings_its_knobs(tmp_path: Path, profile: str) -> None:
    # `-S profile=kimi-k25` fine-tuned a published donor at the laptop's lr, 40 times too high, and served it in-process
    params = load_config(with_knobs(tmp_path, profile=profile)).params
    brought = load_profile(profile, ROOT).knobs
    assert params.model_dump(include=set(Knobs.model_fields)) == brought.model_dump()


def test_the_published_donor_is_trained_as_published_donors_are() -> None:
    config = load_config(ROOT, "kimi-k25")
    assert 2e-5 <= config.fit().lr <= 5e-5
    assert config.params.engine == "sglang"


@given(st.floats(1e-7, 1.0), st.sampled_from(["smollm", "tiny", "kimi-k25"]))
def test_a_knob_that_is_set_on_purpose_overrides_the_profile(lr: float, profile: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(with_knobs(Path(folder), lr=lr, profile=profile))
    assert config.fit().lr == lr
    assert config.params.epochs == config.profile.knobs.epochs


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"lr": "fast"}, "`lr`"),
        ({"lr": -1}, "`lr`"),
        ({"ttt_steps": 1.5}, "`ttt_steps`"),
        ({"init": "magic"}, "`init`"),
        ({"seed": "profile"}, "`seed`"),
        ({"loss__mask": "both"}, "`loss.mask`"),
        ({"loss__freeze": ["embed_tokens"]}, "`loss.freeze.0`"),
        ({"profile": "nowhere"}, "nowhere.yaml"),
        ({"profile": "smolm"}, "did you mean smollm?"),
        ({"profile": 3}, "profile has no name"),
        # case C47: strict types, finite, in range, the nearest known name
        ({"ttt_steps": True}, "`ttt_steps`"),
        ({"ttt_steps": "10"}, "`ttt_steps`"),
        ({"epochs": True}, "`epochs`"),
        ({"seed": True}, "`seed`"),
        ({"warmup": True}, "`warmup`"),
        ({"warmup": 1.5}, "`warmup`"),
        ({"lr": "1e-3"}, "`lr`"),
        ({"lr": math.inf}, "`lr`"),
        ({"lr": math.nan}, "`lr`"),
        ({"epochs": math.inf}, "`epochs`"),
        ({"clip": math.nan}, "`clip`"),
        ({"learning_rate": 0.1}, "`learning_rate`: no such key, did you mean `lr`?"),
        ({"lrr": 0.1}, "`lrr`: no such key, did you mean `lr`?"),
        ({"epoch": 1}, "did you mean `epochs`?"),
        ({"loss__freez": []}, "`loss.freez`: no such key, did you mean `loss.freeze`?"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, knobs: dict[str, object], named: str) -> None:
    with pytest.raises(RedraftError) as caught:
        load_config(with_knobs(tmp_path, **knobs))
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "lr\n", "lr: [\n", "lr: \x00\n", "\xff"])
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(RedraftError, match=r"params\.yaml"):
        load_config(tmp_path)


def test_a_whole_float_is_an_integer(tmp_path: Path) -> None:
    assert load_config(with_knobs(tmp_path, ttt_steps=1e1)).params.ttt_steps == 10


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("tolerance: 0.05", "tolerance: .nan", "extract.tolerance"),
        ("min_accept_length: 1.05", "min_accept_length: .nan", "probe.min_accept_length"),
        ("force_bytes: true", "force_bytes: 1", "vocab.force_bytes"),
        ("max_new_tokens: 32", "max_new_tokens: 1", "max_new_tokens"),
        ("spec_steps: [1, 2, 3]", "spec_steps: []", "bench.spec_steps"),
        ("concurrency: [1]", "concurrency: [1, 1]", "bench.concurrency"),
        ("save_steps: 10", "save_step: 10", "did you mean `train.save_steps`?"),
    ],
)
def test_a_profile_is_read_strictly(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (ROOT / "profiles" / "tiny.yaml").read_text()
    assert old in text
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").write_text(text.replace(old, new))
    with pytest.raises(RedraftError) as caught:
        load_profile("tiny", tmp_path)
    assert named in str(caught.value)


def test_the_page_of_keys_is_current() -> None:
    assert (ROOT / "docs/parameters.md").read_text() == page()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_a_written_profile_is_read_as_the_same_with_a_comment_a_key(tmp_path: Path, name: str) -> None:
    profile = load_profile(name, ROOT)
    text = profile_text(profile.model_dump(mode="json", exclude_none=True), "a title")
    assert Profile.model_validate(load_yaml(text)) == profile
    values = [line for line in text.splitlines() if line.startswith("  ") and not line.rstrip().endswith(":")]
    assert all(" # " in line for line in values)


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
