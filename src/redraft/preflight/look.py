"""What a target would lack later, told before its weights are fetched: packages, classes, permissions, disk, memory."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from redraft.frame.errors import RedraftError
from redraft.frame.gpus import gpus
from redraft.frame.params import Config
from redraft.target.code import PARTS, allows, named_class, own_class
from redraft.target.config import aux_layers_at, library_class, read_config, require_served
from redraft.target.facts import TargetFacts, read_facts
from redraft.target.hf import asking_transformers, offline_transformers
from redraft.target.norm import require_plain_norm
from redraft.target.weights import weight_files

_PACKED = "compressed-tensors"
"""Weights that transformers unpacks to bf16 when they are used; of other kinds it keeps the bits."""
_MOST_GROWTH = 8
"""How many times larger packed weights can get, from 2 bits to bf16."""


def look(folder: Path, coming: dict[str, int], config: Config) -> list[str]:
    """Lines of what is known and of what may be missing, from the files beside a target's weights.

    Args:
        folder: with configuration, tokenizer and template; weights may lie there too.
        coming: bytes of each weight file that is still to be fetched into it.
        config: of the run.

    Raises:
        RedraftError: what is certain to fail later: a drafter, two sets of weights, a model or a tokenizer that cannot
            be made here, no template, code that may not run, or no room on disk or in memory.
    """
    from redraft.corpus.tokenizer import load_tokenizer

    trust = config.profile.target.trust_remote_code
    require_served(folder)
    files = weight_files(folder, coming)
    require_described(folder, config)
    load_tokenizer(folder, trust)
    described = read_config(folder, trust)
    size = sum(coming[file.name] if file.name in coming else file.stat().st_size for file in files)
    return [
        *_code(folder, config),
        *_releases(folder),
        *([require_disk(folder, coming)] if coming else []),
        *(_require_quantiser(folder, described) if _in_process(config) else ()),
        *require_memory(folder, size, config),
    ]


def require_described(folder: Path, config: Config) -> TargetFacts:
    """The facts of a target, held against the profile and its tokenizer's files; no weights, and no code runs.

    Raises:
        RedraftError: no sizes, aux layers or a draft vocabulary that do not fit them, no tokenizer, or one whose code
            is missing or may not run.
    """
    facts, params = read_facts(folder), config.profile.target
    aux_layers_at(facts.depth, params.aux_layers)
    extract = config.profile.extract
    if extract.engine == "vllm" or (extract.dumps is not None and extract.dumps.final == "unnormed"):
        require_plain_norm(folder)
    if config.profile.vocab.slots > facts.vocab:
        raise RedraftError(
            "The draft vocabulary is larger than the target's.",
            where="vocab.slots in the profile",
            expected=f"at most {facts.vocab} (vocab_size in {folder / 'config.json'})",
            found=config.profile.vocab.slots,
        )
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("*.model")):
        raise RedraftError(
            "The target has no tokenizer.",
            where=folder,
            expected="tokenizer.json or tokenizer_config.json",
            fix="copy the tokenizer's files of the model there",
        )
    own_class(folder, params.trust_remote_code)
    return facts


def require_disk(folder: Path, coming: dict[str, int]) -> str:
    """One line on the room that the weights `coming` need in the hub's cache, where `folder` lies.

    Raises:
        RedraftError: there is less.
    """
    begun = sum(file.stat().st_size for file in (folder.parent.parent / "blobs").glob("*.incomplete"))
    needed, free = sum(coming.values()) - begun, shutil.disk_usage(folder).free
    if needed > free:
        raise RedraftError(
            "The target's weights do not fit the disk.",
            where=folder,
            expected=f"{_gb(needed)} free, for {len(coming)} files",
            found=f"{_gb(free)} free",
            fix="free some room, or move the hub's cache: HF_HOME",
        )
    return f"{len(coming)} files of weights to fetch, {_gb(needed)}; {_gb(free)} are free"


def require_memory(folder: Path, size: int, config: Config) -> list[str]:
    """Whether weights of `size` bytes on disk fit the GPUs and the RAM of this machine, if this process must hold them.

    Raises:
        RedraftError: they are larger than all of it.
    """
    if not _in_process(config):
        return []
    facts, (free, most) = read_facts(folder), _memory()
    needed = size // 2 if facts.dtype == "float32" else size
    quantised = facts.top.get("quantization_config") or facts.fields.get("quantization_config") or {}
    unpacked = quantised.get("quant_method") == _PACKED
    if unpacked and needed <= most < needed * _MOST_GROWTH:
        needed = _bf16(folder, config)
    told = f"{_gb(needed)} of weights in this process{', unpacked to bf16,' if unpacked else ''}"
    if needed > most:
        raise RedraftError(
            "The target does not fit this machine's memory.",
            where=folder,
            expected=told,
            found=f"{_gb(most)} of GPUs and RAM together",
            fix="let servers hold it: extract.engine: vllm, engine: sglang, probe.parity: walk; or a larger machine",
        )
    return [f"{told}; {_gb(free)} of GPUs and RAM are free"] if needed > free else []


def _in_process(config: Config) -> bool:
    """Whether a stage of this run loads the whole target."""
    profile = config.profile
    return profile.extract.engine == "transformers" or "torch" in (config.params.engine, profile.probe.parity)


def _memory() -> tuple[int, int]:
    """Bytes of GPUs and RAM: free now, and in all."""
    import psutil

    ram = psutil.virtual_memory()
    free, most = ram.available, ram.total
    for number in range(gpus()):
        import torch

        here = torch.cuda.mem_get_info(number)
        free, most = free + here[0], most + here[1]
    return free, most


def _bf16(folder: Path, config: Config) -> int:
    """Bytes of the whole model in bf16, counted on its class without any weights."""
    import torch

    from redraft.target.model import model_class

    trust = config.profile.target.trust_remote_code
    described = read_config(folder, trust)
    with asking_transformers("target without weights", folder, allows(trust, "model")), torch.device("meta"):
        model = model_class(folder, trust)(described)
    return 2 * sum(weight.numel() for weight in model.parameters())


def _code(folder: Path, config: Config) -> Iterator[str]:
    """Which of the folder's own code runs, and what is taken in place of the rest.

    Raises:
        RedraftError: the model's is needed in this process, and may not run.
    """
    from redraft.target.model import model_class

    trust, library = config.profile.target.trust_remote_code, library_class(folder)
    if _in_process(config):
        model_class(folder, trust)
    for part in PARTS:
        named = named_class(folder, part)
        if named is None:
            continue
        instead = library if part != "tokenizer" else None
        runs = f"runs: {named}" if allows(trust, part) else f"may not run: {named}"
        yield f"the {part}'s own code " + (f"is not needed: transformers has {instead}" if instead else runs)


def _releases(folder: Path) -> Iterator[str]:
    saved, here = str(read_facts(folder).top.get("transformers_version")), offline_transformers().__version__
    with suppress(InvalidVersion):
        if Version(saved) > Version(here):
            yield f"saved by transformers {saved}, and {here} is here: what is newer in it may be missing"


def _require_quantiser(folder: Path, described: Any) -> list[str]:
    """Ask transformers whether it can load weights that are quantised as the configuration says.

    Raises:
        RedraftError: a package is missing.
    """
    parts = (described, described.get_text_config())
    quantised = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if quantised is None:
        return []
    offline_transformers()
    from transformers.quantizers import AutoHfQuantizer

    with asking_transformers("loader of quantised weights", folder, trusted=True):
        try:
            AutoHfQuantizer.from_config(quantised, pre_quantized=True).validate_environment(device_map=None)
        except ImportError:
            raise
        except Exception as error:  # a machine of another kind, for example: only the loading knows for sure
            return [f"quantised weights may not load here: {' '.join(str(error).split())[:200]}"]
    return []


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
