"""Make the hidden states of corpora that the store lacks, and say in a manifest where they all lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from redraft.frame.extraction import ExtractParams
from redraft.frame.profile import Profile
from redraft.frame.progress import note
from redraft.hidden import dumps, in_process, vllm
from redraft.hidden.engine import Opening, Source
from redraft.hidden.pool import require_room
from redraft.hidden.run import Corpora, Manifest, Run
from redraft.target.config import aux_layers_of, read_config
from redraft.target.ends import read_ends, target_hash
from redraft.target.facts import read_facts
from redraft.target.folder import weights_folder
from redraft.target.weights import weight_files

OPENINGS = {"transformers": in_process.opening, "vllm": vllm.opening, "import": dumps.opening}


@dataclass(frozen=True)
class Extracted:
    """What an extraction gave."""

    manifest: Manifest
    """See docs/architecture.md; the same for the same shards."""
    tokens: int
    """That were made: the others were there."""
    seconds: float
    """That it took, without the loading of the target."""


def extract_folder(folder: Path, corpora: Corpora, profile: Profile, like: Manifest | None = None) -> Extracted:
    """The hidden states of the target in `folder` over `corpora`, by the profile's engine. See `extract`."""
    config = read_config(folder, profile.target.trust_remote_code)
    opening = OPENINGS[profile.extract.engine](folder, profile)
    source = Source(
        opening=opening,
        checker=opening if profile.extract.engine != "import" else _loaded_here(folder, profile),
        target=target_hash(folder),
        head=read_ends(folder).head,
        aux_layers=aux_layers_of(config, profile.target.aux_layers),
        depth=config.get_text_config().num_hidden_layers,
    )
    return extract(source, corpora, profile.extract, like)


def _loaded_here(folder: Path, profile: Profile) -> Opening | None:
    """What a dump is held against: the target in this process, where memory holds it."""
    growth = 8 if read_facts(folder).quantised else 2  # packed weights are unpacked; fp32 where bf16 is slow
    size = growth * sum(file.stat().st_size for file in weight_files(weights_folder(folder)))
    gpus = (torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))
    room = psutil.virtual_memory().available + sum(gpus)
    if size <= room:
        return in_process.opening(folder, profile)
    note(f"warning: no dump is rechecked: the target takes {size / 1e9:.0f} GB here, of {room / 1e9:.0f} GB")
    return None


def extract(source: Source, corpora: Corpora, params: ExtractParams, like: Manifest | None = None) -> Extracted:
    """Make what the store lacks of `corpora`, shard by shard.

    The store is asked first: the engine is opened only for what is missing. A process that is killed leaves whole
    shards, and the next one goes on behind them with the same batches, so with the same bits.

    Args:
        source: where states come from.
        corpora: by split; a split `heldout` also gives the diagnostic shard.
        params: batch size, shard size and checks.
        like: a manifest whose shards are to be made again with the same documents, if it is of the same corpora.

    Raises:
        RedraftError: a disk without room, an engine that fails, or a sample that differs by more than
            `params.tolerance` when it is extracted again alone.
    """
    run = Run(source, params)
    with run.pool.held():
        run.take(corpora, like)
        if run.missing or run.unchecked or run.diagnostic_missing:
            require_room(run.pool.folder, run.bytes_needed())
            with source.opening.open(run.layers()) as engine:
                run.make(engine)
                if source.checker is source.opening:
                    run.check(engine)
            if source.checker is None:
                run.leave_unchecked()
            elif source.checker is not source.opening:
                with source.checker.open(source.aux_layers) as other:
                    run.check(other)
        return Extracted(run.manifest(), run.made_tokens, run.seconds)


def summary(manifest: Manifest) -> dict[str, Any]:
    """Documents, tokens and shards by split, bytes per token, and the largest difference of the rechecked samples."""
    splits = manifest["splits"]
    rows: dict[str, Any] = {
        name: {
            "documents": len(split["places"]),
            "tokens": split["tokens"],
            "shards": len({number for number, _ in split["places"]}),
        }
        for name, split in splits.items()
    }
    total = {name: sum(shard[name] for shard in manifest["shards"]) for name in ("tokens", "bytes")}
    rechecked = [split["recheck_difference"] for split in splits.values()]
    return {
        **rows,
        "bytes_per_token": round(total["bytes"] / total["tokens"]),
        "diagnostic_positions": manifest.get("diagnostic", {}).get("positions", 0),
        "recheck_difference": None if None in rechecked else max(rechecked),
    }
