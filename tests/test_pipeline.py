"""The DVC file: code deps cover what each stage imports, and nothing that is not for git gets into it."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("*.py"))
PACKAGE = SRC / "redraft"
FRAME = PACKAGE / "frame"  # decides how a stage runs, not what it makes: an edit must not make a training stale
MOST_OF_A_ROOM = 0.6
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def imported(path: Path) -> set[Path]:
    """First-party modules that `path` imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            file = SRC / (name.replace(".", "/") + ".py")
            if name.split(".")[0] == "redraft" and file.is_file():
                found.add(file)
    return found


def closure(path: Path) -> set[Path]:
    """Every first-party module that a run of `path` can execute, the frame aside."""
    seen: set[Path] = set()
    left = [path]
    while left:
        for file in imported(left.pop()) - seen:
            if FRAME not in file.parents:
                seen.add(file)
                left.append(file)
    return seen


def modules(folder: Path) -> set[Path]:
    return {file for file in folder.glob("*.py") if file.name != "__init__.py"}


def code_deps(stage: str) -> set[str]:
    """The stage's script, the rooms that it runs most of, and of the others the files that it runs."""
    if DVC[stage].get("always_changed"):
        return {f"stages/{stage}.py"}
    run = closure(ROOT / "stages" / f"{stage}.py")
    rooms = {path.parent for path in run} - {PACKAGE}
    whole = {room for room in rooms if len(modules(room) & run) >= MOST_OF_A_ROOM * len(modules(room))}
    files = {path for path in run if path.parent not in whole}
    return {f"stages/{stage}.py", *(str(path.relative_to(ROOT)) for path in whole | files)}


@pytest.mark.parametrize("stage", STAGES)
def test_code_deps_are_what_the_stage_imports(stage: str) -> None:
    assert {dep for dep in DVC[stage]["deps"] if dep.startswith(("src/", "stages/"))} == code_deps(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_reads_and_writes_is_declared(stage: str) -> None:
    text = (ROOT / "stages" / f"{stage}.py").read_text()
    outs = [next(iter(out)) if isinstance(out, dict) else out for out in DVC[stage].get("outs", [])]
    declared = [*DVC[stage]["deps"], *outs]
    for used in re.findall(r"\"(artifacts/[^\"{]*)", text):
        assert any(used.startswith(name) or name.startswith(used) for name in declared), used
    entries = [entry for entry in DVC[stage].get("params", []) if isinstance(entry, dict)]
    listed = {name.split(".")[0] for entry in entries for names in entry.values() for name in names}
    if "artifacts/target" in declared:
        listed.add("target")  # how the target is read; what it is comes with the artefact
    used_sections = set(re.findall(r"config\.profile\.(\w+)", text)) | ({"train"} if "config.fit()" in text else set())
    assert used_sections <= listed or DVC[stage].get("always_changed")


def test_every_stage_script_is_in_the_pipeline() -> None:
    assert set(DVC) == set(STAGES)


def test_what_dvc_does_not_cache_is_kept_in_git() -> None:
    uncached = [
        path
        for stage in DVC.values()
        for kind in ("outs", "metrics", "plots")
        for out in stage.get(kind, [])
        if isinstance(out, dict)
        for path, options in out.items()
        if options.get("cache") is False
    ]
    ignored = subprocess.run(["git", "check-ignore", *uncached], cwd=ROOT, capture_output=True, text=True, check=False)
    assert uncached
    assert ignored.stdout == ""


def test_bytecode_is_no_dependency() -> None:
    assert {"__pycache__/", "*.pyc"} <= set((ROOT / ".dvcignore").read_text().split())


@pytest.mark.parametrize("profile", sorted(path.name for path in (ROOT / "profiles").glob("*.yaml")))
def test_no_parameter_has_a_name_that_the_run_cache_leaves_out(profile: str) -> None:
    # DVC takes `size` and `nfiles` for file facts wherever they stand: another value would bring back an old run
    text = (ROOT / "profiles" / profile).read_text() + (ROOT / "params.yaml").read_text()
    assert not re.findall(r"(?<![\w-])(size|nfiles):", text)
