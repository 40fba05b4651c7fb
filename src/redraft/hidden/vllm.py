"""The engine `vllm`: documents as ids to servers with vLLM's hidden-state connector, states back as files.

vLLM's state k is the residual stream after the 0-based layer k-1, which is the input of layer k: our ids go in as they
are (`EagleModelMixin` in `models/interfaces.py`, `deepseek_v2.py` for Kimi; read in 0.32.0). State `depth` leaves the
last layer, before the final norm, which is applied here. State 0 is the embedding, which is looked up here: DeepSeek's
model fails when it is asked for it.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.frame.device import compute_device, resolve
from redraft.frame.errors import RedraftError
from redraft.frame.http import ReplyError, parsed
from redraft.frame.profile import Profile
from redraft.hidden.alike import apart
from redraft.hidden.engine import Engine, Opening, States
from redraft.hidden.transfer import TransferError, take_states
from redraft.hidden.vllm_reply import Asked, Reply, checked, failed, law_of
from redraft.hidden.vllm_servers import SECTION, TOP, StateServer, StateServers, identity_of, release_of
from redraft.target.ends import Ends, read_ends
from redraft.target.facts import read_facts
from redraft.target.model import DTYPES
from redraft.target.norm import FinalNorm, final_norm

PATH = "/v1/completions"
PROBE_TOKENS = 16
DEATH_SECONDS = 1.0
"""A connection breaks a little before its process is gone."""
ALIKE = 0.1
"""Relative difference that two servers may have: rounding in bf16 is a few hundredths, the next layer some tenths."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
_BUSY = (408, 429)
_ROWS = 256
"""States whose logits are computed at once."""


def opening(folder: Path, profile: Profile) -> Opening:
    """The engine for the target in `folder`; nothing is started yet.

    The target's final norm must be a plain RMSNorm of a known model (`redraft.target.norm.PLAIN`). Where a release
    gives no state `depth` and `extract.law` is `top64`, the server's own law is taken: `top_ids` and `top_logits`,
    which are log probabilities, so logits less a constant; `unnormed` is not there then.

    Raises:
        RedraftError: no vLLM in the interpreter, or a server to join that does not answer.
    """
    params = profile.extract.server
    assert params is not None
    release = release_of(params)

    @contextmanager
    def opened(layers: Sequence[int]) -> Iterator[Engine]:
        ends, facts = read_ends(folder), read_facts(folder)
        norm = final_norm(folder, ends.norm, profile.target.trust_remote_code)
        servers = StateServers(folder, facts, profile, release, layers)
        try:
            yield VllmEngine(servers, ends, norm)
        finally:
            servers.close()

    return Opening(identity_of(params, release), opened)


class VllmEngine:
    """Documents in flight at some servers; see `Engine`."""

    def __init__(self, servers: StateServers, ends: Ends, norm: FinalNorm) -> None:
        self.servers, self.params, self.norm = servers, servers.params, norm
        self.dtype, self.depth = DTYPES[self.params.dtype], servers.facts.depth
        device = compute_device()
        fast = self.dtype if device.type == "cuda" or resolve("auto") == "bf16" else torch.float32
        self.head, self.embed = ends.head.to(device, fast), ends.embed
        self.final = True
        """Whether the servers give the final state."""

    def states(
        self, groups: Sequence[Sequence[Tensor]], layers: Sequence[int], *, around: bool = False
    ) -> Generator[tuple[int, int, States]]:
        """See `Engine`; bits depend on what a server batches a document with.

        Raises:
            RedraftError: besides, states or a token that cannot be this document's.
        """
        jobs = [Asked(group, place, ids) for group, each in enumerate(groups) for place, ids in enumerate(each)]
        if not jobs:
            return
        top64 = self.servers.profile.extract.law == "top64"
        self.servers.require([*sorted(set(layers) - {0}), self.depth], [self.depth] if top64 else [])
        self._check_lengths(jobs)
        ids = jobs[0].ids.repeat(PROBE_TOKENS)  # never one token first: vLLM 0.32 for CPUs dies of that in bf16 on AMX
        self._probe(ids[: min(PROBE_TOKENS, *(server.longest for server in self.servers.servers))], top64)
        for job, reply in self._replies(jobs):
            yield job.group, job.place, self._finished(job, reply, layers, around)

    def _check_lengths(self, jobs: list[Asked]) -> None:
        most = min(server.longest for server in self.servers.servers)
        longest = max(jobs, key=lambda job: len(job.ids))
        if len(longest.ids) > most:
            raise RedraftError(
                "A document is longer than a server takes.",
                where=longest.name,
                expected=f"at most {most} tokens: max-model-len, less the one that is generated",
                found=len(longest.ids),
                fix="a longer max-model-len (extract.server.flags), or a shorter corpus.max_length",
            )

    def _probe(self, ids: Tensor, top64: bool) -> None:
        """Ask every server for a few tokens: how many states does it give, and do servers agree?"""
        self.final, layers = self.depth in self.servers.layers, self.servers.layers
        first: Tensor | None = None
        for server in self.servers.servers:
            states = self._patiently(server, Asked(0, 0, ids))
            found = states.shape[1] if states.ndim == 3 else 0
            one_fewer = found == len(layers) - 1 and self.depth in layers
            if found != len(layers) and not (one_fewer and top64):
                raise RedraftError(
                    "The server gives another number of states than it was asked for.",
                    where=server.name,
                    expected=f"{len(layers)}: {list(layers)}",
                    found=found,
                    cause="this release lacks the state after the last layer (vllm-project/vllm#46788)"
                    if one_fewer
                    else "it was launched with other layers than the profile says, or keeps equal ones once",
                    fix="a newer vLLM; or extract.law: top64, which takes the server's own law"
                    if one_fewer
                    else f"correct {SECTION}.layers, or launch it with them",
                )
            self.final = self.final and not one_fewer
            first = states.float() if first is None else first
            if first.shape != states.shape or not (gap := apart(first, states)) <= ALIKE:
                raise RedraftError(
                    "The servers give different states of the same tokens.",
                    where=f"{self.servers.servers[0].name} and {server.name}",
                    expected=f"one shape, and a relative difference of at most {ALIKE}",
                    found=f"{list(first.shape)} and {list(states.shape)}"
                    + (f", difference {gap:.3g}" if first.shape == states.shape else ""),
                    cause="they were launched with different layers, or serve different weights",
                )

    def _patiently(self, server: StateServer, job: Asked) -> Tensor:
        """The states in the file of one document, asked for as often as any."""
        while True:
            try:
                return self.ask(server, job, law=False)[1]["hidden_states"].clone()
            except (ReplyError, TransferError) as fault:
                self._require_hope(server, job, fault)
                job = job.again
                time.sleep(FIRST_PAUSE)

    def _replies(self, jobs: list[Asked]) -> Iterator[tuple[Asked, Reply]]:
        """Every document with what came back; twice as many are held as are in flight.

        Threads wait for the servers and check what they give. They die with the process: an interrupt does not wait.
        """
        asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        found: queue.SimpleQueue[tuple[Asked, Reply] | BaseException] = queue.SimpleQueue()
        stopped = threading.Event()

        def work(server: StateServer) -> None:
            pause = FIRST_PAUSE
            while (job := asked.get()) is not None:
                try:
                    found.put((job, self._reply(server, job)))
                    pause = FIRST_PAUSE
                except (ReplyError, TransferError) as fault:
                    try:
                        self._require_hope(server, job, fault)
                    except RedraftError as error:
                        found.put(error)
                    else:
                        asked.put(job.again)
                        stopped.wait(pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
                except BaseException as error:
                    found.put(error)

        servers, each = self.servers.servers, self.params.concurrency
        for server in servers * each:
            threading.Thread(target=work, args=(server,), daemon=True).start()
        left, ahead, oldest = Counter(job.group for job in jobs), 0, jobs[0].group
        try:
            for done in range(len(jobs)):
                while ahead < len(jobs) and ahead - done < 2 * each * len(servers) and jobs[ahead].group <= oldest + 1:
                    asked.put(jobs[ahead])
                    ahead += 1
                result = found.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
                left[result[0].group] -= 1
                while not left[oldest] and oldest < jobs[-1].group:
                    oldest += 1
        finally:
            stopped.set()
            for _ in range(len(servers) * each):
                asked.put(None)

    def _require_hope(self, server: StateServer, job: Asked, fault: ReplyError | TransferError) -> None:
        """Give up a document that was asked for often enough, a request that is refused, and a server that is gone."""
        if server.process is not None and isinstance(fault, ReplyError) and fault.status is None:
            time.sleep(DEATH_SECONDS)
        server.require_alive()
        status = fault.status or 0 if isinstance(fault, ReplyError) else 0
        if (400 <= status < 500 and status not in _BUSY) or job.failed >= self.params.retries:
            raise failed(server.name, job, fault) from fault

    def ask(self, server: StateServer, job: Asked, law: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The reply's one choice, and what lies in its file.

        Raises:
            ReplyError, TransferError: as they say; asked again, it may be well.
            RedraftError: a server that gives no states at all.
        """
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": job.ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "repetition_penalty": 1.0,  # else generation_config.json of the target decides
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
        }
        if law:
            body |= {"logprobs": TOP, "prompt_logprobs": TOP, "return_tokens_as_token_ids": True}
        reply = parsed(server.client.post(PATH, body), PATH)
        try:
            choice, told = reply["choices"][0], (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ReplyError("The server sent another reply.", f"{PATH}: {str(reply)[:200]}") from error
        if not isinstance(told, str):
            raise RedraftError(
                "The server gives no hidden states.",
                where=server.name,
                expected="kv_transfer_params.hidden_states_path in the reply",
                found=reply.get("kv_transfer_params"),
                fix="launch it with the connector and the method extract_hidden_states: docs/hidden.md",
            )
        return choice, take_states(server.place(told), self.params.request_seconds)

    def _reply(self, server: StateServer, job: Asked) -> Reply:
        choice, data = self.ask(server, job, law=not self.final)
        layers = self.servers.layers if self.final else tuple(set(self.servers.layers) - {self.depth})
        reply = checked(job, server.name, choice, data, sorted(layers), self.dtype, self.servers.facts.hidden)
        return reply if self.final else replace(reply, law=law_of(job, choice))

    def _finished(self, job: Asked, reply: Reply, layers: Sequence[int], around: bool) -> States:
        """The states of a document as `Engine` names them."""
        states: States = {
            f"layer_{layer}": reply.states[layer]
            if layer in reply.states
            else self.embed[job.ids.long()].to(self.dtype)
            for layer in layers
        }
        if reply.law is not None:
            ids, logits = reply.law
            return {**states, "top_ids": ids, "top_logits": logits, "greedy": ids[:, 0].clone()}
        unnormed = reply.states[self.depth]
        final = self.norm(unnormed)
        best = []
        for part in final.split(_ROWS):  # all logits of a document at once are gigabytes
            logits = part.to(self.head) @ self.head.T
            best.append(logits.argmax(-1).int().cpu())
        self._check_token(job, logits[-1].float().cpu(), reply.token)
        return {**states, **({"unnormed": unnormed} if around else {}), "final": final, "greedy": torch.cat(best)}

    def _check_token(self, job: Asked, logits: Tensor, token: int) -> None:
        """The token that the server generated must be the best one here, or as good within the states' rounding."""
        margin = max(4 * torch.finfo(self.dtype).eps, 1e-4) * float(logits.abs().max())
        gap = float(logits.max() - logits[token]) if 0 <= token < len(logits) else float("inf")
        if gap > margin:
            raise RedraftError(
                "The server's next token is not the one that its last state gives.",
                where=job.name,
                expected=f"{int(logits.argmax())}, or a token within {margin:.3g} of its logit",
                found=f"{token}, {gap:.3g} below",
                cause="states of another document or layer, or other weights, final norm or head than the files'",
                fix=f"see that {SECTION}.layers are those of the servers, and that they serve this target",
            )
