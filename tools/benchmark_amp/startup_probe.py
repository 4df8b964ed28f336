"""Be `python SCRIPT ...` and write down how long each part of starting up took, up to the first update.

    python tools/benchmark_amp/startup_probe.py RESULT.json BEGAN SCRIPT [its own words]

BEGAN is time.monotonic() of whoever starts this, which all processes of a machine share. Time belongs to the innermost
part that is going on: an import that building the model asks for is an import.
"""

from __future__ import annotations

import time

RUNNING = time.monotonic()

# Little else: this file must not be what is measured.
import _thread  # noqa: E402
import importlib._bootstrap  # noqa: E402
import sys  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UPDATES = 4
"""The first one's seconds beyond those of later ones are compiling, or whatever else comes once."""
OURS = ("engine", "models", "datasets", "utils")
UPDATE = "update"
WATCHED = {
    "models.build": {"build_model": "model", "check_model": "model"},
    "datasets.registry": {"open_dataset": "data index", "check_dataset": "data index"},
    "engine.update": {"train_update": UPDATE},
}
"""Functions that are parts of their own, by the module that has them."""


class Parts:
    """Seconds of each part. One goes on at a time; what that one waits for meanwhile is not charged."""

    def __init__(self, began: float) -> None:
        self.seconds = {"python": RUNNING - began}
        self._stack, self._last = ["rest"], RUNNING

    def enter(self, name: str) -> None:
        self._charge()
        self._stack.append(name)

    def leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now, name = time.monotonic(), self._stack[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class Updates:
    """Hears of each update; after some of them all is known, and the program may end."""

    def __init__(self, parts: Parts, result: str) -> None:
        self._parts, self._result = parts, result
        self._until_first: dict[str, float] = {}
        self._seconds: list[float] = []

    def hear(self, train_update: Callable[..., Any]) -> Callable[..., None]:
        def heard(*args: Any, **options: Any) -> None:
            before = self._parts.seconds.get(UPDATE, 0.0)
            self._parts.enter(UPDATE)
            train_update(*args, **options)
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._parts.leave()
            self._until_first = self._until_first or dict(self._parts.seconds)
            self._seconds.append(self._parts.seconds[UPDATE] - before)
            if len(self._seconds) == UPDATES:
                self._write()
                raise SystemExit(0)

        return heard

    def _write(self) -> None:
        import json

        first, *later = self._seconds
        usual = min(first, sorted(later)[len(later) // 2])
        parts = {name: seconds for name, seconds in self._until_first.items() if name != UPDATE}
        parts |= {"compiling": first - usual, "first update": usual}
        with open(self._result, "w", encoding="utf-8") as file:
            json.dump({"seconds": sum(parts.values()), "parts": parts}, file)


def watch_imports(parts: Parts, updates: Updates) -> None:
    """Charge imports to the package they load, and listen at the functions that are parts of their own."""
    bootstrap: Any = importlib._bootstrap  # `import` asks it for what is not loaded yet
    load = bootstrap._find_and_load

    main_thread = _thread.get_ident()

    def watched(name: str, import_: Any) -> Any:
        if _thread.get_ident() != main_thread:  # goes on beside the rest, and keeps nobody waiting
            return load(name, import_)
        parts.enter(f"import {_package(name)}")
        try:
            module = load(name, import_)
        finally:
            parts.leave()
        for function, part in WATCHED.get(name, {}).items():
            known = getattr(module, function)
            setattr(module, function, updates.hear(known) if part == UPDATE else _heard(known, part, parts))
        return module

    bootstrap._find_and_load = watched


def _package(module: str) -> str:
    top = module.partition(".")[0]
    if top in OURS:
        return "vitamp"
    return "Python's own" if top in sys.stdlib_module_names else top


def _heard(function: Callable[..., Any], part: str, parts: Parts) -> Callable[..., Any]:
    def heard(*args: Any, **options: Any) -> Any:
        parts.enter(part)
        try:
            return function(*args, **options)
        finally:
            parts.leave()

    return heard


def main() -> None:
    result, began, script, *argv = sys.argv[1:]
    parts = Parts(float(began))
    watch_imports(parts, Updates(parts, result))
    sys.argv = [script, *argv]
    sys.path[0] = script.rpartition("/")[0] or "."
    # As `python SCRIPT` does it; runpy would have to be imported for it.
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script, "__builtins__": __builtins__})


if __name__ == "__main__":
    main()
