"""donor: the drafter we start from, read from a checkpoint or trained here on the donor corpus."""

from pathlib import Path

from redraft.curves import write_curve
from redraft.drafter.checkpoint import read_donor, write_checkpoint
from redraft.drafter.config import exported_layer_ids
from redraft.hidden.corpus import read_corpus
from redraft.params import Config
from redraft.stage import Result, run
from redraft.target.model import aux_layers_of, read_config, read_ends
from redraft.target.sources import DRAFTER_FILES, checkout
from redraft.train.donor import train_donor

OUT = Path("artifacts/donor")
TARGET = Path("artifacts/target")


def main(config: Config) -> Result:
    params, target = config.profile.donor, config.profile.target
    # first, because what reads the target's folder takes the hub offline for the whole process
    source = checkout(params.source, params.revision, DRAFTER_FILES) if params.source != "train" else None
    described = read_config(TARGET, target.trust_remote_code)
    aux_layers = aux_layers_of(described, target.aux_layers)
    exported_layer_ids(aux_layers)
    if source is not None:
        borrowed = read_ends(TARGET).head if params.head == "target" else None
        donor = read_donor(source, described.get_text_config(), aux_layers, borrowed)
        donor.record = {"source": params.source, "head": params.head}
        write_checkpoint(OUT, donor, aux_layers)
        write_curve(Path("plots/donor.csv"), [])
        return Result({"source": params.source, "slots": len(donor.mapping), "order": donor.mapping.order})
    donor, fitted = train_donor(TARGET, read_corpus(Path("artifacts/corpus/donor.safetensors")), config.profile)
    write_checkpoint(OUT, donor, aux_layers)
    write_curve(Path("plots/donor.csv"), fitted.curve)
    return Result(
        {"source": "train", "slots": len(donor.mapping), "steps": fitted.steps, "heldout": fitted.heldout},
        timing={"tokens_per_second": round(fitted.tokens / fitted.seconds)},
        curves={"train": fitted.curve},
        headline={"donor/accuracy": fitted.heldout["accuracy_0"]},
    )


if __name__ == "__main__":
    run("donor", main)
