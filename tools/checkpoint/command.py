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

import argparse
from pathlib import Path

from tools.common.command_line import run_tool, tool_parser
from utils.errors import UserError
from utils.output_file import check_output_file


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    if "out" in asked:
        _check_out(asked.out)

    # Only now, with the command known to be right: importing torch takes seconds.
    from tools.checkpoint import files
    from tools.common import weights as checkpoint_weights

    if asked.command == "list":
        return files.show(asked.path)
    if asked.command == "verify":
        return files.check(asked.path)
    if asked.command == "strip":
        return checkpoint_weights.strip(asked.path, asked.out, asked.weights)
    if asked.last is not None and (asked.last < 1 or len(asked.path) > 1):
        raise UserError("-last takes a whole number from 1, and goes with one run.")
    if asked.last is None and len(asked.path) < 2:
        raise UserError("average: give -last K with a run, or several checkpoints.")
    return checkpoint_weights.average(asked.path, asked.last, asked.out, asked.weights)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("checkpoint.py", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|average|strip")
    for name, about, many in (
        ("list", "the checkpoints of a run", False),
        ("verify", "read every byte and compare hashes", True),
        ("average", "uniform average of weights", True),
        ("strip", "weights alone, for others to use", False),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("path", type=Path, nargs="+" if many else None, metavar="RUN_OR_CHECKPOINT")
        if name in ("average", "strip"):
            command.add_argument("-out", "--out", type=Path, required=True, metavar="FILE.safetensors")
            command.add_argument(
                "-weights",
                "--weights",
                choices=("auto", "model", "ema"),
                default="auto",
                help="the model's weights or their moving average (default: those that validated better)",
            )
        if name == "average":
            command.add_argument("-last", "--last", type=int, metavar="K", help="the last K checkpoints of a run")
    return parser


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise UserError(f"-out {out}: the file is one of safetensors; name it {out.stem or 'weights'}.safetensors.")
    check_output_file(out, "-out", fresh=True)
