"""The second witness: vLLM serves the same drafter, in the form of speculators, and counts the same."""

import json
import re
from pathlib import Path

import pytest
import requests
from conftest import ROOT, make_project

from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import export_speculators, read_checkpoint
from redraft.engines.open import load_models
from redraft.frame.params import load_config
from redraft.frame.process import ServerProcess, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
VLLM = ROOT / ".engines/vllm/bin/vllm"
STEPS, LIMITS = 3, (21, 40)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def counters(base: str) -> list[int]:
    """Drafts (verify steps) and accepted tokens since the server started."""
    text = requests.get(f"{base}/metrics", timeout=30).text
    names = ("num_drafts_total", "num_accepted_tokens_total")
    found = [re.search(rf"^vllm:spec_decode_{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names]
    return [int(float(each[1])) if each else 0 for each in found]


def ask(base: str, model: str, prompt: list[int], limit: int) -> tuple[list[int], int, int]:
    """New ids, verify steps and right drafts of one answer."""
    before = counters(base)
    body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
    reply = requests.post(f"{base}/v1/completions", json=body, timeout=120).json()
    steps, right = (after - was for after, was in zip(counters(base), before, strict=True))
    return reply["choices"][0]["token_ids"], steps, right


def test_vllm_accepts_what_the_engine_torch_accepts(tmp_path: Path) -> None:
    """In float32; answers are cut by their length, in the middle of a verify step, as well as by a stop token."""
    folder = make_project(tmp_path / "project")
    models = load_models(load_config(folder), folder / "artifacts/target", folder / "artifacts/drafter", "fp32")
    heldout = read_corpus(folder / "artifacts/corpus/heldout.safetensors")
    prompts = [heldout.prompt(index) for index in range(len(heldout))]
    own = models.engines([STEPS])[STEPS]
    wanted = {limit: [own.generate(prompt, limit) for prompt in prompts] for limit in LIMITS}
    assert {given.finish for answers in wanted.values() for given in answers} == {"stop", "length"}

    target, drafter = folder / "artifacts/target", tmp_path / "drafter"
    export_speculators(drafter, read_checkpoint(folder / "artifacts/drafter"), (2, 4, 5), str(target))
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    speculation = json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": STEPS})
    flags = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    command = [str(VLLM), "serve", str(target), "--host", "127.0.0.1", "--port", str(port), *flags]
    server = ServerProcess([*command, "--speculative_config", speculation], ENVIRONMENT, tmp_path / "log")

    def ready() -> bool:
        try:
            return requests.get(f"{base}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    try:
        server.wait(ready, 600)
        served = {limit: [ask(base, str(target), prompt, limit) for prompt in prompts] for limit in LIMITS}
    finally:
        server.stop()
    for limit in LIMITS:
        ids, steps, right = zip(*served[limit], strict=True)
        assert list(ids) == [given.ids for given in wanted[limit]]
        mine = sum(given.steps.verify for given in wanted[limit]), sum(given.steps.right for given in wanted[limit])
        lengths = 1 + sum(right) / sum(steps), 1 + mine[1] / mine[0]
        print(f"\n{limit} tokens: vLLM {lengths[0]:.4f} over {sum(steps)} steps, torch {lengths[1]:.4f} over {mine[0]}")
        assert lengths[0] == pytest.approx(lengths[1], rel=0.02)
