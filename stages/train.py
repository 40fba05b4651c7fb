"""train: fit the initial drafter to the target's hidden states."""

import json
import tempfile
from pathlib import Path

from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import read_checkpoint, read_parts, weights_sha256, write_checkpoint
from redraft.frame import atomic
from redraft.frame.curves import write_curve
from redraft.frame.launch import is_main
from redraft.frame.params import Config
from redraft.frame.profile import Knobs
from redraft.frame.stage import Result, log, run
from redraft.hidden.diagnostic import read_diagnostic
from redraft.hidden.rows import HiddenStates, read_manifest
from redraft.target.ends import read_ends, target_hash
from redraft.train import gate
from redraft.train.batches import require_share
from redraft.train.loop import fit
from redraft.train.measure import Heldout
from redraft.train.walk import chats
from redraft.vocab.build import read_vocab

TARGET = Path("artifacts/target")


def main(config: Config) -> Result:
    params, knobs, profile = config.fit(), config.params, config.profile.train
    drafter, ends = read_checkpoint(Path("artifacts/initial")), read_ends(TARGET)
    if drafter.record["init"] != "keep_donor_vocab":
        drafter.mapping.require_hash(read_vocab(Path("artifacts/vocab")).hash, "artifacts/initial, artifacts/vocab")
    layers = tuple(drafter.record["aux_layers"])
    identity = {"target": target_hash(TARGET), "aux_layers": list(layers)}
    manifest = read_manifest(Path("artifacts/hidden/manifest.json"))
    corpora = {split: read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in ("train", "heldout")}
    states = {split: HiddenStates(manifest, split, corpus, **identity) for split, corpus in corpora.items()}
    donor = read_parts(Path("artifacts/donor"), finite=False).mapping

    def check(start: Heldout) -> None:
        with tempfile.TemporaryDirectory() as scratch:  # a drafter that cannot be written is told now
            write_checkpoint(Path(scratch) / "drafter", drafter, layers, TARGET)
        shard = read_diagnostic(manifest, corpora["heldout"])
        accuracy = drafter.record.get("donor_accuracy")
        gate.check(
            start, drafter, knobs.gate, accuracy, lambda: dict(gate.alternatives(drafter, donor, ends, shard, layers))
        )

    fitted = fit(
        drafter, ends, states["train"], states["heldout"], params,
        processes=profile.processes, resume=knobs.resume, gate=check, log=log,
    )  # fmt: skip
    if not is_main():
        return Result()
    heldout = fitted.heldout.metrics()
    told = {"loss": "loss_0", "accuracy": "accuracy_0", "predicted_accept_length": "accept_length"}
    drafter.record |= {"training": params.model_dump(mode="json"), "hidden": states["train"].fingerprint}
    drafter.record |= {"target": identity["target"], "steps": fitted.kept, "heldout": heldout}
    write_checkpoint(Path("artifacts/drafter"), drafter, layers, TARGET)
    walks = {
        "heldout": states["heldout"].fingerprint,
        "slots": len(drafter.mapping),
        "spec_steps": params.ttt_steps,
        "samples": corpora["heldout"].samples,
        "chats": chats(corpora["heldout"].samples),
        "start": fitted.start.walks,
        "kept": fitted.heldout.walks,
    }
    atomic.write_text(Path("artifacts/walks.json"), json.dumps(walks, ensure_ascii=False) + "\n")
    write_curve(Path("plots/train.csv"), fitted.curve)
    write_curve(Path("plots/heldout.csv"), fitted.evaluations)
    fitted.state.discard()
    return Result(
        {
            "drafter": weights_sha256(Path("artifacts/drafter")),
            "steps": fitted.steps,
            "kept_step": fitted.kept,
            "tokens": fitted.tokens,
            "precision": fitted.precision,
            "knobs": params.model_dump(include=set(Knobs.model_fields)),
            "start": fitted.start.metrics(),
            "heldout": heldout,
        },
        timing={"tokens_per_second": round(fitted.tokens / fitted.seconds), "step_ms": fitted.parts},
        curves={"train": fitted.curve, "heldout": fitted.evaluations},
        headline={f"train/{name}": heldout[key] for name, key in told.items() if heldout.get(key) is not None},
    )


def world(config: Config) -> tuple[int, str]:
    profile = config.profile.train
    require_share(config.fit(), profile.processes)
    return profile.processes, profile.launcher


if __name__ == "__main__":
    run("train", main, world)
