"""vocab: the draft vocabulary, by token frequency over supervised tokens."""

from pathlib import Path
from typing import Any

from redraft.corpus.corpus import Corpus, read_corpus
from redraft.corpus.tokenizer import decodable_ids, forced_ids, load_tokenizer
from redraft.frame.curves import write_curve
from redraft.frame.errors import some
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.target.ends import read_ends
from redraft.vocab.build import Order, build, count_tokens, coverage, coverage_by_source, rank, write_vocab
from redraft.vocab.mapping import Ids, Mapping
from redraft.vocab.slots import by_slots, drafted, ladder

TARGET = Path("artifacts/target")
MAX_PADDED = 0.1  # share of slots, before it is worth a warning


def count_corpus(corpus: Corpus, rows: int) -> Ids:
    return count_tokens(corpus.input_ids.numpy(), corpus.loss_mask.numpy(), rows)


def by_source(corpus: Corpus, mapping: Mapping) -> dict[str, float]:
    found = coverage_by_source(
        mapping, corpus.input_ids.numpy(), corpus.loss_mask.numpy(), corpus.offsets.numpy(), corpus.sources
    )
    return {source or "unnamed": round(share, 6) for source, share in found.items()}


def other_sizes(heldout: Corpus, counts: dict[str, Ids], order: Order, slots: int) -> dict[str, dict[str, float]]:
    mask = drafted(heldout.loss_mask.numpy(), heldout.offsets.numpy())
    drafts = count_tokens(heldout.input_ids.numpy(), mask, len(counts["heldout"]))
    sizes = ladder(slots, order.forced, len(order.ids))
    found = by_slots(order, counts["train"], counts["heldout"], drafts, sizes)
    return {size: {name: round(share, 6) for name, share in row.items()} for size, row in found.items()}


def main(config: Config) -> Result:
    params = config.profile.vocab
    tokenizer = load_tokenizer(TARGET, config.profile.target.trust_remote_code)
    corpora = {split: read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in ("train", "heldout")}
    rows = len(read_ends(TARGET).embed)
    counts = {split: count_corpus(corpus, rows) for split, corpus in corpora.items()}
    forced = forced_ids(tokenizer, special=params.force_special, single_bytes=params.force_bytes)
    known = decodable_ids(tokenizer)
    built = build(counts["train"], params.slots, forced=forced, decodable=known)
    write_vocab(Path("artifacts/vocab"), built, counts, {"corpus": corpora["train"].identity})
    metrics: dict[str, Any] = {
        "slots": len(built.mapping),
        "forced": built.forced,
        "padded": built.padded,
        "outside": len(built.outside),
        "distinct_supervised": int((counts["train"] > 0).sum()),
        "coverage_train": round(coverage(built.mapping, counts["train"]), 6),
        "coverage_heldout": round(coverage(built.mapping, counts["heldout"]), 6),
    }
    if built.padded > MAX_PADDED * len(built.mapping):
        print(
            f"warning: {built.padded:,} of {len(built.mapping):,} slots hold ids that the corpus never shows: lower "
            f"vocab.slots in the profile to {len(built.mapping) - built.padded:,}, or give more chats"
        )
    if built.outside:
        names = [f"{number} ({tokenizer.convert_ids_to_tokens(number)})" for number in built.outside]
        print(f"note: tokens that the target has no row for are left out of the vocabulary: {some(names)}")
    metrics["coverage_by_source"] = {split: by_source(corpus, built.mapping) for split, corpus in corpora.items()}
    order = rank(counts["train"], forced=forced, decodable=known)
    metrics["by_slots"] = other_sizes(corpora["heldout"], counts, order, len(built.mapping))
    write_curve(Path("plots/slots.csv"), [{"slots": int(size), **row} for size, row in metrics["by_slots"].items()])
    return Result(metrics, headline={"vocab/coverage_heldout": metrics["coverage_heldout"]})


if __name__ == "__main__":
    run("vocab", main)
