"""Evaluate a trained model on its validation split or on other data: accuracy, recall, calibration, confusion.

    python scripts/evaluate.py runs/flowers
    python scripts/evaluate.py runs/flowers -weights ema -json eval.json
    python scripts/evaluate.py runs/flowers -calibrate
    python scripts/evaluate.py runs/flowers -knn
    python scripts/evaluate.py runs/a runs/b runs/c
    python scripts/evaluate.py -model vit_small_patch16_224 -pretrained w.pth -data_path flowers -probe -out runs/probe
    python scripts/evaluate.py -model tf_efficientnet_lite0,resnet50 -data_path flowers -probe
    python scripts/evaluate.py runs/flowers -dataset imagefolder -data_path /data/other_flowers

The model is a run (its best checkpoint), a checkpoint, or weights written by scripts/checkpoint.py. Settings are those
of the run; flags and settings of main_single_gpu.py override them, such as -batch_size and -amp, but not those of the
model and its weights (-cfg, -resume, -pretrained, -num_classes). Classes of another data set are matched by name to
those of the model. Other data than the run's is evaluated whole, unless it has a validation split of its own.

Precision, recall and F1 are means over the classes that have images. The calibration error is ECE: the mean distance
between confidence and accuracy, over bins of equal width. A model with several labels per image gets mAP, F1 and exact
match, and average precision for each class.

Of several models, the mean of their probabilities is evaluated.

-calibrate fits a temperature to the weights, so that the probabilities are as often right as they say. It is kept in
the run's calibration.json; predict.py, export.py and later evaluations of these weights divide the logits by it.

-probe trains linear classifiers on the frozen model's features, in seconds: features are computed once and kept, and
folds of the training images choose the strength and the pooling. It says what the weights are worth for these images,
also those of a model that learned without labels, or of timm (-model NAME -pretrained FILE, in place of a run). -model
A,B,C compares several models, with timm's own weights or those that -pretrained lists in the same order. -out saves the
best one as a run. -knn classifies each image by its nearest training images instead. -dataset and -data_path
name images with labels, if the run's have none.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common import command_line
from tools.common.output_file import writing
from utils.cli import CommandLine
from utils.distributed.launchers import read_world
from utils.distributed.world import ALONE
from utils.errors import EXIT_DONE, EXIT_USAGE, UserError
from utils.flags import Flag, Positional, whole
from utils.log import log, log_lines
from utils.program import typed
from utils.record.run_folder import CONFIG, is_run_folder, write_json
from utils.statistics.proportions import Interval
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import BALANCED, ONE_LABEL, SEVERAL_LABELS
from vitamp.pooling import POOLED, POOLS
from vitamp.weights import chosen_at

if TYPE_CHECKING:
    from engine.trained.model import Trained
    from tools.evaluate.part import Part

OWN = (
    command_line.WEIGHTS,
    command_line.PART,
    command_line.TTA,
    Flag("json", "write all metrics and the confusion matrix as JSON", "FILE.json"),
    Flag("calibrate", "fit a temperature to the weights on these images, and keep it in the run; no other metrics"),
    command_line.NO_CALIBRATION,
    Flag(
        "knn",
        "accuracy of the K nearest training images instead of the classifier; no other metrics",
        "[K]",
        kind=whole(1),
        const="20",
        accepts=str.isdecimal,
    ),
    Flag("probe", "linear classifiers on the features of the frozen model; no other metrics"),
    Flag("out", "-probe: save the best one as a run, which starts from the weights", "RUN"),
    replace(
        command_line.POOL,
        about=f"-knn, -probe: {command_line.POOL.about.rpartition(',')[0]}",
        default_text=f"{POOLED}; of -probe, all that the model has",
        choices=POOLS,
    ),
    *command_line.TRUST,
    command_line.OVERWRITE,
)
TOOL = command_line.Tool(
    "evaluate.py", __doc__, OWN, (Positional("path", "RUN_OR_CHECKPOINT", "the model, or several", "*"),)
)
CLASSIFIER_FLAGS = ("calibrate", "no_calibration", "tta")
"""Own flags about the classifier and its probabilities"""


@command_line.tool
def main(argv: list[str]) -> int:
    """Read the command line, evaluate the models that it names, write -json, and return the exit code."""
    line = TOOL.read(argv)
    asked = line.asked
    # The command line may name several models. `path` becomes the first one, for what takes a single model.
    asked.models = asked.path or []
    asked.path = asked.models[0] if asked.models else None
    json_file = line.file("json", ".json")
    features_flag = ""
    if asked.probe:
        features_flag = "-probe"
    elif asked.knn is not None:
        features_flag = "-knn"
    _check(line, features_flag)
    if line.given_by("NGPUS"):
        log.warning("-ngpus has no effect: only main_multi_gpu.py without a launcher starts processes.")
    flags = {**line.run.flags, "EVAL": (True, "evaluate.py")}  # each as its value and who gives it
    # For features the training images vote, so others are evaluated by default.
    part = asked.part or ("val" if features_flag else None)
    if part:
        flags["DATA.PART"] = (part, "-part")
    given = replace(line.run, flags=flags)
    names = _listed(line, "MODEL.NAME")  # -model A,B names models of timm
    if not features_flag:
        results = _evaluate_classifier(given, asked)
    elif len(names) > 1:
        results = _probe_models(line, given, names)
    else:
        results = _evaluate_features(line, given)
    if json_file is not None and results:
        with writing(json_file, "-json"):
            write_json(json_file, results)
        log.info("All metrics: %s", json_file)
    return EXIT_USAGE if results.get("failed") else EXIT_DONE


def _evaluate_classifier(given: CommandLine, asked: Namespace) -> dict[str, Any]:
    """Load the models, and evaluate the mean of their probabilities; with -calibrate, fit a temperature instead.

    Returns the metrics for the JSON file; -calibrate has none.
    """
    command_line.check_one_process("evaluate.py")
    log.setLevel("WARNING")  # building the model logs what the training has logged already

    # Torch takes seconds to import; a wrong command fails at once.
    from engine.trained.model import load_trained, together

    calibrated = not (asked.no_calibration or asked.calibrate)  # whether probabilities have the kept temperature

    def load(path: Path | str) -> Trained:
        return load_trained(path, asked.weights, given=given, calibrated=calibrated)

    trained = together(asked.models, load, bool(asked.tta))
    if not asked.calibrate:
        return _log_metrics(trained, given, asked)
    from tools.evaluate.calibrate import calibrate

    calibrate(trained, given, asked.path)  # a single model, as `_check` makes sure
    return {}


def _evaluate_features(line: command_line.ToolLine, given: CommandLine) -> dict[str, Any]:
    """Run -knn or -probe for a run, or for the weights and the model that flags name.

    `line`: the command line. `given`: its settings, with the split to evaluate (DATA.PART). Returns the metrics for the
    JSON file. They are empty on all ranks but the first.
    """
    asked = line.asked
    world = read_world({}) or ALONE
    log.setLevel("WARNING" if asked.path or not world.first else "INFO")

    from engine.trained.model import load_trained, pretrained
    from tools.evaluate.features import evaluate_features

    if asked.path:
        trained = load_trained(asked.path, asked.weights, given=given, needs_labels=False, world=world)
    else:
        # Each setting as its value and who gives it
        loaded = line.load({"MODEL.NEW_CLASSIFIER": (True, "-probe"), "MODEL.NUM_CLASSES": ("auto", "-probe")})
        if not loaded.config.MODEL.PRETRAINED:
            raise UserError("-probe: MODEL.PRETRAINED is not set; add -pretrained FILE_OR_NAME.")
        log_lines(loaded.notes)
        part, _ = given.flags["DATA.PART"]
        trained = pretrained(loaded.config.changed(DATA={"PART": part}), world)
    return evaluate_features(trained, given, asked, world)


def _listed(line: command_line.ToolLine, key: str) -> list[str]:
    """Return the values that the flag of a setting lists, separated by commas; empty without the flag."""
    value, *_ = line.run.flags.get(key, ("",))  # the value, and which flag gave it
    return [word for word in str(value).split(",") if word]


def _probe_models(line: command_line.ToolLine, given: CommandLine, names: list[str]) -> dict[str, Any]:
    """Run -probe for each of these models, and log one table of all.

    `names`: timm's names of the models. `line`, `given`: see `_evaluate_features`. A model that fails is logged, and
    the others are evaluated. Returns the metrics for the JSON file, with the errors of those that failed; empty on all
    ranks but the first.
    """
    from models.weights.find import local_weights
    from tools.common.evaluation import INTERVALS
    from tools.common.tables import in_columns

    models = list[dict[str, Any]]()
    failed = dict[str, str]()
    weights_of_models = _listed(line, "MODEL.PRETRAINED")
    if not weights_of_models:
        for name in names:
            local_weights(name)  # raises UserError for an unknown one before the first is downloaded
        weights_of_models = names
    for name, weights in zip(names, weights_of_models, strict=True):
        flags = line.run.flags | {"MODEL.NAME": (name, "-model"), "MODEL.PRETRAINED": (weights, "-pretrained")}
        line_of_model = replace(line, run=replace(line.run, flags=flags))
        began = time.perf_counter()
        try:
            metrics = _evaluate_features(line_of_model, given)
        except UserError as error:
            log.error("%s: %s", name, error)
            failed[name] = str(error)
        else:
            if metrics:
                models.append(metrics | {"seconds": round(time.perf_counter() - began, 1)})
    if not models:
        return {"failed": failed} if failed else {}

    # The best model is the one whose chosen probe is the most accurate in folds of the training images.
    best = max(models, key=lambda model: model["probes"][model["chosen"]]["folds"])["model"]
    rows = [["", "parameters", "in folds", "", "seconds"]]
    for model in models:
        rows += _rows_of_model(model, is_best=model["model"] == best)
    rows += [[name, "failed", "", "", ""] for name in failed]
    by_folds = "Best is the highest accuracy in folds of the training images. Kept features take no time."
    log.info("\n%s", "\n".join(in_columns(rows) + [INTERVALS, by_folds]))
    return {"models": models, "best": best, "failed": failed}


def _rows_of_model(model: dict[str, Any], is_best: bool) -> list[list[str]]:
    """Return rows of the table of several models: one per metric of the model's chosen probe.

    `model`: its metrics, as `_evaluate_features` returns them. `is_best`: whether it is the best of the models.
    """
    from tools.common.evaluation import measured

    probe = model["probes"][model["chosen"]]
    has_top1 = probe[ONE_LABEL.best.name] is not None
    metrics = (ONE_LABEL.best, BALANCED) if has_top1 else (SEVERAL_LABELS.best,)
    mark = " (best)" if is_best else ""
    rows = []
    for metric in metrics:
        row = [f"{model['model']}{mark}, {metric.words}", f"{model['parameters']:,}"]
        # Metrics in folds of the training images, then on the evaluated images.
        for values in (probe["in_folds"], probe):
            bounds = values["intervals"].get(metric.name)
            interval = Interval._make(bounds) if bounds else None
            row.append(measured(values[metric.name], interval))
        rows.append(row + [f"{model['seconds']:.0f}"])
    return rows


def _log_metrics(trained: Trained, given: CommandLine, asked: Namespace) -> dict[str, Any]:
    """Evaluate the classifier, log its metrics and what may be wrong with them, and return them for the JSON file."""
    from tools.common.evaluation import evaluation_of, table_of, with_bar
    from tools.common.trust import doubts_of
    from tools.evaluate.calibrate import about_calibration

    data = _open_and_name(trained, given, asked)
    chosen = trained.chosen

    # Evaluate, and log the metrics.
    groups = data.dataset.groups()
    batches = ((logits, data.labels(labels)) for logits, labels in with_bar(trained, data.dataset))
    evaluation = evaluation_of(trained, batches, groups)
    thresholds = ""
    if trained.task.kind != ONE_LABEL:
        _, words_on_thresholds = trained.thresholds()
        thresholds = f"; {words_on_thresholds}"
    source: Any
    if trained.others:
        source = [f"{model.chosen.place}" for model in trained.all]
        name = "mean"
        column_title = "mean"
        model_words = f"Mean of the probabilities of these {len(trained.all)} models"
    else:
        source = f"{chosen.place}"
        name = chosen.which.name  # of the set of weights
        column_title = chosen.which.mark or name
        model_words = f"{trained.config.MODEL.NAME} of {chosen.place}"
    lines = [f"{model_words}, in {trained.precision.name}{thresholds}", f"{data.title}: {evaluation.words()}", ""]
    lines += table_of(evaluation, column_title)
    lines += about_calibration(trained, data, evaluation)
    lines += [""] + evaluation.class_table(trained)
    log.info("%s", "\n".join(lines))

    # Log what may make the metrics too good or too bad, and whether other tools prepare images otherwise.
    result, found = doubts_of(trained, data.dataset, evaluation)
    if found:
        log.info("How far to trust this %s:", result.metric.words)
    log_lines(f"  {doubt.words()}" for doubt in found)
    log_lines([_settings_of_evaluation_alone(trained, given)])
    return {
        "model": trained.config.MODEL.NAME,
        "source": source,
        "precision": trained.precision.name,
        "tta": asked.tta,
        "temperature": {chosen.which.name: trained.temperature},
        "data": data.title,
        "best_of_validations": result.validations,
        "classes": trained.names(),
        "figures": {name: evaluation.as_json()},
        "doubts": list(map(asdict, found)),
    }


def _open_and_name(trained: Trained, given: CommandLine, asked: Namespace) -> Part:
    """Open the images to evaluate, and log which models and images these are, and what one should know of them."""
    from engine.evaluation.data import warn_of_images
    from tools.evaluate.part import open_part

    data, notes = open_part(trained, given)
    models = trained.all
    log.setLevel("INFO")  # it was higher while the models were built
    for path, model in zip(asked.models, models, strict=True):
        log.info("%s: %s", path, model.chosen.with_calibration(model.calibrated))
        warn_of_images(trained.config, model.chosen, data.dataset)
    training_data = {(model.chosen.samples or {}).get("data") for model in models}
    if len(training_data) > 1:
        log.warning(
            "The models were not all trained on the same images. Where one was trained on images that are evaluated "
            "here, the metrics are too good; -part test or -data_path names others."
        )
    log_lines(f"{note}." for note in notes)
    if asked.tta:
        log.info("-tta %s: mean of the probabilities of each image and its mirror image.", asked.tta)
    return data


def _settings_of_evaluation_alone(trained: Trained, given: CommandLine) -> str:
    """Remark that predict.py and export.py prepare images otherwise than this evaluation, and how to change that.

    '' if no setting on the command line changes how images are prepared. Otherwise, the remark names the command that
    makes a run with the same weights and these settings.
    """
    from engine.inputs.batches import input_of
    from utils.config.load import config_of_weights

    # Find the settings on the command line that change the input of the run's model, each taken alone.
    data_of_run = config_of_weights(trained.chosen).DATA
    settings = []
    for key in given.keys:
        if key.startswith("DATA."):
            name = key.removeprefix("DATA.")
            value = getattr(trained.config.DATA, name)
            if input_of(data_of_run.changed(**{name: value})) != input_of(data_of_run):
                text = value if isinstance(value, str) else json.dumps(value)
                settings.append(f"{key}={text}")
    if not settings:
        return ""
    words = f"{' '.join(settings)}: in this evaluation alone. predict.py and export.py prepare images as in training"
    run = run_folder_of(trained.chosen.place)
    if run is None:
        return f"{words}."
    same_model = ["-cfg", f"{run / CONFIG}", "-pretrained", f"{trained.chosen.file}", "MODEL.NEW_CLASSIFIER=false"]
    if trained.config.own_files:
        same_model += ["-use", ",".join(trained.config.own_files)]
    without_training = ["TRAIN.NUM_EPOCHS=0"]
    command = typed("main_single_gpu.py", same_model + without_training + settings + ["-output", "NEW"])
    return f"{words}, unless a run of these weights has these settings: `{command}` makes it."


def _check(line: command_line.ToolLine, features_flag: str) -> None:
    """Raise UserError for flags that do not go together.

    `features_flag`: -probe or -knn, whichever is given; '' without them. Arguments are runs, checkpoints or files of
    weights: `asked.models`, of which `asked.path` is the first. Without an argument, flags name model and weights.
    """
    asked = line.asked
    part = line.run.words.get("DATA.PART", asked.part)
    flag_of_one_model = features_flag or ("-calibrate" if asked.calibrate else "")
    if flag_of_one_model and len(asked.models) > 1:
        raise UserError(f"{flag_of_one_model}: takes one model, but {len(asked.models)} are given.")

    # Flags of -probe and -knn
    if features_flag:
        _check_features(line, features_flag, part)
    elif asked.pool is not None:
        raise UserError(f"-pool {asked.pool}: chooses the features that -knn and -probe use; give one of them too.")
    if asked.out and not asked.probe:
        raise UserError(f"-out {asked.out}: the run that -probe saves; give that too.")
    if asked.out and is_run_folder(Path(asked.out)):
        raise UserError(f"-out {asked.out}: this folder has a run, which is not overwritten; name another folder.")

    # The model. Several names of timm's models (-model A,B) also stand for their pretrained weights.
    has_several_names = len(_listed(line, "MODEL.NAME")) > 1
    flags_name_weights = line.run.cfg or has_several_names or line.given_by("MODEL.PRETRAINED")
    if asked.path is None and not (features_flag and flags_name_weights):
        raise UserError(
            "RUN_OR_CHECKPOINT is missing: name a run, a checkpoint or a file of weights. -probe and -knn also take "
            "weights of another program: -model NAME -pretrained FILE_OR_NAME, or the -cfg of a recipe that has both."
        )

    # Flags beside -calibrate
    if asked.calibrate:
        message = "-{}: does not go with -calibrate, which only fits a temperature; leave it out."
        line.refuse(("tta", "json", "no_calibration"), message)  # with the name of the flag for {}
        if part in command_line.MEMORISED:  # train or all
            raise UserError(
                f"-part {part}: of the run's data, the model was trained on these images, and is surer of them than "
                "of others; -calibrate needs val or test. For other data, leave -part out."
            )

    # Settings beside a run, which has its own, and the files of the models
    if asked.path is not None:
        _check_settings(line)
    for path in asked.models:
        chosen_at(Path(path).expanduser(), asked.weights)  # a wrong one fails before torch is imported


def _check_features(line: command_line.ToolLine, features_flag: str, part: str | None) -> None:
    """Raise UserError for flags that do not go with `features_flag`, which is -knn or -probe.

    `part`: value of -part, the split to evaluate; None if it is not given.
    """
    asked = line.asked
    # `refuse` fills the name of the flag in for {}.
    message = "-{}: does not go with " + f"{features_flag}, which leaves out the classifier of the model."
    line.refuse(CLASSIFIER_FLAGS, message)
    if asked.path is None and "weights" in line.given:
        raise UserError(f"-weights {asked.weights}: chooses among those of a run, and no run is named; leave it out.")
    if part in command_line.MEMORISED:  # train or all
        learns = f"{features_flag} learns from the training images"
        raise UserError(f"-part {part}: {learns}, so it needs others: val or test.")
    if asked.probe and asked.knn is not None:
        raise UserError("-knn: leave it out; -probe shows it too.")
    models = len(_listed(line, "MODEL.NAME"))
    weights = len(_listed(line, "MODEL.PRETRAINED"))
    if models > 1:
        if not asked.probe or asked.path or asked.out:
            raise UserError("-model: several models need -probe, and neither a run nor -out.")
        if weights not in (0, models):
            raise UserError(f"-pretrained: {weights} for {models} models; list one for each, or leave it out.")


def _check_settings(line: command_line.ToolLine) -> None:
    """Raise UserError for settings that a run or checkpoint has of its own, from its training."""
    if line.run.cfg is not None:
        raise UserError(
            f"-cfg {line.run.cfg}: leave this out. The model is evaluated with the settings that it was trained with; "
            "flags and KEY=VALUE change single settings."
        )
    for key in (*line.run.flags, *line.run.words):
        if key.startswith("MODEL.") or key == "TRAIN.LAST_EPOCH":
            where = key if key in line.run.words else line.given_by(key)
            raise UserError(
                f"{where}: leave this out; the model is the first argument, and is evaluated as it was trained."
            )
