"""The forms in which servers are asked for answers, and what they reply: ids in and out where the server can."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redraft.corpus.chat import CUT, render
from redraft.corpus.samples import plain
from redraft.engines.reply import NOT_WHOLE, read_answer
from redraft.frame.http import ReplyError
from redraft.regenerate.conversation import Answer, Conversation

_PURE = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Told where the server knows them: it may have other defaults, of the target's generation_config.json."""
_LARGEST = 2**31


def _sglang(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    temperature = asked.asking.sampling.temperature
    sampling = {
        "temperature": temperature,
        "max_new_tokens": most,
        "stop_token_ids": sorted(asked.asking.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        **_PURE,
        "top_k": -1,
        **({"sampling_seed": seed} if temperature else {}),
    }
    return {"input_ids": asked.prompt, "sampling_params": sampling}


def _openai(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    temperature = asked.asking.sampling.temperature
    return {"max_tokens": most, "temperature": temperature, "top_p": 1.0, **({"seed": seed} if temperature else {})}


def _vllm(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    more = {"return_token_ids": True, "skip_special_tokens": False, "stop_token_ids": sorted(asked.asking.stop)}
    return {"prompt": asked.prompt, **_openai(asked, most, seed), **_PURE, "top_k": -1, **more}


def _tensorrt(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    more = {"detokenize": False, "include_stop_str_in_output": True, "stop_token_ids": sorted(asked.asking.stop)}
    return {"prompt": asked.prompt, **_openai(asked, most, seed), **more}


def _ids_in(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    return {"prompt": asked.prompt, **_openai(asked, most, seed)}


def _text_in(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    asking = asked.asking
    text = render(asking.tokenizer, plain(asked.messages), header=True, tools=asked.chat.tools, how=asking.how)
    return {"prompt": text, **_openai(asked, most, seed)}


def _chat(asked: Conversation, most: int, seed: int) -> dict[str, Any]:
    tools = {"tools": asked.chat.tools} if asked.chat.tools else {}
    arguments = {"chat_template_kwargs": asked.asking.how.arguments} if asked.asking.how.arguments else {}
    return {"messages": plain(asked.messages), **_openai(asked, most, seed), **tools, **arguments}


@dataclass(frozen=True)
class Form:
    """One way of asking."""

    told: str
    path: str
    body: Callable[[Conversation, int, int], dict[str, Any]]
    """Of a conversation, the most tokens and a seed; without the name of the model."""
    ids_out: bool = True
    own_prompt: bool = True
    """Whether the server is given the very prompt, and not messages."""


SGLANG = Form("ids in, ids out", "/generate", _sglang)
OPENAI = (
    Form("ids in, ids out", "/v1/completions", _vllm),
    Form("ids in, ids out without their text", "/v1/completions", _tensorrt),
    Form("ids in, text out", "/v1/completions", _ids_in, ids_out=False),
    Form("text in, text out", "/v1/completions", _text_in, ids_out=False),
    Form("messages in, text out", "/v1/chat/completions", _chat, ids_out=False, own_prompt=False),
)
"""From the best to the poorest."""


def read(form: Form, reply: Any, asked: Conversation) -> Answer:
    """A reply as an answer to the prompt of `asked`.

    Raises:
        ReplyError: it is no whole answer, or one to another prompt.
    """
    if not isinstance(reply, dict):
        raise ReplyError(NOT_WHOLE, f"a {type(reply).__name__}")
    answer = _of_sglang(reply) if form is SGLANG else _of_openai(form, reply, asked.asking.stop)
    expected = len(asked.prompt or [])
    if form.own_prompt and answer.prompt_tokens not in (None, expected):
        found = f"{answer.prompt_tokens} tokens, of {expected}"
        raise ReplyError("The server reads another prompt than it was sent:", found)
    return answer


def _of_sglang(reply: dict[str, Any]) -> Answer:
    if not isinstance(reply.get("meta_info"), dict):
        raise ReplyError("The server sent an error:", reply.get("error", reply))
    found, meta = read_answer([reply], lambda: 0.0)
    text = reply.get("text")
    return Answer(
        _require_ids(found.ids),
        found.finish,
        _sound(text) if isinstance(text, str) else "",
        tokens=len(found.ids),
        prompt_tokens=_number(meta.get("prompt_tokens")),
    )


def _of_openai(form: Form, reply: dict[str, Any], stop: frozenset[int]) -> Answer:
    choices, usage = reply.get("choices"), reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counted = _number(usage.get("completion_tokens"))
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
        raise ReplyError(NOT_WHOLE, choice or reply.get("error") or reply)
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {"content": choice.get("text")}
    text, calls = message.get("content"), message.get("tool_calls") or None
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    finish = CUT if choice["finish_reason"] == "length" else "stop"
    ids = choice.get("token_ids") if form.ids_out else None
    if ids is not None:
        ids = _with_end(_require_ids(ids), finish, choice.get("stop_reason"), counted, stop)
    elif form.ids_out or not (isinstance(text, str) or isinstance(calls, list)):
        raise ReplyError(NOT_WHOLE, f"no {'token_ids' if form.ids_out else 'text'}: {choice}")
    return Answer(
        ids,
        finish,
        _sound(text) if isinstance(text, str) else "",
        _sound(reasoning) if isinstance(reasoning, str) else "",
        _sound(calls) if isinstance(calls, list) else None,
        tokens=len(ids) if ids is not None else counted or 0,
        prompt_tokens=_number(usage.get("prompt_tokens")),
    )


def _with_end(ids: list[int], finish: str, reason: Any, counted: int | None, stop: frozenset[int]) -> list[int]:
    """`ids` with the marker that ended them, where a server leaves it out but tells it, or counts it."""
    if finish == CUT or (ids and (ids[-1] in stop or ids[-1] == reason)):
        return ids
    if type(reason) is int:
        return [*ids, reason]
    return [*ids, *stop] if counted == len(ids) + 1 and len(stop) == 1 else ids


def _sound(value: Any) -> Any:
    """`value` without halves of surrogate pairs, which no file and no tokenizer takes."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _require_ids(ids: Any) -> list[int]:
    if isinstance(ids, list) and all(type(number) is int and 0 <= number < _LARGEST for number in ids):
        return ids
    raise ReplyError(NOT_WHOLE, f"ids that are none: {ids}")


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
