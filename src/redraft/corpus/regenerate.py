"""Answers by the target itself, greedy: the corpora on which drafters are trained and measured."""

from collections.abc import Iterator
from typing import Any

import torch

from redraft.corpus.chat import prompt_ids
from redraft.frame.progress import progress
from redraft.target.model import Target


def regenerate(
    target: Target,
    tokenizer: Any,
    chats: list[dict[str, Any]],
    *,
    stop: frozenset[int],
    max_new_tokens: int,
    batch: int,
) -> Iterator[dict[str, Any]]:
    """Yield `chats` in their order, each cut after its last user turn and answered greedily, up to an id of `stop`."""
    prompts = []
    for chat in chats:
        turns = chat["messages"]
        while turns and turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        prompts.append((turns, prompt_ids(tokenizer, turns)))
    by_length = sorted(range(len(chats)), key=lambda index: len(prompts[index][1]))
    answers: dict[int, str] = {}
    tokenizer.padding_side = "left"
    plain = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    starts = range(0, len(chats), batch)
    for start in progress(starts, "regenerate", "batch"):
        group = by_length[start : start + batch]
        padded = tokenizer.pad({"input_ids": [prompts[index][1] for index in group]}, return_tensors="pt")
        padded = padded.to(target.head.device)
        with torch.inference_mode():
            output = target.model.generate(**padded, max_new_tokens=max_new_tokens, **plain)  # type: ignore[operator]
        for index, ids in zip(group, output[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            end = next((place for place, token in enumerate(ids) if token in stop), len(ids))
            answers[index] = tokenizer.decode(ids[:end])  # markers inside the answer stay
    for index, chat in enumerate(chats):
        answer = {"role": "assistant", "content": answers[index].strip()}
        yield {**chat, "messages": [*prompts[index][0], answer]}
