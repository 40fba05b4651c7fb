"""Extraction against a plain forward: tokens a second of both, in one run, over the same documents in the same batches.

Floor: the target's own forward, head included, over padded batches; what extraction adds is the copying of states, the
check that they are finite, and shards written by a thread. Both are repeated in turn and the best of each is told.

    python benchmarks/extract.py [TARGET_FOLDER] [CORPUS] [DOCUMENTS]      default: artifacts of this project, 120
"""

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from redraft.corpus.corpus import read_corpus
from redraft.frame.device import resolve
from redraft.frame.params import load_config
from redraft.hidden.engine import Opening, Source
from redraft.hidden.extract import extract
from redraft.hidden.in_process import InProcess
from redraft.target.model import Target, load_target

REPEATS = 3


def batches(documents: list[torch.Tensor], batch_tokens: int) -> list[list[torch.Tensor]]:
    """As extraction cuts them: the longest first, as many as fit when padded."""
    found: list[list[torch.Tensor]] = []
    for ids in sorted(documents, key=len, reverse=True):
        if not found or len(found[-1][0]) * (len(found[-1]) + 1) > batch_tokens:
            found.append([])
        found[-1].append(ids)
    return found


@torch.inference_mode()
def plain(target: Target, documents: list[torch.Tensor], batch_tokens: int) -> float:
    """Seconds of the target's own forwards."""
    began = time.perf_counter()
    for batch in batches(documents, batch_tokens):
        padded = torch.nn.utils.rnn.pad_sequence([ids.long() for ids in batch], batch_first=True).to(target.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(ids)) for ids in batch], batch_first=True)
        target.model(input_ids=padded, attention_mask=mask.long().to(target.device), use_cache=False)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(
    folder: str = "artifacts/target", corpus: str = "artifacts/corpus/train.safetensors", count: str = "120"
) -> None:
    """Measure and print; see the module."""
    params = load_config().profile.extract.model_copy(update={"recheck": 0})
    target = load_target(Path(folder), dtype=resolve("auto"))
    whole = read_corpus(Path(corpus))
    part = whole.part(range(min(int(count), len(whole))))
    documents = [part.document(index)[0] for index in range(len(part))]
    tokens = sum(map(len, documents))
    opening = Opening({"name": "benchmark"}, lambda layers: nullcontext(InProcess(target, params.batch_tokens)))
    source = Source(opening, opening, "benchmark", target.head, target.aux_layers, len(target.decoder.layers))
    times: dict[str, list[float]] = {"plain forward": [], "extraction": []}
    for _ in range(REPEATS):
        times["plain forward"].append(plain(target, documents, params.batch_tokens))
        with tempfile.TemporaryDirectory() as store:
            os.environ["REDRAFT_STORE"] = store
            began = time.perf_counter()
            extract(source, {"train": part}, params)
            times["extraction"].append(time.perf_counter() - began)
    print(f"{len(documents)} documents, {tokens} tokens, {target.head.dtype}, {torch.get_num_threads()} threads")
    best = {name: min(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        told = ", ".join(f"{tokens / each:,.0f}" for each in seconds)
        print(f"{name}: {tokens / best[name]:,.0f} tokens/s (all: {told})")
    print(f"extraction is {best['plain forward'] / best['extraction']:.1%} of a plain forward's rate")


if __name__ == "__main__":
    main(*sys.argv[1:])
