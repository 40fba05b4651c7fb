"""What this project already knows of a profile: which stages ran for it, its corpus, and rates that were measured."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redraft.frame.errors import RedraftError
from redraft.frame.files import open_tensors, read_object
from redraft.frame.params import Config
from redraft.frame.section import read_object as read_parameters

SUPERVISED = 0.6
"""Share of the tokens that is supervised, where nothing tells it."""


def made_for(stage: str, config: Config, root: Path) -> bool:
    """Whether what a stage left here is of this profile: dvc.lock says for which one it ran last.

    Without dvc.lock (stages that were run by hand) it is of the profile that params.yaml names.
    """
    lock, name = root / "dvc.lock", config.params.profile
    if not lock.is_file():
        return bool(read_parameters(root / "params.yaml").get("profile") == name)
    # as text: it takes half a second to parse
    told = re.search(rf"^  {stage}:\n((?:    .*\n|\n)*)", lock.read_text(), re.M)
    return bool(told and f"\n      profiles/{name}.yaml:\n" in told[1])


@dataclass(frozen=True)
class Amount:
    """What is extracted and trained on."""

    tokens: int
    """Of which states are kept: training, held-out and, where a donor is trained, its own."""
    trained: int
    """Of one pass of the training."""
    supervised: float
    """Share of the tokens."""
    scored: float
    """Share of the tokens whose final state is kept under `extract.law: scored`."""
    told: str
    """What says so."""


def amount(config: Config, root: Path, tokens: int | None, supervised: float | None) -> Amount:
    """By `tokens` and `supervised` where they are given, else by the corpus of this profile.

    Raises:
        RedraftError: neither tokens nor a corpus of this profile.
    """
    if tokens is not None:
        share = SUPERVISED if supervised is None else supervised
        assumed = ", assumed: --supervised" * (supervised is None)
        return Amount(tokens, tokens, share, share, f"given, {share:.0%} of them supervised{assumed}")
    folder = root / "artifacts/corpus"
    if not (folder / "train.safetensors").is_file() or not made_for("corpus", config, root):
        raise RedraftError(
            "How many tokens there will be is not known.",
            where=folder,
            expected=f"the corpus of profile {config.params.profile}",
            found="that of another profile, or of none" if folder.is_dir() else "none",
            fix="give --tokens; or run `dvc repro corpus` first, and it is read from there",
        )
    splits = ("train", "heldout", *(["donor"] if config.profile.donor.source == "train" else []))
    counts = {split: _counts(folder / f"{split}.safetensors") for split in splits}
    total, answers, scored = (sum(each[place] for each in counts.values()) for place in range(3))
    share = answers / total if supervised is None else supervised
    return Amount(total, counts["train"][0], share, scored / total, f"artifacts/corpus, {share:.0%} of them supervised")


def _counts(path: Path) -> tuple[int, int, int]:
    """Tokens, supervised ones, and those whose target may be scored (see `redraft.hidden.formats`) of a split."""
    with open_tensors(path, "np") as file:
        mask, offsets = file.get_tensor("loss_mask").astype(bool), file.get_tensor("offsets")
    before = np.zeros_like(mask)
    before[1:] = mask[:-1]
    before[offsets[:-1][offsets[:-1] < len(mask)]] = False  # of another document
    return len(mask), int(mask.sum()), int((mask | before).sum())


def measured_rate(stage: str, config: Config, root: Path) -> float | None:
    """Tokens a second that the last run of a stage measured for this profile; None if none did."""
    path = root / f"metrics/{stage}_timing.json"
    if not path.is_file() or not made_for(stage, config, root):
        return None
    rate = read_object(path).get("tokens_per_second")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None
