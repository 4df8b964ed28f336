"""Web servers for tests."""

import contextlib
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


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
        return self.send_part(content, first, content[first : last + 1])

    def send_part(self, content: bytes, first: int, body: bytes) -> io.BytesIO | None:
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, format: str, *args: object) -> None: ...


class FaultyStore(ByteRanges):
    """An object store of which every `every`-th part fails, by each of `faults` in turn. It counts parts and bytes."""

    counts = itertools.count()
    sent: ClassVar[list[tuple[str, int]]] = []
    """Path and bytes of each answer with a part"""

    def __init__(self, *args: Any, every: int = 0, faults: Sequence[str] = (), **options: Any) -> None:
        self.every, self.faults = every, faults
        super().__init__(*args, **options)

    def send_part(self, content: bytes, first: int, body: bytes) -> io.BytesIO | None:
        number = next(FaultyStore.counts)
        due = self.every and number % self.every == self.every - 1
        FaultyStore.sent.append((self.path, len(body)))
        fault = self.faults[number // self.every % len(self.faults)] if due else ""
        if fault in ("429", "503"):
            self.send_response(int(fault))
            self.send_header("Retry-After", "86400")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if fault == "whole":  # ignores the range
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return io.BytesIO(content)
        if fault == "truncated":  # closes the connection in the middle
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.close_connection = True
            return io.BytesIO(body[: len(body) // 2])
        if fault == "shorter":
            body = body[:-1]
        if fault == "elsewhere":
            body = content[-len(body) :]
        return super().send_part(content, first, body)


class Hostile(ByteRanges):
    """A server whose answers about names that end with `of` have a fault. It counts their bytes."""

    poured = 0
    MOST = 256 << 20

    def __init__(self, *args: Any, fault: str, of: str, **options: Any) -> None:
        self.fault, self.of = fault, of
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        trial = self.fault == "slow" and self.headers.get("Range") == "bytes=0-0"
        if trial or not self.path.endswith(self.of) or self.headers["Host"].startswith("localhost"):
            super().do_GET()
            return
        if self.fault == "redirect":
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host'].replace('127.0.0.1', 'localhost')}{self.path}")
            self.end_headers()
            return
        if self.fault == "slow headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        else:
            self.send_response(206 if "Range" in self.headers else 200)
            if self.fault == "gzip":
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", "text/html")
            self.end_headers()
        piece, nap = (b"x", 0.05) if self.fault.startswith("slow") else (b" " * (1 << 16), 0)
        end = time.monotonic() + 10
        with contextlib.suppress(OSError):
            while Hostile.poured < self.MOST and time.monotonic() < end:
                self.wfile.write(piece)
                Hostile.poured += len(piece)
                time.sleep(nap)
