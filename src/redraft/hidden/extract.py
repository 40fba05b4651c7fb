"""Run the target over a corpus once and keep what a drafter is trained on."""

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from redraft.corpus.corpus import Corpus
from redraft.frame import atomic
from redraft.frame.device import resolve
from redraft.frame.errors import RedraftError
from redraft.frame.files import open_tensors, read_object
from redraft.frame.profile import ExtractParams, Profile
from redraft.frame.progress import counter
from redraft.frame.store import fingerprint, store_root
from redraft.hidden import shards as store
from redraft.hidden.shards import MANIFEST, ShardWriter, check_present, write_shard
from redraft.target import model as target_model
from redraft.target.ends import target_hash
from redraft.target.model import Target, load_target

Corpora = dict[str, Corpus]
_CODE = (Path(__file__), Path(target_model.__file__), Path(store.__file__))
"""What decides the content of a shard: an edit here is another fingerprint."""


def extract_folder(folder: Path, corpora: Corpora, profile: Profile) -> Path:
    """Extract from the target in `folder`; the path of the manifest in the store. See `extract`.

    Computed in bf16 where the machine multiplies it, else in fp32; stored in bf16.
    """
    params = profile.target
    target = load_target(
        folder, dtype=resolve("auto"), aux_layers=params.aux_layers, trust_remote_code=params.trust_remote_code
    )
    return extract(target, target_hash(folder), corpora, profile.extract)


def extract(target: Target, identity: str, corpora: Corpora, params: ExtractParams) -> Path:
    """Write the hidden states of `corpora` to the store, unless they are there; the path of the manifest.

    Args:
        target: the loaded target.
        identity: `target_hash` of its folder.
        corpora: by split; a split `heldout` also gives the diagnostic shard.
        params: batch size, shard size and checks.

    Raises:
        RedraftError: a sample extracted again alone differs by more than `params.tolerance`.
    """
    facts = {
        "code": hashlib.sha256(b"".join(path.read_bytes() for path in _CODE)).hexdigest(),
        "target": identity,
        "aux_layers": list(target.aux_layers),
        "dtype": str(target.head.dtype).removeprefix("torch."),
        "hidden_size": target.head.shape[1],
        "vocab_size": target.head.shape[0],
        "shard_mib": params.shard_mib,
        "diagnostic_positions": params.diagnostic_positions,
        "corpora": {split: corpus.identity for split, corpus in corpora.items()},
    }
    name = fingerprint(facts)
    stored = store_root() / name / MANIFEST
    stored.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(store_root() / f"{name}.lock"):  # experiments that run at the same time share the store
        if not _complete(stored):
            _write(target, corpora, params, stored.parent, {"fingerprint": name, **facts, "splits": {}})
    return stored


def _write(target: Target, corpora: Corpora, params: ExtractParams, folder: Path, manifest: dict[str, Any]) -> None:
    with atomic.folder(folder) as partial:
        for split, corpus in corpora.items():
            writer = ShardWriter(partial, split, params.shard_mib * 2**20)
            for index, document in _run(target, corpus, params.batch_tokens, f"extract {split}"):
                writer.add(corpus.samples[index], document)
            writer.flush()
            manifest["splits"][split] = writer.shards
        if "heldout" in corpora:
            heldout = corpora["heldout"]
            chosen = diagnostic_documents(heldout, params.diagnostic_positions)
            written = write_shard(partial / "diagnostic.safetensors", _diagnostic(target, heldout, chosen))
            positions = sum(_measurable(heldout.document(index)[1]) for index in chosen)
            manifest["diagnostic"] = {**written, "positions": positions}
        manifest["recheck_difference"] = _recheck(target, corpora, manifest, partial, params)
        atomic.write_json(partial / MANIFEST, manifest)


def summary(manifest: Path) -> dict[str, Any]:
    """Documents, tokens and bytes by split, bytes per token, and the largest difference of the rechecked samples."""
    record = read_object(manifest)
    rows: dict[str, Any] = {
        split: {
            "documents": sum(len(shard["samples"]) for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "bytes": sum(shard["bytes"] for shard in shards),
            "shards": len(shards),
        }
        for split, shards in record["splits"].items()
    }
    total = {name: sum(row[name] for row in rows.values()) for name in ("tokens", "bytes")}
    return {
        **rows,
        "bytes_per_token": round(total["bytes"] / total["tokens"]),
        "diagnostic_positions": record["diagnostic"]["positions"],
        "recheck_difference": round(record["recheck_difference"], 6),
    }


def _complete(stored: Path) -> bool:
    if not stored.is_file():
        return False
    try:
        manifest = read_object(stored)
        entries = [entry for shards in manifest["splits"].values() for entry in shards]
        for entry in [*entries, *([manifest["diagnostic"]] if "diagnostic" in manifest else [])]:
            check_present(stored.parent / entry["file"], entry["bytes"])
    except RedraftError:
        return False
    return True


def _run(target: Target, corpus: Corpus, batch_tokens: int, title: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (document, its tensors), documents by rising length, in padded batches of at most `batch_tokens`."""
    lengths = corpus.offsets.diff().tolist()
    order = sorted(range(len(corpus)), key=lambda index: (lengths[index], index))
    with counter(sum(lengths), title, "token") as bar:
        while order:
            size = 1
            while size < len(order) and lengths[order[size]] * (size + 1) <= batch_tokens:
                size += 1
            batch, order = order[:size], order[size:]
            yield from zip(batch, forward(target, [corpus.document(index) for index in batch]), strict=True)
            bar.update(sum(lengths[index] for index in batch))


@torch.inference_mode()
def forward(
    target: Target, documents: list[tuple[Tensor, Tensor]], dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Tensor]]:
    """One forward over (ids, mask) documents, padded on the right; per document the tensors of a shard in `dtype`."""
    device = target.head.device
    length = max(len(ids) for ids, _ in documents)
    padded = torch.zeros(len(documents), length, dtype=torch.int64, device=device)
    attention = torch.zeros_like(padded)
    for row, (ids, _) in enumerate(documents):
        padded[row, : len(ids)] = ids.to(device)
        attention[row, : len(ids)] = 1
    with target.capture(target.aux_layers) as captured:
        final = target.decoder(input_ids=padded, attention_mask=attention, use_cache=False).last_hidden_state
    aux = target.aux(captured).to(dtype)
    results = []
    for row, (ids, mask) in enumerate(documents):
        states = final[row, : len(ids)]
        greedy = torch.cat([(part @ target.head.T).argmax(-1) for part in states.split(256)])
        results.append(
            {
                "input_ids": ids.int(),
                "loss_mask": mask,
                "aux": aux[row, : len(ids)].to("cpu", copy=True),  # not a view that keeps the whole batch
                "final": states.to("cpu", dtype, copy=True),
                "greedy": greedy.int().cpu(),
            }
        )
    return results


def _measurable(mask: Tensor) -> int:
    """Positions whose first draft step can be measured: the two next tokens are supervised."""
    return int((mask[1:-1].bool() & mask[2:].bool()).sum())


def diagnostic_documents(corpus: Corpus, positions: int) -> list[int]:
    """Documents that have `positions` measurable positions together, or all: one of every source in turn, at random.

    The same corpus gives the same documents, in their order.
    """
    shuffled = [random.Random(0).sample(documents, len(documents)) for documents in corpus.by_source().values()]
    chosen: list[int] = []
    for index in (index for turn in itertools.zip_longest(*shuffled) for index in turn if index is not None):
        if positions <= 0:
            break
        chosen.append(index)
        positions -= _measurable(corpus.document(index)[1])
    return sorted(chosen)


@torch.inference_mode()
def _diagnostic(target: Target, corpus: Corpus, documents: list[int]) -> dict[str, Tensor]:
    """Documents with the layers around each aux layer (`layer_<i>`, inputs) and the un-normed final state."""
    depth = len(target.decoder.layers)
    wanted = {layer + shift for layer in target.aux_layers for shift in (-1, 0, 1)}
    layers = sorted(layer for layer in wanted if 0 <= layer < depth)
    kept: dict[str, list[Tensor]] = {}
    lengths = [0]
    for index in documents:
        ids, mask = corpus.document(index)
        with target.capture(layers) as captured:
            row = ids[None].long().to(target.head.device)
            final = target.decoder(input_ids=row, use_cache=False).last_hidden_state[0]
        assert captured.unnormed is not None
        states = {f"layer_{layer}": captured.inputs[layer][0] for layer in layers}
        states |= {"unnormed": captured.unnormed[0], "final": final}
        tensors = {name: state.to(torch.bfloat16).cpu() for name, state in states.items()}
        for name, tensor in {"input_ids": ids, "loss_mask": mask, **tensors}.items():
            kept.setdefault(name, []).append(tensor)
        lengths.append(len(ids))
    joined = {name: torch.cat(parts) for name, parts in kept.items()}
    return {**joined, "offsets": torch.tensor(lengths).cumsum(0)}


def _recheck(target: Target, corpora: Corpora, manifest: dict[str, Any], folder: Path, params: ExtractParams) -> float:
    """Extract some samples again, alone; the largest relative difference to what was written.

    Catches states of another sample (vllm-project/speculators#279) and padding that leaks into attention.
    """
    worst = 0.0
    for split, corpus in corpora.items():
        places = [(entry, place) for entry in manifest["splits"][split] for place in range(len(entry["samples"]))]
        spread = max(1, len(places) // max(1, params.recheck))  # over all lengths, so over all amounts of padding
        for entry, place in places[spread // 2 :: spread][: params.recheck]:
            sample = entry["samples"][place]
            alone = forward(target, [corpus.document(corpus.samples.index(sample))])[0]
            with open_tensors(folder / entry["file"]) as file:
                start, end = file.get_tensor("offsets")[place : place + 2].tolist()
                written = {kind: file.get_slice(kind)[start:end].float() for kind in ("aux", "final")}
            for kind, states in written.items():
                difference = float((alone[kind].float() - states).norm() / states.norm())
                worst = max(worst, difference)
                if difference > params.tolerance:
                    raise RedraftError(
                        "A sample extracted alone differs from the same sample in a batch.",
                        where=f"{split}: {sample}, {kind}",
                        expected=f"relative difference at most {params.tolerance}",
                        found=f"{difference:.3g}",
                        cause="states of another sample, or padding that leaks into attention",
                    )
    return worst
