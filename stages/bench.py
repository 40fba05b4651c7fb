"""bench: is it faster, where, and what would it take?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.bench.load import Plan, measure
from redraft.bench.machine import machine
from redraft.bench.slots import Reads, measure_head, setting_of
from redraft.bench.verdict import refusal, summary
from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import weights_sha256
from redraft.drafter.config import read_config
from redraft.engines.open import open_arms
from redraft.engines.prompts import held_out
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.target.ends import target_hash
from redraft.target.folder import weights_folder
from redraft.target.weights import weight_files
from redraft.vocab.slots import ladder

TARGET, DRAFTER = Path("artifacts/target"), Path("artifacts/drafter")
BF16 = 2  # bytes of a weight of the drafter's files


def main(config: Config) -> Result:
    params = config.profile.bench
    heldout = read_corpus(Path("artifacts/corpus/heldout.safetensors"))
    # other prompts than the probe's, where there are enough
    prompts = held_out(heldout, params.prompts, "bench", first=config.profile.probe.prompts)
    alone = config.params.engine == "torch"
    levels = [level for level in params.concurrency if level == 1 or not alone]
    skipped = dict.fromkeys(set(params.concurrency) - set(levels), "the engine torch answers one request at a time")
    plan = Plan.of(prompts, params.max_new_tokens, levels)
    arms, together = open_arms(config, TARGET, DRAFTER)
    measured = measure(arms, plan, together=together)
    metrics = summary(measured, params.max_new_tokens, skipped)
    print(metrics["verdict"])
    described = {arm.key: engine.describe() for arm, engine in arms.items()}
    engine = next(iter(described.values()))
    memory = {arm.key: engine.memory_gib() for arm, engine in arms.items()}
    metrics |= {
        "engine": engine,
        "arms": described,
        "memory_gib": {key: round(gib, 1) for key, gib in memory.items() if gib},
        "machine": machine(),
        "target": target_hash(TARGET),
        "drafter": weights_sha256(DRAFTER),
        "asked": {"prompts": params.prompts, "max_new_tokens": params.max_new_tokens},
        "prompts": len(prompts),
        **_head(config, engine),
    }
    refused = refusal(metrics["levels"], params.min_ratio)
    return Result(metrics, headline=_headline(metrics["levels"]), refused=refused)


def _head(config: Config, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's number of slots, and what a head costs by its own; None where that cannot be measured here."""
    drafter, threads = read_config(DRAFTER)[0], config.profile.engine.env.get("OMP_NUM_THREADS", "")
    slots, found = drafter.draft_vocab_size, {}
    setting = setting_of(engine, int(threads) if threads.isdecimal() else None)
    if setting:
        target, whole = (_bytes(folder) for folder in (weights_folder(TARGET), DRAFTER))
        reads = Reads(target, whole - BF16 * slots * drafter.hidden_size, config.params.spec_steps)
        try:
            found = measure_head(drafter.hidden_size, ladder(slots, 1, drafter.vocab_size), setting, reads)
        except RuntimeError as error:  # of torch: it must not cost the figures of the bench
            print(f"warning: what the draft head costs could not be measured: {error}")
    return {"slots": slots, "head_ms": found or None}


def _bytes(weights: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(weights))


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
