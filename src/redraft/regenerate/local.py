"""Answers in this process, in batches: for targets that fit it."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from redraft.corpus.chat import AS_IT_IS, CUT
from redraft.corpus.rows import Refused, UnusableError, read_row
from redraft.frame.errors import RedraftError
from redraft.frame.profile import TemplateParams
from redraft.frame.progress import counter
from redraft.regenerate.conversation import Answer, Asking, Conversation
from redraft.target.hf import offline_transformers
from redraft.target.model import Target

Numbered = tuple[int, Conversation]
_WINDOW = 8
"""Batches that are sorted by length together."""


def answer_here(target: Target, conversations: Iterable[Numbered], batch: int) -> Iterator[Numbered]:
    """Answer conversations with a loaded target; they come back whole, with their places, in any order.

    Greedy ones `batch` at a time; others one at a time, each answer by a seed of its own.

    Raises:
        RedraftError: the batch does not fit the memory of the GPU.
    """
    source = iter(conversations)
    while window := list(itertools.islice(source, batch * _WINDOW)):
        size = 1 if window[0][1].asking.sampling.temperature else batch
        waiting = window
        while waiting := sorted(
            (each for each in waiting if each[1].prompt is not None), key=lambda each: len(each[1].prompt or [])
        ):
            for start in range(0, len(waiting), size):
                group = waiting[start : start + size]
                for (_, conversation), answer in zip(group, _generate(target, group), strict=True):
                    conversation.take(answer)
                yield from (each for each in group if each[1].prompt is None)


@torch.inference_mode()
def _generate(target: Target, group: list[Numbered]) -> list[Answer]:
    """One answer to the prompt of each conversation."""
    asking = group[0][1].asking
    padding = asking.tokenizer.pad_token_id or 0  # any id will do: the attention mask hides it
    prompts = [each.prompt or [] for _, each in group]
    rooms = [each.room for _, each in group]
    longest = max(map(len, prompts))
    rows = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
    seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    given = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(seen)}
    given = {name: tensor.to(target.head.device) for name, tensor in given.items()}
    how: dict[str, Any] = {"do_sample": False}
    if asking.sampling.temperature:
        place, conversation = group[0]
        torch.manual_seed(asking.sampling.of(place, len(conversation.answers)))
        how = {"do_sample": True, "temperature": asking.sampling.temperature, "top_k": 0, "top_p": 1.0}
    # in place of the target's own: a penalty or a filter that it brings would be no part of its law
    target.model.generation_config = offline_transformers().GenerationConfig(
        **how, max_new_tokens=max(rooms), eos_token_id=sorted(asking.stop) or None, pad_token_id=padding
    )
    try:
        with counter(max(rooms), f"{len(group)} answers", "token") as bar:
            watched = {"stopping_criteria": [partial(_watch, bar)]}
            output = target.model.generate(**given, **watched)  # type: ignore[operator]
    except torch.OutOfMemoryError as error:
        raise RedraftError(
            "The memory of the GPU is full.",
            where=f"{len(group)} prompts of up to {longest:,} tokens",
            found=str(error).splitlines()[0],
            fix="a smaller --batch or --max-new-tokens, or a server (--url)",
        ) from error
    found = zip(output[:, longest:].tolist(), rooms, strict=True)
    return [_answer(ids[:room], asking.stop) for ids, room in found]


def _watch(bar: Any, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    """Stops nothing; tells of every token that there was one more."""
    bar.update()
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _answer(ids: list[int], stop: frozenset[int]) -> Answer:
    end = next((place + 1 for place, token in enumerate(ids) if token in stop), None)
    return Answer(ids[:end], CUT if end is None else "stop", tokens=len(ids[:end]))


def regenerate(
    target: Target,
    tokenizer: Any,
    chats: Iterable[dict[str, Any]],
    *,
    stop: frozenset[int],
    max_new_tokens: int | None,
    batch: int,
    how: TemplateParams = AS_IT_IS,
) -> Iterator[dict[str, Any]]:
    """Yield the rows `chats` in their order, every answer made anew, greedily, up to an id of `stop`.

    Raises:
        RedraftError: a row that cannot be used, before anything is generated.
    """
    asking = Asking(tokenizer, stop, context_of(target.config), max_new_tokens, how)
    conversations = [_conversation(row, asking) for row in chats]
    for _ in answer_here(target, enumerate(conversations), batch):
        pass
    yield from (each.row() for each in conversations)


def _conversation(row: dict[str, Any], asking: Asking) -> Conversation:
    chat = read_row(row, "?")
    try:
        if isinstance(chat, Refused):
            raise UnusableError(chat.reason)
        return Conversation(chat, asking)
    except UnusableError as fault:
        raise RedraftError(
            "A chat cannot be answered.", where=f"chat {row.get('id')}", found=fault, fix="mend the chat or remove it"
        ) from fault


def context_of(config: Any) -> int:
    """Tokens that a target takes, by its configuration; without limit if that does not tell."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)
