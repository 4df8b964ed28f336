"""Run `python SCRIPT ...` up to its first updates and record how long each part of the start takes.

    python tools/benchmark_amp/startup_probe.py RESULT.json BEGAN SCRIPT [arguments of SCRIPT]

BEGAN is time.monotonic() of the parent; all processes of a machine share that clock. Time counts for the innermost
active part: an import that is triggered by building the model counts as import.
"""

from __future__ import annotations

import time

RUNNING = time.monotonic()

# Few imports: this file must not add to the measured time.
import _thread  # noqa: E402
import importlib._bootstrap  # noqa: E402
import sys  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UPDATES = 4
"""The first one's time beyond that of later ones counts as compiling."""
OURS = ("engine", "models", "datasets", "utils")
UPDATE = "update"
WATCHED = {
    "models.build": {"build_model": "model", "check_model": "model"},
    "datasets.registry": {"open_dataset": "data index", "check_dataset": "data index"},
    "engine.update": {"train_update": UPDATE},
}
"""Functions that are timed as a part: module -> function -> part."""


class Parts:
    """Seconds of each part. Only the innermost active part is charged."""

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
    """Times each update, and ends the program after a few."""

    def __init__(self, parts: Parts, result: str) -> None:
        self._parts, self._result = parts, result
        self._until_first: dict[str, float] = {}
        self._seconds: list[float] = []

    def timed(self, train_update: Callable[..., Any]) -> Callable[..., None]:
        def wrapper(*args: Any, **options: Any) -> None:
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

        return wrapper

    def _write(self) -> None:
        import json

        first, *later = self._seconds
        usual = min(first, sorted(later)[len(later) // 2])
        parts = {name: seconds for name, seconds in self._until_first.items() if name != UPDATE}
        parts |= {"compiling": first - usual, "first update": usual}
        with open(self._result, "w", encoding="utf-8") as file:
            json.dump({"seconds": sum(parts.values()), "parts": parts}, file)


def watch_imports(parts: Parts, updates: Updates) -> None:
    """Charge imports to the package they load, and time the functions in WATCHED."""
    bootstrap: Any = importlib._bootstrap  # loads modules that are not in sys.modules
    load = bootstrap._find_and_load

    main_thread = _thread.get_ident()

    def watched(name: str, import_: Any) -> Any:
        if _thread.get_ident() != main_thread:  # runs concurrently and delays nothing
            return load(name, import_)
        parts.enter(f"import {_package(name)}")
        try:
            module = load(name, import_)
        finally:
            parts.leave()
        for function, part in WATCHED.get(name, {}).items():
            known = getattr(module, function)
            setattr(module, function, updates.timed(known) if part == UPDATE else _timed(known, part, parts))
        return module

    bootstrap._find_and_load = watched


def _package(module: str) -> str:
    top = module.partition(".")[0]
    if top in OURS:
        return "vitamp"
    return "standard library" if top in sys.stdlib_module_names else top


def _timed(function: Callable[..., Any], part: str, parts: Parts) -> Callable[..., Any]:
    def wrapper(*args: Any, **options: Any) -> Any:
        parts.enter(part)
        try:
            return function(*args, **options)
        finally:
            parts.leave()

    return wrapper


def main() -> None:
    result, began, script, *argv = sys.argv[1:]
    parts = Parts(float(began))
    watch_imports(parts, Updates(parts, result))
    sys.argv = [script, *argv]
    sys.path[0] = script.rpartition("/")[0] or "."
    # As `python SCRIPT` does; runpy would have to be imported.
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script, "__builtins__": __builtins__})


if __name__ == "__main__":
    main()
