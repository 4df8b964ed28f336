"""README and docs: every command in them is one that the program takes, those marked so run, links lead somewhere.

A block that calls our scripts is checked by itself: scripts, flags, settings and recipes in it exist. The line before
it may say more:

    <!-- runs -->                 the block is run as it is printed, in an empty copy, with the slow tests
    <!-- runs: quickly -->        in every test
    <!-- not checked: reason -->  left alone
"""

import ast
import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import PAGES, Block, blocks, commands, spans, tracked_files
from tests.lint import for_each
from tests.program import ROOT
from utils.cli import FLAG, WORD, entry_parser, parse
from utils.config import load_config
from utils.config.keys import settings
from utils.errors import UserError
from utils.flags import BY_NAME

BLOCKS = list(blocks())
RUN = [block for block in BLOCKS if block.mark == "runs"]
OTHERS = {"scripts/test.sh"}
"""Their arguments go to a program that is not ours."""


def marks_of(block: Block) -> list[pytest.MarkDecorator]:
    if block.why == "quickly":
        return []
    return [pytest.mark.slow, *([pytest.mark.every_slice] if block.page == "README.md" else [])]


def problems_of(words: list[str]) -> list[str]:
    script, args = words[0], ["1" if word == "N" else word for word in words[1:] if word != "..."]
    if not (ROOT / script).is_file():
        return [f"{script} does not exist"]
    if script in OTHERS:
        return []
    try:
        return problems_of_run(args, script) if script.startswith("main_") else problems_of_tool(script, args)
    except UserError as error:
        return [str(error)]
    except SystemExit:  # -h
        return []


def problems_of_run(args: list[str], script: str) -> list[str]:
    command = parse(args, script)
    # Another name stands for the reader's own.
    recipe = command.cfg if command.cfg and "configs/" in command.cfg else None
    missing = [f"{recipe} does not exist"] if recipe and not (ROOT / recipe).is_file() else []
    if not missing:
        load_config(recipe and str(ROOT / recipe), command.flags, command.words)
    return missing


def _mention(flag: str) -> str:
    """Matches a flag in quotes, or the constant of a shared one."""
    return rf"""["']-{{0,2}}{re.escape(flag)}["']|\b{re.escape(flag.upper())}\b"""


def room_of(script: str) -> str:
    return "tools" if (ROOT / "tools" / Path(script).stem).is_dir() else "bench"


def problems_of_tool(script: str, args: list[str]) -> list[str]:
    """Its flags are read in its own files, or are those of the entry scripts."""
    text = (ROOT / script).read_text(encoding="utf-8")
    parts = sorted((ROOT / room_of(script) / Path(script).stem).rglob("*.py"))
    source = "\n".join([text, *(path.read_text(encoding="utf-8") for path in parts)])
    wrong = []
    for arg in args:
        flag, word = FLAG.fullmatch(arg), WORD.fullmatch(arg)
        if flag and flag[1] not in BY_NAME and not re.search(_mention(flag[1]), source):
            wrong.append(f"{script} has no -{flag[1]}")
        if word and word[1] not in settings() and not script.endswith(".sh"):
            wrong.append(f"there is no setting {word[1]}")
        if arg.startswith("configs/") and not (ROOT / arg).is_file():
            wrong.append(f"{arg} does not exist")
    return wrong


@for_each(PAGES)
def test_commands_are_those_the_program_takes(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    assert [
        str(block) for block in BLOCKS if block.page == name and block.mark == "not checked" and not block.why
    ] == []
    texts = [block.text for block in BLOCKS if block.page == name and block.mark != "not checked"]
    found = [words for text in (*texts, *spans(page)) for words in commands(text)]
    wrong = {" ".join(words): problems for words in found if (problems := problems_of(words))}
    assert not wrong


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block), marks=marks_of(block)) for block in RUN])
def test_a_block_runs_as_it_is_printed(block: Block, tmp_path: Path) -> None:
    place = tmp_path / "vitamp"
    for name in tracked_files():
        if not name.startswith("tests/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=place,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def anchors(path: Path) -> set[str]:
    """As a page of Markdown is given them, from its headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@for_each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE), "a conflict of git"
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_index_links_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [str(name) for name in names if f"({name})" not in text and str(name) != "README.md"] == []
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


GUIDES = [p for p in PAGES if p.parent in (ROOT / "docs", ROOT / "docs" / "recipes") and p.name != "README.md"]


@for_each(GUIDES)
def test_page_links_to_the_index_and_to_a_next_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert any("README.md)" in line for line in text.splitlines()[:5])
    assert text.strip().split("\n\n")[-1].startswith("Next: [")


def test_files_on_the_page_of_the_architecture_exist() -> None:
    named = [span for span in spans(ROOT / "docs" / "architecture.md") if re.fullmatch(r"[\w/]+/[\w/]*(\.\w+)?", span)]
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists() and name != "vitamp/program"] == []


def test_imports_in_python_blocks_exist() -> None:
    """Of our own packages, which may have moved since the page was written."""
    ours, missing = ("engine", "datasets", "models", "utils", "tools"), []
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ours:
                    module = importlib.import_module(node.module)
                    missing += [f"{page}: {one.name}" for one in node.names if not hasattr(module, one.name)]
    assert not missing


def messages() -> set[str]:
    """Every text in the program, with … where something is put in."""
    found = set()
    for name in ("engine", "datasets", "models", "utils", "tools", "scripts", "vitamp"):
        for file in (ROOT / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%(?:\.\d)?[sdfg]", "…", node.value))
    return found


def test_messages_in_troubleshooting_are_the_programs_own() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+?)`$", page, flags=re.MULTILINE)
    known = messages()
    strange = []
    for quote in quoted:
        pieces = [piece.strip() for piece in quote.split("…") if len(piece.strip()) > 2]
        if not any(all(piece in message for piece in pieces) for message in known):
            strange.append(quote)
    assert not strange
    assert len(quoted) >= 25
    remedies = page[page.index("## The ten most common") :]
    assert "vit_digits" not in remedies, "a reader with images of their own must not be shown the digits"


PADDLEVITS = {"MODEL.USE_REL_POS_BIAS"}
"""Keys that its YAML files have, and our schema does not."""


@for_each([page for page in PAGES if page.name != "config.md"])
def test_settings_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:AMP|DATA|DIST|MODEL|TRAIN)(?:\.[A-Z][A-Z0-9_]+)+\b", text))
    known = {".".join(key.split(".")[: n + 1]) for key in settings() for n in range(key.count(".") + 1)}
    assert sorted(key for key in named - known - PADDLEVITS if not key.startswith("MODEL.TRANS.")) == []


TOOLS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
WITH_FLAGS = ["main_single_gpu.py", "main_multi_gpu.py", *(f"scripts/{name}" for name in TOOLS)]
WITH_FLAGS += ["bench/loading.py", "bench/profile_update.py", "bench/simulate_loading.py"]


@pytest.mark.parametrize("script", WITH_FLAGS)
def test_help_fits_a_terminal_and_leads_on(script: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Asked in this process: nothing heavy is imported for it."""
    monkeypatch.setenv("COLUMNS", "100")
    if script.startswith("main_"):
        shown = entry_parser(script).format_help()
    else:
        stem = Path(script).stem
        module = f"bench.{stem}" if script.startswith("bench/") else f"{room_of(script)}.{stem}.command"
        tool = importlib.import_module(module)
        with contextlib.suppress(SystemExit):
            assert tool.main(["-h"]) == 0
        shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > 120] == []
    assert sum(line.strip().startswith("python ") for line in lines) >= 2
    assert [page for page in re.findall(r"docs/[\w/]+\.md", shown) if not (ROOT / page).is_file()] == []
    assert re.search(r"docs/[\w/]+\.md", shown)
    wrong = {" ".join(words): found for words in commands(shown) if (found := problems_of(words))}
    assert not wrong
