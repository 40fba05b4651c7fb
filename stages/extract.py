"""extract: run the target over the corpora once and keep the hidden states that feed a drafter."""

from pathlib import Path

from redraft.corpus.corpus import read_corpus
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.hidden.extract import extract_folder, summary
from redraft.hidden.holdings import use


def main(config: Config) -> Result:
    corpora = {split: read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in ("train", "heldout")}
    made = extract_folder(Path("artifacts/target"), corpora, config.profile)
    use(made.manifest)
    atomic.write_json(Path("artifacts/hidden/manifest.json"), made.manifest)
    timing = {"tokens_per_second": round(made.tokens / made.seconds)} if made.tokens else {}
    return Result(summary(made.manifest), timing=timing)


if __name__ == "__main__":
    run("extract", main)
