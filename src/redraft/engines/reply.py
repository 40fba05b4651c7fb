"""What a reply of SGLang says: tokens, how the answer ended, and its counters, whose names differ by release."""

from collections.abc import Callable, Iterable
from typing import Any

from redraft.acceptance import Steps
from redraft.engines.engine import Generation
from redraft.frame.errors import RedraftError
from redraft.frame.http import ReplyError

NOT_WHOLE = "The reply of the server is not a whole answer."


def read_answer(events: Iterable[dict[str, Any]], clock: Callable[[], float]) -> tuple[Generation, dict[str, Any]]:
    """One streamed answer, its verify steps not counted yet, and the `meta_info` of its last event.

    Args:
        events: as they arrive.
        clock: seconds since the request.

    Raises:
        ReplyError: it is no whole answer.
    """
    ids: list[int] = []
    meta: dict[str, Any] = {}
    first = last = 0.0
    try:
        for event in events:
            last = clock()
            new, meta = event.get("output_ids") or [], event["meta_info"]
            ids = [*new] if meta.get("completion_tokens") == len(new) else ids + new  # all so far, or what is new
            first = first or (last if ids else 0.0)
        finish = meta.get("finish_reason") or {}
        kind, tokens = finish.get("type"), meta.get("completion_tokens")
        if tokens == len(ids) + 1 and kind == "stop":
            ids = [*ids, finish["matched"]]
        whole = kind in ("stop", "length") and tokens == len(ids) and all(isinstance(token, int) for token in ids)
        cached = int(meta.get("cached_tokens") or 0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReplyError(
            "The reply of the server is not a whole answer.", f"{type(error).__name__}: {error}"
        ) from error
    if not whole:
        told = f"finish_reason {finish}, completion_tokens {tokens}, {len(ids)} output_ids"
        raise ReplyError(NOT_WHOLE, told)
    return Generation(ids, last, first or last, str(kind), cached_tokens=cached), meta


def read_counters(meta: dict[str, Any], spec_steps: int, where: str) -> Steps:
    """The verify steps of an answer from its `meta_info`.

    Names by release: docs/serving.md. Every verify step is counted in full, one that the answer's end cut included.

    Raises:
        RedraftError: counters missing, older than 0.5.5, or contradicting each other.
    """

    def first(*names: str) -> Any:
        return next((meta[name] for name in names if meta.get(name) is not None), None)

    steps = first("spec_verify_ct")
    right = first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    histogram = first("spec_correct_drafts_histogram", "spec_accept_histogram")
    rate = first("spec_accept_rate")
    if right is None and isinstance(steps, int) and isinstance(rate, int | float):
        right = round(rate * steps * spec_steps)  # 0.5.5
    if not isinstance(steps, int) or not isinstance(right, int):
        raise RedraftError(
            "The reply of a speculating server has no counters.",
            where=where,
            expected="spec_verify_ct and spec_num_correct_drafts, or their names in releases from 0.5.5 on",
            found=sorted(name for name in meta if name.startswith("spec_")) or "none",
            cause="the server does not speculate, or is older than 0.5.5; its accept length cannot be told",
        )
    told = None if histogram is None else _spread(histogram, spec_steps)
    if histogram is not None and (told is None or (sum(told), _right(told)) != (steps, right)):
        raise RedraftError(
            "The counters of the server contradict each other.",
            where=where,
            expected=f"{steps} verify steps, {right} right drafts, at most {spec_steps} a step",
            found=f"histogram {histogram}",
        )
    return Steps(steps, right, told)


def _spread(histogram: Any, spec_steps: int) -> list[int] | None:
    """[K + 1], or None if it is no histogram of at most K right drafts a step."""
    if not isinstance(histogram, list) or not all(isinstance(count, int) and count >= 0 for count in histogram):
        return None
    told = [*histogram, *[0] * (spec_steps + 1 - len(histogram))]
    return told if len(told) == spec_steps + 1 else None


def _right(histogram: list[int]) -> int:
    return sum(count * number for number, count in enumerate(histogram))
