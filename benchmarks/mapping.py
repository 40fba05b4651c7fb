"""Audit and remap at the size of Kimi-K2.5, against the machine's floor: `python benchmarks/mapping.py [FOLDER]`.

Makes two random checkpoints (2.4 GB each, bf16) and a target's head in FOLDER (8 GB of disk, removed at the end), then
times commands as whole processes, medians of 5 (of 1 for `fitted`), with their peak anonymous memory. The floor of an
audit is reading nothing; of a head comparison the machine's read rate; of a remap `cp` of the file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from redraft.drafter.checkpoint import Parts, write_parts
from redraft.drafter.config import config_json
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.vocab.build import Vocabulary, write_vocab
from redraft.vocab.mapping import Mapping

KIMI = DrafterConfig(
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=163_840,
    draft_vocab_size=32_000,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=131_072,
)
SHARED = 25_750


def mappings() -> tuple[Mapping, Mapping]:
    """Two ascending mappings with the set sizes of the known case."""
    free = np.random.default_rng(0).permutation(KIMI.vocab_size)
    own = KIMI.draft_vocab_size - SHARED
    both, one, two = free[:SHARED], free[SHARED : SHARED + own], free[SHARED + own : SHARED + 2 * own]
    donor, new = (Mapping(np.sort(np.concatenate([both, mine])), KIMI.vocab_size) for mine in (one, two))
    return donor, new


def prepare(folder: Path) -> None:
    """Write donor, a second drafter, the new vocabulary and a target of two tensors to `folder`."""
    donor, new = mappings()
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Drafter(KIMI).state_dict().items()}
    tensors = {name: 0.02 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, mapping in (("donor", donor), ("other", new)):
        write_parts(folder / name, Parts(KIMI, config_json(KIMI, [1, 29, 57]), tensors, mapping), {}, None)
    write_vocab(folder / "vocab", Vocabulary(new, 0, 0), {}, {})
    (folder / "target").mkdir()
    rows = torch.randn(KIMI.vocab_size, KIMI.hidden_size, dtype=torch.bfloat16)
    text = {"model.norm.weight": torch.ones(KIMI.hidden_size, dtype=torch.bfloat16)}
    save_file({"model.embed_tokens.weight": rows, **text}, folder / "target" / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": KIMI.hidden_size,
        "vocab_size": KIMI.vocab_size,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "tie_word_embeddings": True,
    }
    (folder / "target" / "config.json").write_text(json.dumps(config))


def measure(command: list[str], repeats: int, made: list[Path]) -> tuple[float, float]:
    """Median seconds, and the highest anonymous memory seen, GB; `made` is removed and the disk is idle before each."""
    seconds, peak = [], 0.0
    for _ in range(repeats):
        subprocess.run(["rm", "-rf", *made], check=True)
        os.sync()
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        done = threading.Event()

        def watch(pid: int, done: threading.Event) -> None:
            nonlocal peak
            while not done.wait(0.01):
                try:
                    memory = psutil.Process(pid).memory_info()
                    peak = max(peak, (memory.rss - memory.shared) / 1e9)
                except psutil.NoSuchProcess:
                    return

        watcher = threading.Thread(target=watch, args=(process.pid, done))
        watcher.start()
        code = process.wait()
        seconds.append(time.perf_counter() - began)
        done.set()
        watcher.join()
        assert code == 0, command
    return statistics.median(seconds), peak


def main() -> None:
    """Prepare, time, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where to put the files; default a temporary folder")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as scratch:
        folder = Path(scratch)
        prepare(folder)
        redraft = [sys.executable, "-m", "redraft.cli"]
        donor, other, vocab, target, out = (folder / name for name in ("donor", "other", "vocab", "target", "out"))
        weights, copy = donor / "model.safetensors", folder / "copy"
        remap = [*redraft, "remap", donor, "--vocab", vocab, "--output", out, "--fill"]
        imports = [
            sys.executable,
            "-c",
            "import redraft.vocab.audit, redraft.drafter.mapping_of, redraft.vocab.describe",
        ]
        commands = {
            "imports of an audit": (imports, 5),
            "redraft audit A B": ([*redraft, "audit", donor, other], 5),
            "redraft audit A B --heads": ([*redraft, "audit", donor, other, "--target", target, "--heads"], 5),
            "reading as many bytes as both heads have": (["sh", "-c", f"head -c 917504000 {weights} | wc -c"], 5),
            "cp of the checkpoint": (["cp", weights, copy], 5),
            "imports of a remap": ([sys.executable, "-c", "import redraft.remap.remap, redraft.drafter.mapping_of"], 5),
            "redraft remap --fill zero": ([*remap, "zero"], 5),
            "redraft remap --fill mean": ([*remap, "mean"], 5),
            "redraft remap --fill target": ([*remap, "target", "--target", target], 5),
            "redraft remap --fill fitted": ([*remap, "fitted", "--target", target], 1),
        }
        print("| command | median, s | peak anonymous memory, GB |\n| --- | ---: | ---: |")
        for name, (command, repeats) in commands.items():
            seconds, memory = measure([str(part) for part in command], repeats, [out, copy])
            print(f"| {name} | {seconds:.2f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
