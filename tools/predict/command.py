"""Use a trained model: which classes do these images show?

    python scripts/predict.py runs/flowers photo.jpg
    python scripts/predict.py runs/flowers 'holiday/*.jpg' more_photos/ -topk 3
    python scripts/predict.py runs/flowers photos/ -format csv -out found.csv
    find /data -name '*.jpg' | python scripts/predict.py runs/flowers - -format jsonl -amp bf16 | gzip > all.jsonl.gz

The model is that of a run (its best checkpoint), of one checkpoint, or of weights that scripts/checkpoint.py wrote.
Images are files, folders with all that is in them, globs, or `-` for a list of files on standard input. They are
prepared exactly as the run's validation prepares its own. Results come in the order of the images, as they are found.

Exit codes: 0 done, 1 some images could not be read (each is named; the others are predicted), 2 anything wrong with
the command, the model, or the disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from tools.common.command_line import OVERWRITE, WEIGHTS, Tool, run_tool
from tools.predict.show import ENDINGS, FORMATS
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError
from utils.flags import BY_NAME, Flag, Place, whole
from utils.log import log
from utils.output_file import check_output_file, writing

OWN = (
    Flag("topk", "classes shown of each image", "N", default=5, kind=whole(1)),
    Flag("format", "table, csv, jsonl (default: by the ending of -out, else table)", "FORMAT", choices=tuple(FORMATS)),
    Flag("out", "write there; only a whole result takes its name", "FILE", kind=Path),
    OVERWRITE,
    WEIGHTS,
    replace(BY_NAME["amp"], about=f"{BY_NAME['amp'].about} (default: as the run validates)", adds_up=False),
    Flag("device", "default: the run's, if it is here, else the best", "NAME", choices=("cpu", "cuda", "mps")),
    Flag("batch_size", "images at a time (default: as the run validates)", "N", kind=whole(1)),
    Flag("num_workers", "loading processes (default: by the cores)", "N", kind=whole(0)),
)
PLACES = (
    Place("path", "RUN_OR_CHECKPOINT", "the model", kind=Path),
    Place("images", "IMAGE", "file, folder, glob, or - for a list on stdin", "+"),
)
TOOL = Tool("predict.py", __doc__, OWN, PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = TOOL.read(argv).asked
    _check(asked)
    log.setLevel("WARNING")  # standard output is for the results

    # Only now, with the command known to be right: importing torch takes seconds.
    from engine.saved.trained import load_trained
    from tools.predict.find import paths_of
    from tools.predict.images import predict

    paths = paths_of(asked.images)
    trained = load_trained(asked.path, asked.weights, asked.device, asked.amp)
    print(f"{asked.path}: {trained.choice}", file=sys.stderr)
    with _opened(asked.out) as stream:
        form = FORMATS[_format(asked)](stream, trained.names(), asked.topk, paths)
        progress = sys.stderr.isatty() and not (asked.out is None and sys.stdout.isatty())
        try:
            unread = predict(trained, paths, form, asked.topk, asked.batch_size, asked.num_workers, progress)
            stream.flush()
        except KeyboardInterrupt:
            if asked.out is not None:
                raise
            log.warning("interrupted")  # what has been written stands
            return EXIT_INTERRUPTED
    return EXIT_FAILED if unread else EXIT_DONE


def _check(asked: Namespace) -> None:
    if asked.out is not None:
        asked.out = check_output_file(asked.out, "-out", fresh=not asked.overwrite)
    if not asked.path.expanduser().exists():
        raise UserError(f"{asked.path}: there is no such run, checkpoint or file; it comes first, before the images.")


def _format(asked: Namespace) -> str:
    return asked.format or ENDINGS.get(asked.out.suffix.lower() if asked.out else "", "table")


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that has its name only once it is whole. Names that are no text pass as bytes."""
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with writing(out, "-out"):
            with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                yield file
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
