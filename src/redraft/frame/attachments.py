"""Small files of a run, kept beside its journal so that they can be sent later, when others lie in their place."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from redraft.frame import atomic
from redraft.frame.store import home

MOST_BYTES = 5 << 20
"""Of one file; a larger one is left out."""
FILES: Mapping[str, Sequence[tuple[str, str]]] = {
    "train": (("artifacts/drafter/*.json", "drafter"),),
    "probe": (("artifacts/samples.txt", ""),),
    "report": (("report.md", ""), ("report/*.svg", "report")),
}
"""By stage, what is kept of it, and the folder of the artifacts that it goes to."""
SERVED = ("probe", "bench")
"""Stages that may have launched servers: the ends of their logs are kept, without secrets."""
CORPORA = {"train": "training", "heldout": "evaluation"}
"""Splits that are inputs of a training, and MLflow's word for what they are for."""
LOG_BYTES = 1 << 20
_SECRET = re.compile(
    r"""(?ix) ( [\w-]* (?: (?:api|access|private)[_-]?key | token | secret[\w-]* | passwo?r?d | authorization ) \b
    ["']? \s* [=:\s] \s* (?:bearer\s+)? ["']? ) [^\s"',}\])]{4,}"""
)
"""Of names that end so: `max_tokens` is none."""
_WITHIN_URL = re.compile(r"//[^/@\s:]+:[^/@\s]+@")


def attach(stage: str, folder: Path, since: float, *, failed: bool = False) -> list[dict[str, str]]:
    """Copy what a stage wrote into `folder`; a line of the journal for each: `file` there, `to` in the artifacts.

    Args:
        stage: its name.
        folder: of this run.
        since: when it began, seconds since 1970: older logs are of another run.
        failed: the logs alone, since what else lies there may be of another run.
    """
    wanted = () if failed else FILES.get(stage, ())
    found = [(path, to) for pattern, to in wanted for path in sorted(Path().glob(pattern))]
    if stage in SERVED:
        logs = sorted((home() / "serve").glob("*.log"))
        found += [(path, f"logs/{stage}") for path in logs if path.stat().st_mtime >= since]
    lines = []
    for path, to in found:
        own, log = folder / to / path.name, path.suffix == ".log"
        if log or path.stat().st_size <= MOST_BYTES:
            atomic.write_bytes(own, without_secrets(_end(path)).encode() if log else path.read_bytes())
            lines.append({"file": str(own), "to": to})
    return lines


def inputs(profile: str) -> list[dict[str, str]]:
    """The corpora that a training reads: name, digest, file and what for, by `dvc.lock`; none where it tells none."""
    try:
        told = yaml.safe_load(Path("dvc.lock").read_text())["stages"]["corpus"]["outs"]
        outs = {out["path"]: out.get("md5") for out in told}
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # not there, or in the middle of a merge
        return []
    files = {split: f"artifacts/corpus/{split}.safetensors" for split in CORPORA}
    return [
        {"name": f"{profile}-{split}", "digest": outs[path], "source": path, "context": CORPORA[split]}
        for split, path in files.items()
        if outs.get(path)
    ]


def without_secrets(text: str) -> str:
    """`text` without values of keys, tokens and passwords, whether of flags, of the environment or of an address."""
    for name, value in os.environ.items():
        if re.search(r"(?i)key|token|secret|password", name) and len(value) >= 8:
            text = text.replace(value, "***")
    return _WITHIN_URL.sub("//***@", _SECRET.sub(r"\1***", text))


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")
