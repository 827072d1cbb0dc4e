"""A Hugging Face hub on 127.0.0.1 with one dataset, for the real `datasets` library: HF_ENDPOINT is its address.

It answers the requests that `load_dataset(NAME, name=CONFIG, streaming=True)` makes, and can lose its connections.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `files` (path in the repository → content) as the dataset `name` until it is closed.

    After `lose_after` bytes of parquet files the connection is lost in the middle of an answer, and then at every
    request for such a file without any answer, `losses` times in all.
    """

    daemon_threads = True

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files = name, dict(files)
        self.lose_after, self.losses = math.inf, 0
        self.sent = self.lost = 0  # bytes of parquet files; connections
        self.requests: list[tuple[str, int]] = []  # files, and the first byte that was asked for
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client may leave at any time."""

    def entries(self) -> list[dict[str, Any]]:
        """Folders and files, as the hub's API lists them."""
        folders = {name.rsplit("/", depth)[0] for name in self.files for depth in range(1, name.count("/") + 1)}
        return [{"type": "directory", "path": name, "oid": REVISION, "size": 0} for name in sorted(folders)] + \
               [{"type": "file", "path": name, "oid": REVISION, "size": len(self.files[name])}
                for name in sorted(self.files)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        hub, address = self.server, urlsplit(self.path)
        path, files = unquote(address.path), f"/datasets/{hub.name}/resolve/"
        if path.startswith(files):
            self._send_file(path.removeprefix(files).split("/", 1)[1])
        elif re.fullmatch(f"/api/datasets/{hub.name}/revision/[^/]+", path):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"_id": "1", "id": hub.name, "sha": REVISION, "siblings": siblings, "private": False,
                             "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []})
        elif found := re.fullmatch(f"/api/datasets/{hub.name}/tree/{REVISION}/?(.*)", path):
            start = f"{found[1]}/" if found[1] else ""
            below = [each for each in hub.entries() if each["path"].startswith(start)]
            recursive = parse_qs(address.query).get("recursive") == ["true"]
            self._send_json([each for each in below if recursive or "/" not in each["path"].removeprefix(start)])
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def _send_json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str) -> None:
        hub, content = self.server, self.server.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        status, first, headers = 200, 0, {"ETag": f'"{name}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = 206, content[first:last + 1]
        hub.requests.append((name, first))
        if name.endswith(".parquet"):
            hub.sent += len(content)
            if hub.sent > hub.lose_after and hub.lost < hub.losses:
                hub.lost += 1
                if hub.lost == 1:
                    self._send(status, content, headers, sent=len(content) // 2)
                self.close_connection = True
                return
        self._send(status, content, headers)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None,
              sent: int | None = None) -> None:
        """Sends the headers and the first `sent` bytes of the content: all of it by default."""
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
