"""One training step against the machine's matrix-multiply rate: `python benchmarks/train_step.py [--repeats N]`.

Three shapes: `small` (one thread, fp32: the shape at which speculators 0.9.0 was timed at 7,150 tokens/s), `default`
(profile smollm, in the precision that `auto` takes here), and `kimi`, whose weights are made on the `meta` device:
its figures are arithmetic. The floor is the FLOPs of every product that the step needs, over the rate of one product of
the drafter's own shape, [tokens, hidden] x [hidden, intermediate], measured here.
"""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.device import resolve
from redraft.hidden.rows import Batch
from redraft.train.step import TTTModule
from redraft.vocab.mapping import Mapping

STEPS = 3


@dataclass
class Shape:
    """A drafter and a batch of packed rows."""

    config: DrafterConfig
    rows: int
    row_tokens: int
    documents: int
    """Documents in a row."""
    prompt: float
    """Share of a document before its answer."""
    threads: int
    precision: str


def drafter(hidden: int, inner: int, heads: int, groups: int, head: int, vocab: int, slots: int) -> DrafterConfig:
    """A drafter's configuration."""
    return DrafterConfig(hidden, inner, heads, groups, head, vocab, slots, 1e-5, 1e4, 262_144)


def shapes() -> dict[str, Shape]:
    """The shapes that can be run here."""
    small = drafter(64, 128, 4, 2, 16, 512, 256)
    default = drafter(576, 1536, 9, 3, 64, 49_152, 3072)
    return {
        "small": Shape(small, 1, 512, 1, 0.0, 1, "fp32"),
        "default": Shape(default, 2, 256, 1, 0.17, 2, resolve("auto")),
    }


def flops(config: DrafterConfig, tokens: int, asked: int, keys: float) -> dict[str, float]:
    """Multiply-add FLOPs of one step, forward and backward (twice the forward; fc has no input gradient), by part.

    Args:
        config: the drafter.
        tokens: T, positions that are not padding.
        asked: P, positions that count.
        keys: step-0 keys that a position sees, on average.
    """
    h, d = config.hidden_size, config.head_dim
    query, group = config.num_attention_heads * d, config.num_key_value_heads * d
    parts = {
        "fc": 2 * 2 * tokens * config.num_aux_layers * h * h,
        "keys and values": 3 * 2 * (tokens + (STEPS - 1) * asked) * 2 * h * 2 * group,
        "queries and output": 3 * 2 * STEPS * asked * (2 * h + h) * query,
        "mlp": 3 * 2 * STEPS * asked * 3 * h * config.intermediate_size,
        "attention": 3 * 2 * STEPS * asked * 2 * keys * query,
        "head": 3 * 2 * STEPS * asked * h * config.draft_vocab_size,
        "target's law": 2 * (asked + STEPS - 1) * h * config.draft_vocab_size,
    }
    return {name: float(number) for name, number in parts.items()}


def rate(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    """FLOP/s of [m, k] x [k, n], the median of 15."""
    one, two = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype).T
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        one @ two
        seconds.append(time.perf_counter() - began)
    return 2 * m * k * n / statistics.median(seconds)


def batch_of(shape: Shape) -> Batch:
    """Random packed rows, full to the last token."""
    size, hidden = (shape.rows, shape.row_tokens), shape.config.hidden_size
    length = shape.row_tokens // shape.documents
    place = torch.arange(shape.row_tokens)
    return Batch(
        input_ids=torch.randint(shape.config.vocab_size, size),
        loss_mask=(place % length >= shape.prompt * length).long().expand(size),
        aux=torch.randn(*size, 3 * hidden).bfloat16(),
        final=torch.randn(*size, hidden).bfloat16(),
        greedy=torch.randint(shape.config.draft_vocab_size, size),
        documents=(place // length + 1).expand(size),
        positions=(place % length).expand(size),
    )


def measure(shape: Shape, repeats: int) -> tuple[float, int, dict[str, float]]:
    """Median seconds of an optimizer step, positions asked, and the median seconds of its parts."""
    torch.manual_seed(0)
    config = shape.config
    head = torch.randn(config.vocab_size, config.hidden_size)
    mapping = Mapping(np.arange(config.draft_vocab_size), config.vocab_size)
    module = TTTModule(Drafter.fresh(config, 0), mapping, head, head, STEPS, shape.precision)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    batch = batch_of(shape)
    seconds, parts = [], defaultdict(list)
    for _ in range(repeats + 1):
        began = last = time.perf_counter()

        def lap(part: str) -> None:
            nonlocal last
            now = time.perf_counter()
            parts[part].append(now - last)
            last = now

        output = module(batch, lap=lap)
        contributing = output.contributing()
        (output.losses * contributing).sum().div(contributing.sum()).backward()
        lap("backward")
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        lap("optimizer")
        seconds.append(time.perf_counter() - began)
    asked = len(output.flat)
    return statistics.median(seconds[1:]), asked, {name: statistics.median(part[1:]) for name, part in parts.items()}


def kimi() -> str:
    """FLOPs, weights and optimizer state of the Kimi-K2.5 profile's step, 4 rows of 4096 tokens, 60 % answers."""
    config = drafter(7168, 18_432, 64, 64, 128, 163_840, 32_000)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in Drafter(config).parameters())
    tokens, asked = 16_384, 9_830
    total = sum(flops(config, tokens, asked, 2048).values())
    fixed = 2 * config.vocab_size * config.hidden_size * 4 / 1e9  # embedding in fp32, and the draft head's source
    logits = STEPS * asked * config.draft_vocab_size * 4 / 1e9
    return (
        f"kimi: {weights / 1e9:.2f} G weights; fp32 weights, gradients and AdamW {16 * weights / 1e9:.1f} GB; "
        f"embedding and head at most {fixed:.1f} GB; logits of {STEPS} steps {logits:.1f} GB; "
        f"{total / tokens / 1e9:.1f} GFLOP a token, {total / 1e12:.0f} TFLOP a step of {tokens:,} tokens"
    )


def main() -> None:
    """Print one line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for name, shape in shapes().items():
        torch.set_num_threads(shape.threads)
        config, tokens = shape.config, shape.rows * shape.row_tokens
        seconds, asked, parts = measure(shape, repeats)
        total = sum(flops(config, tokens, asked, shape.row_tokens / shape.documents / 2).values())
        dtype = torch.bfloat16 if shape.precision == "bf16" else torch.float32
        peak = rate(tokens, config.hidden_size, config.intermediate_size, dtype)
        print(
            f"{name} ({shape.precision}, {shape.threads} threads): {tokens / seconds:,.0f} tokens/s, "
            f"{seconds * 1e3:.0f} ms a step of {tokens} tokens, {asked} asked; {total / 1e9:.1f} GFLOP, "
            f"{total / seconds / 1e9:.0f} GFLOP/s of {peak / 1e9:.0f} for one product: {total / seconds / peak:.0%}"
        )
        print("  " + ", ".join(f"{part} {value * 1e3:.0f} ms" for part, value in parts.items()), flush=True)
    print(kimi())


if __name__ == "__main__":
    main()
