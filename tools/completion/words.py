"""What a shell may put in place of the word under the cursor. It is asked at every TAB, and so imports next to nothing.

python -I -S tools/completion/words.py WORD ... WORD_UNDER_THE_CURSOR

Prints a word a line, and what it means after a tab. Exit code 1: the command line starts no program of ours.
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
"""Folders whose files tell which words there are."""
ENOUGH = 2000
YAML_ENDINGS = (".yaml", ".yml")
Found = list[tuple[str, str]]
"""Words and what they mean"""


def complete(words: list[str], table: dict) -> Found | None:
    """[(word, what it means)], or None where none of our programs is started."""
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
    return found + _fresh(program, current, home, table, first=len(before) == place + 1)


def _fresh(program: dict, current: str, home: str, table: dict, first: bool) -> Found:
    """What may begin anew: flags, settings, commands, files."""
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
    """Values behind `prefix`, a flag's or a setting's name with its `=`, that go on as `current` does."""
    begun = current[len(prefix) :]
    if takes is None:
        return []
    if isinstance(takes, list):
        found = [(word, "") for word in takes if word.startswith(begun)]
    elif takes == "model":
        found = [(word, "") for word in models(table) if begun and word.startswith(begun)] + _paths(begun, None)
    elif takes == "yaml":
        found = _paths(begun, YAML_ENDINGS)
        recipes = os.path.join(home, "configs")
        if not begun and os.path.isdir(recipes):
            found = _paths(recipes + os.sep, YAML_ENDINGS) + found
    else:
        found = _paths(begun, () if takes == "folder" else None)
    return [(prefix + word, about) for word, about in found]


def _paths(begun: str, endings: tuple[str, ...] | None) -> Found:
    """Files and folders that begin so; hidden ones if asked for. `endings`: of files; None: all."""
    folder, name = os.path.split(begun)
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


def known() -> dict:
    """The table, made anew when one of the files it comes from is younger."""
    file = os.path.join(_cache(), f"completion-{zlib.crc32(ROOT.encode()):08x}.json")
    if _age(file) <= max(_age(path) for path in _sources()):
        script = os.path.join(ROOT, "tools", "completion", "table.py")
        subprocess.run([sys.executable, script, file], capture_output=True, check=False, timeout=20)
    with open(file, encoding="utf-8") as text:
        return json.load(text)


def models(table: dict) -> list[str]:
    """Names for MODEL.NAME. timm has to be asked, which takes seconds; once, until another timm is installed."""
    file = os.path.join(_cache(), "models.txt")
    if _age(file) <= max(_age(table["timm"] or ""), _age(os.path.join(ROOT, "models", "names.py"))):
        script = os.path.join(ROOT, "main_single_gpu.py")
        asked = subprocess.run([sys.executable, script, "-list_models"], capture_output=True, check=False, text=True)
        if asked.returncode != 0:
            return []
        temporary = f"{file}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as text:
            text.write(asked.stdout)
        os.replace(temporary, file)
    with open(file, encoding="utf-8") as text:
        return text.read().split()


def _sources() -> Iterator[str]:
    for folder in SOURCES:
        for place, _, names in os.walk(os.path.join(ROOT, folder)):
            yield from (os.path.join(place, name) for name in names if name.endswith(".py"))


def _age(path: str) -> float:
    """The moment of its last change; of what is not there, before all others."""
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
        found = complete(words, known())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 1  # nobody wants to read a traceback in the middle of a command line
    if found is None:
        return 1
    print("\n".join(f"{word}\t{about}" for word, about in found[:ENOUGH]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
