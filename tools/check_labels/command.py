"""Find images whose label is probably wrong, by models that did not see the image.

    python scripts/check_labels.py -cfg configs/finetune.yaml -data_path /data/flowers -output labels
    python scripts/check_labels.py -model vit_small_patch16_224 -pretrained w.pth -data_path flowers -output labels
    python scripts/check_labels.py runs/pretrained -data_path /data/flowers -output labels
    python scripts/check_labels.py -cfg configs/small_images.yaml -data_path /data/icons -folds 5 -output labels
    python main_single_gpu.py -cfg configs/finetune.yaml -data_path /data/flowers DATA.RELABEL=labels/suspects.csv

With weights, a linear classifier of the model's features is fitted to four of five folds of the images and asked about
the fifth, in seconds. With -folds, or without weights, the recipe is trained once per fold, as compare.py -folds does;
the same command continues after an interruption. Images with equal bytes, and groups (DATA.GROUP), share a fold.

In -output: report.html shows the suspects, or at least the 20 most doubtful images; suspects.csv lists them, with a
decision (keep, drop or relabel) that you may edit and DATA.RELABEL applies; exclude.txt lists those to drop for
DATA.EXCLUDE, after the lines of the list in use. Of data with a validation split, validation/ has the same of its
labels. No image is moved or changed.

-prove trains the recipe with all labels, without the suspects, with the proposed labels, and without as many random
images of each class, and compares them on validation images that were not searched. docs/check_labels.md explains it.

Exit codes: 0 done, also with suspects, or the time of -budget_min is over; 1 a training failed; 2 an error found
before; 130 interrupted.
"""

from dataclasses import replace
from pathlib import Path

from tools.common.command_line import OVERWRITE, POOL, TRUST, Tool, ToolLine, above_zero, check_one_training, tool
from tools.common.output_file import if_interrupted, results_folder
from utils.config import Config
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional, whole
from utils.log import log, log_lines
from vitamp.pooling import POOLED, POOLS

FOLDS = 5
"""Folds of a search that trains, without -folds"""
SUSPECTS = "suspects.csv"
OWN = (
    Flag("folds", "train the recipe on N folds, in place of fitting a classifier to features", "N", kind=whole(2)),
    replace(
        POOL, about=f"features: {POOL.about.rpartition(',')[0]}", default_text=f"{POOLED}, the model's", choices=POOLS
    ),
    Flag("prove", "train with and without the suspects, and compare"),
    Flag("seeds", "-prove: number of seeds, such as 3, or a list of seeds, such as 0,1,5", "N", default="3"),
    Flag("budget_min", "start no training that would end after so many minutes", "N", kind=above_zero),
    Flag("output", "folder of the results", "DIR", default=Path("output/labels"), kind=Path),
    *TRUST,
    replace(OVERWRITE, about="replace suspects.csv, with the decisions in it"),
)
TOOL = Tool("check_labels.py", __doc__, OWN, (Positional("path", "RUN_OR_CHECKPOINT", "a model for features", "?"),))


@tool
def main(argv: list[str]) -> int:
    """Read the command line, search the labels that it describes, and return the exit code."""
    line = TOOL.read(argv)
    asked = line.asked
    out = results_folder(asked.output)
    _check(line, out)

    from tools.check_labels.methods import OutOfTimeError  # imports torch; a wrong command fails at once

    # A recipe counts its classes in the data; a run or checkpoint has its own number.
    settings = {}  # each as its value and who gives it
    if asked.path is None:
        settings["MODEL.NUM_CLASSES"] = ("auto", "check_labels.py")
    loaded = line.load(settings)
    check_one_training(loaded, "check_labels.py")
    log_lines((*loaded.notes, *loaded.warnings))
    config = loaded.config
    if config.DATA.RELABEL:
        raise UserError("DATA.RELABEL: the labels are searched as they are in the data; leave the table out.")
    if asked.prove and config.DATA.FOLD:
        raise UserError("DATA.FOLD: a search reads all folds, and -prove needs images that it did not; leave it out.")
    has_weights = asked.path or config.MODEL.PRETRAINED
    by_features = bool(has_weights and not asked.folds)  # else the recipe is trained once per fold
    trains_something = asked.prove or not by_features
    if asked.budget_min and not trains_something:
        raise UserError(f"-budget_min {asked.budget_min:g}: nothing is trained; it is for -folds and -prove.")
    if_interrupted.append("the same command resumes")  # logged after Ctrl-C
    try:
        return _search(line, config, by_features, out)
    except OutOfTimeError as error:
        log.warning("%s", error)
        return EXIT_DONE


def _search(line: ToolLine, config: Config, by_features: bool, out: Path) -> int:
    """Search the labels, and write the results; or with -prove, train and compare. Returns the exit code.

    `by_features`: whether a classifier of features is fitted, rather than the recipe trained on folds.
    """
    from datasets import comes_unsplit
    from tools.check_labels.methods import ByFeatures, ByTraining
    from tools.check_labels.page import write_results
    from tools.check_labels.prove import prove
    from tools.check_labels.search import find_suspects, judge_validation
    from tools.check_labels.searched_images import config_to_search, open_images, open_validation

    asked = line.asked
    if by_features:
        method = ByFeatures.of(line, config)
        if asked.path:  # a run: its model, with the images of the command line
            config = config_to_search(method.trained, line, config)
        else:  # the recipe, with settings that loading its weights has changed
            config = method.trained.config
    else:
        method = ByTraining(line, asked.folds or FOLDS, out / "folds")
        if not asked.folds:
            log.info("No weights are given (-pretrained): the recipe is trained on %d folds.", FOLDS)
    if asked.prove:
        return prove(line, config, method, out)

    # Data that comes without a validation split is searched whole.
    unsplit = comes_unsplit(config.DATA)
    images = open_images(config, "all" if unsplit else "train")
    result = find_suspects(images, method, config.SEED)
    if_interrupted.clear()  # all trainings have ended, so there is nothing to resume
    write_results(images, result, out / SUSPECTS)
    if not unsplit:
        val_images = open_validation(config, images.classes)
        val_result = judge_validation(val_images, method, result, config.SEED)
        write_results(val_images, val_result, out / "validation" / SUSPECTS)
    return EXIT_DONE


def _check(line: ToolLine, out: Path) -> None:
    """Raise UserError for flags that do not go together, and for decisions in `out` that would be overwritten."""
    asked = line.asked
    if asked.path:
        _check_with_model(line)
    if asked.folds and asked.pool:
        raise UserError(f"-pool {asked.pool}: chooses features, and -folds trains instead; leave one of them out.")
    if (out / SUSPECTS).exists() and not (asked.overwrite or asked.prove):
        raise UserError(f"{out / SUSPECTS} may have decisions of yours; name another -output, or give -overwrite.")
    if "seeds" in line.given and not asked.prove:
        raise UserError(f"-seeds {asked.seeds}: only for -prove; a search has one seed, SEED.")
    settings_on_command_line = {*line.run.flags, *line.run.words}
    names_model = not settings_on_command_line.isdisjoint(("MODEL.NAME", "MODEL.PRETRAINED"))
    has_recipe = line.run.cfg is not None
    if not (asked.path or has_recipe or names_model):
        raise UserError("Name the model: a run, -cfg RECIPE, or -model NAME -pretrained FILE.")


def _check_with_model(line: ToolLine) -> None:
    """Raise UserError for flags that do not go with a run or checkpoint.

    Its model gives features. It has the settings of its own training, so a recipe (-cfg) is only for -prove to train.
    """
    asked = line.asked
    has_recipe = line.run.cfg is not None
    if asked.prove and not has_recipe:
        raise UserError(f"{asked.path}: -prove trains a recipe: name it by -cfg.")
    if has_recipe and not asked.prove:
        raise UserError(f"{asked.path}: leave -cfg out: it has the settings of its own training.")
    if asked.folds:
        raise UserError(f"-folds {asked.folds}: trains a recipe, so leave {asked.path} out and name it by -cfg.")
