"""The diagnostic shard: some held-out documents with the layers around each aux layer, in bf16 whatever is kept else.

With it the gate names the cause of numbers that cannot be right, and the remap tells on which layers a donor was
trained.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redraft.corpus.corpus import Corpus
from redraft.frame.store import store_root
from redraft.hidden.engine import States
from redraft.hidden.reading import ShardFile
from redraft.hidden.shards import Shard, require_whole


def measurable(mask: Tensor) -> int:
    """Positions whose first draft step can be measured: the two next tokens are supervised."""
    return int((mask[1:-1].bool() & mask[2:].bool()).sum())


def chosen_documents(corpus: Corpus, positions: int) -> list[int]:
    """Documents that have `positions` measurable positions together, or all: one of every source in turn, at random.

    The same corpus gives the same documents, in their order.
    """
    shuffled = [random.Random(0).sample(documents, len(documents)) for documents in corpus.by_source().values()]
    chosen: list[int] = []
    for index in (index for turn in itertools.zip_longest(*shuffled) for index in turn if index is not None):
        if positions <= 0:
            break
        chosen.append(index)
        positions -= measurable(corpus.document(index)[1])
    return sorted(chosen)


def layers_around(aux_layers: Sequence[int], depth: int) -> list[int]:
    """The aux layers of a target of `depth` layers and their neighbours, as inputs of layers."""
    wanted = {layer + shift for layer in aux_layers for shift in (-1, 0, 1)}
    return sorted(layer for layer in wanted if 0 <= layer < depth)


def pack_diagnostic(states: States) -> dict[str, Tensor]:
    """What is kept of one document."""
    return {
        name: each.to(torch.bfloat16, copy=True) if each.is_floating_point() else each
        for name, each in states.items()
        if name not in ("top_ids", "top_logits") or "final" not in states
    }


def read_diagnostic(manifest: dict[str, Any], heldout: Corpus) -> dict[str, Tensor]:
    """The diagnostic shard that `manifest` names, T tokens of D documents one after another.

    Returns:
        `input_ids` int32 [T], `loss_mask` uint8 [T], `offsets` int64 [D+1], `greedy` int32 [T]; bf16 [T, H] each:
        `layer_<i>`, the inputs of the layers around the aux layers, `unnormed` and `final`, or what the engine has in
        place of `final`. Empty if there is none.

    Raises:
        RedraftError: it is not in the store.
    """
    record = manifest.get("diagnostic")
    if record is None:
        return {}
    folder = store_root() / "hidden" / manifest["states"]
    shard = Shard(record["name"], (), record["tokens"], record["bytes"], record["sha256"])
    require_whole(folder, shard)
    documents = [heldout.document(index) for index in record["documents"]]
    return {
        **ShardFile(shard.file(folder)).read_all(),
        "input_ids": torch.cat([ids for ids, _ in documents]),
        "loss_mask": torch.cat([mask for _, mask in documents]),
    }
