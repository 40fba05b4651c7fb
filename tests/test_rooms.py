"""The rooms of the package: who may import whom, and that docs/architecture.md draws the map as it is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/redraft"
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if (path.parent != PACKAGE or path.name != "__init__.py") and path.parent.name != "kimi_tokenizer"
)  # that folder is laid into a target, and nobody imports it
MAP = re.findall(r"^\| `(\w+)(?:/|\.py)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "docs/architecture.md").read_text(), re.M)
ORDER = [room for room, _, _ in MAP]
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.split(".")[0] == "redraft"}
    return found


def test_the_map_has_every_room() -> None:
    assert set(ORDER) == {room(path) for path in MODULES}
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_upwards(path: Path) -> None:
    place = ORDER.index(room(path))
    for other in imports(path) - {room(path)}:
        assert ORDER.index(other) > place, f"{path} imports {other}, which is not below {room(path)}"


@pytest.mark.parametrize(("name", "told", "below"), MAP, ids=ORDER)
def test_the_map_is_true(name: str, told: str, below: str) -> None:
    files = [path for path in MODULES if room(path) == name]
    if files != [PACKAGE / f"{name}.py"]:
        assert set(re.findall(r"`(\w+)`", told)) == {path.stem for path in files} - {"__init__", "__main__"}
    used = set().union(*map(imports, files)) - {name, "frame"}
    assert re.findall(r"\w+", below.replace("–", "")) == [room for room in ORDER if room in used]


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / "stages").glob("*.py")], ids=lambda path: str(path.name))
def test_house_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MOST_LINES_OF_A_FUNCTION, node.name
