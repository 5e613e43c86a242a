"""A Hugging Face hub on loopback: one dataset's commits, served to the hub's own client and to `datasets`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Commits = dict[str, dict[str, bytes]]
"""Commit (40 hex digits) -> path -> content, the newest last."""


@contextmanager
def served(name: str, commits: Commits) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has the dataset `name`, and the requests that were made."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _answer(self, body: bytes = b"") -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            files, inside = f"/datasets/{name}/resolve/", f"/api/datasets/{name}"
            if path.startswith(files):
                revision, _, file = path.removeprefix(files).partition("/")
                self._send_file(_commit(commits, revision), file)
            elif path.startswith(f"{inside}/paths-info/"):
                commit = _commit(commits, path.rpartition("/")[2])
                wanted = json.loads(body)["paths"]
                found = [_entry(file, commits[commit][file]) for file in wanted if file in commits[commit]]
                self._send(json.dumps(found).encode())
            elif path.startswith(f"{inside}/tree/"):
                revision, _, folder = path.removeprefix(f"{inside}/tree/").partition("/")
                its = commits[_commit(commits, revision)]
                self._send(json.dumps([_entry(f, its[f]) for f in its if f.startswith(folder)]).encode())
            elif path == inside or path.startswith(f"{inside}/revision/"):
                commit = _commit(commits, path.removeprefix(inside).rpartition("/")[2])
                siblings = [{"rfilename": file} for file in commits[commit]]
                self._send(json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode())
            else:
                self._send(b"{}", status=404, code="EntryNotFound")

        def _send_file(self, commit: str, file: str) -> None:
            content = commits[commit].get(file)
            if content is None:
                self._send(b"", status=404, code="EntryNotFound", commit=commit)
            else:
                self._send(content, commit=commit, etag=hashlib.sha1(content).hexdigest())

        def _send(self, content: bytes, *, status: int = 200, code: str = "", commit: str = "", etag: str = "") -> None:
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None] if first else content
            self.send_response(206 if first and status == 200 else status)
            for key, value in (("X-Error-Code", code), ("X-Repo-Commit", commit), ("ETag", etag and f'"{etag}"')):
                if value:
                    self.send_header(key, value)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _commit(commits: Commits, revision: str) -> str:
    return revision if revision in commits else [*commits][-1]


def _entry(file: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
