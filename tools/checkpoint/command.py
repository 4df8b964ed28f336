"""List, verify, average and strip checkpoints.

    python scripts/checkpoint.py list    runs/a
    python scripts/checkpoint.py verify  runs/a
    python scripts/checkpoint.py average runs/a -last 5 -out averaged.safetensors
    python scripts/checkpoint.py average runs/a runs/b runs/c -out soup.safetensors
    python scripts/checkpoint.py strip   runs/a -out vit_mine.safetensors

A path is a run's folder, one of its checkpoints, or a file in one. `list` reads meta.json and file sizes. `verify`
reads every byte and compares checksums. `average` writes the uniform mean of a run's last K checkpoints, or of several
checkpoints (a model soup). `strip` writes only the weights. Given a run, `strip` and a soup take its best checkpoint.
The header of a written file has class names and input format; -pretrained and timm load the file.

Exit codes: 0 done, 1 `verify` found damage, 2 anything wrong with the command, the files, or the disk.
"""

from pathlib import Path
from typing import Any

from tools.common.command_line import OVERWRITE, WEIGHTS, Tool, first_word, model_at, tool
from utils.errors import UserError
from utils.flags import Flag, Positional, whole

NAME = "checkpoint.py"
ONE = Positional("path", "RUN_OR_CHECKPOINT", "a run's folder, one of its checkpoints, or a file in one", kind=model_at)
MANY = Positional("path", "RUN_OR_CHECKPOINT", ONE.about, "+", model_at)
OUT = Flag("out", "file to write", "FILE.safetensors", kind=Path, required=True)
LAST = Flag("last", "average the last K checkpoints of a run", "K", kind=whole(1))
COMMANDS = {
    subcommand.command: subcommand
    for subcommand in (
        Tool(NAME, "list the checkpoints of a run", (), (ONE,), settings=False, command="list"),
        Tool(NAME, "read every byte and compare checksums", (), (MANY,), settings=False, command="verify"),
        Tool(
            NAME,
            "write the uniform mean of several checkpoints' weights",
            (OUT, OVERWRITE, LAST, WEIGHTS),
            (MANY,),
            settings=False,
            command="average",
        ),
        Tool(
            NAME,
            "write only the weights of a checkpoint",
            (OUT, OVERWRITE, WEIGHTS),
            (ONE,),
            settings=False,
            command="strip",
        ),
    )
}


@tool
def main(argv: list[str]) -> int:
    """Run the subcommand that the first word names, and return its exit code."""
    descriptions = {name: subcommand.about or "" for name, subcommand in COMMANDS.items()}
    command = first_word(argv, NAME, __doc__, descriptions, "command")
    command_line = COMMANDS[command].read(argv[1:])
    options = command_line.asked
    out: Any = command_line.file("out", ".safetensors") if "out" in options else None

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from tools.common.weights import average, list_checkpoints, strip, verify_checkpoints

    if command == "list":
        return list_checkpoints(options.path)
    if command == "verify":
        return verify_checkpoints(options.path)
    if command == "strip":
        return strip(options.path, out, options.weights)
    if options.last is not None and len(options.path) > 1:
        raise UserError(f"-last {options.last}: takes one run, but {len(options.path)} paths are given.")
    if options.last is None and len(options.path) < 2:
        raise UserError("average: give one run with -last K, or several checkpoints.")
    return average(options.path, options.last, out, options.weights)
