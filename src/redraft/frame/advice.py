"""What to do next, in commands that hold where they are read."""

import os
from pathlib import Path

from redraft.frame.errors import RedraftError
from redraft.frame.section import read_object


def rerun(stage: str) -> str:
    """How to run one stage again and then what follows.

    Inside `dvc exp run -S profile=mine` params.yaml may name another profile by the time that the advice is followed.
    """
    commands = f"dvc repro --force --single-item {stage}, then dvc repro"
    if not os.environ.get("DVC_EXP_NAME"):
        return commands
    try:
        profile = read_object(Path("params.yaml")).get("profile")
    except RedraftError:
        return commands
    return f"make sure that params.yaml says `profile: {profile}` (a failed experiment may not leave it so), {commands}"
