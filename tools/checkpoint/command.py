"""Look after checkpoints: see what there is, verify it, average weights, and strip them for others to use.

    python scripts/checkpoint.py list    runs/a
    python scripts/checkpoint.py verify  runs/a
    python scripts/checkpoint.py average runs/a -last 5 -out averaged.safetensors
    python scripts/checkpoint.py average runs/a runs/b runs/c -out soup.safetensors
    python scripts/checkpoint.py strip   runs/a -out vit_mine.safetensors

A path is a run's folder, one of its checkpoints, or a file in one. `list` looks at meta.json and sizes; `verify` reads
every byte and compares hashes. `average` is uniform: of a run's last K checkpoints, or of the checkpoints given, of a
run its best one (a model soup). `strip` writes weights alone (of a run, its best). What these two write says in its
header which classes and which input it is for; -pretrained takes it, and so does timm.

Exit codes: 0 done, 1 `verify` found damage, 2 anything wrong with the command, the files, or the disk.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import OVERWRITE, WEIGHTS, Tool, first_word, run_tool
from utils.errors import UserError
from utils.flags import Flag, Place, whole
from utils.output_file import check_output_file

NAME = "checkpoint.py"
ONE = Place("path", "RUN_OR_CHECKPOINT", "a run's folder, one of its checkpoints, or a file in one", kind=Path)
MANY = Place("path", "RUN_OR_CHECKPOINT", ONE.about, "+", Path)
OUT = Flag("out", "the file to write", "FILE.safetensors", kind=Path, required=True)
LAST = Flag("last", "the last K checkpoints of a run", "K", kind=whole(1))
COMMANDS = {
    tool.command: tool
    for tool in (
        Tool(NAME, "the checkpoints of a run", (), (ONE,), False, "list"),
        Tool(NAME, "read every byte and compare hashes", (), (MANY,), False, "verify"),
        Tool(NAME, "uniform average of weights", (OUT, OVERWRITE, LAST, WEIGHTS), (MANY,), False, "average"),
        Tool(NAME, "weights alone, for others to use", (OUT, OVERWRITE, WEIGHTS), (ONE,), False, "strip"),
    )
}


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    command = first_word(argv, NAME, __doc__, {name: tool.about or "" for name, tool in COMMANDS.items()}, "command")
    asked = COMMANDS[command].read(argv[1:]).asked
    if "out" in asked:
        _check_out(asked.out, asked.overwrite)

    # Only now, with the command known to be right: importing torch takes seconds.
    from tools.checkpoint import files
    from tools.common import weights as checkpoint_weights

    if command == "list":
        return files.show(asked.path)
    if command == "verify":
        return files.check(asked.path)
    if command == "strip":
        return checkpoint_weights.strip(asked.path, asked.out, asked.weights)
    if asked.last is not None and len(asked.path) > 1:
        raise UserError(f"-last {asked.last}: goes with one run, and {len(asked.path)} paths are given.")
    if asked.last is None and len(asked.path) < 2:
        raise UserError("average: give -last K with a run, or several checkpoints.")
    return checkpoint_weights.average(asked.path, asked.last, asked.out, asked.weights)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix != ".safetensors":
        raise UserError(f"-out {out}: the file is one of safetensors; name it {out.stem or 'weights'}.safetensors.")
    check_output_file(out, "-out", fresh=not overwrite)
