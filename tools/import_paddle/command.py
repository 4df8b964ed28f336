"""Read weights of PaddleViT (.pdparams), and write them as timm and vitamp take them (.safetensors).

    python scripts/import_paddle.py vit_base_patch16_224.pdparams
    python scripts/import_paddle.py Epoch-300-Loss-2.1.pdparams -out mine.safetensors -name deit_small_patch16_224

ViT, DeiT (distilled too) and Swin, of all of PaddleViT's generations, weights alone or a training's checkpoint. Which
model it is follows from the file's name or from the sizes; -name says it. Every tensor is told: used and under which
name, not used, or missing. The file is a pickle, and is read without running anything in it: arrays of numbers are
taken, and whatever else asks to be made is refused.

main_single_gpu.py -pretrained takes the .pdparams too. docs/paddlevit_weights.md has more.

Exit codes: 0 done (a missing classifier is only told), 1 something else is missing or left over and nothing was
written, 2 anything wrong with the command or the file.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import OVERWRITE, Tool, run_tool
from utils.errors import UserError
from utils.flags import Flag, Place
from utils.output_file import check_output_file

OWN = (
    Flag("out", "the file to write (default: the same name, another ending)", "FILE.safetensors", kind=Path),
    OVERWRITE,
    Flag("name", "timm's name of the model, where sizes do not tell it", "NAME"),
)
PLACES = (Place("file", "FILE.pdparams", "PaddleViT's weights", kind=Path),)
TOOL = Tool("import_paddle.py", __doc__, OWN, PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = TOOL.read(argv).asked
    file = asked.file.expanduser()
    out = (asked.out or file.with_suffix(".safetensors")).expanduser()
    if not file.is_file():
        raise UserError(f"{file}: there is no such file.")
    if out.suffix != ".safetensors":
        raise UserError(f"-out {out}: the file is one of safetensors; name it {out.stem or 'weights'}.safetensors.")
    check_output_file(out, "-out", fresh=not asked.overwrite)

    # Only now, with the command known to be right: importing torch takes seconds.
    from tools.import_paddle.weights import import_weights

    return import_weights(file, out, asked.name)
