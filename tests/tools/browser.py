"""Headless Chromium, controlled over its DevTools protocol."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class View:
    """A page in a window of some width, light or dark."""

    width: int
    dark: bool
    page_width: int = 0
    text: str = ""
    complaints: list[str] = field(default_factory=list)
    """Console messages and failed loads"""
    requests: list[str] = field(default_factory=list)
    """All URLs except data: URIs"""
    dialogs: int = 0
    picture: bytes = b""
    script: str = ""
    """An expression, and what its promise gave"""
    answer: Any = None


def views_of(page: Path, folder: Path, views: list[View]) -> list[View]:
    """Open `page` from the disk in each view. Without a browser the test is skipped, but in CI it fails."""
    if PROGRAM is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is required in CI: apt-get install chromium")
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [PROGRAM, *words, "--remote-debugging-port=0", f"--user-data-dir={folder / 'chromium'}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            asyncio.run(asyncio.wait_for(_look(page, _port(folder / "chromium"), views), 120))
        finally:
            browser.kill()
    return views


def _port(profile: Path) -> int:
    file = profile / "DevToolsActivePort"
    until(lambda: file.exists() and len(file.read_text().split()) > 1)
    return int(file.read_text().split()[0])


async def _look(page: Path, port: int, views: list[View]) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json") as answer:
            tabs = json.loads(await answer.text())
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(address, max_msg_size=0) as socket:
            tab = _Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            for view in views:
                await tab.show(page, view)


class _Tab:
    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self._events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                return message.get("result", {})
            self._events.append(message)

    async def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(json.loads((await self._socket.receive()).data))

    async def value(self, expression: str) -> Any:
        how = {"returnByValue": True, "awaitPromise": True}
        return (await self.call("Runtime.evaluate", expression=expression, **how))["result"]["value"]

    async def show(self, page: Path, view: View) -> None:
        self._events.clear()
        size = {"width": view.width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=page.resolve().as_uri())
        await self.wait_for("Page.loadEventFired")
        view.page_width = await self.value("document.documentElement.scrollWidth")
        view.text = await self.value("document.body.innerText")
        view.answer = await self.value(view.script) if view.script else None
        view.picture = base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
        self._sort(view)

    def _sort(self, view: View) -> None:
        of: dict[str, Callable[[dict[str, Any]], None]] = {
            "Log.entryAdded": lambda event: view.complaints.append(event["entry"]["text"]),
            "Runtime.consoleAPICalled": lambda event: view.complaints.append(str(event["args"])),
            "Runtime.exceptionThrown": lambda event: view.complaints.append(str(event["exceptionDetails"])),
            "Network.requestWillBeSent": lambda event: view.requests.append(event["request"]["url"]),
        }
        for event in self._events:
            of.get(event.get("method", ""), lambda _: None)(event.get("params", {}))
            view.dialogs += event.get("method") == "Page.javascriptDialogOpening"
        view.requests = [address for address in view.requests if not address.startswith("data:")]
