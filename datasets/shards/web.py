"""Refuse answers of web servers that are larger than the request, encoded, or too slow.

fsspec and aiohttp would read any answer to its end. So a class of our own is used for aiohttp's answers.
"""

import asyncio
import re
import time
from typing import Any

import aiohttp

from datasets.base import remark
from utils.text import redacted

SECONDS_OF_HEADERS = 30.0
"""Time that a server may take to send the headers of an answer"""
LOWEST_SPEED = 1000
"""Bytes per second of each request. A modem is faster; below, an image would take minutes, and training never end."""
SECONDS_OF_SPEED = 10.0
"""Time for which a request may be slower than LOWEST_SPEED"""
LARGEST_LIST = 16 << 20
"""Most bytes of dataset.json and of a listing. Both have less than 160 bytes per tar file: enough for 100,000 files."""
LARGEST_ANSWER = 768 << 20
"""Most bytes of any answer. The largest is an index: that of the 14 million images of ImageNet-21k has 700 MB."""

NOT_ENCODED = ("", "identity", "aws-chunked")
"""Allowed values of Content-Encoding. The last one describes how a file was uploaded to S3, not its content."""


class Refused(aiohttp.ClientError):
    """The error for an answer that would be no better if the request were repeated."""

    lasting = True


class Answer(aiohttp.ClientResponse):
    """An answer of a web server, which is refused if it is not what was asked for."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the headers, within SECONDS_OF_HEADERS. A server that sends a byte now and then gets no more time."""
        limit = asyncio.timeout(SECONDS_OF_HEADERS)
        try:
            async with limit:
                await super().start(connection)
        except TimeoutError:
            if not limit.expired():  # the session's limit for a silent server
                raise
            raise OSError(f"{self._shown_url} is too slow (no complete headers in {SECONDS_OF_HEADERS:g} s)") from None
        encoding = self.headers.get("Content-Encoding", "")
        if encoding.lower() not in NOT_ENCODED:
            raise Refused(f"{self._shown_url} is sent with Content-Encoding {encoding[:40]!r}, which was not asked for")
        return self

    async def read(self) -> bytes:
        """Read the content, once; later calls return the same bytes. If reading fails, the connection is closed."""
        if self._body is None:
            try:
                self._body = bytes(await self._read())
            except BaseException:
                self.close()
                raise
        return self._body

    async def _read(self) -> bytearray:
        """Read the content up to its limit. Raises Refused if it is too large, and OSError if it comes too slowly.

        If a range was requested and the answer is longer, one byte more than the range is returned. That byte shows
        the caller that the server ignores ranges.
        """
        self._log_redirect()
        requested = self._requested_bytes()  # None if a whole file was requested: an index (.npz), or a list
        limit = requested or LARGEST_LIST
        if requested is None and self.url.path.endswith(".npz"):
            limit = LARGEST_ANSWER
        if limit > LARGEST_ANSWER:
            raise Refused(f"{self._shown_url} has a range of {limit:,} bytes, and {LARGEST_ANSWER:,} are the most")

        content = bytearray()
        begin = time.monotonic()
        # The time and the bytes when the speed was last measured.
        measured_at = begin
        measured_bytes = 0
        while len(content) <= limit:
            chunk = await self.content.readany()
            if not chunk:
                return content
            content += chunk
            now = time.monotonic()
            if now - measured_at < SECONDS_OF_SPEED or self.content.at_eof():
                continue
            if len(content) - measured_bytes < LOWEST_SPEED * (now - measured_at):
                raise OSError(  # fsspec would replace a TimeoutError by one without words
                    f"{self._shown_url} is too slow ({len(content):,} bytes in {now - begin:.0f} s; the least is "
                    f"{LOWEST_SPEED:,} bytes per second)"
                )
            measured_at = now
            measured_bytes = len(content)
        self.close()  # the rest is not read
        if requested is None:
            raise Refused(f"{self._shown_url} has more than {limit:,} bytes, the most that are read of such a file")
        return content[: limit + 1]

    def _requested_bytes(self) -> int | None:
        """Return the number of bytes in the requested range; None if the whole file was requested."""
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        if byte_range is None:
            return None
        first, last = map(int, byte_range.groups())
        return last + 1 - first

    def _log_redirect(self) -> None:
        """Warn if the server redirects to another host, whose content is then read."""
        if self.history and self.history[0].url.host != self.url.host:
            remark(f"{self.history[0].url.origin()} redirects to another host: {self.url.origin()}. That one is read.")

    @property
    def _shown_url(self) -> str:
        """The URL without its password."""
        return redacted(str(self.url))


def session_options(silence: float) -> dict[str, Any]:
    """Return the options of an aiohttp session whose answers are `Answer`. `silence`: most seconds without a byte."""
    return {
        "response_class": Answer,
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
        # Compressed answers are neither requested nor unpacked: a small one could unpack to any size.
        "headers": {"Accept-Encoding": "identity"},
        "auto_decompress": False,
    }
