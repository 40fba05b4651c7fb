"""vocab: the draft vocabulary, by token frequency over supervised tokens."""

from pathlib import Path

from redraft.hidden.corpus import read_corpus
from redraft.params import Config
from redraft.stage import Result, run
from redraft.target.chat import decodable_ids, forced_ids, load_tokenizer
from redraft.target.model import read_ends
from redraft.vocab.build import build, count_tokens, coverage, write_vocab

TARGET = Path("artifacts/target")


def main(config: Config) -> Result:
    params = config.profile.vocab
    tokenizer = load_tokenizer(TARGET, config.profile.target.trust_remote_code)
    corpora = {split: read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in ("train", "heldout")}
    rows = len(read_ends(TARGET).embed)
    counts = {
        split: count_tokens(corpus.input_ids.numpy(), corpus.loss_mask.numpy(), rows)
        for split, corpus in corpora.items()
    }
    forced = forced_ids(tokenizer, special=params.force_special, single_bytes=params.force_bytes)
    built = build(counts["train"], params.size, forced=forced, decodable=decodable_ids(tokenizer))
    write_vocab(Path("artifacts/vocab"), built, counts, {"corpus": corpora["train"].identity})
    metrics = {
        "slots": len(built.mapping),
        "forced": built.forced,
        "padded": built.padded,
        "distinct_supervised": int((counts["train"] > 0).sum()),
        "coverage_train": round(coverage(built.mapping, counts["train"]), 6),
        "coverage_heldout": round(coverage(built.mapping, counts["heldout"]), 6),
    }
    return Result(metrics, headline={"vocab/coverage_heldout": metrics["coverage_heldout"]})


if __name__ == "__main__":
    run("vocab", main)
