"""A small hub over HTTP, as far as huggingface_hub asks one: revisions, listings, files with their hashes."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A model: files by commit, and commits by branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    """Told of to everybody, given to nobody."""

    def push(self, folder: Path, branch: str = "main") -> str:
        """Lay the files of `folder` down as the newest commit of `branch`; that commit."""
        names = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        files = {name: data for name, data in names.items() if name != "target.json"}
        commit = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


@dataclass
class Hub:
    """What is served, and what was asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Paths of files whose bytes were given."""


def large(name: str) -> bool:
    """Whether the hub keeps a file outside git, by its SHA-256."""
    return name.endswith((".safetensors", ".bin"))


def known_as(name: str, data: bytes) -> str:
    """The hash of a file there."""
    git = f"blob {len(data)}\0".encode() + data
    return hashlib.sha256(data).hexdigest() if large(name) else hashlib.sha1(git).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if asked := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)/?", path):
                self._listing(*asked.groups())
            elif asked := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(*asked.groups())
            else:
                self._answer(404, {})

        def _found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            repo = hub.repos.get(name)
            if repo is None:
                self._answer(401, {"X-Error-Code": "RepoNotFound"})
                return None
            commit = repo.branches.get(revision, revision)
            if commit not in repo.commits:
                self._answer(404, {"X-Error-Code": "RevisionNotFound"})
                return None
            return commit, repo.commits[commit]

        def _listing(self, name: str, kind: str, revision: str) -> None:
            found = self._found(name, revision)
            if found is None:
                return
            commit, files = found
            told: list[dict[str, object]] = []
            for path, data in files.items():
                lfs = {"oid": known_as(path, data), "sha256": known_as(path, data), "size": len(data), "pointerSize": 9}
                each: dict[str, object] = {"type": "file", "path": path, "rfilename": path, "size": len(data)}
                told.append(each | {"oid": "0" * 40, "blobId": "0" * 40, **({"lfs": lfs} if large(path) else {})})
                if not large(path):
                    told[-1] |= {"oid": known_as(path, data)}
            body = told if kind == "tree" else {"id": name, "sha": commit, "siblings": told}
            self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

        def _file(self, name: str, revision: str, path: str) -> None:
            found = self._found(name, revision)
            if found is None:
                return
            commit, files = found
            if hub.repos[name].gated:
                self._answer(403, {"X-Error-Code": "GatedRepo"})
            elif path not in files:
                self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            else:
                if self.command == "GET":
                    hub.asked.append(path)
                etag = f'"{known_as(path, files[path])}"'
                linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(files[path]))}
                self._answer(200, {"ETag": etag, "X-Repo-Commit": commit, **linked}, files[path])

        def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
