"""bench: is it faster, where, and what would it take?"""

from pathlib import Path
from typing import Any

from redraft.engines.arm import PLAIN

from redraft.bench.load import measure
from redraft.bench.machine import machine
from redraft.bench.verdict import refusal, summary
from redraft.corpus.corpus import read_corpus
from redraft.engines.alike import require_alike
from redraft.engines.open import open_arms
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.target.ends import target_hash

TARGET, DRAFTER = Path("artifacts/target"), Path("artifacts/drafter")


def main(config: Config) -> Result:
    params = config.profile.bench
    heldout = read_corpus(Path("artifacts/corpus/heldout.safetensors"))
    first = config.profile.probe.prompts  # other prompts than the probe's, where there are enough
    prompts = [heldout.prompt((first + at) % len(heldout)) for at in range(min(params.prompts, len(heldout)))]
    alone = config.params.engine == "torch"
    levels = [level for level in params.concurrency if level == 1 or not alone]
    skipped = dict.fromkeys(set(params.concurrency) - set(levels), "the engine torch answers one request at a time")
    arms, together = open_arms(config, TARGET, DRAFTER)
    measured = measure(arms, prompts, params.max_new_tokens, levels, together=together)
    if config.profile.engine.url and PLAIN in arms and not alone:
        for name in arms.keys() - {PLAIN}:
            require_alike(arms[PLAIN].describe(), arms[name].describe())
    metrics = summary(measured, {name: arm.spec_steps for name, arm in arms.items()}, params.max_new_tokens, skipped)
    print(metrics["verdict"])
    described = {name: arm.describe() for name, arm in arms.items()}
    memory = {name: arm.memory_gib() for name, arm in arms.items()}
    metrics |= {
        "engine": described.get(PLAIN) or next(iter(described.values())),
        "arms": described,
        "memory_gib": {name: round(gib, 1) for name, gib in memory.items() if gib},
        "machine": machine(),
        "target": target_hash(TARGET),
        "asked": {"prompts": len(prompts), "max_new_tokens": params.max_new_tokens},
    }
    refused = refusal(metrics["levels"], params.min_ratio)
    return Result(metrics, headline=_headline(metrics["levels"]), refused=refused)


def _headline(levels: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The best arm's ratio and rate at every concurrency."""
    figures: dict[str, float] = {}
    for level, told in levels.items():
        if told["best"] and told["word"] != "invalid":
            row = told["rows"][told["best"]]
            figures |= {
                f"bench/ratio_at_{level}": row["ratio"],
                f"bench/tokens_per_second_at_{level}": row["tokens_per_second"],
            }
    return figures


if __name__ == "__main__":
    run("bench", main)
