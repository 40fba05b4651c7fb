"""The budget of a run: bytes, hours, FLOPs, memory. Whether it fits is told by `redraft.plan.fits`."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redraft.frame.files import read_object
from redraft.frame.params import Config
from redraft.frame.profile import FitParams
from redraft.frame.section import read_object as read_parameters
from redraft.hidden.sizes import token_bytes
from redraft.plan.here import Here
from redraft.plan.load import Load, memory
from redraft.plan.made import Amount, made_for, measured_rate
from redraft.plan.shape import AUX, Shape, as_dict

FORMATS, LAWS = ("bf16", "fp8"), ("states", "scored", "top64")
GREEDY = 4
"""Bytes a token of the target's own next token, beside its states."""
DISK, NETWORK, FLOPS = 1e9, 1.25e9, 400e12
"""Where no rate is given: bytes/s of a disk and of 10 Gbit/s, FLOP/s of one GPU (two fifths of an H200's in bf16)."""
GRID = (3, 5, 7)
"""Draft steps that memory is told for beside the profile's."""
MANIFEST = "artifacts/hidden/manifest.json"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Rates:
    """Rates that were given, None where none was."""

    extract: float | None = None
    """Tokens a second."""
    flops: float | None = None
    """FLOP/s that training reaches on one GPU."""
    disk: float | None = None
    """Bytes a second."""
    network: float | None = None
    """Bytes a second."""


@dataclass(frozen=True)
class Budget:
    """What a plan is made of."""

    config: Config
    root: Path
    shape: Shape
    amount: Amount
    rates: Rates
    here: Here

    @property
    def fit(self) -> FitParams:
        """The training."""
        return self.config.fit()

    @property
    def processes(self) -> int:
        """World size of the training."""
        return self.config.profile.train.processes

    @property
    def sharded(self) -> bool:
        """Whether the profile's launcher shards weights.

        Raises:
            RedraftError: its file is missing or cannot be read.
        """
        train = self.config.profile.train
        if train.processes == 1 or train.launcher == "torchrun":
            return False
        return bool(read_parameters(self.root / train.launcher).get("distributed_type") == "FSDP")

    def figures(self) -> Figures:
        """Everything by name, for JSON: bytes, seconds, tokens a second, FLOPs."""
        states = self.states()
        return {
            "profile": self.config.params.profile,
            "tokens": asdict(self.amount),
            "shape": as_dict(self.shape),
            "states": states,
            "extraction": self.extraction(),
            "training": self.training(states["bytes"]),
            "memory": self.memory(),
            "disk": self.disk(states["bytes"]),
            "ram": self.ram(),
            "dvc": self.dvc(),
            "variants": [self.variant(kept, law) for kept in FORMATS for law in LAWS],
            "machine": {**asdict(self.here), "store": str(self.here.store)},
        }

    # bytes and times of the states

    def _bytes(self, kept: str, law: str) -> int:
        """Of all hidden states; headers of files and the diagnostic shard, some megabytes, not counted."""
        return self.amount.tokens * (token_bytes(self.shape.hidden, AUX, kept, law, self.amount.scored) + GREEDY)

    def variant(self, kept: str, law: str) -> Figures:
        """What hidden states kept so cost."""
        size = self._bytes(kept, law)
        disk, network = self.rates.disk or DISK, self.rates.network or NETWORK
        return {
            "format": kept,
            "law": law,
            "bytes_per_token": token_bytes(self.shape.hidden, AUX, kept, law, self.amount.scored),
            "bytes": size,
            "disk_seconds": size / disk,
            "network_seconds": size / network,
            "checksum_seconds": size / self.here.sha256,
            "fits": size + self.state <= self.room,
        }

    def states(self) -> Figures:
        """Of the profile's variant."""
        extract = self.config.profile.extract
        given = {"disk": self.rates.disk, "network": self.rates.network}
        assumed = [name for name, rate in given.items() if rate is None]
        return {
            **self.variant(extract.format, extract.law),
            "disk_rate": self.rates.disk or DISK,
            "network_rate": self.rates.network or NETWORK,
            "assumed": assumed,
        }

    def extraction(self) -> Figures:
        """Seconds, by a given or a measured rate; None without one."""
        measured = measured_rate("extract", self.config, self.root)
        rate = self.rates.extract or measured
        source = "given" if self.rates.extract else "measured" if measured else None
        return {"tokens_per_second": rate, "rate": source, "seconds": self.amount.tokens / rate if rate else None}

    # training

    def load(self, supervised: float, fit: FitParams | None = None) -> Load:
        """A micro batch, of `fit` or of the profile's training, of which this share is supervised."""
        return Load.of(self.shape, fit or self.fit, self.config.profile.extract.law, supervised)

    def gpu_bytes(self, fit: FitParams, sharded: bool, supervised: float = 1.0) -> int:
        """Bytes of one GPU."""
        return sum(memory(self.load(supervised, fit), fit, self.processes, sharded).values())

    def training(self, states: int) -> Figures:
        """FLOPs, optimizer steps and seconds of all passes; `states`: bytes that one pass reads, held-out ones among
        them.
        """
        fit, processes = self.fit, self.processes
        load = self.load(self.amount.supervised)
        a_token = load.flops() / load.tokens
        flops = fit.epochs * self.amount.trained * a_token
        per_pass = math.ceil(math.ceil(self.amount.trained / fit.row_tokens) / (fit.batch_tokens // fit.row_tokens))
        measured = None if self.rates.flops else measured_rate("train", self.config, self.root)
        rate = self.rates.flops or FLOPS
        seconds = fit.epochs * self.amount.trained / measured if measured else flops / (rate * processes)
        read = fit.epochs * states / (self.rates.disk or DISK)
        return {
            "steps": max(1, round(fit.epochs * per_pass)),
            "ttt_steps": fit.ttt_steps,
            "epochs": fit.epochs,
            "batch_tokens": fit.batch_tokens,
            "flops": flops,
            "flops_per_token": a_token,
            "processes": processes,
            "rate": "measured" if measured else "given" if self.rates.flops else "assumed",
            "tokens_per_second": measured or rate * processes / a_token,
            "flops_per_second": None if measured else rate,
            "seconds": seconds,
            "gpu_seconds": seconds * processes,
            "read_seconds": read,
        }

    def memory(self) -> Figures:
        """Bytes of one GPU by part, for DDP and FSDP2, at the share supervised and where every token is."""
        fit, processes = self.fit, self.processes
        ways = {"DDP": False, "FSDP2": True} if processes > 1 else {"one process": False}
        columns, totals = [], []
        for way, sharded in ways.items():
            for share in sorted({self.amount.supervised, 1.0}):
                load = self.load(share)
                parts = memory(load, fit, processes, sharded)
                columns.append({"way": way, "supervised": share, "parts": parts, "bytes": sum(parts.values())})
                totals += [
                    {"way": way, "supervised": share, "ttt_steps": steps,
                     "bytes": sum(memory(load.at(steps), fit, processes, sharded).values())}
                    for steps in sorted({fit.ttt_steps, *GRID})
                ]  # fmt: skip
        used = "FSDP2" if self.sharded else next(iter(ways))
        return {"micro_tokens": fit.micro_tokens, "used": used, "columns": columns, "by_steps": totals}

    # what lies on disk and in memory

    @property
    def state(self) -> int:
        """Bytes of saved trainings: weights, moments and the best weights in fp32, twice while one replaces another."""
        return 2 * 16 * self.shape.weights

    @property
    def room(self) -> int:
        """Bytes free at the store, with those that the states of this profile take already."""
        path, there = self.root / MANIFEST, 0
        if path.is_file() and made_for("extract", self.config, self.root):
            told = read_object(path)
            folder = self.here.store / "hidden" / str(told.get("states"))
            files = [folder / f"{shard['name']}.safetensors" for shard in told.get("shards", [])]
            there = sum(file.stat().st_size for file in files if file.is_file())
        return self.here.disk_free + there

    def disk(self, states: int) -> Figures:
        """Bytes at the store."""
        return {"states": states, "training_state": self.state, "bytes": states + self.state, "room": self.room}

    def ram(self) -> Figures:
        """Bytes of RAM of a node that trains with all processes, and of one that extracts."""
        shards = 2 * self.config.profile.extract.shard_mib * 2**20
        return {"training": self.ram_of(self.processes), "extraction": shards}

    def ram_of(self, processes: int) -> int:
        """Bytes of RAM of a node that trains with so many processes on GPUs.

        Each holds two copies of the drafter in fp32; the target's embedding in fp32 and the head's rows until they are
        moved to the GPU; and two steps' batches.
        """
        shape, load = self.shape, self.load(1.0)
        micro = math.ceil(self.fit.batch_tokens / (processes * self.fit.micro_tokens))
        ahead = 2 * (load.batch(micro) - load.batch(0))
        return processes * (8 * shape.weights + (4 * shape.vocab + 2 * shape.slots) * shape.hidden + ahead)

    def dvc(self) -> Figures:
        """Bytes of artefacts that DVC hashes and keeps, once each: three drafters, the corpus, and a target that lies
        in artifacts/.
        """
        target = self.root / "artifacts/target"
        inside = made_for("target", self.config, self.root) and target.is_dir()
        sizes = {
            "drafters": 3 * self.shape.file_bytes,
            "corpus": 5 * self.amount.tokens,
            "target": sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) if inside else 0,
        }
        return {**sizes, "bytes": sum(sizes.values()), "seconds": sum(sizes.values()) / self.here.md5}
