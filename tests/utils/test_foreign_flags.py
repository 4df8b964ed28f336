"""Every flag in the tables of docs/migrating.md, as an unknown flag, gets the suggestion of its row."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from tests.program import ROOT
from utils.cli import Parser, parse
from utils.config import Config, load_config
from utils.config.keys import nested, settings
from utils.errors import UserError
from utils.flags import BY_NAME, FLAGS
from utils.foreign_flags import ANY_VALUE, equivalents

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
CELLS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [(re.findall("`(-.+?)`", cells[0]), *cells[1:]) for cells in CELLS if "`-" in cells[0]]
FOREIGN = [
    pytest.param(flag, re.findall("`(.+?)`", ours), note, id=flag)
    for flags, ours, note in ROWS
    for flag in flags
    if flag.split()[0].lstrip("-").replace("-", "_") not in BY_NAME
]


def error_of(*argv: str, **tool: object) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv, "main_single_gpu.py") if not tool else Parser("x.py", "", FLAGS, **tool).read(argv)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(("flag", "ours", "note"), FOREIGN)
def test_flag_of_a_table_gets_the_suggestion_of_its_row(flag: str, ours: list[str], note: str) -> None:
    name, _, own_value = flag.partition(" ")
    for value in [own_value] if own_value else ["", "0.5", "8", "true", "0.1 0.2", "strange"]:
        message = error_of(name, *value.split())
        assert message.startswith(f"unknown flag {name}. ")
        if not ours:
            assert note[1:] in message, "the page says why there is none"
        for one in ours:
            assert one in message
            if not one.startswith("-") and "=" not in one and value:
                assert f"{one}={value.replace(' ', ',')}" in message or f"{one}=..." in message


def test_what_the_rows_suggest_is_accepted() -> None:
    """Flags exist, keys exist, and the values that a row names are valid."""
    for flag, (ours, _) in equivalents().items():
        for one in ours:
            if one.startswith("-"):
                words = one.split()
                assert words[0].removeprefix("-") in BY_NAME, flag
                if len(words) > 1:
                    parse(words, "main_single_gpu.py")
            else:
                key, _, value = one.partition("=")
                assert key in settings(), flag
                if value and value != ANY_VALUE:
                    load_config(words={key: value})


def test_no_flag_has_two_meanings() -> None:
    seen: dict[str, str] = {}
    for flags, ours, _ in ROWS:
        for flag in flags:
            name = flag.lstrip("-").replace("-", "_")
            if name not in BY_NAME:
                assert seen.setdefault(name, ours) == ours, flag
    assert len(seen) > 100


def test_value_of_the_other_program_is_suggested_only_if_it_is_valid_here() -> None:
    with pytest.raises(ValidationError):
        Config.model_validate(nested({"DATA.INTERPOLATION": "random"}))
    assert "DATA.INTERPOLATION=bilinear?" in error_of("--interpolation", "bilinear")
    assert "DATA.INTERPOLATION=...?" in error_of("--interpolation", "random")
    assert "TRAIN.WARMUP_START_LR=...?" in error_of("--lr-warmup-decay", "0.01"), "there a factor"


def test_tool_without_settings_suggests_none() -> None:
    assert "TRAIN.SMOOTHING=0.1" in error_of("--label-smoothing", "0.1", settings=True)
    assert "TRAIN.SMOOTHING" not in error_of("--label-smoothing", "0.1", settings=False)
    assert "MODEL.DEPTH" not in error_of("-depth", "3", settings=False)
