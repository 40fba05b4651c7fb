"""The accept length that serving will give, predicted by walking answers as a server does, document by document.

A server drafts at the last prompt position, accepts the right prefix of a <= K drafts, adds its own token, and drafts
again a + 1 positions on; the last round, which the answer's end cuts, is left out. Drafts after true tokens are what
training computes anyway, so the walk costs nothing. It predicts serving as far as the answers are the target's own.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.train.step import StepOutput, answer_numbers


def walk(output: StepOutput, input_ids: Tensor, loss_mask: Tensor, documents: Tensor) -> Tensor:
    """Count the rounds of every answer in a batch, by document.

    A token without a slot is never drafted, so it is a miss, whichever draft vocabulary there is.

    Args:
        output: of `ttt_step` with counting `served`.
        input_ids: int [B, S].
        loss_mask: [B, S].
        documents: int64 [B, S].

    Returns:
        int64 [B, D, K + 1], rounds by accepted drafts, the histogram of `redraft.acceptance`, for each of the at most
            D documents of a row.
    """
    steps, size = output.counted.shape[0], input_ids.shape[1]
    ids = input_ids.flatten()
    drafted_at = (output.flat + 2 + _column(steps, output.flat)).clamp(max=len(ids) - 1)  # [K, P]
    right = output.counted & (output.drafted == ids[drafted_at])
    prefix = right.long().cumprod(0).sum(0).tolist()  # accepted drafts, were the answer long enough
    # answer tokens from x[t+1] on: what a round may add; beyond them nothing is known
    answers = answer_numbers(loss_mask, documents).flatten()
    following = (answers[(output.flat + 1).clamp(max=len(ids) - 1)]).tolist()
    accepted = dict(zip(output.flat.tolist(), prefix, strict=True))
    number = dict(zip(output.flat.tolist(), following, strict=True))
    last: dict[tuple[int, int], int] = {}
    for place, answer in enumerate(answers.tolist()):
        if answer:
            last[place // size, answer] = place
    within = documents.flatten().tolist()
    histograms = torch.zeros(len(input_ids), int(documents.max()), steps + 1, dtype=torch.int64)
    at, current = -1, (-1, -1)
    for place in sorted(accepted):
        answer = (place // size, number[place])
        if answer != current:
            at, current = place, answer  # the last prompt position of an answer
        if place != at:
            continue
        bonus = place + 2 + accepted[place]
        if bonus > last[answer]:  # cut by the end
            at = -1
            continue
        histograms[place // size, within[place] - 1, accepted[place]] += 1
        at = place + 1 + accepted[place]
    return histograms.to(output.flat.device)


def chats(samples: Sequence[str]) -> list[int]:
    """The number of each document's chat: turns of one chat, `a#1`, `a#2` and last `a`, depend on each other."""
    names = [re.sub(r"#\d+\Z", "", sample) for sample in samples]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]


def _column(steps: int, like: Tensor) -> Tensor:
    return like.new_tensor(range(steps))[:, None]
