"""corpus: chats to token ids and loss mask, by the target's own template."""

from pathlib import Path

from redraft.corpus.chat import show_sample
from redraft.corpus.corpus import tokenize_file, write_corpus
from redraft.corpus.jsonl import conversations, require_apart
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run

OUT = Path("artifacts/corpus")
LEAST_HELDOUT = 8  # documents: below that an interval over packed rows tells nothing


def main(config: Config) -> Result:
    data, trained = Path("data") / config.params.profile, config.profile.donor.source == "train"
    paths = {split: data / f"{split}.jsonl" for split in ("donor", "train", "heldout")}
    told = {split: conversations(path) for split, path in paths.items() if trained or split != "donor"}
    for split in [split for split in told if split != "heldout"]:
        require_apart(told["heldout"], told[split], f"{paths['heldout']}, {paths[split]}")
    tokenizer = load_tokenizer(Path("artifacts/target"), config.profile.target.trust_remote_code)
    metrics = {}
    for split, path in paths.items():
        corpus, metrics[split] = tokenize_file(path, tokenizer, config.profile.corpus, optional=split not in told)
        if split in told:
            metrics[split]["duplicates"] = sum(len(ids) - 1 for ids in told[split].values())
        write_corpus(OUT / f"{split}.safetensors", corpus)
        if split == "train":
            ids, mask = corpus.document(0)
            atomic.write_text(OUT / "sample.txt", show_sample(tokenizer, ids.tolist(), mask.tolist()))
    if (count := metrics["heldout"]["samples"]) < LEAST_HELDOUT:
        print(f"warning: {paths['heldout']} gives {count} samples, too few to measure on: {LEAST_HELDOUT} at least")
    return Result(metrics)


if __name__ == "__main__":
    run("corpus", main)
