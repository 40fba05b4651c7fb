"""`redraft store`: what lies beside DVC, what uses it, and how it is brought back."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError, some

MANIFEST = Path("artifacts/hidden/manifest.json")
REFS = ("refs/heads", "refs/tags", "refs/remotes", "refs/exps")


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    group = command(commands, "store", "hidden states on disk: list, verify, remove, rebuild", "redraft store ls")
    inner = group.add_subparsers(required=True, metavar="ls | verify | rm | rebuild")
    listed = command(inner, "ls", "what is there, its size, what uses it, what is stale", "redraft store ls")
    listed.add_argument("--json", action="store_true", help="print JSON")
    listed.set_defaults(run=_ls)
    check = command(inner, "verify", "compare every byte with its checksum", "redraft store verify")
    check.add_argument("names", metavar="STATES", nargs="*", help="of `redraft store ls` (default: all)")
    check.set_defaults(run=_verify)
    drop = command(inner, "rm", "remove states that nothing uses", "redraft store rm --stale")
    drop.add_argument("names", metavar="STATES", nargs="*", help="of `redraft store ls`: all of their shards")
    drop.add_argument("--stale", action="store_true", help="every shard that no branch, tag or experiment names")
    drop.add_argument("--force", action="store_true", help="also what is used; `redraft store rebuild` makes it again")
    drop.set_defaults(run=_rm)
    again = command(
        inner, "rebuild", "make the shards that artifacts/hidden/manifest.json names and the store lacks",
        "redraft store rebuild",
    )  # fmt: skip
    again.set_defaults(run=_rebuild)


def _manifests() -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Manifests of the workspace, of running experiments, of every branch, tag and experiment; and whose is not here.

    DVC's cache may lack what a branch names: nobody can tell then which shards it uses.
    """
    from redraft.frame.files import read_object

    found: dict[str, list[dict[str, Any]]] = {}
    unread = [] if Path("dvc.yaml").is_file() else ["this folder, which is no project's root"]
    if MANIFEST.is_file():
        found["workspace"] = [read_object(MANIFEST)]
    for path in Path(".dvc/tmp/exps").glob(f"*/{MANIFEST}"):
        found.setdefault("running experiment", []).append(read_object(path))
    cache = _said(sys.executable, "-m", "dvc", "cache", "dir")
    refs = _said("git", "for-each-ref", "--format=%(refname)", *REFS).splitlines()
    for ref in refs:
        lock = _said("git", "show", f"{ref}:./dvc.lock")
        who = re.sub(r"^refs/(heads|tags|remotes)/", "", ref)
        for digest in re.findall(rf"path: {re.escape(str(MANIFEST))}\n\s+hash: md5\n\s+md5: (\w+)", lock):
            kept = Path(cache) / "files/md5" / digest[:2] / digest[2:]
            if kept.is_file():
                found.setdefault(who, []).append(read_object(kept))
            else:
                unread.append(who)
    return found, unread


def _said(*words: str) -> str:
    """What a command prints; nothing where it fails: no git, no DVC, no such file."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _holdings(names: list[str]) -> list[Any]:
    from redraft.hidden.holdings import holdings

    found = holdings(_manifests()[0])
    unknown = set(names) - {each.pool.name for each in found}
    if unknown:
        raise RedraftError(
            "The store has no such hidden states.",
            where=", ".join(sorted(unknown)),
            found=", ".join(each.pool.name for each in found) or "none",
            fix="redraft store ls",
        )
    return [each for each in found if not names or each.pool.name in names]


def _ls(arguments: argparse.Namespace) -> None:
    from redraft.frame.store import store_root
    from redraft.report.tables import markdown

    rows = []
    for each in _holdings([]):
        facts, stale = each.pool.facts, each.stale
        rows.append(
            {
                "states": each.pool.name,
                "target": facts["target"][:12],
                "kept": f"{facts['kept']}/{facts['law']}",
                "engine": f"{facts['engine']['name']} {facts['engine']['release']}",
                "shards": len(each.shards),
                "tokens": sum(shard.tokens for shard in each.shards.values()),
                "bytes": each.bytes,
                "stale": sum(shard.bytes for shard in stale),
                "used by": each.used_by,
            }
        )
    beside = (path for path in sorted(store_root().glob("*")) if path.is_dir() and path.name != "hidden")
    other = {path.name: _size(path) for path in beside}
    if arguments.json:
        print(json.dumps({"store": str(store_root()), "hidden": rows, "other": other}, indent=2))
        return
    print(f"{store_root()}")
    told = [
        {**row, "bytes": _told(row["bytes"]), "stale": _told(row["stale"]), "used by": ", ".join(row["used by"]) or "–"}
        for row in rows
    ]
    print(markdown(tuple(told[0]), [tuple(map(str, row.values())) for row in told]) if told else "no hidden states")
    for name, size in other.items():
        print(f"{name}/: {_told(size)}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _told(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _verify(arguments: argparse.Namespace) -> None:
    found = _holdings(arguments.names)
    faults = [fault for each in found for fault in each.damaged()]
    for fault in faults:
        print(f"{fault}\n")
    print(f"{sum(len(each.shards) for each in found)} shards, {len(faults)} damaged or missing")
    if faults:
        sys.exit(1)


def _rm(arguments: argparse.Namespace) -> None:
    if bool(arguments.names) == arguments.stale:
        raise RedraftError(
            "Say what to remove.", where="redraft store rm", expected="names of `redraft store ls`, or --stale"
        )
    freed, unread = 0, _manifests()[1]
    if arguments.stale and unread and not arguments.force:
        raise RedraftError(
            "What uses the states cannot be told.",
            where="redraft store rm --stale",
            found=f"no manifest of {some(unread)} in DVC's cache",
            fix="run it at the project's root, after dvc fetch --all-branches --all-tags; --force takes them as unused",
        )
    for each in _holdings(arguments.names):
        if arguments.stale:
            if (others := each.pool.users()) and not arguments.force:  # of those only the last extraction is known
                raise RedraftError(
                    "Other workspaces make hidden states here.",
                    where=each.pool.name,
                    found=some(sorted(others)),
                    fix="ask whose they are; --force keeps what their last extraction names, and removes the rest",
                )
            freed += each.remove([shard.name for shard in each.stale]) if each.stale else 0
            continue
        if each.used_by and not arguments.force:
            raise RedraftError(
                "These hidden states are used.",
                where=each.pool.name,
                found=", ".join(each.used_by),
                fix="--stale removes what nothing names; --force these too, and redraft store rebuild makes them again",
            )
        freed += each.remove(list(each.shards))
    print(f"removed {_told(freed)}")


def _rebuild(arguments: argparse.Namespace) -> None:
    from redraft.corpus.corpus import read_corpus
    from redraft.frame.advice import rerun
    from redraft.frame.params import load_config
    from redraft.hidden.extract import extract_folder
    from redraft.hidden.holdings import absent, use
    from redraft.hidden.rows import read_manifest

    manifest, profile = read_manifest(MANIFEST), load_config().profile
    use(manifest)
    missing = absent(manifest)
    if not missing:
        print(f"nothing to make: all {len(manifest['shards'])} shards are there")
        return
    corpora = {split: read_corpus(Path(f"artifacts/corpus/{split}.safetensors")) for split in manifest["splits"]}
    made = extract_folder(Path("artifacts/target"), corpora, profile, like=manifest).manifest
    for split, told in made["splits"].items():  # another machine's check may have found another last digit
        told["recheck_difference"] = manifest["splits"][split].get("recheck_difference")
    if made != manifest:
        raise RedraftError(
            "The states that this machine makes are not those of the manifest.",
            where=MANIFEST,
            found=", ".join(name for name in made if made[name] != manifest.get(name)),
            cause="another processor, GPU or release rounds otherwise; or target, corpus or profile changed",
            fix=f"to train on this machine's: {rerun('extract')}",
        )
    print(f"made {len(missing)} shards: the store has what {MANIFEST} names")
