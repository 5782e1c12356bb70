"""A server that speaks the hub's API as huggingface_hub asks it, over loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

LIMIT_S: Final = 60.0

__all__ = ["Hub", "Repository", "running_hub"]

_INFO: Final = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
_REFS: Final = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/refs")
_AUTH: Final = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/auth-check")
_FILE: Final = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


def commit_of(name: str) -> str:
    """Makes a commit of a name."""
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()


@dataclass(kw_only=True)
class Repository:
    """A repository: its files by commit, and branches and tags.

    Attributes:
        told_sizes: Sizes that the listing tells instead of the true ones.
        needs_token: Whether it is private.
        is_gated: Whether only holders of the token may read its files.
    """

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    told_sizes: dict[str, int] = field(default_factory=dict)
    needs_token: bool = False
    is_gated: bool = False

    @classmethod
    def of(cls, files: Mapping[str, bytes], *, needs_token: bool = False, is_gated: bool = False) -> Repository:
        """Makes one with one commit, `main`."""
        return cls(
            commits={commit_of("main"): dict(files)},
            refs={"main": commit_of("main")},
            needs_token=needs_token,
            is_gated=is_gated,
        )

    def commit(self, revision: str) -> str | None:
        """Returns the commit of a revision."""
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@dataclass(kw_only=True)
class Hub:
    """The hub.

    Attributes:
        url: Its address.
        token: The token that may read everything.
        asked: Paths of all requests, with their methods.
        cut_after: Bytes after which the first answer with a file breaks off, by file.
        fails: Whether every request is answered with 503.
        held: Files that are sent only once their event is set.
        private: Repositories that were created as such.
    """

    url: str = ""
    token: str = "hf_" + "s3cret" * 6
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    ranges: list[str] = field(default_factory=list)
    cut_after: dict[str, int] = field(default_factory=dict)
    fails: bool = False
    held: dict[str, threading.Event] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, before they are committed."""

    def files_asked(self) -> list[str]:
        """Returns the names of files that were downloaded."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Runs a hub."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = unquote(urlsplit(self.path).path)
        self.state.asked.append(f"POST {path}")
        if path == "/api/validate-yaml":
            self._send(200, b'{"errors": [], "warnings": []}')
        elif self.headers.get("Authorization") != f"Bearer {self.state.token}":
            self._send(401, b"{}")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif re.fullmatch(r"/api/models/.+/preupload/main", path):
            self._preupload(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._send(404, b"{}")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.state.uploaded[hashlib.sha256(content).hexdigest()] = content
        self._send(200, b"{}")

    def _create(self, asked: Mapping[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.state.repositories:
            self._send(409, json.dumps({"url": f"{self.state.url}/{name}"}).encode())
            return
        self.state.repositories[name] = Repository.of({})
        if asked.get("visibility") == "private":
            self.state.private.add(name)
        self._send(200, json.dumps({"url": f"{self.state.url}/{name}"}).encode())

    def _preupload(self, asked: Mapping[str, list[dict[str, str]]]) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in asked["files"]
        ]
        self._send(200, json.dumps({"files": modes}).encode())

    def _batch(self, asked: Mapping[str, list[dict[str, object]]]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.state.url}/upload/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        self._send(200, json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _commit(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        files = self.state.repositories[name].commits[commit_of("main")]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.uploaded[value["oid"]]
        url = f"{self.state.url}/{name}/commit/{commit_of('main')}"
        self._send(200, json.dumps({"commitUrl": url, "commitOid": commit_of("main")}).encode())

    def _answer(self) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token:
            hub.tokens.add(token)
        if hub.fails:
            self._send(503, b"{}")
        elif path == "/api/models":
            word = parse_qs(urlsplit(self.path).query).get("search", [""])[0].lower()
            found = [name for name in hub.repositories if word[:5] in name.lower()]
            self._send(200, json.dumps([{"id": name, "modelId": name} for name in found]).encode())
        elif match := _REFS.fullmatch(path):
            self._refs(hub.repositories.get(match["id"]))
        elif match := _AUTH.fullmatch(path):
            repository = self._readable(match["id"], token, files=True)
            if repository is not None:
                self._send(200, b"{}")
        elif match := _INFO.fullmatch(path):
            self._info(match["id"], match["revision"] or "main", token)
        elif match := _FILE.fullmatch(path):
            self._file(match["id"], match["revision"], match["file"], token)
        else:
            self._send(404, b"{}")

    def _readable(self, name: str, token: str, *, files: bool) -> Repository | None:
        """Returns a repository, or answers why it is not shown."""
        repository = self.state.repositories.get(name)
        if token and token != self.state.token:
            self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.needs_token and not token):
            # As the hub does: to those without a token it does not tell the one from the other.
            self._send(404 if token else 401, b"{}", {"X-Error-Code": "RepoNotFound"} if token else {})
        elif files and repository.is_gated and not token:
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            return repository
        return None

    def _refs(self, repository: Repository | None) -> None:
        refs = {} if repository is None else repository.refs
        branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": at} for name, at in refs.items()]
        self._send(200, json.dumps({"branches": branches, "tags": [], "converts": []}).encode())

    def _info(self, name: str, revision: str, token: str) -> None:
        repository = self._readable(name, token, files=False)
        if repository is None:
            return
        commit = repository.commit(revision)
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [
            {"rfilename": file, "size": repository.told_sizes.get(file, len(content)), "blobId": "0" * 40}
            for file, content in repository.commits[commit].items()
        ]
        gated = "auto" if repository.is_gated else False
        body = {"id": name, "modelId": name, "sha": commit, "gated": gated, "siblings": siblings}
        self._send(200, json.dumps(body).encode())

    def _file(self, name: str, revision: str, file: str, token: str) -> None:
        repository = self._readable(name, token, files=True)
        if repository is None:
            return
        commit = repository.commit(revision)
        content = None if commit is None else repository.commits[commit].get(file)
        if commit is None or content is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        status, begin = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, begin = 206, int(match[1])
            self.state.ranges.append(match[0])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and file in self.state.held:
            self.state.held[file].wait(LIMIT_S)
        cut = self.state.cut_after.pop(file, None) if self.command == "GET" else None
        self._send(status, content[begin:], headers, cut_after=cut)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(body if cut_after is None else body[:cut_after])
            self.wfile.flush()
        except OSError:
            self.close_connection = True
        if cut_after is not None:
            self.close_connection = True
