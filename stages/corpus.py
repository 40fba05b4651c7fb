"""corpus: chats to token ids and loss mask, by the target's own template."""

from pathlib import Path

from redraft.corpus.chat import load_tokenizer, show_sample
from redraft.corpus.corpus import tokenize_file, write_corpus
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run

OUT = Path("artifacts/corpus")


def main(config: Config) -> Result:
    tokenizer = load_tokenizer(Path("artifacts/target"), config.profile.target.trust_remote_code)
    metrics = {}
    for split in ("donor", "train", "heldout"):
        path = Path("data") / config.params.profile / f"{split}.jsonl"
        optional = split == "donor" and config.profile.donor.source != "train"
        corpus, metrics[split] = tokenize_file(path, tokenizer, config.profile.corpus, optional=optional)
        write_corpus(OUT / f"{split}.safetensors", corpus)
        if split == "train":
            ids, mask = corpus.document(0)
            atomic.write_text(OUT / "sample.txt", show_sample(tokenizer, ids.tolist(), mask.tolist()))
    return Result(metrics)


if __name__ == "__main__":
    run("corpus", main)
