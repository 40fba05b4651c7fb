"""audit: do the donor's mapping and the new one agree; a run that cannot work stops here, before it costs anything."""

from pathlib import Path

import numpy as np

from redraft import atomic
from redraft.curves import write_curve
from redraft.drafter.checkpoint import read_checkpoint
from redraft.params import Config
from redraft.stage import Result, run
from redraft.vocab.audit import audit, drift_curve
from redraft.vocab.build import read_vocab

VOCAB = Path("artifacts/vocab")


def main(config: Config) -> Result:
    donor, new = read_checkpoint(Path("artifacts/donor")).mapping, read_vocab(VOCAB)
    counts = {split: np.load(VOCAB / f"counts_{split}.npy") for split in ("train", "heldout")}
    found = audit(donor, new, counts["train"], counts["heldout"])
    write_curve(Path("plots/drift.csv"), drift_curve(donor, new))
    atomic.write_json(Path("artifacts/gate.json"), {"audit": "passed"})
    headline = {"audit/same_slot": float(found.same_slot), "audit/shared": float(found.shared)}
    print(found.verdict)
    return Result(found.metrics(), headline=headline)


if __name__ == "__main__":
    run("audit", main)
