"""The command line of the tools in scripts/: flags of their own beside those of the entry scripts."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest

from tests.program import ROOT
from tools.common.command_line import Tool, ToolLine, above_zero, some_of
from utils import cli
from utils.errors import UserError
from utils.flags import Flag, whole

OWN = (
    Flag("out", "where to", "FILE.png"),
    Flag("count", "how many", "N", default=7, kind=whole(1, 8)),
    Flag("quiet", "say less"),
    Flag("above", "a number", "X", kind=above_zero),
    Flag("words", "some words", "A,B", kind=some_of("red", "green")),
)
TOOL = Tool("tool.py", "What it does.", OWN)


def read(*words: str) -> ToolLine:
    return TOOL.read(list(words))


def test_own_flags_and_those_of_the_run_are_kept_apart() -> None:
    line = read("-count=3", "-num_classes", "5", "-quiet", "TRAIN.SEED=1", "-cfg", "a.yaml")
    assert (line.asked.count, line.asked.quiet, line.asked.out) == (3, True, None)
    assert line.given == {"count", "quiet"}
    assert line.run.flags == {"MODEL.NUM_CLASSES": ("5", "-num_classes")}
    assert (line.run.cfg, line.run.words) == ("a.yaml", {"TRAIN.SEED": "1"})
    loaded = read("-count", "3", "-num_classes", "5").load({"DATA.DATASET": ("digits", "SRC")})
    assert (loaded.config.MODEL.NUM_CLASSES, loaded.config.DATA.DATASET) == (5, "digits")
    assert loaded.sources["DATA.DATASET"] == "SRC"


def test_texts_of_flags_leave_defaults_to_the_table() -> None:
    """-h adds the default from Flag.default or Flag.default_text."""
    twice = []
    for path in (ROOT / "tools").glob("*/command.py"):
        module = importlib.import_module(f"tools.{path.parent.name}.command")
        tools: dict[str, Tool] = getattr(module, "COMMANDS", None) or {"": module.TOOL}
        twice += [
            f"{tool.name} -{flag.name}" for tool in tools.values() for flag in tool.flags if "default" in flag.about
        ]
    assert not twice


def test_one_tool_s_flags_are_no_other_program_s() -> None:
    before = copy.deepcopy((cli.FLAGS, cli.BY_NAME))
    read("-count", "3")
    assert before == (cli.FLAGS, cli.BY_NAME)
    with pytest.raises(UserError, match="unknown flag -count"):
        cli.parse(["-count", "3"], "main_single_gpu.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-cuont", "3"], "unknown flag -cuont. Did you mean -count?"),
        (["-num_clases", "3"], "unknown flag -num_clases. Did you mean -num_classes?"),
        (["count=3"], "Did you mean -count=3?"),
        (["count"], "Did you mean -count?"),
        (["-count"], "-count needs a value: -count N (how many)"),
        (["-quiet=1"], "-quiet takes no value"),
        (["-quiet", "1"], "-quiet takes no value"),
        (["-dry_run"], "tool.py has no -dry_run; use main_single_gpu.py, which has it"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        read(*words)
    assert said in str(error.value)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_own_flags_and_exits_with_0(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read("-count", "3", word)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python scripts/tool.py [-flag value ...] [KEY=VALUE ...]\n\nWhat it does.\n")
    assert "\nFlags of this tool:\n  -out FILE.png  where to\n  -count N       how many (default: 7)\n" in shown
    assert "-num_classes" not in shown


def test_values_of_flags_and_files(tmp_path: Path) -> None:
    assert (read().asked.count, read("-count", "3").asked.count) == (7, 3)
    assert read("-above", "0.5").asked.above == 0.5
    assert read("-words", "green,red,green").asked.words == ("green", "red")
    for words, said in (
        (("-count", "0"), "-count 0: takes a whole number from 1 to 8."),
        (("-count", "1.5"), "-count 1.5: takes a whole number"),
        (("-above", "0"), "-above 0: takes a number above 0."),
        (("-above", "nan"), "-above nan: takes a number above 0."),
        (("-words", "red,gren"), "-words red,gren: unknown 'gren'. Did you mean green? Known: red,green."),
    ):
        with pytest.raises(UserError) as error:
            read(*words)
        assert said in str(error.value)
    assert read().file("out", ".png") is None
    assert read("-out", f"{tmp_path}/a.PNG").file("out", ".png") == tmp_path / "a.PNG"
    (tmp_path / "folder.png").mkdir()
    for name, said in (
        ("a.jpg", "a.jpg: name a file that ends in .png, such as a.png."),
        ("none/a.png", "the folder none does not exist; name a file in an existing folder."),
        (f"{tmp_path}/folder.png", "is a folder; name a file."),
    ):
        with pytest.raises(UserError) as error:
            read("-out", name).file("out", ".png")
        assert said in str(error.value)
