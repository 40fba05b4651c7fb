"""Which rows make up which optimizer step on which process: a function of the step's number alone.

So a training resumes in the middle of a pass without any state of a loader, and one process or many see the same
global batches.
"""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import default_collate

from redraft.frame.profile import FitParams
from redraft.hidden.rows import PackedRows

Batch = dict[str, Tensor]
_Item = TypeVar("_Item")


@dataclass
class Batches:
    """Global batches of `params.batch_tokens`, in another order in each pass, dealt to `world` processes."""

    rows: PackedRows
    params: FitParams
    rank: int = 0
    world: int = 1

    @property
    def per_pass(self) -> int:
        """Optimizer steps of one pass; the last one may be smaller."""
        return math.ceil(len(self.rows) / self._batch_rows)

    @property
    def total(self) -> int:
        """Optimizer steps of the training."""
        return max(1, round(self.params.epochs * self.per_pass))

    @property
    def _batch_rows(self) -> int:
        return self.params.batch_tokens // self.params.row_tokens

    def numbers(self, step: int) -> list[int]:
        """The rows of the global batch of a step."""
        passed, place = divmod(step, self.per_pass)
        generator = torch.Generator().manual_seed((self.params.seed << 20) + passed)
        order = torch.randperm(len(self.rows), generator=generator)
        return order[place * self._batch_rows : (place + 1) * self._batch_rows].tolist()

    def read(self, step: int) -> list[Batch]:
        """This process's share of a step, cut to micro batches; all processes get as many."""
        return [batch for _, batch in deal(self.rows, self.numbers(step), self.params, self.rank, self.world)]


def deal(
    rows: PackedRows, numbers: list[int], params: FitParams, rank: int, world: int
) -> Iterator[tuple[list[int], Batch]]:
    """This process's micro batches of `numbers`, each with the numbers in it; where rows run out, empty ones stand in.

    Every process gets as many batches of the same shape: none waits for another, and nothing counts twice.
    """
    size = params.micro_tokens // params.row_tokens
    mine = numbers[rank::world]
    most = math.ceil(len(numbers) / world)
    for start in range(0, most, size):
        taken = mine[start : start + size]
        empty = min(size, most - start) - len(taken)
        yield taken, default_collate([*(rows[number] for number in taken), *[rows.empty()] * empty])


def ahead(items: Iterable[_Item]) -> Iterator[_Item]:
    """Make the next item in a thread while the last one is in use."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
