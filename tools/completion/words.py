"""Completions of the word under the cursor. A shell runs this at every TAB, so it imports almost nothing.

python -I -S tools/completion/words.py WORD ... WORD_UNDER_THE_CURSOR

Prints one completion per line, then a tab and its description. Exit code 1: the command is not one of vitamp's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator

ROOT = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
SOURCES = ("scripts", "tools", "utils", "datasets")
"""Folders that the table is made from"""
MOST_WORDS = 2000
YAML_ENDINGS = (".yaml", ".yml")
Found = list[tuple[str, str]]
"""(completion, description)"""


def complete(words: list[str], table: dict) -> Found | None:
    """Completions of the last word, or None if the command is not one of vitamp's."""
    programs = table["programs"]
    *before, current = words
    place = next((n for n, word in enumerate(before) if os.path.basename(word) in programs), None)
    if place is None:
        return None
    program = programs[os.path.basename(before[place])]
    home = os.path.dirname(before[place])
    setting = re.match(r"([A-Z][A-Z0-9_.]*)=", current)
    if setting:
        takes = table["settings"].get(setting[1], ["", None])[1] if program["settings"] else None
        return _values(takes, setting[0], current, home, table)
    flag = re.match(r"--?([\w-]+)=", current)
    if flag:
        option = program["flags"].get("-" + flag[1].replace("-", "_"))
        return _values(option and option["takes"], flag[0], current, home, table)
    last = program["flags"].get(_plain(before[-1])) if len(before) > place + 1 else None
    if last and last["value"] == "needed":
        return _values(last["takes"], "", current, home, table)
    found = _values(last["takes"], "", current, home, table) if last and last["value"] == "may" else []
    return found + _new_word(program, current, home, table, first=len(before) == place + 1)


def _new_word(program: dict, current: str, home: str, table: dict, first: bool) -> Found:
    """Completions of a word that belongs to no flag: flags, settings, commands, files."""
    found = []
    if current.startswith("-") or not current:
        dashes = "--" if current.startswith("--") else "-"
        flags = ((dashes + name.lstrip("-"), option["about"]) for name, option in program["flags"].items())
        found += [pair for pair in flags if pair[0].startswith(current)]
    if program["settings"] and current[:1].isupper():
        keys = ((key + "=", about) for key, (about, _) in table["settings"].items())
        found += [pair for pair in keys if pair[0].startswith(current)]
    if first and program["words"]:
        found += [(word, "") for word in program["words"] if word.startswith(current)]
    elif program["paths"] and not current.startswith("-"):
        found += _values(program["paths"], "", current, home, table)
    return found


def _plain(word: str) -> str:
    return "-" + word.lstrip("-").replace("-", "_") if word.startswith("-") else word


def _values(takes: list[str] | str | None, prefix: str, current: str, home: str, table: dict) -> Found:
    """Values that complete `current`, which begins with `prefix`: a flag or setting with its `=`, or nothing."""
    begin = current[len(prefix) :]
    if takes is None:
        return []
    if isinstance(takes, list):
        found = [(word, "") for word in takes if word.startswith(begin)]
    elif takes == "model":
        found = [(word, "") for word in models(table) if begin and word.startswith(begin)] + _paths(begin, None)
    elif takes == "yaml":
        found = _paths(begin, YAML_ENDINGS)
        recipes = os.path.join(home, "configs")
        if not begin and os.path.isdir(recipes):
            found = _paths(recipes + os.sep, YAML_ENDINGS) + found
    else:
        found = _paths(begin, () if takes == "folder" else None)
    return [(prefix + word, about) for word, about in found]


def _paths(begin: str, endings: tuple[str, ...] | None) -> Found:
    """Files and folders that begin with `begin`; hidden ones if it says so. `endings` of files; None: all."""
    folder, name = os.path.split(begin)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    found = []
    for entry in entries:
        if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
            continue
        word = os.path.join(folder, entry.name)
        if entry.is_dir():
            found.append((word + os.sep, ""))
        elif endings is None or entry.name.endswith(endings or ("/",)):
            found.append((word, ""))
    return found


def cached_table() -> dict:
    """The table, written again if one of its sources is newer."""
    file = os.path.join(_cache(), f"completion-{zlib.crc32(ROOT.encode()):08x}.json")
    if _mtime(file) <= max(_mtime(path) for path in _sources()):
        script = os.path.join(ROOT, "tools", "completion", "table.py")
        subprocess.run([sys.executable, script, file], capture_output=True, check=False, timeout=20)
    with open(file, encoding="utf-8") as text:
        return json.load(text)


def models(table: dict) -> list[str]:
    """Names for MODEL.NAME. Importing timm takes seconds, so they are cached until another timm is installed."""
    file = os.path.join(_cache(), "models.txt")
    if _mtime(file) <= max(_mtime(table["timm"] or ""), _mtime(os.path.join(ROOT, "models", "names.py"))):
        script = os.path.join(ROOT, "main_single_gpu.py")
        asked = subprocess.run([sys.executable, script, "-list_models"], capture_output=True, check=False, text=True)
        if asked.returncode != 0:
            return []
        sys.path.insert(0, ROOT)
        from pathlib import Path  # late, both: no other word needs them

        from utils.files import write_atomically

        write_atomically(Path(file), asked.stdout)
    with open(file, encoding="utf-8") as text:
        return text.read().split()


def _sources() -> Iterator[str]:
    for folder in SOURCES:
        for place, _, names in os.walk(os.path.join(ROOT, folder)):
            yield from (os.path.join(place, name) for name in names if name.endswith(".py"))


def _mtime(path: str) -> float:
    """Time of the last change; 0 for a missing file."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _cache() -> str:
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vitamp")
    os.makedirs(folder, exist_ok=True)
    return folder


def main(words: list[str]) -> int:
    try:
        found = complete(words, cached_table())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 1  # a traceback would land in the middle of the command line
    if found is None:
        return 1
    print("\n".join(f"{word}\t{about}" for word, about in found[:MOST_WORDS]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
