"""train: fit the initial drafter to the target's hidden states."""

from pathlib import Path

from redraft.curves import write_curve
from redraft.drafter.checkpoint import read_checkpoint, write_checkpoint
from redraft.hidden.extract import target_hash
from redraft.hidden.store import HiddenStates
from redraft.params import Config
from redraft.stage import Result, run
from redraft.target.model import read_ends
from redraft.train.loop import fit
from redraft.vocab.build import read_vocab

TARGET = Path("artifacts/target")
MANIFEST = Path("artifacts/hidden/manifest.json")


def main(config: Config) -> Result:
    params = config.fit()
    drafter = read_checkpoint(Path("artifacts/initial"))
    if drafter.record["init"] != "keep_donor_vocab":
        drafter.mapping.require_hash(read_vocab(Path("artifacts/vocab")).hash, "artifacts/initial, artifacts/vocab")
    identity = {"target": target_hash(TARGET), "aux_layers": drafter.record["aux_layers"]}
    states = {split: HiddenStates(MANIFEST, split, **identity) for split in ("train", "heldout")}
    processes = config.profile.train.processes
    fitted = fit(drafter, read_ends(TARGET), states["train"], states["heldout"], params, processes=processes)
    drafter.record |= {"training": params.model_dump(), "hidden": states["train"].manifest["fingerprint"]}
    write_checkpoint(Path("artifacts/drafter"), drafter, tuple(drafter.record["aux_layers"]))
    write_curve(Path("plots/train.csv"), fitted.curve)
    return Result(
        {"steps": fitted.steps, "tokens": fitted.tokens, "start": fitted.start, "heldout": fitted.heldout},
        timing={"tokens_per_second": round(fitted.tokens / fitted.seconds)},
        curves={"train": fitted.curve},
        headline={f"train/{name}": fitted.heldout[f"{name}_0"] for name in ("loss", "accuracy")},
    )


if __name__ == "__main__":
    run("train", main)
