"""Export a trained model to ONNX, OpenVINO, torch.export, safetensors or the Hugging Face Hub; check it on real images.

    python scripts/export.py runs/a -to onnx        -out vit.onnx
    python scripts/export.py runs/a -to onnx -int8  -out vit.onnx
    python scripts/export.py runs/a -to openvino    -out vit.xml
    python scripts/export.py runs/a -to torch       -out vit.pt2
    python scripts/export.py runs/a -to safetensors -out vit.safetensors
    python scripts/export.py runs/a -to onnx,torch,safetensors -out vit       (vit.onnx, vit.pt2, vit.safetensors)
    python scripts/export.py runs/a -to hub         -output vit
    python scripts/export.py vit_base_patch16_224.pdparams -to safetensors

The path is a run's folder (its best checkpoint), a checkpoint, or weights written by scripts/checkpoint.py strip. onnx
is for ONNX Runtime and other programs that read ONNX; openvino is for Intel's OpenVINO, with weights in vit.bin; torch
is a torch.export program; safetensors has weights for timm.create_model(..., checkpoint_path=...). hub is a folder for
timm.create_model("local-dir:..."), with a model card; `hf upload me/vit vit` puts it on the Hugging Face Hub. Each has
class names, mean, standard deviation, image size and crop, and takes any batch size. docs/export.md has code for them.

From PaddleViT's weights (.pdparams), -to safetensors makes a file for timm and vitamp: the models of
docs/paddlevit_weights.md, as plain weights or a training checkpoint. The model follows from the file's name or
from the tensor sizes, unless -name gives it. The log lists every tensor: used (and under which name), unused, or
missing. The file is a pickle, but nothing in it is executed: only arrays of numbers are read, and a file that asks for
any other object is refused. docs/paddlevit_weights.md has more.

-int8 computes layers in 8 bits, calibrated on training images; layers that hurt stay in fp32.

Every export is run on validation images of the run, and the log says which answers changed (FILE.changed.html shows
them), what that costs, and how fast the file is. Without -int8, no file is left whose outputs are not the model's.

Exit codes: 0 done, 1 the model cannot be exported, or the check failed, or tensors of PaddleViT's weights
are missing or left over, apart from the classifier's; 2 anything wrong with the command, the files, or the disk.
"""

from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.common.command_line import (
    NO_CALIBRATION,
    OVERWRITE,
    PART,
    TRUST,
    WEIGHTS,
    Tool,
    ToolLine,
    model_at,
    number,
    tool,
)
from tools.common.output_file import check_output_file, check_output_folder
from tools.export import HUB_FILES, files_beside
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional
from utils.log import log
from vitamp.weights import chosen_at

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "safetensors": ".safetensors"}
"""Formats that are files"""
HUB = "hub"
PADDLE = ".pdparams"
KNOWN = list(ENDINGS) + [HUB]
ONLY_WEIGHTS = ("safetensors", HUB)
DTYPES = ("fp32", "fp16", "bf16")
IMAGES_CHECKED = 256
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
"""Needed besides vitamp's requirements"""

NAMES = f"{', '.join(KNOWN[:-1])} and {KNOWN[-1]}"


def _image_count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("takes a whole number from 1 on, or all")
    return int(text)


OWN = (
    Flag("to", f"one or several of {NAMES}, separated by commas", "FORMAT[,FORMAT]", required=True),
    Flag(
        "out",
        "file to write; for several formats, the name without an ending",
        "FILE",
        kind=Path,
        default_text="for a .pdparams file, its name",
    ),
    Flag("output", "hub: folder to write", "DIR", kind=Path),
    Flag("license", "hub: license in the model card, such as mit or cc-by-4.0", "ID", default_text="none"),
    OVERWRITE,
    WEIGHTS,
    NO_CALIBRATION,
    *TRUST,
    Flag(
        "dtype",
        "dtype of the stored weights; fp16 and bf16 halve the file",
        "|".join(DTYPES),
        default="fp32",
        choices=DTYPES,
    ),
    Flag("int8", "onnx: layers in 8 bits, calibrated on training images"),
    Flag(
        "keep", "-int8: leave layers in fp32 whose names begin so", "NAMES", default_text="those that are found to hurt"
    ),
    Flag("with_preprocess", "the model takes pixels (0 to 255, or by DATA.BITS) and normalises them itself"),
    Flag("with_resize", "onnx: the model takes one RGB image of any size, and returns probabilities"),
    Flag("images", "check on images in this folder instead of validation images", "DIR", kind=Path),
    replace(PART, about="check on images of this split of the run's data", default_text="val"),
    Flag("check", "number of images to check on", "N|all", default=IMAGES_CHECKED, kind=_image_count),
    Flag("name", "of a .pdparams file: the timm model, if neither its name nor its sizes identify it", "NAME"),
    Flag(
        "tolerance",
        "largest difference allowed, as a fraction of the largest output",
        "X",
        kind=number("between 0 and 1, such as 1e-3", lambda value: 0 < value < 1),
    ),
)
PLACES = (Positional("path", "PATH", "the model: a run, a checkpoint or weights", kind=model_at),)
TOOL = Tool("export.py", __doc__, OWN, PLACES, settings=False)


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    if asked.path.suffix == PADDLE:
        return _convert(line)
    if asked.name is not None:
        raise UserError(f"-name {asked.name}: works only with PaddleViT's weights, a {PADDLE} file; leave it out.")
    formats = _formats(asked)
    files = _files(asked, formats)
    for name in formats:
        missing = [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]
        if missing:
            raise UserError(f"-to {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    chosen_at(asked.path.expanduser(), asked.weights)  # raises UserError for a wrong one

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from engine.trained.model import load_trained
    from tools.export.card import Hub
    from tools.export.changed import write_changed
    from tools.export.formats import FORMATS, TOLERANCES, Export, images_for_check, reference_logits, write_checked

    kinds = FORMATS | {HUB: Hub(asked.license)}
    trained = load_trained(asked.path, asked.weights, device="cpu", amp="off", calibrated=not asked.no_calibration)
    log.info("%s: %s", asked.path, trained.chosen.with_calibration(trained.calibrated))
    for name in formats:
        kinds[name].check(trained)
    if asked.int8:
        from tools.export.int8 import Int8, calibration_images

        keep = tuple(filter(None, (asked.keep or "").split(",")))
        kinds["onnx"] = Int8(calibration_images(trained), keep)
        asked.dtype = "int8"
        if "check" not in line.given:
            asked.check = None  # all
    images = images_for_check(trained, asked.images, asked.check, asked.part)
    if asked.with_resize:
        from tools.export.from_image import whole_images

        images = whole_images(trained, images)
    expected = reference_logits(trained, images)
    if asked.with_resize:
        expected = trained.task.probabilities(expected)
    tolerance = asked.tolerance or TOLERANCES[asked.dtype]
    for name in formats:
        kind = kinds[name]
        export = Export(trained, images, asked.dtype, asked.with_preprocess)
        logits, words = write_checked(kind, export, expected, out=files[name], tolerance=tolerance)
        write_changed(export, [expected, logits], words, out=files[name], flag=kind.flag)
    if HUB in formats and asked.license is None:
        log.info("  README.md has no license: add one before others use the model (-license ID)")
    return EXIT_DONE


def _convert(line: ToolLine) -> int:
    """Make safetensors of PaddleViT's weights."""
    asked = line.asked
    if asked.to != "safetensors":
        raise UserError(f"-to {asked.to}: PaddleViT's weights become safetensors only; use -to safetensors.")
    others = sorted(line.given - {"path", "to", "out", "overwrite", "name"})
    line.refuse(others, f"-{{}}: has no effect on PaddleViT's weights ({PADDLE}); leave it out.")
    file = asked.path.expanduser()
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    asked.out = asked.out or file.with_suffix(ENDINGS["safetensors"])
    out: Any = line.file("out", ENDINGS["safetensors"])

    from tools.export.paddle import import_weights

    return import_weights(file, out, asked.name)


def _formats(asked: Namespace) -> list[str]:
    names = list(dict.fromkeys(asked.to.split(",")))
    unknown = [name for name in names if name not in KNOWN]
    only_weights = [name for name in names if name in ONLY_WEIGHTS]
    others = [name for name in names if name != "onnx"]
    if unknown:
        raise UserError(f"-to {asked.to}: unknown format {unknown[0]!r}; formats are {NAMES}.")
    if asked.with_preprocess and only_weights:
        name = only_weights[0]
        raise UserError(f"-with_preprocess: {name} holds only weights; leave out the flag or {name}.")
    if asked.with_resize and others:
        raise UserError(f"-with_resize: works only with -to onnx; export {others[0]} by a command of its own.")
    if asked.with_resize and asked.with_preprocess:
        raise UserError("-with_preprocess: -with_resize normalises pixels too; leave -with_preprocess out.")
    if asked.int8 and (others or asked.with_resize or asked.dtype != "fp32"):
        raise UserError("-int8: goes with -to onnx alone, in fp32 and without -with_resize; leave the others out.")
    if asked.int8 and asked.tolerance:
        raise UserError(
            f"-tolerance {asked.tolerance:g}: has no effect on -int8, whose cost is measured; leave it out."
        )
    if asked.keep and not asked.int8:
        raise UserError(f"-keep {asked.keep}: works only with -int8; add it, or leave -keep out.")
    if asked.dtype == "bf16" and PACKAGES.keys() & names:
        raise UserError("-dtype bf16: onnxruntime cannot run it, so the file could not be checked; use fp16 or fp32.")
    return names


def _check_places(asked: Namespace, singles: list[str], hub: bool) -> None:
    """Raise UserError for all flags about places that are missing, or belong to another format."""
    problems = []
    if singles and not asked.out:
        problems.append("-out is missing: name the file to write, such as vit.onnx")
    if asked.out and not singles:
        problems.append(f"-out {asked.out}: -to hub writes a folder; name it with -output {asked.out}")
    if hub and not asked.output:
        problems.append("-output is missing: name the folder that -to hub writes")
    for name in ("output", "license"):
        given = getattr(asked, name)
        if given is not None and not hub:
            problems.append(f"-{name} {given}: works only with -to hub; add hub, or omit -{name}")
    if asked.part and asked.images:
        problems.append(f"-part {asked.part}: the check is on -images {asked.images}; leave one of them out")
    if problems:
        raise UserError(f"{'; '.join(problems)}.")


def _files(asked: Namespace, formats: list[str]) -> dict[str, Path]:
    """File or folder of each format, checked."""
    singles = [name for name in formats if name != HUB]
    _check_places(asked, singles, HUB in formats)
    files: dict[str, Path] = {}
    if len(singles) == 1:
        ending = ENDINGS[singles[0]]
        if asked.out.suffix != ending:
            better = asked.out.parent / f"{asked.out.stem}{ending}"
            raise UserError(f"-out {asked.out}: {singles[0]} files end in {ending}; use -out {better}.")
        files = {singles[0]: asked.out}
    elif singles:
        if asked.out.suffix in ENDINGS.values():
            many = f"there are {len(singles)} formats; give the name without ending, {asked.out.with_suffix('')}"
            raise UserError(f"-out {asked.out}: {many}.")
        files = {name: asked.out.with_name(f"{asked.out.name}{ENDINGS[name]}") for name in singles}
    fresh = not asked.overwrite
    files = {name: check_output_file(file, "-out", fresh=fresh) for name, file in files.items()}
    if HUB in formats:
        files[HUB] = check_output_folder(asked.output, "-output", HUB_FILES, fresh=fresh)
    for name, file in files.items():
        flag = "-output" if name == HUB else "-out"
        for beside in files_beside(file):
            check_output_file(beside, flag, fresh=fresh)
    return files
