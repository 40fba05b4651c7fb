"""audit: do the donor's mapping and the new one agree; a run that cannot work stops here, before it costs anything."""

from pathlib import Path

import numpy as np

from redraft.corpus.tokenizer import byte_ids, load_tokenizer, special_tokens
from redraft.drafter.checkpoint import read_checkpoint
from redraft.frame import atomic
from redraft.frame.curves import write_curve
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.remap.heads import compare_heads
from redraft.target.ends import read_ends
from redraft.vocab.audit import audit, drift_curve
from redraft.vocab.build import read_vocab

VOCAB, TARGET = Path("artifacts/vocab"), Path("artifacts/target")


def main(config: Config) -> Result:
    donor, new = read_checkpoint(Path("artifacts/donor")), read_vocab(VOCAB)
    tokenizer = load_tokenizer(TARGET, config.profile.target.trust_remote_code)
    found = audit(
        donor.mapping,
        new,
        counts={split: np.load(VOCAB / f"counts_{split}.npy") for split in ("train", "heldout")},
        special=special_tokens(tokenizer),
        single_bytes=byte_ids(tokenizer),
        foreign=donor.foreign,
    )
    heads = compare_heads(donor.drafter.lm_head.weight.detach(), read_ends(TARGET).head, donor.mapping.ids)
    write_curve(Path("plots/drift.csv"), drift_curve(donor.mapping, new))
    atomic.write_json(Path("artifacts/gate.json"), {"audit": "passed"})
    headline = {"audit/same_slot": float(found.same_slot), "audit/shared": float(found.shared)}
    print(found.verdict)
    if not donor.compared:
        print("note: the donor's tokenizer was not compared with the target's: donor.tokenizer in the profile")
    return Result({**found.metrics(), "heads": heads}, headline=headline)


if __name__ == "__main__":
    run("audit", main)
