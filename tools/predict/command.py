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

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tools.common.command_line import amp_in_one_word, run_tool, tool_parser
from tools.predict.show import ENDINGS, FORMATS
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError
from utils.log import log
from utils.output_file import check_output_file, writing
from utils.precisions import AMP_WORDS


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    asked = _parser().parse_args(amp_in_one_word(argv))
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


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("predict.py", __doc__)
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="file, folder, glob, or - for a list on stdin")

    def flag(name: str, help: str, **more: object) -> None:
        parser.add_argument(f"-{name}", f"--{name}", help=help, **more)  # pyright: ignore[reportArgumentType]

    flag("topk", "classes shown of each image (default 5)", type=int, default=5, metavar="N")
    flag("format", "default: by the ending of -out, else table", choices=sorted(FORMATS))
    flag("out", "write there; only a whole result takes its name", type=Path, metavar="FILE")
    flag("weights", "default: those that validated better", choices=("auto", "model", "ema"), default="auto")
    flag("amp", f"{AMP_WORDS}; alone: on (default: as the run validates)", metavar="HOW")
    flag("device", "default: the run's, if it is here, else the best", choices=("cpu", "cuda", "mps"))
    flag("batch_size", "images at a time (default: as the run validates)", type=int, metavar="N")
    flag("num_workers", "loading processes (default: by the cores)", type=int, metavar="N")
    return parser


def _check(asked: argparse.Namespace) -> None:
    for name, least in (("topk", 1), ("batch_size", 1), ("num_workers", 0)):
        value = getattr(asked, name)
        if value is not None and value < least:
            raise UserError(f"-{name} {value}: takes a whole number from {least} on.")
    if asked.out is not None:
        asked.out = check_output_file(asked.out, "-out")
    if not asked.path.expanduser().exists():
        raise UserError(f"{asked.path}: there is no such run, checkpoint or file; it comes first, before the images.")


def _format(asked: argparse.Namespace) -> str:
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
