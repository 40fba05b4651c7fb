"""The second witness: vLLM serves the same drafter, in the form of speculators, and counts the same."""

import json
import re
from pathlib import Path

import pytest
import requests
from conftest import ROOT, make_project

from redraft.drafter.checkpoint import export_speculators, read_checkpoint
from redraft.hidden.corpus import read_corpus
from redraft.params import load_config
from redraft.serve.open import load_models
from redraft.serve.process import ServerProcess, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
VLLM = ROOT / ".engines/vllm/bin/vllm"
STEPS, TOKENS = 3, 21
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


def test_vllm_accepts_what_the_engine_torch_accepts(tmp_path: Path) -> None:
    """In float32; answers are cut by their length, in the middle of a verify step, as well as by a stop token."""
    folder = make_project(tmp_path / "project")
    models = load_models(load_config(folder), folder / "artifacts/target", folder / "artifacts/drafter", "fp32")
    heldout = read_corpus(folder / "artifacts/corpus/heldout.safetensors")
    prompts = [heldout.prompt(index) for index in range(len(heldout))]
    own = models.engines([STEPS])[STEPS]
    wanted = [own.generate(prompt, TOKENS) for prompt in prompts]

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
        total = [0, 0]
        for prompt, mine in zip(prompts, wanted, strict=True):
            before = counters(base)
            body = {"model": str(target), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            reply = requests.post(f"{base}/v1/completions", json={**body, "return_token_ids": True}, timeout=120).json()
            assert reply["choices"][0]["token_ids"] == mine.ids
            steps, right = (after - was for after, was in zip(counters(base), before, strict=True))
            print(f"vLLM {steps} steps, {right} accepted; torch {mine.verify_steps}, {mine.right}; {mine.finish}")
            total = [total[0] + steps, total[1] + right]
    finally:
        server.stop()
    served = 1 + total[1] / total[0]
    mine_steps, mine_right = sum(given.verify_steps for given in wanted), sum(given.right for given in wanted)
    print(f"\nvLLM {served:.4f} over {total[0]} steps, torch {1 + mine_right / mine_steps:.4f} over {mine_steps}")
    assert served == pytest.approx(1 + mine_right / mine_steps, rel=0.02)
