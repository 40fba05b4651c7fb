"""The workflow of pull requests: valid, pinned, safe for forks; its shell runs, the hosted service aside."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github/workflows/ci.yml"
BIN = Path(sys.executable).parent


def job(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"][name]
    return found


def script(name: str, step: str) -> str:
    return next(str(each["run"]) for each in job(name)["steps"] if each.get("name") == step)


@pytest.mark.parametrize(
    "command",
    [
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)],
        ["zizmor", "--offline", "--no-progress", str(WORKFLOW)],
    ],
    ids=lambda command: command[0],
)
def test_the_workflow_is_valid_and_nothing_in_it_can_be_turned_against_us(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_pinned() -> None:
    used = re.findall(r"uses: (\S+)", WORKFLOW.read_text())
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)


def test_only_the_comment_may_write_and_it_runs_nothing_of_the_pull_request() -> None:
    whole = yaml.safe_load(WORKFLOW.read_text())
    assert whole["permissions"] == {"contents": "read"}
    writing = [name for name, each in whole["jobs"].items() if "write" in (each.get("permissions") or {}).values()]
    assert writing == ["comment"]
    comment = job("comment")
    assert "head.repo.full_name == github.repository" in comment["if"]
    assert not any("uses" in step for step in comment["steps"])
    assert "${{" not in script("comment", "One comment, updated")
    assert "pull_request_target" not in WORKFLOW.read_text()


GH = """#!{python}
import json, pathlib, subprocess, sys
store = pathlib.Path("comments.json")
comments = json.loads(store.read_text()) if store.exists() else []
words = sys.argv[1:]
if "--method" not in words:
    found = [each["id"] for each in comments if each["bot"] and each["body"].startswith("<!-- redraft diff -->")]
    print("\\n".join(map(str, found)))
else:
    body = words[words.index("--raw-field") + 1].removeprefix("body=")
    if words[words.index("--method") + 1] == "POST":
        comments.append({{"id": 7, "bot": True, "body": body}})
    else:
        number = int(next(word for word in words if word.startswith("repos/")).rsplit("/", 1)[1])
        next(each for each in comments if each["id"] == number)["body"] = body
    store.write_text(json.dumps(comments))
"""


def test_there_is_one_comment_and_it_is_updated(tmp_path: Path) -> None:
    gh = tmp_path / "gh"
    gh.write_text(GH.format(python=sys.executable))
    gh.chmod(0o755)
    (tmp_path / "comments.json").write_text(json.dumps([{"id": 1, "bot": False, "body": "<!-- redraft diff --> mine"}]))
    places = {"COMMENTS": "repos/o/r/issues/3/comments", "REPOSITORY": "o/r", "GH_TOKEN": "x"}
    for text in ("**ship** $(touch bad) `touch bad`", "**no**\n\n| a |"):
        env = {**os.environ, **places, "TEXT": text, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(
            ["bash", "-e", "-c", script("comment", "One comment, updated")], cwd=tmp_path, env=env, check=True
        )
        comments = json.loads((tmp_path / "comments.json").read_text())
        assert [each["id"] for each in comments] == [1, 7]
        assert comments[1]["body"] == f"<!-- redraft diff -->\n{text}"
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_the_text_reaches_summary_and_output_whether_a_gate_fails_or_not(tmp_path: Path, code: int) -> None:
    redraft = tmp_path / ".venv/bin/redraft"
    redraft.parent.mkdir(parents=True)
    redraft.write_text(f'#!/bin/sh\necho "text of $2 $6"\nexit {code}\n')
    redraft.chmod(0o755)
    told = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_OUTPUT": str(tmp_path / "output")}
    env = {**os.environ, **told, "BASE": "abc", "LINK": "https://host/"}
    done = subprocess.run(
        ["bash", "-e", "-c", script("diff", "What moved against the base")], cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == code
    assert (tmp_path / "summary").read_text() == "text of abc https://host/\n"
    first, text, last = (tmp_path / "output").read_text().splitlines()
    assert first == f"text<<{last}"
    assert text == "text of abc https://host/"
