"""A target from the hub: which commit it is, what is told before its weights are fetched, and when it is another."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fake.hub import Hub, Repo, serving
from kimi.folder import kimi_folder
from safetensors.torch import load_file, save_file

from redraft.frame.errors import RedraftError
from redraft.frame.params import Config, load_config
from redraft.frame.profile import TargetParams
from redraft.preflight.look import look, require_memory
from redraft.preflight.source import source_of
from redraft.target.checkout import checkout
from redraft.target.ends import target_hash
from redraft.target.folder import weights_folder
from redraft.target.sources import make_target

ROOT = Path(__file__).parent.parent
NAME, WEIGHTS = "org/name", "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, `org/name`, and an empty cache. The library reads its addresses once, when imported."""
    with serving() as served:
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr(
            "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE",
            served.url + "/{repo_id}/resolve/{revision}/{filename}",
            raising=False,
        )
        served.repos[NAME] = Repo()
        yield served


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def config_of(
    root: Path, target: str = "", extract: str = "vllm", knobs: str = "sglang", parity: str = "walk"
) -> Config:
    """Profile `tiny` with another `target` section and other engines."""
    (root / "profiles").mkdir(exist_ok=True)
    text = (ROOT / "profiles/tiny.yaml").read_text()
    for old, new in {
        "source: fit:tiny": target or f"source: {NAME}",
        "engine: torch": f"engine: {knobs}",
        "engine: transformers": f"engine: {extract}",
        "parity: torch": f"parity: {parity}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    server = "server: {python: python, dtype: fp32, concurrency: 1, ready_seconds: 1, request_seconds: 1, retries: 0}"
    text = text.replace("  engine: vllm ", f"  {server}\n  engine: vllm ")
    (root / "profiles/tiny.yaml").write_text(text)
    knobs_file = (ROOT / "params.yaml").read_text()
    (root / "params.yaml").write_text(knobs_file.replace("profile: smollm ", "profile: tiny "))
    return load_config(root)


def merged(folder: Path) -> None:
    """Merge a fine-tuning of low rank into one projection of one layer: every size stays."""
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.o_proj.weight"))
    rows, columns = tensors[name].shape
    torch.manual_seed(0)
    delta = torch.randn(rows, 2) @ torch.randn(2, columns) * 0.01
    tensors[name] = (tensors[name].float() + delta).to(tensors[name].dtype)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def made(out: Path, revision: str, lock: Path | None = None) -> str:
    make_target(TargetParams(source=NAME, revision=revision), out, lock=lock)
    return target_hash(out)


def test_a_branch_is_its_first_commit_until_the_profile_names_another(hub: Hub, model: Path, tmp_path: Path) -> None:
    lock, out = tmp_path / "profile.lock", tmp_path / "target"
    first = hub.repos[NAME].push(model)
    before = made(out, "main", lock)
    assert json.loads((out / "target.json").read_text())["commit"] == first
    assert json.loads(lock.read_text()) == {f"{NAME}@main": first}
    assert (source_of(out).name, source_of(out).revision) == (NAME, first)
    (model / "README.md").write_text("words alone")
    second = hub.repos[NAME].push(model)
    with pytest.raises(RedraftError, match=f"(?s)moved.*{first}.*{second}"):
        made(out, "main", lock)
    assert made(out, second, lock) == before  # another commit, the same weights
    assert made(out, first, lock) == before
    assert json.loads(lock.read_text()) == {f"{NAME}@main": first}


def test_a_merged_fine_tuning_is_another_target_wherever_it_is_written(hub: Hub, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "target"
    before = made(out, hub.repos[NAME].push(model))
    merged(weights_folder(out))  # through the links of the hub's cache: the blob keeps its name
    with pytest.raises(RedraftError, match="changed after the target stage"):
        weights_folder(out)
    in_place = made(out, next(iter(hub.repos[NAME].commits)))
    merged(model)
    pushed = made(out, hub.repos[NAME].push(model))
    assert pushed == in_place != before  # the same bytes, and not those of before


def test_a_copy_of_a_snapshot_is_the_same_target(hub: Hub, model: Path, tmp_path: Path) -> None:
    snapshot = made(tmp_path / "target", hub.repos[NAME].push(model))
    shutil.copytree(weights_folder(tmp_path / "target"), tmp_path / "copy")
    make_target(TargetParams(source=str(tmp_path / "copy")), tmp_path / "again")
    assert target_hash(tmp_path / "again") == snapshot
    config = json.loads((tmp_path / "copy/config.json").read_text())
    (tmp_path / "copy/config.json").write_text(json.dumps({**config, "transformers_version": "9.0"}))
    assert target_hash(tmp_path / "copy") == snapshot
    (tmp_path / "copy/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert target_hash(tmp_path / "copy") != snapshot


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file but the smallest is a large one."""
    for name, value in {"_BLOCK": 64, "_BLOCKS": 4, "_PAGE": 16}.items():
        monkeypatch.setattr(f"redraft.target.folder.{name}", value)


def test_of_a_large_file_the_hubs_hash_tells_revisions_apart_and_a_sample_what_was_written_over(
    hub: Hub, model: Path, tmp_path: Path, sampled: None
) -> None:
    first = made(tmp_path / "target", hub.repos[NAME].push(model))
    here = weights_folder(tmp_path / "target")
    tensors = load_file(model / WEIGHTS)
    tensors["model.embed_tokens.weight"][3, 5] += 1  # one number, which no sample is sure to hit
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    assert made(tmp_path / "target", hub.repos[NAME].push(model)) != first
    copy = shutil.copytree(here, tmp_path / "copy")
    assert target_hash(copy) != first  # the price: it has lost the hub's hash
    record = copy / f".cache/huggingface/download/{WEIGHTS}.metadata"
    record.parent.mkdir(parents=True)
    blob = (here / WEIGHTS).readlink().name
    record.write_text(f"{'0' * 40}\n{blob}\n{(copy / WEIGHTS).stat().st_mtime + 0.5}\n")
    assert target_hash(copy) == first  # as `hf download --local-dir` leaves it
    os.utime(copy / WEIGHTS, (2e9, 2e9))
    assert target_hash(copy) != first


def test_no_tensor_of_a_large_file_is_left_out(model: Path, sampled: None) -> None:
    before, tensors = target_hash(model), load_file(model / WEIGHTS)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, model / WEIGHTS, {"format": "pt"})
        assert target_hash(model) != before, name
    save_file(tensors, model / WEIGHTS, {"format": "pt", "long": "x" * 5000})  # the header's end, past the first blocks
    long = target_hash(model)
    save_file(tensors, model / WEIGHTS, {"format": "pt", "long": "x" * 4999 + "y"})
    assert target_hash(model) != long


# before the weights


def edit(name: str, **fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit("tokenizer_config.json", chat_template=None)(folder)


def needs(package: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        kimi_folder(folder)
        code = folder / "tokenization_small.py"
        code.write_text(f"import {package}\n{code.read_text()}")

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (no_template, "no chat template"),
        (edit("config.json", model_type="nobody_knows"), "nobody_knows"),
        (edit("config.json", architectures=["LlamaForCausalLMEagle3"]), "is a drafter"),
        (edit("config.json", vocab_size=100), "larger than the target's"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (needs("no_such_package"), "(?s)not installed: no_such_package.*pip install"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "no safetensors weights"),
        (lambda folder: shutil.copy(folder / WEIGHTS, folder / "model.fp16.safetensors"), "two sets of weights"),
    ],
)
def test_what_would_fail_is_told_before_a_weight_is_fetched(
    hub: Hub, model: Path, tmp_path: Path, change: Callable[[Path], object], told: str
) -> None:
    change(model)
    config = config_of(tmp_path, f"source: {NAME}\n  trust_remote_code: [tokenizer]")
    hub.repos[NAME].push(model)
    with pytest.raises(RedraftError, match=told):
        checkout(NAME, "main", look=lambda folder, coming: print(look(folder, coming, config)))
    assert "config.json" in hub.asked
    assert not [name for name in hub.asked if name.endswith((".safetensors", ".bin"))]


def test_code_that_may_not_run_is_told_with_its_part_and_key(hub: Hub, model: Path, tmp_path: Path) -> None:
    kimi_folder(model)
    hub.repos[NAME].push(model)
    config = config_of(tmp_path, f"source: {NAME}\n  trust_remote_code: [configuration, model]")
    with pytest.raises(RedraftError, match=r"(?s)tokenizer is Python code.*tokenizer in target\.trust_remote_code"):
        checkout(NAME, "main", look=lambda folder, coming: print(look(folder, coming, config)))
    assert WEIGHTS not in hub.asked


def test_room_on_disk_and_in_memory_is_asked_where_it_is_needed(model: Path, tmp_path: Path) -> None:
    (model / WEIGHTS).unlink()
    served = config_of(tmp_path)
    with pytest.raises(RedraftError, match=r"(?s)do not fit the disk.*1,000,000,000\.0 GB free.*HF_HOME"):
        look(model, {WEIGHTS: 10**18}, served)
    assert any("1 files of weights to fetch" in line for line in look(model, {WEIGHTS: 10**6}, served))
    assert require_memory(model, 10**18, served) == []
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"  # held in 2 bytes a value, at least
    for held in ({"extract": "transformers"}, {"knobs": "torch"}, {"parity": "torch"}):
        with pytest.raises(RedraftError, match=r"(?s)memory.*500,000,000\.0 GB of weights.*extract\.engine: vllm"):
            require_memory(model, 10**18, config_of(tmp_path, **held))
        assert require_memory(model, 10**6, config_of(tmp_path, **held)) == []


def test_packed_weights_are_counted_as_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-K2.5 by its shapes: 595 GB of files would fit 8 GPUs of 141 GB, 2.05 TB of bf16 do not."""
    text = {
        "model_type": "kimi_k2", "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    fields = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "text_config": text | {"quantization_config": packed}, "tie_word_embeddings": False})
    )
    monkeypatch.setattr("redraft.preflight.look._memory", lambda: (8 * 141 * 10**9,) * 2)
    with pytest.raises(RedraftError, match=r"2,05\d\.\d GB of weights in this process, unpacked to bf16"):
        require_memory(tmp_path, 595 * 10**9, config_of(tmp_path, extract="transformers"))


@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="the package is here")
def test_a_package_for_quantised_weights_is_asked_for_only_where_they_are_loaded(model: Path, tmp_path: Path) -> None:
    edit("config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})(model)
    with pytest.raises(RedraftError, match=r"(?s)quantised weights.*compressed"):
        look(model, {}, config_of(tmp_path, extract="transformers"))
    look(model, {}, config_of(tmp_path))


# what the hub does not give


def test_a_hub_that_gives_nothing_is_told_by_its_reason(hub: Hub, model: Path, tmp_path: Path) -> None:
    commit = hub.repos[NAME].push(model)
    hub.repos["org/gated"] = Repo(hub.repos[NAME].commits, hub.repos[NAME].branches, gated=True)
    for source, revision, told in (
        ("org/gated", "main", "accepted its terms.*HF_TOKEN"),
        ("org/nothing", "main", "no such model, or does not show it"),
        (NAME, "absent", "no such revision"),
        (NAME, "0" * 40, "no such revision"),
    ):
        with pytest.raises(RedraftError, match=f"(?s){told}"):
            make_target(TargetParams(source=source, revision=revision), tmp_path / "target")
        assert not (tmp_path / "target").exists()
    assert made(tmp_path / "target", commit)


def test_without_the_hub_its_cache_is_taken(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repos[NAME].push(model)
    known = made(tmp_path / "target", "main")
    hub.repos.clear()  # as after a token ran out
    assert made(tmp_path / "target", commit) == known
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert made(tmp_path / "target", commit) == known
    assert made(tmp_path / "target", commit, tmp_path / "lock") == known
    for source, revision in (("org/other", commit), (NAME, "1" * 40)):
        with pytest.raises(RedraftError, match="did not give"):
            make_target(TargetParams(source=source, revision=revision), tmp_path / "target")


def test_the_stages_take_target_and_donor_by_branch(model: Path, donor_folder: Path, tmp_path: Path) -> None:
    with serving() as hub:
        hub.repos |= {NAME: Repo(), "org/donor": Repo()}
        commit, donor = hub.repos[NAME].push(model), hub.repos["org/donor"].push(donor_folder)
        config_of(tmp_path, f"source: {NAME}\n  revision: main")
        profile = tmp_path / "profiles/tiny.yaml"
        profile.write_text(profile.read_text().replace("source: train", "source: org/donor\n  revision: main"))
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}

        def stage(name: str, code: int = 0) -> str:
            done = subprocess.run(
                [sys.executable, str(ROOT / f"stages/{name}.py")],
                cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
            return done.stdout + done.stderr

        assert f"note: commit {commit}, kept in profiles/tiny.lock: git add" in stage("target")
        stage("donor")
        kept = json.loads((tmp_path / "profiles/tiny.lock").read_text())
        assert kept == {f"{NAME}@main": commit, "org/donor@main": donor}
        assert json.loads((tmp_path / "artifacts/donor/redraft.json").read_text())["commit"] == donor
        merged(model)
        moved = hub.repos[NAME].push(model)
        told = stage("target", 1)
        assert commit in told
        assert moved in told
