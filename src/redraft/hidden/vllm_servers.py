"""vLLM servers that give hidden states: launched here with what they need for it, or joined and looked at."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from packaging.version import InvalidVersion, Version

from redraft.frame.errors import RedraftError, some
from redraft.frame.extraction import StateServerParams
from redraft.frame.files import read_object
from redraft.frame.http import Client, ReplyError, parsed
from redraft.frame.interpreter import installed, interpreter
from redraft.frame.process import ServerProcess, free_port
from redraft.frame.profile import Profile
from redraft.frame.progress import note
from redraft.frame.store import store_root
from redraft.hidden.transfer import transfer_folder
from redraft.target.facts import TargetFacts
from redraft.target.folder import contents, weights_folder

TOP = 64
"""Largest logits of the full vocabulary that are kept where a release gives no final state."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
CONNECTOR = Path(__file__).parent / "connector"
SECTION = "extract.server"
HEALTH_SECONDS = 10.0
OWN_FLAGS = {
    "model", "host", "port", "dtype", "max-num-seqs", "speculative-config", "kv-transfer-config",
    "enable-prefix-caching", "no-enable-prefix-caching",
}  # fmt: skip
"""Flags that are decided here."""
_SAME_NUMBERS = {
    "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "enable-expert-parallel",
    "gpu-memory-utilization", "max-model-len", "max-num-batched-tokens", "enforce-eager", "max-logprobs",
    "distributed-executor-backend", "cpu-offload-gb", "no-enable-chunked-prefill", "enable-chunked-prefill",
    "trust-remote-code", "tokenizer-mode", "safetensors-load-strategy", "disable-log-requests",
    "disable-log-stats", "uvicorn-log-level", "api-server-count",
}  # fmt: skip
"""Flags that decide speed and place, and of the numbers no more than the last bits."""


@dataclass
class StateServer:
    """One server that answers."""

    client: Client
    model: str
    """What it calls the target."""
    longest: int
    """Tokens of a document at most: one is generated besides."""
    folder: Path | None
    """Where its files are seen here; None for the paths that it tells."""
    process: ServerProcess | None = None
    lock: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        """Its address, and its log if it was launched."""
        return f"{self.client.base} ({self.process.log if self.process else 'joined'})"

    def require_alive(self) -> None:
        """Refuse a launched server that has ended, with the cause from its log."""
        if self.process is not None:
            with self.lock:
                self.process.require_alive("while it gave hidden states")

    def place(self, told: str) -> Path:
        """Where the file that it tells of is seen here."""
        return self.folder / Path(told).name if self.folder else Path(told)


def release_of(params: StateServerParams) -> str:
    """The release of vLLM, as it is told: asked of joined servers, else of the interpreter.

    Raises:
        RedraftError: no answer, no vLLM, or joined servers of different releases.
    """
    if params.urls:
        told = {url: str(_ask(Client(url, HEALTH_SECONDS), "/version").get("version")) for url in params.urls}
        if len(set(told.values())) > 1:
            raise RedraftError("The servers are of different releases.", where=f"{SECTION}.urls", found=told)
        return next(iter(told.values()))
    assert params.python is not None
    where, environment = f"{SECTION}.python", {**os.environ, **params.env}
    return installed("vLLM", params.python, where, "join servers by urls", environment)


def identity_of(params: StateServerParams, release: str) -> dict[str, Any]:
    """What decides the states besides weights and ids; a build (`+cpu`) is no other release."""
    with suppress(InvalidVersion):
        release = Version(release).public
    flags = {_dashed(name): value for name, value in params.flags.items() if _dashed(name) not in _SAME_NUMBERS}
    return {"name": "vllm", "release": release, "dtype": params.dtype, **({"flags": flags} if flags else {})}


class StateServers:
    """The servers of one extraction; those that were launched are ended by `close`."""

    def __init__(
        self, target: Path, facts: TargetFacts, profile: Profile, release: str, layers: Sequence[int] = ()
    ) -> None:
        """`release` as `release_of` tells it: a build for CPUs takes another connector. `layers` will be asked for."""
        params = profile.extract.server
        assert params is not None
        self.params, self.facts, self.profile, self.release = params, facts, profile, release
        self.weights = weights_folder(target).absolute()
        self._coming = set(layers) - {0}
        self.layers: tuple[int, ...] = ()
        """States that the running servers give, ascending."""
        self.servers: list[StateServer] = []
        self.folder: Path | None = None
        """Where launched ones hand states over."""
        self._running = ExitStack()
        taken = OWN_FLAGS & {_dashed(flag) for flag in params.flags}
        if taken:
            raise RedraftError(
                "The profile sets a flag that is decided here.",
                where=f"{SECTION}.flags in the profile",
                found=", ".join(sorted(taken)),
                fix="dtype, concurrency and layers have keys of their own; prefix caching loses states",
            )

    def require(self, layers: Sequence[int], optional: Sequence[int] = ()) -> None:
        """Have servers that give the states `layers`; a list of the profile may lack what of them is `optional`.

        Raises:
            RedraftError: a server that does not come up or serves something else, or joined ones that lack a state.
        """
        asked, given = set(layers), self.params.layers
        needed = asked - (set(optional) if given is not None else set())
        if self.servers and needed <= set(self.layers):
            return
        if self.params.urls:
            self._join(sorted(needed | self._coming))
        else:
            self.close()
            self._launch(tuple(sorted(needed | self._coming | set(self.layers) | set(given or ()))))

    def close(self) -> None:
        """End what was launched and remove the folder of the transfer."""
        self.servers = []
        self._running.close()

    def _join(self, needed: list[int]) -> None:
        assert self.params.layers is not None
        self.layers = tuple(sorted(self.params.layers))
        if lacking := sorted(set(needed) - set(self.layers)):
            raise RedraftError(
                "The joined servers do not give all states that are needed.",
                where=f"{SECTION}.layers in the profile",
                expected=sorted({*self.layers, *needed}),
                found=f"{list(self.layers)}: no {some(lacking)}",
                fix=f"start them again with these layers: {' '.join(self.command('HOST', 8000, 'FOLDER', needed))}",
            )
        for url in self.params.urls:
            client = Client(url, self.params.request_seconds)
            self._running.callback(client.close)
            folder = Path(self.params.folder) if self.params.folder else None
            if folder and not folder.is_dir():
                raise RedraftError(
                    "The folder of the transfer is not there.",
                    where=f"{SECTION}.folder in the profile",
                    found=folder,
                    fix="mount it, or name it as this process sees it",
                )
            server = StateServer(client, "", 0, folder)
            self._look(server)
            self.servers.append(server)

    def _launch(self, layers: tuple[int, ...]) -> None:
        params, facts = self.params, self.facts
        width = {"bf16": 2, "fp32": 4}[params.dtype]
        need = params.servers * params.concurrency * self.profile.corpus.max_length * len(layers) * facts.hidden * width
        self.folder = self._running.enter_context(transfer_folder(params.folder, need))
        self.layers, started = layers, list[StateServer]()
        for number in range(params.servers):
            port = free_port()
            devices = {"CUDA_VISIBLE_DEVICES": params.devices[number]} if params.devices else {}
            paths = os.pathsep.join(filter(None, [str(CONNECTOR), params.env.get("PYTHONPATH")]))
            usual = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONFAULTHANDLER": "1"}
            environment = {**usual, **params.env, **devices, "PYTHONPATH": paths}
            log = store_root() / "serve" / f"vllm-states-{number}.log"
            command = self.command("127.0.0.1", port, str(self.folder), layers)
            process = ServerProcess(command, environment, log, SECTION)
            self._running.callback(process.stop)
            client = Client(f"http://127.0.0.1:{port}", params.request_seconds)
            self._running.callback(client.close)
            started.append(StateServer(client, "", 0, None, process))
        for server in started:
            assert server.process is not None
            server.process.wait(partial(_healthy, server.client), params.ready_seconds)
            self._look(server)
        self.servers = started

    def command(self, host: str, port: int, folder: str, layers: Sequence[int]) -> list[str]:
        """The words that start a server which gives the states `layers` in `folder`."""
        params = self.params
        context, most = self.profile.corpus.max_length + 1, self.facts.fields.get("max_position_embeddings")
        context = min(context, most) if isinstance(most, int) else context
        draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
        own = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "redraft_cpu_states"}
        transfer = {
            **(own if "cpu" in self.release else {"kv_connector": "ExampleHiddenStatesConnector"}),
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        flags: dict[str, Any] = {
            "host": host,
            "port": port,
            "dtype": DTYPES[params.dtype],
            "max-model-len": context,
            "max-num-batched-tokens": max(self.profile.extract.batch_tokens, context),
            "max-num-seqs": params.concurrency,
            "max-logprobs": TOP,
            "no-enable-prefix-caching": True,
            "no-enable-chunked-prefill": True,
            "trust-remote-code": bool(self.profile.target.trust_remote_code),
            **{_dashed(name): value for name, value in params.flags.items()},
            "speculative-config": json.dumps(speculation, separators=(",", ":")),
            "kv-transfer-config": json.dumps(transfer, separators=(",", ":")),
        }
        given = [(f"--{name}", value) for name, value in flags.items() if value is not False]
        words = [[name] if value is True else [name, str(value)] for name, value in given]
        start = [interpreter(params.python or "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(self.weights)]
        return [*start, *(word for each in words for word in each)]

    def _look(self, server: StateServer) -> None:
        """Take the name and the longest prompt that it tells, and hold its weights against the target's."""
        told = _ask(server.client, "/v1/models")
        cards = told.get("data")
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        if not isinstance(card.get("id"), str) or not isinstance(card.get("max_model_len"), int):
            raise RedraftError(
                "The server does not tell what it serves.",
                where=f"{server.name}/v1/models",
                expected="id and max_model_len of a vLLM server",
                found=str(told)[:300],
                fix="give the address of the server itself, not of a gateway before it",
            )
        server.model, server.longest = card["id"], card["max_model_len"] - 1
        if server.process is not None:
            return
        root = Path(str(card.get("root") or server.model))
        if not root.is_dir():
            note(f"{server.client.base} serves {root}, which is not seen here: that it has this target's weights, and "
                 f"gives the states {list(self.layers)}, is taken at the profile's word")  # fmt: skip
        elif root.resolve() != self.weights.resolve() and contents(root) != contents(self.weights):
            mine, its = (read_object(each / "config.json").get("architectures") for each in (self.weights, root))
            raise RedraftError(
                "The joined server has other weights.",
                where=server.name,
                expected=f"{self.weights} ({mine})",
                found=f"{root} ({its})",
                fix="join a server of this target",
            )


def _ask(client: Client, path: str) -> dict[str, Any]:
    try:
        found = parsed(client.get(path, HEALTH_SECONDS), path)
        if isinstance(found, dict):
            return found
        fault = ReplyError("The server tells nothing of itself.", f"{path}: {found}")
    except ReplyError as error:
        fault = error
    raise RedraftError(
        "The server does not answer." if fault.status is None else "This is no vLLM server.",
        where=client.base,
        found=f"{fault.what} {fault.found}",
        fix=f"start it, or correct {SECTION}.urls in the profile",
    ) from fault


def _healthy(client: Client) -> bool:
    try:
        client.get("/health", HEALTH_SECONDS)
    except ReplyError:
        return False
    return True


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
