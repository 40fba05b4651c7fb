"""The corpus stage at size: chats and tokens a second on one core, and peak memory as the corpus grows.

Floor of the text form: the tokenizer's own `encode_batch`, on one thread, over the text of each chat once. A chat is
rendered with and without its answers, since it has to be proven that what is supervised is the answer. Ids are read as
they are: their floor is the reading of JSON.

    python benchmarks/corpus.py TARGET_FOLDER [TOKENS ...]     rates; and peak memory for corpora of so many tokens
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from redraft.corpus.build import build_split
from redraft.corpus.chat import Markers, render, template_hash
from redraft.corpus.parts import Settings, tokenize_rows
from redraft.corpus.rows import read_row
from redraft.corpus.samples import GENERATED, PROMPT
from redraft.corpus.tokenizer import load_tokenizer, tokenizer_hash
from redraft.frame.profile import CorpusParams, TemplateParams

ROOT = Path(__file__).parent.parent
PARAMS = CorpusParams(max_length=4096, max_dropped=0.0, max_repeated=1.0)
CHATS, TURNS, SENTENCES = 400, 2, 30


def sentences() -> list[str]:
    """Of the shipped corpora."""
    found: list[str] = []
    for path in sorted((ROOT / "data/smollm").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found += [part for part in json.loads(line)["messages"][-1]["content"].split(". ") if len(part) > 20]
    return found


def chat(number: int, told: list[str], chosen: random.Random) -> dict[str, Any]:
    """A chat of about a thousand tokens."""
    messages = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{chosen.choice(told)} ({number}, {turn})?"})
        messages.append({"role": "assistant", "content": ". ".join(chosen.choices(told, k=SENTENCES // TURNS)).strip()})
    return {"id": f"c{number}", "source": "made", "messages": messages}


def best(work: Any, times: int = 3) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def rates(folder: Path) -> None:
    """Print rates on one core."""
    tokenizer = load_tokenizer(folder)
    told, chosen = sentences(), random.Random(0)
    chats = [chat(number, told, chosen) for number in range(CHATS)]
    rows = [("?", json.dumps(each).encode()) for each in chats]
    settings = Settings(PARAMS, TemplateParams(), tokenizer_hash(tokenizer), template_hash(tokenizer), None)
    markers = Markers(tokenizer)
    part = tokenize_rows(rows, tokenizer, settings, markers)
    tokens = len(part.arrays["input_ids"])
    texts = [render(tokenizer, each["messages"], header=False) for each in chats]
    backend = tokenizer.backend_tokenizer
    given = [("?", json.dumps(with_ids(each, part, number)).encode()) for number, each in enumerate(chats)]
    print(f"{CHATS} chats of {TURNS} turns, {tokens / CHATS:.0f} tokens a chat, one core")
    for name, work in {
        "the tokenizer's own encode_batch": lambda: backend.encode_batch_fast(texts, add_special_tokens=False),
        "the same as lists of ids (tokenizer(texts))": lambda: tokenizer(texts, add_special_tokens=False)["input_ids"],
        "text: rendered, proven, tokenised": lambda: tokenize_rows(rows, tokenizer, settings, markers),
        "reading JSON with ids": lambda: [json.loads(raw) for _, raw in given],
        "ids: checked, joined": lambda: tokenize_rows(given, tokenizer, settings, markers),
    }.items():
        seconds = best(work)
        print(f"{name:<46} {CHATS / seconds:9,.0f} chats/s {tokens / seconds:12,.0f} tokens/s")


def with_ids(row: dict[str, Any], part: Any, number: int) -> dict[str, Any]:
    """A chat whose last answer carries its ids."""
    start, end = part.arrays["offsets"][number : number + 2]
    ids, mask = part.arrays["input_ids"][start:end].tolist(), part.arrays["loss_mask"][start:end].tolist()
    first = len(mask) - mask[::-1].index(0)
    last = {**row["messages"][-1], "finish": "stop", PROMPT: ids[:first], GENERATED: ids[first:]}
    return {**row, "messages": [*row["messages"][:-1], last]}


def memory(folder: Path, tokens: int) -> None:
    """Build a corpus of about so many tokens, and print time and peak anonymous memory of this process and its own."""
    told, chosen = sentences(), random.Random(1)
    tokenizer = load_tokenizer(folder)
    one = read_row({**chat(0, told, chosen)}, "?")
    each = len(tokenizer(json.dumps(one.row))["input_ids"])  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "train.jsonl"
        with path.open("w") as file:
            for number in range(tokens // each):
                file.write(json.dumps(chat(number, told, chosen)) + "\n")
        del told
        began = time.perf_counter()
        split = build_split(
            [path], Path(scratch) / "train.safetensors", tokenizer, PARAMS, load=partial(load_tokenizer, folder)
        )
        seconds = time.perf_counter() - began
        size = path.stat().st_size
    peaks = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        f"{split.counts['tokens']:>13,} tokens, {split.counts['chats']:>9,} chats, {size / 2**30:6.2f} GiB of JSON: "
        f"{seconds:7.1f} s, {split.counts['tokens'] / seconds:10,.0f} tokens/s, peak {peaks[0]:.2f} GiB here (mapped "
        f"pages included), {peaks[1]:.2f} GiB in a process of the pool"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if len(sys.argv) == 4 and sys.argv[2] == "--one":
        memory(target, int(sys.argv[3]))
    else:
        rates(target)
        for count in sys.argv[2:]:  # a process each: a peak is one of a whole life
            subprocess.run([sys.executable, __file__, str(target), "--one", count], check=True)
