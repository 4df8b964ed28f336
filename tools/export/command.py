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

from argparse import Namespace
from pathlib import Path

from tools.common.command_line import OVERWRITE, WEIGHTS, Tool, run_tool
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Place, whole
from utils.log import log
from utils.output_file import check_output_file

ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
DTYPES = ("fp32", "fp16", "bf16")
OPSETS = range(18, 24)
IMAGES_CHECKED = 256

NAMES = f"{', '.join(list(ENDINGS)[:-1])} and {list(ENDINGS)[-1]}"


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("takes a whole number from 1 on, or all")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError("takes a number between 0 and 1, such as 1e-3")
    return share


OWN = (
    Flag("to", f"{NAMES}, or several with commas between", "FORMAT[,FORMAT]", required=True),
    Flag("out", "the file to write; for several formats, its name without an ending", "FILE", kind=Path, required=True),
    OVERWRITE,
    WEIGHTS,
    Flag("dtype", "half precision halves the file", "|".join(DTYPES), default="fp32", choices=DTYPES),
    Flag("with_preprocess", "take pixels, 0 to 255, and normalise them inside; without it, take normalised numbers"),
    Flag(
        "opset",
        f"onnx: {OPSETS[0]} to {OPSETS[-1]} (default: torch's)",
        "N",
        kind=whole(OPSETS[0], OPSETS[-1]),
    ),
    Flag("images", "check on the images in this folder instead", "DIR", kind=Path),
    Flag("check", "on how many images to check", "N|all", default=IMAGES_CHECKED, kind=_count),
    Flag("tolerance", "greatest difference allowed, of the largest output", "X", kind=_share),
)
PLACES = (Place("path", "RUN_OR_CHECKPOINT", "the model", kind=Path),)
TOOL = Tool("export.py", __doc__, OWN, PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = TOOL.read(argv).asked
    formats = _formats(asked)
    files = _files(asked.out, formats, asked.overwrite)

    # Only now, with the command known to be right: importing torch takes seconds.
    from engine.saved.trained import load_trained
    from tools.export.check import images_for_check, reference_logits
    from tools.export.formats import FORMATS
    from tools.export.model import Wishes, plain_model
    from tools.export.place import export_one

    for name in formats:
        FORMATS[name].require()
    trained = load_trained(asked.path, asked.weights, device="cpu", amp="off")
    log.info("%s: %s", asked.path, trained.choice)
    images = images_for_check(trained, asked.images, asked.check)
    wanted = reference_logits(trained, images)
    wishes = Wishes(asked.dtype, asked.with_preprocess, asked.opset)
    for name in formats:
        export_one(FORMATS[name], plain_model(trained), trained, images, wanted, wishes, files[name], asked.tolerance)
    return EXIT_DONE


def _formats(asked: Namespace) -> list[str]:
    names = list(dict.fromkeys(asked.to.split(",")))
    if unknown := [name for name in names if name not in ENDINGS]:
        raise UserError(f"-to {asked.to}: there is no {unknown[0] or 'format without a name'}; there are {NAMES}.")
    if asked.with_preprocess and "safetensors" in names:
        raise UserError(
            "-with_preprocess: a safetensors file holds weights and computes nothing; leave one of them out."
        )
    if asked.opset is not None and "onnx" not in names:
        raise UserError(f"-opset {asked.opset}: only onnx has one; leave it out.")
    if asked.dtype == "bf16" and "onnx" in names:
        raise UserError("-dtype bf16: onnxruntime runs no such model, so none could be checked; take fp16, or fp32.")
    return names


def _files(out: Path, formats: list[str], overwrite: bool) -> dict[str, Path]:
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
        check_output_file(file, "-out", fresh=not overwrite)
    return files
