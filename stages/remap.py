"""remap: carry the donor's head to the new mapping, and measure the first step of every option."""

import math
from pathlib import Path
from typing import Any

from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import read_checkpoint, write_checkpoint
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.rows import HiddenStates, read_manifest
from redraft.remap.first_step import best_fill, first_steps
from redraft.remap.remap import count_sources, initial, prove
from redraft.remap.shifts import layer_shifts
from redraft.target.ends import read_ends, target_hash
from redraft.target.facts import read_facts
from redraft.vocab.build import read_vocab

TARGET = Path("artifacts/target")
WARNING = "init: naive swaps the mapping and keeps the head: most rows now stand for another token. It shows the fault."


def main(config: Config) -> Result:
    knobs = config.params
    donor, mapping, ends = (
        read_checkpoint(Path("artifacts/donor")),
        read_vocab(Path("artifacts/vocab")),
        read_ends(TARGET),
    )
    corpus = read_corpus(Path("artifacts/corpus/heldout.safetensors"))
    manifest = read_manifest(Path("artifacts/hidden/manifest.json"))
    aux_layers = tuple(manifest["aux_layers"])
    heldout = HiddenStates(manifest, "heldout", corpus, target=target_hash(TARGET))
    table = first_steps(donor, mapping, ends, heldout, config.fit())
    fill = best_fill(table) if knobs.fill == "auto" else knobs.fill
    chosen = initial(knobs.init, fill, donor, mapping, ends.head, knobs.seed)
    shard, depth = read_diagnostic(manifest, corpus), read_facts(TARGET).depth
    layers = layer_shifts(donor, ends, shard, aux_layers, depth, config.fit().ttt_steps)
    chosen.record |= {"donor_accuracy": table["keep_donor_vocab"]["accuracy"], "layers": layers}
    write_checkpoint(Path("artifacts/initial"), chosen, aux_layers, TARGET)
    if knobs.init == "naive":
        print(WARNING)
    if layers["best"]:
        print(f"warning: {layers['verdict']}")
    option = f"remap_{fill}" if knobs.init == "remap" else knobs.init
    metrics: dict[str, Any] = {
        "init": knobs.init,
        "option": option,
        "ln_n": round(math.log(len(mapping)), 6),
        "chance": round(1 / len(mapping), 6),
        "rows": count_sources(chosen),
        "first_step": table,
        "layers": layers,
    }
    if knobs.init == "remap":
        metrics["proof"] = prove(donor, chosen)
    first, naive = table[option], table["naive"]["loss"]
    headline = {"first_loss": first["loss"], "naive_first_loss": naive, "first_accuracy": first["accuracy"]}
    return Result(metrics, headline={f"remap/{name}": value for name, value in headline.items() if value is not None})


if __name__ == "__main__":
    run("remap", main)
