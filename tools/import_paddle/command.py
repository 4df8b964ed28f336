"""Convert PaddleViT weights (.pdparams) to a safetensors file for timm and vitamp.

    python scripts/import_paddle.py vit_base_patch16_224.pdparams
    python scripts/import_paddle.py Epoch-300-Loss-2.1.pdparams -out mine.safetensors -name deit_small_patch16_224

Takes ViT, DeiT (also distilled) and Swin from every PaddleViT version, as plain weights or a training checkpoint. The
model follows from the file's name or from the tensor sizes, unless -name gives it. The log lists every tensor: used
(and under which name), unused, or missing. The file is a pickle, but nothing in it is executed: only arrays of numbers
are read, and a file that asks for any other object is refused.

main_single_gpu.py -pretrained reads .pdparams files too. More in docs/paddlevit_weights.md.

Exit codes: 0 done (also without a classifier, with a warning); 1 other tensors are missing or left over, and nothing
was written; 2 anything wrong with the command or the file.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import OVERWRITE, Tool, run_tool
from tools.common.output_file import check_weights_file
from utils.errors import UserError
from utils.flags import Flag, Positional

OWN = (
    Flag("out", "file to write", "FILE.safetensors", default_text="same name, with .safetensors", kind=Path),
    OVERWRITE,
    Flag("name", "name of the timm model, if neither the file's name nor the tensor sizes identify it", "NAME"),
)
PLACES = (Positional("file", "FILE.pdparams", "PaddleViT weights", kind=Path),)
TOOL = Tool("import_paddle.py", __doc__, OWN, PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_import, argv)


def _import(argv: list[str]) -> int:
    asked = TOOL.read(argv).asked
    file = asked.file.expanduser()
    out = (asked.out or file.with_suffix(".safetensors")).expanduser()
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    check_weights_file(out, fresh=not asked.overwrite)

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from tools.import_paddle.weights import import_weights

    return import_weights(file, out, asked.name)
