"""Small real things for tests: targets of real architectures made from a config, drafters, hidden states."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from clones import clone_of, commit_all, shell
from filelock import FileLock
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from redraft.corpus.corpus import Corpus, write_corpus
from redraft.drafter.checkpoint import Checkpoint, write_checkpoint
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.profile import ExtractParams
from redraft.hidden.engine import Opening, Source
from redraft.hidden.extract import extract
from redraft.hidden.in_process import InProcess
from redraft.hidden.rows import HiddenStates
from redraft.hidden.run import Manifest
from redraft.target.ends import Ends, read_ends, target_hash
from redraft.target.model import Target, load_target
from redraft.vocab.mapping import Mapping

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)
VOCAB, HIDDEN, LAYERS, SLOTS = 96, 32, 8, 24
DONOR_SLOTS = 300
"""Of `donor_folder`."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def deepseek() -> DeepseekV3ForCausalLM:
    torch.manual_seed(2)
    return DeepseekV3ForCausalLM(deepseek_config()).eval()


def deepseek_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def save_target(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    record = {"source": "test", "revision": None, "weights": "."}
    (folder / "target.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="session")
def finished_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the working tree after `dvc repro` of profile `tiny` and a commit; made once for all test processes.

    Nobody changes it: `clones.copy_of` gives one of your own.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished-tiny"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            making = clone_of(folder.with_suffix(".making"), "tiny")
            shell("dvc", "repro", cwd=making)
            commit_all(making, "tiny")
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def target(llama_folder: Path) -> Target:
    return load_target(llama_folder, dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fitted target of profile `tiny`, with its tokenizer."""
    from redraft.frame.profile import TargetParams
    from redraft.target.sources import make_target

    folder = tmp_path_factory.mktemp("tiny") / "target"
    make_target(TargetParams(source="fit:tiny"), folder)
    return folder


@pytest.fixture(scope="session")
def donor_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A drafter of the fitted target's shape."""
    fields = json.loads((tiny_folder / "config.json").read_text())
    config = DrafterConfig(
        hidden_size=fields["hidden_size"],
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=fields["vocab_size"],
        draft_vocab_size=DONOR_SLOTS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
    )
    folder = tmp_path_factory.mktemp("donor") / "drafter"
    drafter = Drafter.fresh(config, 0)
    write_checkpoint(
        folder, Checkpoint(drafter, Mapping(np.arange(0, 2 * DONOR_SLOTS, 2), config.vocab_size)), (2, 4, 5)
    )
    (folder / "redraft.json").unlink()  # as somebody else's
    return folder


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stages up to train are done, for a target like profile `tiny`'s and the engine `sglang`."""
    return make_project(tmp_path_factory.mktemp("project"))


def make_project(
    folder: Path,
    config: object = None,
    python: str = sys.executable,
    aux_layers: tuple[int, ...] = (2, 4, 5),
    **fields: object,
) -> Path:
    """A target (by default a Llama whose layers differ much), a drafter of it, prompts, and a profile named `tiny`.

    `fields` are added to the target's config.json.
    """
    from redraft.corpus.build import tokenize_file
    from redraft.corpus.corpus import write_corpus
    from redraft.corpus.tokenizer import load_tokenizer
    from redraft.frame.profile import Profile
    from redraft.frame.section import load_yaml
    from redraft.target.tiny import fit_tiny, tiny_llama
    from redraft.train.donor import train_donor

    text = (ROOT / "profiles/tiny.yaml").read_text().replace(".engines/sglang/bin/python", python)
    text = text.replace("slots: 400", "slots: 200").replace("force_bytes: true", "force_bytes: false")
    text = text.replace("epochs: 6", "epochs: 40")
    text = text.replace("source: fit:tiny", f"source: fit:tiny\n  aux_layers: {list(aux_layers)}")
    artifacts = folder / "artifacts"
    fit_tiny(artifacts / "target", config=config or tiny_llama(initializer_range=0.2))
    path = artifacts / "target/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (artifacts / "target/target.json").write_text(json.dumps({"source": "test", "revision": None, "weights": "."}))
    profile = Profile.model_validate(load_yaml(text))
    tokenizer = load_tokenizer(artifacts / "target")
    for split in ("heldout", "train"):
        corpus, _ = tokenize_file(ROOT / f"data/tiny/{split}.jsonl", tokenizer, profile.corpus)
        write_corpus(artifacts / f"corpus/{split}.safetensors", corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_STORE", str(folder / ".store"))
        drafter, _ = train_donor(artifacts / "target", corpus, profile)
    for name in ("drafter", "donor"):
        write_checkpoint(artifacts / name, drafter, aux_layers, artifacts / "target")
    (folder / "stages").symlink_to(ROOT / "stages")
    (folder / "profiles").mkdir()
    (folder / "profiles/tiny.yaml").write_text(text)
    knobs = (ROOT / "params.yaml").read_text().replace("profile: smollm ", "profile: tiny ")
    (folder / "params.yaml").write_text(re.sub(r"^engine: \w+", "engine: sglang", knobs, flags=re.M))
    return folder


def some_mapping(seed: int = 0, slots: int = SLOTS, vocab: int = VOCAB) -> Mapping:
    generator = np.random.default_rng(seed)
    return Mapping(np.sort(generator.choice(vocab, slots, replace=False)), vocab)


def some_checkpoint(seed: int = 0, slots: int = SLOTS, scale: float = 8.0) -> Checkpoint:
    """A random drafter whose attention and head are large enough to matter."""
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=slots,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=256,
    )
    drafter = Drafter.fresh(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
            else:
                weight.mul_(scale)
            weight.copy_(weight.bfloat16().float())
    return Checkpoint(drafter, some_mapping(seed, slots))


def source_of(target: Target, identity: str = "x", batch_tokens: int = 40) -> Source:
    """A loaded target as what states come from."""
    opening = Opening(
        {"name": "transformers", "release": "the tests'", "dtype": str(target.head.dtype)},
        lambda layers: nullcontext(InProcess(target, batch_tokens)),
    )
    return Source(opening, opening, identity, target.head, target.aux_layers, len(target.decoder.layers))


def extracted(target: Target, corpora: dict[str, Corpus], params: ExtractParams, identity: str = "x") -> Manifest:
    """The manifest of what was made of `corpora` in the store."""
    return extract(source_of(target, identity, params.batch_tokens), corpora, params).manifest


def write_states(states: dict[str, HiddenStates], folder: Path) -> None:
    """Manifest and corpora for another process, under the names that stages use."""
    (folder / "hidden").mkdir(parents=True, exist_ok=True)
    (folder / "hidden/manifest.json").write_text(json.dumps(states["train"].manifest))
    for split, each in states.items():
        write_corpus(folder / "corpus" / f"{split}.safetensors", each.corpus)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def states(
    target: Target, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, HiddenStates]:
    """Hidden states of random documents, in a store of their own."""
    from test_hidden import PARAMS, corpus_of

    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    corpora = {"train": corpus_of([30, 25, 20, 18, 40, 33]), "heldout": corpus_of([30, 25, 20], seed=0)}
    manifest = extracted(target, corpora, PARAMS, target_hash(llama_folder))
    return {split: HiddenStates(manifest, split, corpus) for split, corpus in corpora.items()}


@pytest.fixture
def ends(llama_folder: Path) -> Ends:
    return read_ends(llama_folder)


@pytest.fixture(scope="session", autouse=True)
def _modules_of_others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A tokenizer's own code is copied before it runs: into one folder of these tests, not into the user's cache."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", folder)
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # one process trains several times, in two precisions


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database without a run: it takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A project's root with params, profiles and an MLflow database of its own; the current folder."""
    for name in ("params.yaml", "profiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "DVC_")):
            monkeypatch.delenv(name)
    (tmp_path / ".store").mkdir()
    shutil.copy(empty_database, tmp_path / ".store" / "mlflow.db")
    return tmp_path


@pytest.fixture(scope="module")
def server_database(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    return Path(shutil.copy(empty_database, tmp_path_factory.mktemp("server")))


@pytest.fixture(scope="module")
def server(server_database: Path) -> Iterator[str]:
    """The address of a real tracking server."""
    folder = server_database.parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        f"mlflow server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{server_database}"
    )
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen([sys.executable, "-m", *command.split()], cwd=folder, env=env, start_new_session=True)
    try:
        for _ in range(300):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: two workers take files in turn, and it would be alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_run.py")
