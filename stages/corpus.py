"""corpus: chats to token ids and loss mask: what the target generated, to the token."""

from functools import partial
from pathlib import Path

from redraft.corpus.build import build_split
from redraft.corpus.chat import show_sample
from redraft.corpus.corpus import read_corpus
from redraft.corpus.files import require_files
from redraft.corpus.prompts import require_apart
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.frame.store import store_root
from redraft.target.ends import target_hash
from redraft.target.facts import read_facts

OUT, TARGET = Path("artifacts/corpus"), Path("artifacts/target")
LEAST_HELDOUT = 8  # documents: below that an interval over packed rows tells nothing


def main(config: Config) -> Result:
    data, params = Path("data") / config.params.profile, config.profile.corpus
    load = partial(load_tokenizer, TARGET, config.profile.target.trust_remote_code)
    tokenizer, target = load(), target_hash(TARGET)
    trained = config.profile.donor.source == "train"
    splits = {}
    with atomic.folder(OUT) as out:  # a split that is refused leaves none of the others
        for split in ("donor", "train", "heldout"):
            splits[split] = build_split(
                require_files(data, split) if trained or split != "donor" else [],
                out / f"{split}.safetensors",
                tokenizer,
                params,
                how=config.profile.target.template,
                load=load,
                scratch=store_root() / "corpus",
                target=target,
                rows=read_facts(TARGET).vocab,
            )
        prompts = {split: each.prompts for split, each in splits.items()}
        leaks = require_apart(prompts, params.max_leaks, params.max_repeated, data)
        ids, mask = read_corpus(out / "train.safetensors").document(0)
        (out / "sample.txt").write_text(show_sample(tokenizer, ids.tolist(), mask.tolist()))
    if (count := splits["heldout"].counts["samples"]) < LEAST_HELDOUT:
        print(f"warning: {data / 'heldout'} gives {count} samples, too few to measure on: {LEAST_HELDOUT} at least")
    return Result({**{split: each.counts for split, each in splits.items()}, "leaks": leaks})


if __name__ == "__main__":
    run("corpus", main)
