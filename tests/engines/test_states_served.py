"""The engine `vllm` against a real server: the states are those of transformers on the same tokens."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.profile import Profile, load_profile
from redraft.frame.section import validate
from redraft.hidden.engine import Engine, States
from redraft.hidden.vllm import VllmEngine, opening
from redraft.hidden.vllm_reply import Asked, law_of
from redraft.target.model import Target, load_target
from redraft.target.tiny import VOCAB, fit_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
DEPTH, AUX = 8, (2, 4, 5)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}


def served(dtype: str = "fp32", **changes: Any) -> Profile:
    """Profile `tiny` with a server that gives every state."""
    values = load_profile("tiny", ROOT).model_dump()
    values["extract"] |= {"engine": "vllm", "server": {
        "python": str(ROOT / ".engines/vllm/bin/python"), "layers": list(range(1, DEPTH + 1)), "dtype": dtype,
        "concurrency": 4, "ready_seconds": 600, "request_seconds": 120, "retries": 1,
        "flags": {"enforce-eager": True}, "env": ENVIRONMENT, **changes,
    }}  # fmt: skip
    return validate(Profile, values, Path("tiny"))


def documents(seed: int) -> list[list[Tensor]]:
    """Shards of documents: some of one token, some with the start of another, one as long as the corpus allows."""
    draw = random.Random(seed)
    sizes = [[1, 2, 128, 7], [64, 65], [31, 33, 90, 17, 5]]
    groups = [
        [torch.tensor(draw.choices(range(3, VOCAB), k=size), dtype=torch.int32) for size in each] for each in sizes
    ]
    groups[1][1][:60] = groups[0][2][:60]
    return groups


def expected(target: Target, ids: Tensor) -> States:
    """In this process, by transformers."""
    with torch.inference_mode(), target.capture(range(DEPTH)) as captured:
        final = target.decoder(input_ids=ids[None].long(), use_cache=False).last_hidden_state[0]
    assert captured.unnormed is not None
    layers = {f"layer_{layer}": state[0] for layer, state in captured.inputs.items()}
    return {**layers, "unnormed": captured.unnormed[0], "final": final, "greedy": (final @ target.head.T).argmax(-1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "target"
    fit_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_STORE", str(tmp_path_factory.mktemp("store")))
        with opening(folder, served()).open(()) as engine:
            assert isinstance(engine, VllmEngine)
            yield engine


def differences(engine: Engine, target: Target, groups: list[list[Tensor]]) -> dict[str, float]:
    """Largest relative difference of every kind of state."""
    seen, worst = set(), dict[str, float]()
    for group, place, states in engine.states(groups, range(DEPTH), around=True):
        seen.add((group, place))
        wanted = expected(target, groups[group][place])
        assert states.keys() == wanted.keys()
        assert states["greedy"].dtype == torch.int32
        same = (states["greedy"] == wanted.pop("greedy")).float().mean()
        worst["greedy"] = max(worst.get("greedy", 0.0), 1 - float(same))
        for name, state in wanted.items():
            difference = float((states[name].float() - state.float()).norm() / state.float().norm())
            worst[name] = max(worst.get(name, 0.0), difference)
    assert seen == {(group, place) for group, each in enumerate(groups) for place in range(len(each))}
    return worst


def told(worst: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1e}" for name, value in worst.items())


def test_states_are_those_of_transformers(engine: VllmEngine, folder: Path) -> None:
    target = load_target(folder, dtype="fp32", aux_layers=AUX)
    worst = differences(engine, target, documents(0))
    print(f"\nfp32: {told(worst)}")
    assert worst.pop("greedy") == 0
    assert max(worst.values()) < 1e-4
    assert worst["layer_0"] == 0
    assert engine.servers.folder is not None
    assert not list(engine.servers.folder.iterdir())  # every file was taken


def test_the_servers_own_law_is_that_of_the_final_state(engine: VllmEngine, folder: Path) -> None:
    """What a release without the last state gives instead; logits are told less a constant."""
    target = load_target(folder, dtype="fp32", aux_layers=AUX)
    groups = documents(1)
    whole = {(group, place): states for group, place, states in engine.states(groups, AUX)}
    for job, given in whole.items():
        assert given.keys() == {*(f"layer_{layer}" for layer in AUX), "final", "greedy"}, job
    jobs = [Asked(group, place, ids) for group, each in enumerate(groups) for place, ids in enumerate(each)]
    for job in jobs:
        group, place = job.group, job.place
        ids, logits = law_of(job, engine.ask(engine.servers.servers[0], job, law=True)[0])
        wanted = (expected(target, groups[group][place])["final"] @ target.head.T).topk(64)
        offset = wanted.values - logits
        assert float((offset - offset[:, :1]).abs().max()) < 1e-3
        assert float((ids == wanted.indices).float().mean()) > 0.99
        assert torch.equal(ids[:, 0], whole[group, place]["greedy"])


def refuse(folder: Path, profile: Profile, message: str) -> None:
    with opening(folder, profile).open(()) as engine, pytest.raises(RedraftError, match=message):
        next(iter(engine.states(documents(2), AUX)))


def test_a_joined_server_is_looked_at(engine: VllmEngine, folder: Path, tmp_path: Path) -> None:
    base = engine.servers.servers[0].client.base
    joined = {"urls": [base], "python": None, "env": {}, "flags": {}}
    opened = opening(folder, served(**joined))
    assert opened.identity == opening(folder, served()).identity
    ids = documents(2)
    with opened.open(()) as other:
        mine = {job[:2]: job[2] for job in engine.states(ids, AUX)}
        for group, place, states in other.states(ids, AUX):
            for name, state in states.items():
                assert torch.allclose(state.float(), mine[group, place][name].float(), atol=1e-3)

    refuse(
        folder, served(**joined, layers=(2, 4, 5, 8)), r"another number of states(.|\n)*4: \[2, 4, 5, 8\]\n  found: 8"
    )
    refuse(folder, served(**joined, layers=(2, 4, 8)), r"do not give all states(.|\n)*no 5(.|\n)*\[2,4,5,8\]")
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    model = load_target(folder, dtype="fp32", aux_layers=AUX).model
    with torch.no_grad():
        model.get_decoder().layers[3].mlp.down_proj.weight.mul_(1.01)  # type: ignore[operator]
    model.save_pretrained(tuned)  # type: ignore[operator]
    refuse(tuned, served(**joined), "other weights")


@pytest.mark.slow
def test_states_of_experts_and_latent_attention(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's model, which Kimi is: another class of vLLM, which gathers its states in another way."""
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path))
    target = tmp_path / "target"
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=DEPTH,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=64, max_position_embeddings=512, initializer_range=0.2, eos_token_id=2,
        bos_token_id=None, tie_word_embeddings=False,
    ))  # fmt: skip
    model.save_pretrained(target)
    fields = read_object(target / "config.json") | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (target / "config.json").write_text(json.dumps(fields))
    for path in folder.glob("*token*"):
        shutil.copy(path, target)
    flags = {"enforce-eager": True, "compilation-config": '{"custom_ops":["none"]}'}
    profile = served(flags=flags, env={**ENVIRONMENT, "VLLM_MLA_DISABLE": "1"})
    with opening(target, profile).open(()) as engine:
        worst = differences(engine, load_target(target, dtype="fp32", aux_layers=AUX), documents(0))
    print(f"\nDeepSeek, fp32: {told(worst)}")
    assert worst.pop("greedy") == 0
    assert max(worst.values()) < 1e-4


@pytest.mark.slow
def test_bf16_is_near(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: docs/hidden.md has the numbers."""
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path))
    target = load_target(folder, dtype="bf16", aux_layers=AUX)
    with opening(folder, served("bf16")).open(()) as engine:
        worst = differences(engine, target, documents(0))
    print(f"\nbf16: {told(worst)}")
    assert worst.pop("greedy") < 0.1
    assert max(worst.values()) < 0.03
