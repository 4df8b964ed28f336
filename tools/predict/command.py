"""Predict the classes of images with a trained model.

    python scripts/predict.py runs/flowers photo.jpg
    python scripts/predict.py runs/flowers 'holiday/*.jpg' more_photos/ -topk 3
    python scripts/predict.py runs/flowers photos/ -format csv -out found.csv
    python scripts/predict.py runs/flowers -part test -out found.csv
    python scripts/predict.py runs/a runs/b runs/c photos/
    python scripts/predict.py runs/flowers photos/ -explain maps
    python scripts/predict.py runs/flowers photos/ -features photos.npz
    find /data -name '*.jpg' | python scripts/predict.py runs/flowers - -format jsonl -amp bf16 | gzip > all.jsonl.gz
    python scripts/predict.py runs/flowers -serve

The model is a run (its best checkpoint), a checkpoint, or weights written by scripts/checkpoint.py. With several, one
after another, the mean of their probabilities is predicted. Images are files, folders with their subfolders, globs,
.csv tables with paths, or `-` for a list of files on stdin; or with -part a split of the run's data. They are prepared
exactly as in the run's validation. Results keep the order of the images and are written batch by batch.

-explain DIR also writes a picture of each image on which those places are coloured that the model's first class needs:
without them, its score falls. It computes each image 50 times. The files are called NUMBER_IMAGE_CLASS.jpg, with the
number of the image in the results, from 1.

-features FILE writes what the model has learned to see in each image, in place of classes: vectors of numbers, for
search, clustering, or another classifier. A model that learned without labels has these alone.

-serve stays, for a program that asks again and again: for each line of standard input, a JSON list of images, it writes
a line, the list of what -format jsonl writes of them, or {"error": "why"}. It ends with its input.

The processes of torchrun, srun or mpirun share the work of the other ways.

Exit codes: 0 done, 1 some images could not be predicted (each is named; the others are), 2 anything wrong with the
command, the model, or the disk.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tools.common import command_line
from tools.common.output_file import check_output_folder, if_interrupted, writing
from tools.common.ranks import ranks_of_launcher
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.flags import BY_NAME, Flag, Positional, whole
from utils.log import log
from utils.record.run_folder import is_run_folder
from vitamp.checkpoints import META, located
from vitamp.files import replacing
from vitamp.pooling import POOLED

if TYPE_CHECKING:
    from datasets import Batch, ImageDataset
    from engine.trained.model import Trained
    from tools.predict.images import ClassChooser, Guess

FORMATS = ("table", "csv", "json", "jsonl")
DEVICES = ("cpu", "cuda", "mps")
OWN = (
    Flag(
        "topk",
        "number of classes per image",
        "N",
        default_text="5; with several labels per image, all that are predicted",
        kind=whole(1),
    ),
    Flag(
        "threshold",
        "several labels per image: predict each class whose probability is at least P",
        "P",
        default_text="each class's own threshold, from validation",
        kind=command_line.number("from 0 to 1, such as 0.5", lambda value: 0 <= value <= 1),
    ),
    Flag("format", "output format", "FORMAT", default_text="by the ending of -out, else table", choices=FORMATS),
    Flag("out", "write to a file, which appears only when complete", "FILE", kind=Path),
    Flag("serve", "answer each line of standard input, a JSON list of images, with a line of JSON"),
    Flag("features", "write the features of the images, in place of their classes", "FILE.npz", kind=Path),
    replace(command_line.POOL, about=f"-features: {command_line.POOL.about}"),
    Flag("explain", "for each image, write a picture with a map of where the model looks", "DIR", kind=Path),
    replace(command_line.PART, about="predict the images of this split of the run's data", default_text="none"),
    command_line.OVERWRITE,
    command_line.WEIGHTS,
    command_line.TTA,
    command_line.NO_CALIBRATION,
    *command_line.TRUST,
    replace(BY_NAME["amp"], default_text="as in the run's validation", append=False),
    replace(BY_NAME["device"], default_text="the run's device if available, else the best", choices=DEVICES),
    Flag("batch_size", "images per batch", "N", default_text="as in the run's validation", kind=whole(1)),
    Flag("num_workers", "loading processes", "N", default_text="depends on the number of cores", kind=whole(0)),
)
PLACES = (
    Positional("path", "RUN_OR_CHECKPOINT", "the model", kind=command_line.model_at),
    Positional("images", "IMAGE", "file, folder, glob, .csv table, or - for a list on stdin", "*"),
)
OF_CLASSES = ("topk", "threshold", "format", "out", "explain", "tta", "no_calibration")
"""Own flags about classes, which -features does not write"""
TOOL = command_line.Tool("predict.py", __doc__, OWN, PLACES, settings=False)


@command_line.tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    _check(line)
    if asked.serve:
        command_line.check_one_process("predict.py -serve")
    with ranks_of_launcher(argv, line.run.ranks) as world:
        return _predict(asked, world)


def _predict(asked: Namespace, world: World) -> int:
    """Load the models, and predict the images by all ranks; rank 0 writes the results. Returns the exit code."""
    log.setLevel("WARNING" if world.first else "ERROR")  # standard output is for the results

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from engine.trained.model import load_trained, name_of, together
    from tools.predict.images import FORMS, ClassChooser, predict_images, serve, with_maps, write_features

    load = partial(
        load_trained,
        weights=asked.weights,
        device=asked.device,
        amp=asked.amp,
        calibrated=not asked.no_calibration,
        needs_labels=asked.features is None,
        world=world,
    )
    trained = on_every_rank(world, lambda: together(asked.models, load, bool(asked.tta)))
    if asked.serve:
        choose = ClassChooser(trained, asked.topk, asked.threshold)
        _print_models(asked.models, trained, choose)
        with _opened(None) as stream:
            return serve(sys.stdin.buffer, stream, trained, choose, asked)
    dataset, paths = _open_images(asked, trained, world)
    if not paths:
        paths = [name_of(dataset, index) for index in range(len(dataset))]
    if asked.features is not None:
        return write_features(asked, trained, dataset, paths, world)
    choose = ClassChooser(trained, asked.topk, asked.threshold)
    if world.first:
        _print_models(asked.models, trained, choose)

    def guesses_of(batch: Batch) -> Iterable[list[Guess] | None]:
        rows = choose(trained.logits(batch.images))
        return with_maps(rows, batch, trained, paths, asked) if asked.explain else rows

    write_rows = FORMS[asked.format or _format_of(asked.out)]
    shows_rows = asked.out is None and sys.stdout.isatty()
    failed = list[str]()
    rows = predict_images(
        trained,
        dataset,
        paths,
        results=guesses_of,
        asked=asked,
        progress=world.first and sys.stderr.isatty() and not shows_rows,
        failed=failed,
        world=world,
    )
    if not world.first:
        list(rows)  # predicts the images of this rank, whose rows go to rank 0
        return EXIT_DONE
    # Of JSON, a list that is not closed is not valid.
    if asked.out is None and write_rows is not FORMS["json"]:
        if_interrupted.append("the rows written so far are valid")
    with _opened(asked.out) as stream:
        write_rows(stream, rows, trained.names(), choose.most, paths)
        stream.flush()
    return EXIT_FAILED if failed else EXIT_DONE


def _format_of(out: Path | None) -> str:
    """The output format by the ending of the file; without a known one, a table."""
    ending = out.suffix.lower().removeprefix(".") if out else ""
    return ending if ending in FORMATS else FORMATS[0]


def _open_images(asked: Namespace, trained: Trained, world: World) -> tuple[ImageDataset, list[str]]:
    """Open the images that the command line names, and return their names; for -part, which names a split, none."""
    from datasets.given import open_given
    from datasets.sources.files import OF_SEVERAL
    from engine.evaluation.data import check_split
    from engine.trained.model import split_of_run
    from tools.predict.images import find_images

    if asked.part is None:
        find = partial(find_images, asked.images, trained.config.DATA)
        paths = broadcast(on_rank_0(world, find), world)  # one process reads standard input
        names = [path.partition(OF_SEVERAL)[0] for path in paths]  # an image of several files has the name of the first
        return open_given(paths, trained.config.DATA), names
    try:
        for model in trained.all:
            check_split(trained.config, model.chosen, asked.part)
        return split_of_run(trained, asked.part), []
    except UserError as error:
        instead = "predict.py cannot change where the run's data is: name the images instead."
        raise UserError(f"{error} {instead}") from None


def _check(line: command_line.ToolLine) -> None:
    """Find out which positional arguments are models, and raise UserError for flags that do not go together.

    Sets `models`, and the checked paths of the output files, among the values of the command line.
    """
    asked = line.asked
    asked.models = [asked.path]
    # Models come first, then images. Where the first argument is no model, an error that names it follows.
    if asked.images and _is_model(asked.path):
        while asked.images and _is_model(Path(asked.images[0])):
            asked.models.append(Path(asked.images.pop(0)))
    if asked.serve:
        why = "-serve: does not go with -{}; standard input names the images."
        line.refuse(("part", "features", "format", "out", "explain"), why)
        if asked.images:
            raise UserError(f"-serve: standard input names the images; leave {asked.images[0]} out.")
    elif asked.part and asked.images:
        raise UserError(f"-part {asked.part} predicts the images of the run's data; leave {asked.images[0]} out.")
    elif not asked.part and not asked.images:
        raise UserError("IMAGE is missing: name files or folders, or a split of the run's data with -part test.")
    asked.out = line.file("out")
    if asked.explain is not None:
        asked.explain = check_output_folder(asked.explain, "-explain", ("pictures",), fresh=not asked.overwrite)
    if not asked.path.expanduser().exists():
        raise UserError(f"{asked.path}: no such run, checkpoint or file; the model comes before the images.")
    if asked.features is None:
        if asked.pool is not None:
            raise UserError(f"-pool {asked.pool}: chooses the features that -features FILE writes; give that too.")
        return
    if len(asked.models) > 1:
        raise UserError(f"-features: takes one model, but {len(asked.models)} are given; their features differ.")
    asked.pool = asked.pool or POOLED
    line.refuse(OF_CLASSES, "-{}: does not go with -features, which writes no classes; leave it out.")
    asked.features = line.file("features", ".npz")


def _print_models(paths: list[Path], trained: Trained, choose: ClassChooser) -> None:
    """Print on standard error which weights predict, and how classes are chosen."""
    mirrored = "mean of the probabilities of each image and its mirror image" if trained.flip else ""
    for path, model in zip(paths, trained.all, strict=True):
        words = (model.chosen.words, choose.words, model.chosen.describe_calibration(model.calibrated), mirrored)
        print(f"{path}: {'; '.join(filter(None, words))}", file=sys.stderr)
    if trained.others:
        print(f"mean of the probabilities of these {len(paths)} models", file=sys.stderr)


def _is_model(path: Path) -> bool:
    place = located(path.expanduser())
    return place.suffix == ".safetensors" or is_run_folder(place) or (place / META).is_file()


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    """Open the file `out`, which appears only when complete; without it, standard output.

    Bytes of names that are not UTF-8 pass unchanged.
    """
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout
        return
    with (
        writing(out, "-out"),
        replacing(out) as unfinished,
        unfinished.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        yield file
