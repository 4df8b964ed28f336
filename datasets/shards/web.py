"""What a web server may send: no more than was asked, not encoded, and not too slowly.

fsspec and aiohttp read an answer to its end, whatever it is; so this is the class of aiohttp's answers.
"""

import asyncio
import re
import time
from typing import Any

import aiohttp

from datasets.base import remark
from utils.text import redacted

SECONDS_OF_HEADERS = 30.0
"""For which a server may send the headers of an answer"""
LOWEST_SPEED = 1000
"""Bytes per second, of each request. A modem is faster; below, an image would take minutes, and training never end."""
SECONDS_OF_SPEED = 10.0
"""For which a request may be slower than that"""
LARGEST_LIST = 16 << 20
"""Most bytes of dataset.json and of a listing: both have less than 160 bytes for each tar file, so 100,000 tar files"""
LARGEST_ANSWER = 768 << 20
"""Most bytes of any answer. The largest is an index: that of the 14 million images of ImageNet-21k has 700 MB."""

NOT_ENCODED = ("", "identity", "aws-chunked")
"""Values of Content-Encoding; the last one is of an upload to S3, not of the content."""


class Refused(aiohttp.ClientError):
    """An answer that will be no better when the request is repeated."""

    lasting = True


class Answer(aiohttp.ClientResponse):
    """An answer that is refused if it is not what was asked for."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the headers. A byte now and then does not prolong that."""
        limit = asyncio.timeout(SECONDS_OF_HEADERS)
        try:
            async with limit:
                await super().start(connection)
        except TimeoutError:
            if limit.expired():  # else the server is silent
                raise OSError(f"{self._shown} is too slow (no complete headers in {SECONDS_OF_HEADERS:g} s)") from None
            raise
        encoding = self.headers.get("Content-Encoding", "")
        if encoding.lower() not in NOT_ENCODED:
            raise Refused(f"{self._shown} is sent with Content-Encoding {encoding[:40]!r}, which was not asked for")
        return self

    async def read(self) -> bytes:
        """The whole answer; of one to a request for a range that is longer than the range, one byte more than that."""
        if self._body is None:
            try:
                self._body = bytes(await self._read())
            except BaseException:
                self.close()
                raise
        return self._body

    async def _read(self) -> bytearray:
        self._log_redirect()
        wanted = self._wanted()
        most = wanted or LARGEST_LIST
        if wanted is None and self.url.path.endswith(".npz"):
            most = LARGEST_ANSWER
        if most > LARGEST_ANSWER:
            raise Refused(f"{self._shown} has a range of {most:,} bytes, and {LARGEST_ANSWER:,} are the most")
        content = bytearray()
        begin = last = time.monotonic()
        counted = 0
        while len(content) <= most:
            chunk = await self.content.readany()
            if not chunk:
                return content
            content += chunk
            now = time.monotonic()
            if now - last < SECONDS_OF_SPEED or self.content.at_eof():
                continue
            if len(content) - counted < LOWEST_SPEED * (now - last):
                raise OSError(  # fsspec would replace a TimeoutError by one without words
                    f"{self._shown} is too slow ({len(content):,} bytes in {now - begin:.0f} s; the least is "
                    f"{LOWEST_SPEED:,} bytes per second)"
                )
            last = now
            counted = len(content)
        self.close()  # the rest is not read
        if wanted is None:
            raise Refused(f"{self._shown} has more than {most:,} bytes, the most that are read of such a file")
        return content[: most + 1]

    def _wanted(self) -> int | None:
        """Bytes of the range that was asked for; None if it was all."""
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        if span is None:
            return None
        first, last = map(int, span.groups())
        return last + 1 - first

    def _log_redirect(self) -> None:
        if self.history and self.history[0].url.host != self.url.host:
            remark(f"{self.history[0].url.origin()} redirects to another host: {self.url.origin()}. That one is read.")

    @property
    def _shown(self) -> str:
        return redacted(str(self.url))


def session_options(silence: float) -> dict[str, Any]:
    """Options of an aiohttp session with such answers. `silence`: most seconds without a byte."""
    return {
        "response_class": Answer,
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
        "headers": {"Accept-Encoding": "identity"},
        "auto_decompress": False,
    }
