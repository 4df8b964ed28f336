"""Web servers for tests."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Address of a local server that answers with `handler`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ByteRanges(SimpleHTTPRequestHandler):
    """Serves a folder and supports byte ranges, like object stores; each of these takes `nap` seconds."""

    def __init__(self, *args: Any, nap: float = 0.0, **options: Any) -> None:
        self.nap = nap
        super().__init__(*args, **options)

    def send_head(self) -> io.BytesIO | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not path.is_file() or not wanted:
            return super().send_head()  # pyright: ignore[reportReturnType]
        time.sleep(self.nap)
        first, last = (int(word) for word in wanted.removeprefix("bytes=").split("-"))
        content = path.read_bytes()
        body = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, format: str, *args: object) -> None: ...
