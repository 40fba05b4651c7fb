"""The command line of a server: interpreter, release, flags, and which of them the engine decides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.frame.interpreter import installed, interpreter
from redraft.frame.profile import EngineParams
from redraft.target.folder import weights_folder

OWN_FLAGS = {
    "model-path", "model", "host", "port", "max-running-requests", "speculative-algorithm",
    "speculative-draft-model-path", "speculative-draft-model", "speculative-num-steps", "speculative-eagle-topk",
    "speculative-num-draft-tokens",
}  # fmt: skip
"""Flags that the engine decides, with SGLang's other spellings; elsewhere in the profile they have their own names."""
TENSOR_PARALLEL = ("tp-size", "tensor-parallel-size", "tp")
"""SGLang's spellings of one flag."""


def installed_version(python: str) -> str:
    """The version of SGLang in the interpreter `python`.

    Raises:
        RedraftError: no such interpreter, or no SGLang in it.
    """
    return installed("SGLang", python, "engine.python", "join a server by engine.url")


def require_free_flags(params: EngineParams) -> None:
    """Refuse flags in the profile that the engine decides.

    Raises:
        RedraftError: naming them.
    """
    taken = OWN_FLAGS & {*params.flags, *params.speculative}
    if taken:
        raise RedraftError(
            "The profile sets a flag that the engine decides.",
            where="engine.flags or engine.speculative in the profile",
            found=", ".join(sorted(taken)),
            fix="engine.port, engine.max_running, engine.topk, engine.draft_tokens and spec_steps set them",
        )


def draft_tokens(params: EngineParams, spec_steps: int) -> int:
    """Tokens of one verify forward.

    Raises:
        RedraftError: a shape that SGLang would correct with no more than a warning.
    """
    topk, tokens = params.topk, params.draft_tokens or spec_steps + 1
    most = spec_steps + 1 if topk == 1 else topk**2 * (spec_steps - 1) + topk + 1
    if spec_steps and (tokens != most if topk == 1 else not 2 <= tokens <= most):
        raise RedraftError(
            "The speculative settings do not fit each other.",
            where="engine.topk, engine.draft_tokens and spec_steps",
            expected=f"{most} draft tokens (spec_steps + 1)" if topk == 1 else f"2 to {most} draft tokens",
            found=f"{spec_steps} steps, topk {topk}, {tokens} draft tokens",
            cause="SGLang would serve other numbers than these with no more than a warning",
            fix="engine.draft_tokens: null takes spec_steps + 1",
        )
    return tokens


def command_line(
    params: EngineParams, target: Path, drafter: Path | None, spec_steps: int, context: int, port: int
) -> list[str]:
    """The words that start a server for `target`, with `drafter` if one is given."""
    flags: dict[str, Any] = {
        "model-path": weights_folder(target).absolute(),
        "host": "127.0.0.1",
        "port": port,
        "context-length": context,
        "max-running-requests": params.max_running,
        **params.flags,
    }
    if drafter is not None:
        flags |= {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": drafter.absolute(),
            "speculative-num-steps": spec_steps,
            "speculative-eagle-topk": params.topk,
            "speculative-num-draft-tokens": draft_tokens(params, spec_steps),
            **params.speculative,
        }
    given = [(f"--{name}", value) for name, value in flags.items() if value is not False]
    words = [[name] if value is True else [name, str(value)] for name, value in given]
    return [interpreter(params.python), "-m", "sglang.launch_server", *(word for each in words for word in each)]


def flag_number(params: EngineParams, names: Sequence[str], otherwise: int | None) -> int | None:
    """The value of a flag that is a whole number, under any of its `names`; `otherwise` if the profile has none.

    Raises:
        RedraftError: it is no whole number.
    """
    name = next((name for name in names if params.flags.get(name) is not None), None)
    if name is None:
        return otherwise
    value = params.flags[name]
    if isinstance(value, bool) or not str(value).isdecimal():
        raise RedraftError(
            "A flag of the profile is no whole number.", where=f"engine.flags.{name} in the profile", found=repr(value)
        )
    return int(value)
