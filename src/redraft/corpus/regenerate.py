"""Answers by the target itself, greedy: the corpora on which drafters are trained and measured."""

from collections.abc import Iterator
from typing import Any

import torch

from redraft.corpus.chat import Message, RenderError, prompt_ids
from redraft.frame.errors import RedraftError
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
    """Yield `chats` in their order, each cut after its last user turn and answered greedily, up to an id of `stop`.

    Raises:
        RedraftError: a prompt that the chat template does not render, before anything is generated.
    """
    prompts = [_prompt(tokenizer, chat) for chat in chats]
    by_length = sorted(range(len(chats)), key=lambda index: len(prompts[index][1]))
    answers: dict[int, str] = {}
    padding = tokenizer.pad_token_id or 0  # any id will do: the attention mask hides it
    plain = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "pad_token_id": padding}
    starts = range(0, len(chats), batch)
    for start in progress(starts, "regenerate", "batch"):
        group = by_length[start : start + batch]
        longest = max(len(prompts[index][1]) for index in group)
        lacking = [longest - len(prompts[index][1]) for index in group]
        rows = [[padding] * count + prompts[index][1] for index, count in zip(group, lacking, strict=True)]
        seen = [[0] * count + [1] * (longest - count) for count in lacking]
        given = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(seen)}
        given = {name: tensor.to(target.head.device) for name, tensor in given.items()}
        with torch.inference_mode():
            output = target.model.generate(**given, max_new_tokens=max_new_tokens, **plain)  # type: ignore[operator]
        for index, ids in zip(group, output[:, longest:].tolist(), strict=True):
            end = next((place for place, token in enumerate(ids) if token in stop), len(ids))
            answers[index] = tokenizer.decode(ids[:end])  # markers inside the answer stay
    for index, chat in enumerate(chats):
        answer = {"role": "assistant", "content": answers[index].strip()}
        yield {**chat, "messages": [*prompts[index][0], answer]}


def _prompt(tokenizer: Any, chat: dict[str, Any]) -> tuple[list[Message], list[int]]:
    """The turns before the answer, and their ids with its header."""
    turns = chat["messages"]
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    try:
        return turns, prompt_ids(tokenizer, turns)
    except RenderError as refusal:
        raise RedraftError(
            "The chat template does not render a prompt.",
            where=f"chat {chat['id']}",
            found=refusal.reason,
            fix="mend the chat or remove it",
        ) from refusal
