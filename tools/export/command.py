"""Write a trained model for others to use, and check it on real images before it is called done.

    python scripts/export.py runs/a -to onnx        -out vit.onnx
    python scripts/export.py runs/a -to torch       -out vit.pt2
    python scripts/export.py runs/a -to safetensors -out vit.safetensors
    python scripts/export.py runs/a -to onnx,torch,safetensors -out vit       (vit.onnx, vit.pt2, vit.safetensors)

The path is a run's folder (its best checkpoint), a checkpoint, or weights that scripts/checkpoint.py strip wrote.
onnx is for ONNX Runtime and what reads its format, torch is a program of torch.export, safetensors are weights for
timm.create_model(..., checkpoint_path=...). Each takes any number of images at once and holds what a user must know:
class names, mean, standard deviation, size, crop. docs/export.md has the code that uses them.

What is written is run, by onnxruntime, torch and timm, on images of the run's validation part, and its outputs are
compared with the model's. A file whose outputs differ is not left behind.

Exit codes: 0 done, 1 the model cannot be exported, or the check failed; 2 anything wrong with the command, the files,
or the disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.common.command_line import run_tool, tool_parser
from utils.errors import EXIT_DONE, UserError
from utils.log import log
from utils.output_file import check_output_file

ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
DTYPES = ("fp32", "fp16", "bf16")
OPSETS = range(18, 24)
IMAGES_CHECKED = 256


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    formats = _formats(asked)
    files = _files(asked.out, formats)

    # Only now, with the command known to be right: importing torch takes seconds.
    from engine.saved.trained import load_trained
    from tools.export.check import images_for_check
    from tools.export.formats import FORMATS
    from tools.export.model import Wishes, plain_model
    from tools.export.place import export_one

    for name in formats:
        FORMATS[name].require()
    trained = load_trained(asked.path, asked.weights, device="cpu", amp="off")
    log.info("%s: %s", asked.path, trained.choice)
    images = images_for_check(trained, asked.images, asked.check)
    wishes = Wishes(asked.dtype, asked.with_preprocess, asked.opset)
    for name in formats:
        export_one(FORMATS[name], plain_model(trained), trained, images, wishes, files[name], asked.tolerance)
    return EXIT_DONE


def _formats(asked: argparse.Namespace) -> list[str]:
    names = list(dict.fromkeys(asked.to.split(",")))
    if unknown := [name for name in names if name not in ENDINGS]:
        raise UserError(f"-to {asked.to}: there is no {unknown[0] or 'format without a name'}; there are {_named()}.")
    if asked.with_preprocess and "safetensors" in names:
        raise UserError(
            "-with_preprocess: a safetensors file holds weights and computes nothing; leave one of them out."
        )
    if asked.opset is not None and "onnx" not in names:
        raise UserError(f"-opset {asked.opset}: only onnx has one; leave it out.")
    if asked.dtype == "bf16" and "onnx" in names:
        raise UserError("-dtype bf16: onnxruntime runs no such model, so none could be checked; take fp16, or fp32.")
    return names


def _files(out: Path, formats: list[str]) -> dict[str, Path]:
    """The file of each format: the one named, or where there are several, that name with their endings."""
    if len(formats) == 1:
        ending = ENDINGS[formats[0]]
        if out.suffix != ending:
            raise UserError(f"-out {out}: a file of {formats[0]} ends in {ending}; name it {out.stem}{ending}.")
        files = {formats[0]: out}
    else:
        if out.suffix in ENDINGS.values():
            raise UserError(f"-out {out}: {len(formats)} files are asked for; name them without an ending, {out.stem}.")
        files = {name: out.with_name(f"{out.name}{ENDINGS[name]}") for name in formats}
    beside = [file.with_name(f"{file.name}.data") for name, file in files.items() if name == "onnx"]  # beyond 2 GB
    for file in (*files.values(), *beside):
        check_output_file(file, "-out", fresh=True)
    return files


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("export.py", __doc__)
    add = parser.add_argument
    add("path", type=Path, metavar="RUN_or_CHECKPOINT")
    add("-to", "--to", required=True, metavar="FORMAT[,FORMAT]", help=f"{_named()}, or several with commas between")
    add("-out", "--out", type=Path, required=True, metavar="FILE")
    add(
        "-weights",
        "--weights",
        choices=("auto", "model", "ema"),
        default="auto",
        help="the model's weights or their moving average (default: those that validated better)",
    )
    add("-dtype", "--dtype", choices=DTYPES, default="fp32", help="half precision halves the file (default: fp32)")
    add(
        "-with_preprocess",
        "--with_preprocess",
        "-with-preprocess",
        "--with-preprocess",
        action="store_true",
        help="take pixels, 0 to 255, and normalise them inside; without it, take normalised numbers",
    )
    add("-opset", "--opset", type=_opset, metavar="N", help=f"onnx: {OPSETS[0]} to {OPSETS[-1]} (default: torch's)")
    add("-images", "--images", type=Path, metavar="DIR", help="check on the images in this folder instead")
    add(
        "-check",
        "--check",
        type=_count,
        default=IMAGES_CHECKED,
        metavar="N|all",
        help=f"on how many images to check (default: {IMAGES_CHECKED})",
    )
    add(
        "-tolerance", "--tolerance", type=_share, metavar="X", help="greatest difference allowed, of the largest output"
    )
    return parser


def _opset(text: str) -> int:
    if not text.isdecimal() or int(text) not in OPSETS:
        raise UserError(f"-opset {text}: takes a whole number from {OPSETS[0]} to {OPSETS[-1]}.")
    return int(text)


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"-check {text}: takes a whole number from 1 on, or all.")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(f"-tolerance {text}: takes a number between 0 and 1, such as 1e-3.")
    return share


def _named() -> str:
    return f"{', '.join(list(ENDINGS)[:-1])} and {list(ENDINGS)[-1]}"
