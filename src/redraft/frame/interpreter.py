"""Another interpreter, of an environment that has a serving engine."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from redraft.frame.errors import RedraftError


def interpreter(python: str) -> str:
    """Relative to the project, so that a change of directory does not matter; a bare name is looked up on PATH."""
    path = Path(python).expanduser()
    return str(path.absolute()) if "/" in python else python


def installed(package: str, python: str, where: str, otherwise: str, env: Mapping[str, str] = os.environ) -> str:
    """The version of `package` in the interpreter `python`.

    Args:
        package: its name, as people write it.
        python: path of an interpreter, or a name on PATH.
        where: the parameter that names it.
        otherwise: what to do without one.
        env: what the interpreter runs in.

    Raises:
        RedraftError: no such interpreter, or no such package in it.
    """
    asked = f"from importlib.metadata import version; print(version('{package.lower()}'))"
    try:
        done = subprocess.run([interpreter(python), "-c", asked], env=env, capture_output=True, text=True, check=False)
        reason = (done.stderr.strip().splitlines() or [""])[-1]
    except OSError as error:
        done, reason = None, str(error.strerror)
    if done is None or done.returncode:
        raise RedraftError(
            f"There is no {package} in the interpreter.",
            where=f"{where} in the profile: {python}",
            found=reason,
            fix=f"give the interpreter of an environment that has it, or {otherwise}",
        )
    return done.stdout.strip()
