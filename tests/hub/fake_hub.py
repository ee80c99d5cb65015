"""The Hub's routes that a kernel's download uses, over http.server, counting what is asked."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from linnet.kernels.hub.pins import pin_of

PIN = pin_of("ms_deform_attn")


class FakeHub:
    """Serves one revision of one kernel repository.

    Attributes:
        root: the repository's folder.
        repository, revision: what it is served as.
        requests: (method, path) of each request.
    """

    def __init__(
        self, root: Path, repository: str = PIN.repository, revision: str = PIN.revision
    ) -> None:
        self.root, self.repository, self.revision = root, repository, revision
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_HEAD(self):
                hub.serve(self)

            do_GET = do_HEAD  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def downloads(self) -> list[str]:
        return [
            path.rpartition("/")[2]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def serve(self, handler) -> None:
        parts = urlsplit(handler.path)
        self.requests.append((handler.command, parts.path))
        tree = f"/api/kernels/{self.repository}/tree/"
        files = f"/kernels/{self.repository}/resolve/"
        if not parts.path.startswith((tree, files)):
            handler.answer(404, X_Error_Code="RepoNotFound")
            return
        revision, _, path = parts.path.removeprefix(tree).removeprefix(files).partition("/")
        if revision != self.revision:
            handler.answer(404, X_Error_Code="RevisionNotFound")
        elif parts.path.startswith(tree):
            handler.answer(
                200, json.dumps(self.tree(path)).encode(), Content_Type="application/json"
            )
        elif not (self.root / path).is_file():
            handler.answer(404, X_Error_Code="EntryNotFound")
        else:
            body = (self.root / path).read_bytes()
            name = sha256(body) if large(path) else oid(body)
            named = {"ETag": f'"{name}"', "X_Repo_Commit": revision}
            handler.answer(200, body, **named)

    def tree(self, path: str):
        if path:
            folders = [each for each in sorted((self.root / path).iterdir()) if each.is_dir()]
            return [
                {"type": "directory", "path": f"{path}/{each.name}", "oid": "0" * 40}
                for each in folders
            ]
        found = [each for each in sorted(self.root.rglob("*")) if each.is_file()]
        return [
            {
                "type": "file",
                "path": str(each.relative_to(self.root)),
                "size": each.stat().st_size,
                "oid": oid(each.read_bytes()),
                **({"lfs": lfs(each.read_bytes())} if large(each.name) else {}),
            }
            for each in found
        ]


def large(path: str) -> bool:
    """Whether a file lies in the Hub's large storage, which names files by SHA-256."""
    return path.endswith(".so")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def lfs(content: bytes) -> dict:
    return {"oid": sha256(content), "size": len(content), "pointerSize": 130}


def oid(content: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
