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
"""Formats that are files, and how the name of such a file ends"""
HUB = "hub"
"""The format that is a folder"""
PADDLE = ".pdparams"
"""Ending of PaddleViT's weights"""
KNOWN = list(ENDINGS) + [HUB]
ONLY_WEIGHTS = ("safetensors", HUB)
DTYPES = ("fp32", "fp16", "bf16")
IMAGES_CHECKED = 256
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
"""Packages that a format needs besides vitamp's requirements"""

NAMES = f"{', '.join(KNOWN[:-1])} and {KNOWN[-1]}"


def _image_count(text: str) -> int | None:
    """Convert the value of -check to a number of images; None for all."""
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
    """Check the flags and the model, then write and check a file for each format."""
    command_line = TOOL.read(argv)
    options = command_line.asked
    if options.path.suffix == PADDLE:
        return _convert_paddle_weights(command_line)
    if options.name is not None:
        raise UserError(f"-name {options.name}: works only with PaddleViT's weights, a {PADDLE} file; leave it out.")
    format_names = _format_names(options)
    output_paths = _output_paths(options, format_names)
    for name in format_names:
        missing = [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]
        if missing:
            raise UserError(f"-to {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    chosen_at(options.path.expanduser(), options.weights)  # raises UserError if the path has no such weights

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from engine.trained.model import load_trained
    from tools.export.card import Hub
    from tools.export.changed import write_changed
    from tools.export.check import TOLERANCES, images_for_check, reference_logits, write_checked
    from tools.export.formats import FORMATS, Export

    # The model, and whether the formats can hold it.
    formats = FORMATS | {HUB: Hub(options.license)}
    calibrated = not options.no_calibration
    trained = load_trained(options.path, options.weights, device="cpu", amp="off", calibrated=calibrated)
    log.info("%s: %s", options.path, trained.chosen.with_calibration(trained.calibrated))
    for name in format_names:
        formats[name].check(trained)
    if options.int8:
        from tools.export.int8 import Int8, calibration_images

        keep = tuple(prefix for prefix in (options.keep or "").split(",") if prefix)
        formats["onnx"] = Int8(calibration_images(trained), keep)
        # -int8 implies a dtype, and a check on all images unless -check gives their number.
        options.dtype = "int8"
        if "check" not in command_line.given:
            options.check = None

    # What the files must compute: the model's outputs on the images of the check.
    images = images_for_check(trained, options.images, options.check, options.part)
    if options.with_resize:
        from tools.export.from_image import whole_images

        images = whole_images(trained, images)
    expected = reference_logits(trained, images)
    if options.with_resize:
        expected = trained.task.probabilities(expected)
    tolerance = options.tolerance or TOLERANCES[options.dtype]

    for name in format_names:
        kind = formats[name]
        out = output_paths[name]
        export = Export(trained, images, options.dtype, options.with_preprocess)
        logits, verdict = write_checked(kind, export, expected, out=out, tolerance=tolerance)
        write_changed(export, [expected, logits], verdict, out=out, flag=kind.flag)
    if HUB in format_names and options.license is None:
        log.info("  README.md has no license: add one before others use the model (-license ID)")
    return EXIT_DONE


def _convert_paddle_weights(command_line: ToolLine) -> int:
    """Convert PaddleViT's weights to safetensors; return the exit code. Raise UserError for flags without effect."""
    options = command_line.asked
    if options.to != "safetensors":
        raise UserError(f"-to {options.to}: PaddleViT's weights become safetensors only; use -to safetensors.")
    flags_without_effect = sorted(command_line.given - {"path", "to", "out", "overwrite", "name"})
    reason = f"has no effect on PaddleViT's weights ({PADDLE}); leave it out."
    command_line.refuse(flags_without_effect, "-{}: " + reason)  # `refuse` puts the flag's name in place of {}
    file = options.path.expanduser()
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    options.out = options.out or file.with_suffix(ENDINGS["safetensors"])
    out: Any = command_line.file("out", ENDINGS["safetensors"])  # not None: -out has just been set

    from tools.export.paddle import import_weights

    return import_weights(file, out, options.name)


def _format_names(options: Namespace) -> list[str]:
    """Return the formats that -to names, each once. Raise UserError if one is unknown, or does not go with a flag."""
    names = list(dict.fromkeys(options.to.split(",")))
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise UserError(f"-to {options.to}: unknown format {unknown[0]!r}; formats are {NAMES}.")
    _check_input_flags(options, names)
    _check_int8_flags(options, names)
    if options.dtype == "bf16" and PACKAGES.keys() & names:
        raise UserError("-dtype bf16: onnxruntime cannot run it, so the file could not be checked; use fp16 or fp32.")
    return names


def _check_input_flags(options: Namespace, names: list[str]) -> None:
    """Raise UserError if -with_preprocess or -with_resize does not go with these formats, or with the other flag."""
    only_weights = [name for name in names if name in ONLY_WEIGHTS]
    besides_onnx = [name for name in names if name != "onnx"]
    if options.with_preprocess and only_weights:
        name = only_weights[0]
        raise UserError(f"-with_preprocess: {name} holds only weights; leave out the flag or {name}.")
    if options.with_resize and besides_onnx:
        raise UserError(f"-with_resize: works only with -to onnx; export {besides_onnx[0]} by a command of its own.")
    if options.with_resize and options.with_preprocess:
        raise UserError("-with_preprocess: -with_resize normalises pixels too; leave -with_preprocess out.")


def _check_int8_flags(options: Namespace, names: list[str]) -> None:
    """Raise UserError if -int8 does not go with these formats or other flags, or -keep is given without it."""
    if options.int8 and (names != ["onnx"] or options.with_resize or options.dtype != "fp32"):
        raise UserError("-int8: goes with -to onnx alone, in fp32 and without -with_resize; leave the others out.")
    if options.int8 and options.tolerance:
        raise UserError(
            f"-tolerance {options.tolerance:g}: has no effect on -int8, whose cost is measured; leave it out."
        )
    if options.keep and not options.int8:
        raise UserError(f"-keep {options.keep}: works only with -int8; add it, or leave -keep out.")


def _check_path_flags(options: Namespace, file_formats: list[str], to_hub: bool) -> None:
    """Raise one UserError for all flags about paths that are missing, or belong to another format.

    `file_formats`: the formats in -to that are files. `to_hub`: whether hub is in -to.
    """
    problems = []
    if file_formats and not options.out:
        problems.append("-out is missing: name the file to write, such as vit.onnx")
    if options.out and not file_formats:
        problems.append(f"-out {options.out}: -to hub writes a folder; name it with -output {options.out}")
    if to_hub and not options.output:
        problems.append("-output is missing: name the folder that -to hub writes")
    for flag in ("output", "license"):
        value = getattr(options, flag)
        if value is not None and not to_hub:
            problems.append(f"-{flag} {value}: works only with -to hub; add hub, or omit -{flag}")
    if options.part and options.images:
        problems.append(f"-part {options.part}: the check is on -images {options.images}; leave one of them out")
    if problems:
        raise UserError(f"{'; '.join(problems)}.")


def _output_paths(options: Namespace, format_names: list[str]) -> dict[str, Path]:
    """Return the file or folder to write for each format. Raise UserError if one cannot be written."""
    file_formats = [name for name in format_names if name != HUB]
    _check_path_flags(options, file_formats, to_hub=HUB in format_names)

    # A single file has the name of -out; several files have that name and their endings.
    paths: dict[str, Path] = {}
    if len(file_formats) == 1:
        name = file_formats[0]
        ending = ENDINGS[name]
        if options.out.suffix != ending:
            better = options.out.parent / f"{options.out.stem}{ending}"
            raise UserError(f"-out {options.out}: {name} files end in {ending}; use -out {better}.")
        paths = {name: options.out}
    elif file_formats:
        if options.out.suffix in ENDINGS.values():
            advice = f"give the name without ending, {options.out.with_suffix('')}"
            raise UserError(f"-out {options.out}: there are {len(file_formats)} formats; {advice}.")
        paths = {name: options.out.with_name(f"{options.out.name}{ENDINGS[name]}") for name in file_formats}

    # The files, the folder of hub, and the further files that an export has beside these must be writable. Without
    # -overwrite, none of them may exist.
    fresh = not options.overwrite
    checked_paths = {name: check_output_file(path, "-out", fresh=fresh) for name, path in paths.items()}
    if HUB in format_names:
        checked_paths[HUB] = check_output_folder(options.output, "-output", HUB_FILES, fresh=fresh)
    for name, path in checked_paths.items():
        flag = "-output" if name == HUB else "-out"
        for further_file in files_beside(path):
            check_output_file(further_file, flag, fresh=fresh)
    return checked_paths
