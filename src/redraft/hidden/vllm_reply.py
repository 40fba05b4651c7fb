"""A document at a vLLM server: what is asked, and the checks of what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError, some
from redraft.frame.http import ReplyError
from redraft.hidden.transfer import TransferError
from redraft.hidden.vllm_servers import SECTION, TOP

_CACHED = "prefix caching: launch with --no-enable-prefix-caching"


@dataclass(frozen=True)
class Asked:
    """A document that is asked for."""

    group: int
    place: int
    ids: Tensor
    failed: int = 0
    """Requests for it that failed."""

    @property
    def again(self) -> "Asked":
        """The same after one more failure."""
        return replace(self, failed=self.failed + 1)

    @property
    def name(self) -> str:
        """Place, length and first tokens."""
        first = " ".join(map(str, self.ids[:6].tolist()))
        return f"document {self.place} of shard {self.group} ({len(self.ids)} tokens: {first} ...)"


@dataclass
class Reply:
    """What came back, held against the document."""

    states: dict[int, Tensor]
    """[T, H] by id."""
    token: int
    """That the server generated after it."""
    law: tuple[Tensor, Tensor] | None = None
    """Ids and logits [T, 64], where no final state can be had."""


def failed(server: str, job: Asked, fault: ReplyError | TransferError) -> RedraftError:
    """A document that was asked for often enough, or in vain."""
    told = f"{fault.what} {fault.found}" if isinstance(fault, ReplyError) else str(fault)
    fix = "see the server's log"
    if "logprobs" in told:
        fix = f"launch the server with --max-logprobs {TOP}"
    elif isinstance(fault, TransferError):
        fix = f"see the server's log; {SECTION}.folder names the folder as this process sees it"
    return RedraftError(
        "The server does not give a document's states.",
        where=f"{server}: {job.name}",
        expected="a reply and a file of states",
        found=f"{told}, after {job.failed} retries",
        fix=fix,
    )


def checked(
    job: Asked,
    server: str,
    choice: dict[str, Any],
    data: dict[str, Tensor],
    layers: Sequence[int],
    dtype: torch.dtype,
    hidden: int,
) -> Reply:
    """The states by id, after every check that needs no weights.

    Raises:
        RedraftError: naming document, expected and found.
    """

    def refuse(what: str, expected: object, found: object, cause: str | None = None) -> RedraftError:
        return RedraftError(what, where=f"{server}: {job.name}", expected=expected, found=found, cause=cause)

    states, ids, tokens = data["hidden_states"], data["token_ids"], choice.get("token_ids")
    if ids.tolist() != job.ids.tolist():
        raise refuse("The states are of other tokens.", some(job.ids.tolist()), some(ids.tolist()))
    if choice.get("prompt_token_ids") not in (None, job.ids.tolist()):
        raise refuse("The server read other tokens.", some(job.ids.tolist()), some(choice["prompt_token_ids"]))
    if states.ndim != 3 or states.shape[1] != len(layers):
        raise refuse("Another number of states.", f"{len(layers)}: {list(layers)}", list(states.shape))
    if states.shape[0] != len(job.ids):
        raise refuse("States of another number of tokens.", len(job.ids), states.shape[0], _CACHED)
    if states.shape[2] != hidden:
        raise refuse("States of another width.", hidden, states.shape[2], "another target is served")
    if states.dtype != dtype:
        raise refuse("States of another dtype.", dtype, states.dtype, f"{SECTION}.dtype is not the server's")
    if not bool(states.isfinite().all()):
        odd = [layer for place, layer in enumerate(layers) if not bool(states[:, place].isfinite().all())]
        raise refuse("A state is not finite.", "numbers", f"NaN or infinity in {odd}")
    if not isinstance(tokens, list) or len(tokens) != 1 or type(tokens[0]) is not int:
        raise refuse("The server generated no token.", "token_ids of one token", tokens)
    return Reply({layer: states[:, place].clone() for place, layer in enumerate(layers)}, tokens[0])


def law_of(job: Asked, choice: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The 64 most probable next tokens after every position, from the reply: row t is told with token t+1.

    Raises:
        RedraftError: fewer rows, or fewer tokens in one.
    """
    told: Any = choice.get("prompt_logprobs")
    last: Any = (choice.get("logprobs") or {}).get("top_logprobs")
    rows: list[list[tuple[int, float]]] = []
    try:
        for row in told[1:]:
            rows.append([(int(token), float(each["logprob"])) for token, each in row.items()])
        rows.append([(int(token.removeprefix("token_id:")), float(each)) for token, each in last[0].items()])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        rows = []
    rows = [sorted(row, key=lambda each: -each[1])[:TOP] for row in rows]
    if len(rows) != len(job.ids) or any(len(row) < TOP for row in rows):
        raise RedraftError(
            "The server does not tell its law.",
            where=job.name,
            expected=f"{len(job.ids)} rows of {TOP} log probabilities",
            found=f"{len(rows)} rows, the shortest of {min(map(len, rows), default=0)}",
            fix=f"launch it with --max-logprobs {TOP}",
        )
    ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int32)
    return ids, torch.tensor([[logit for _, logit in row] for row in rows])
