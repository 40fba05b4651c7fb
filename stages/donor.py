"""donor: the drafter we start from, read from a checkpoint or trained here on the donor corpus."""

from pathlib import Path

from redraft.corpus.corpus import read_corpus
from redraft.corpus.tokenizer import differing_ids, load_tokenizer
from redraft.drafter.checkpoint import read_donor, write_checkpoint
from redraft.frame.curves import write_curve
from redraft.frame.params import Config
from redraft.frame.stage import Result, log, run
from redraft.target.checkout import DRAFTER_FILES, checkout
from redraft.target.config import aux_layers_of, read_config
from redraft.target.ends import read_ends
from redraft.target.hub import snapshot_of
from redraft.train.donor import train_donor

OUT = Path("artifacts/donor")
TARGET = Path("artifacts/target")


def main(config: Config) -> Result:
    params, target = config.profile.donor, config.profile.target
    # first, because what reads the target's folder takes the hub offline for the whole process
    lock = Path(f"profiles/{config.params.profile}.lock")
    trained = params.source == "train"
    source = None if trained else checkout(params.source, params.revision, DRAFTER_FILES, lock=lock)
    own = checkout(params.tokenizer, None, (), lock=lock) if params.tokenizer else None
    described = read_config(TARGET, target.trust_remote_code)
    aux_layers = aux_layers_of(described, target.aux_layers)
    if source is not None:
        ends = read_ends(TARGET)
        donor = read_donor(
            source,
            described,
            aux_layers,
            ends.head if params.head == "target" else None,
            target_embed=ends.embed,
            embedding=params.embedding,
            prefix=params.prefix_vocabulary,
            named=target.aux_layers is not None,
        )
        _, commit = snapshot_of(source) or (None, None)
        donor.record = {"source": params.source, "head": params.head, **({"commit": commit} if commit else {})}
        if own is not None:
            tokenizers = (load_tokenizer(folder, target.trust_remote_code) for folder in (own, TARGET))
            donor.record["foreign"] = differing_ids(*tokenizers)
        write_checkpoint(OUT, donor, aux_layers, TARGET)
        write_curve(Path("plots/donor.csv"), [])
        foreign = len(donor.foreign) if own is not None else None  # None: nothing was compared
        figures = {"slots": len(donor.mapping), "order": donor.mapping.order, "foreign_ids": foreign}
        name = source.name if Path(params.source).expanduser().is_dir() else params.source  # no path of one machine
        return Result({"source": name, **figures})
    corpus = read_corpus(Path("artifacts/corpus/donor.safetensors"))
    donor, fitted = train_donor(TARGET, corpus, config.profile, resume=config.params.resume, log=log)
    write_checkpoint(OUT, donor, aux_layers, TARGET)
    fitted.state.discard()
    write_curve(Path("plots/donor.csv"), fitted.curve)
    heldout = fitted.heldout.metrics()
    return Result(
        {"source": "train", "slots": len(donor.mapping), "steps": fitted.steps, "heldout": heldout},
        timing={"tokens_per_second": round(fitted.tokens / fitted.seconds), "step_ms": fitted.parts},
        curves={"train": fitted.curve},
        headline={"donor/accuracy": heldout["accuracy_0"]},
    )


if __name__ == "__main__":
    run("donor", main)
