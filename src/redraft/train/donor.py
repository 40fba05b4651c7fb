"""Train a donor: the same code on another corpus, with a mapping of its own."""

from collections.abc import Callable
from pathlib import Path

from redraft.corpus.corpus import Corpus
from redraft.corpus.tokenizer import decodable_ids, forced_ids, load_tokenizer
from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.model import Drafter, DrafterConfig
from redraft.frame.errors import RedraftError
from redraft.frame.profile import Profile
from redraft.hidden.extract import extract_folder
from redraft.hidden.rows import HiddenStates
from redraft.target.config import read_config
from redraft.target.ends import read_ends
from redraft.train.loop import Fitted, fit
from redraft.vocab.build import build, count_tokens

HELDOUT_SHARE = 0.1


def train_donor(
    target: Path,
    corpus: Corpus,
    profile: Profile,
    *,
    resume: str = "auto",
    log: Callable[[str, dict[str, float]], None] = lambda curve, row: None,
) -> tuple[Checkpoint, Fitted]:
    """Train a drafter from nothing on `corpus`, the last tenth of which is held out.

    Args:
        target: target folder.
        corpus: the donor corpus.
        profile: its `donor`, `vocab`, `target` and `extract` sections are used.
        resume: see `redraft.train.loop.fit`.
        log: likewise.
    """
    params = profile.donor
    if params.train is None or params.shape is None or params.slots is None or len(corpus) < 2:
        raise RedraftError(
            "The donor cannot be trained.",
            where="donor in the profile",
            expected="train, shape, slots, and at least two samples in donor.jsonl",
            found=f"{len(corpus)} samples",
        )
    ends = read_ends(target)
    rows, hidden = ends.embed.shape
    tokenizer = load_tokenizer(target, profile.target.trust_remote_code)
    cut = len(corpus) - max(1, round(HELDOUT_SHARE * len(corpus)))
    parts = {"train": corpus.part(range(cut)), "heldout": corpus.part(range(cut, len(corpus)))}
    vocab = profile.vocab
    forced = forced_ids(tokenizer, special=vocab.force_special, single_bytes=vocab.force_bytes)
    counts = count_tokens(corpus.input_ids.numpy(), corpus.loss_mask.numpy(), rows)
    vocabulary = build(counts, params.slots, forced=forced, decodable=decodable_ids(tokenizer))
    shape = DrafterConfig(
        hidden_size=hidden,
        vocab_size=rows,
        draft_vocab_size=params.slots,
        rms_norm_eps=read_config(target, profile.target.trust_remote_code).get_text_config().rms_norm_eps,
        **params.shape.model_dump(),
    )
    donor = Checkpoint(Drafter.fresh(shape, params.train.seed), vocabulary.mapping, {"source": "train"})
    manifest = extract_folder(target, parts, profile).manifest
    states = {split: HiddenStates(manifest, split, parts[split]) for split in parts}
    training = states["train"], states["heldout"], params.train
    return donor, fit(donor, ends, *training, title="train donor", resume=resume, log=log)
