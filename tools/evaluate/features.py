"""evaluate.py -knn and -probe: measure how well a model's features separate classes, whatever it was trained on.

-knn compares images with the most similar training images, -probe fits linear classifiers. Both read features that are
computed once and kept.
"""

import shlex
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from datasets import ImageDataset, has_labels, source_of
from datasets.base import TITLES, part_of
from engine.evaluation.alike import count_alike
from engine.evaluation.data import data_for_evaluation, title_of
from engine.evaluation.features import AT_ONCE, Features, features_of
from engine.evaluation.knn import classify, labelled_data, open_labelled
from engine.evaluation.linear import STRENGTHS, UNWEIGHTED, fit, folds_of
from engine.report.outcome import of_groups
from engine.trained.model import Trained
from models.parts import count_parameters
from tools.common.command_line import MEMORISED
from tools.common.evaluation import INTERVALS, evaluation_of, measured
from tools.common.tables import in_columns
from tools.common.turns import progress_bar
from utils.cli import CommandLine
from utils.config import load_config
from utils.config.data import DataConfig
from utils.config.keys import deciding, values_to_keep
from utils.config.read import Kind, Source
from utils.distributed.world import ALONE, World
from utils.log import log, log_lines, quiet_terminal
from utils.program import tool
from utils.record.run_folder import alike_in_words, copies_unknown
from utils.statistics.groups import effective_images
from utils.statistics.proportions import wilson
from vitamp.metrics import BALANCED, KNN, TOP1, always_guessing
from vitamp.pooling import POOLED, check_pool, pool_of

NEIGHBOURS_BESIDE_PROBE = 20
"""Neighbours that vote with -probe, which shows their accuracy, too"""
FLAGS_FOR_LABELS = "-dataset imagefolder -data_path DIR"
"""Flags that name labelled images, for errors"""


def evaluate_features(trained: Trained, given: CommandLine, asked: Namespace, world: World) -> dict[str, Any]:
    """Evaluate the features of a model by -knn or -probe, and log the accuracy.

    -knn classifies each image by its nearest training images. -probe does so, too, and fits linear classifiers. Returns
    the metrics for the JSON file; empty on all ranks but the first. With -out, saves the best probe as a run.
    """
    weight_set = trained.chosen.which
    config = trained.config
    model = trained.model
    check_pool(model, asked.pool or POOLED)

    # Open the images, and choose the folds of -probe. Without -probe, these are not used.
    data, train_set, val_set = _open(trained, given, asked, world)
    train_data = data.changed(PART="train")
    neighbours = min(NEIGHBOURS_BESIDE_PROBE if asked.probe else asked.knn, len(train_set))
    fold_of = np.empty(0)
    about_folds = ""
    if asked.probe:
        fold_of, about_folds = folds_of(train_set, train_set.sample_labels(), data)

    # Compute the features of the training images and of the evaluated ones.
    with trained.computing(config.DATA.val_batch):
        training = features_of(trained, config, train_set, train_data, world)
    with trained.computing(config.DATA.val_batch):
        evaluated = features_of(trained, config, val_set, data, world)
    if not world.first:
        return {}

    # Metrics for the JSON file; the bank is the training images, among which neighbours are searched.
    pools = _pools_to_evaluate(model, evaluated, asked)
    total, _ = count_parameters(model)
    results: dict[str, Any] = {
        "model": config.MODEL.NAME,
        "parameters": total,
        "source": f"{trained.chosen.place}",
        "precision": trained.precision.name,
        "data": title_of(data),
        "bank": title_of(train_data),
        "bank_images": len(train_set),
        "knn": neighbours,
    }
    log.info("%s of %s, in %s", config.MODEL.NAME, trained.chosen.place, trained.precision.name)
    remarks: list[str] = []
    split = TITLES[part_of(data, False)]
    title = weight_set.mark or weight_set.name  # 'EMA', or the name of the plain weights
    table = [["", "strength", "in folds", f"{title}, {split}"]]

    # Fit and evaluate linear classifiers of the classes in the data, which need not be those of the model.
    if asked.probe:
        log.info("%s", about_folds)
        meta = {**trained.chosen.meta, "classes": val_set.classes, "thresholds": {}}
        trained_for_data = replace(trained, chosen=replace(trained.chosen, meta=meta), config=config.changed(DATA=data))
        probes = _fit_probes(trained_for_data, training, evaluated, pools, fold_of)
        table += probes.rows
        remarks = probes.remarks
        results |= {"probes": probes.results, "chosen": probes.chosen_pool}

    # Classify by neighbours, which takes one label per image.
    if not data.MULTI_LABEL:
        results["largest_class_percent"] = 100 * float(np.bincount(evaluated.labels).max()) / len(val_set)
        log.info("%s", always_guessing(results["largest_class_percent"]))
        by_pool, rows = _classify_by_neighbours(training, evaluated, pools, neighbours, trained.precision.device)
        table += rows
        if asked.knn is not None:
            (pool,) = pools
            results |= {"pool": pool, "figures": {weight_set.name: by_pool[pool]}}
        results["neighbours"] = by_pool

    # Log the table, and what may be wrong with it: images that look like training images, unless the split has those.
    if asked.probe and data.PART not in MEMORISED and data.CHECK != "off" and val_set.single_images() is not None:
        with trained.computing(data.val_batch):
            counts, _ = count_alike(trained, val_set, evaluated, training, pools[0], data)
        remarks.append(_look_alike(counts, split))
    remarks.append(of_groups(evaluated.groups))
    log.info("\n%s", "\n".join(in_columns(table) + [INTERVALS] + list(filter(None, remarks))))
    if asked.out:  # which goes with -probe alone
        save_probe(trained, data, results["chosen"], asked.out)
    return results


def _open(
    trained: Trained, given: CommandLine, asked: Namespace, world: World
) -> tuple[DataConfig, ImageDataset, ImageDataset]:
    """Open the training images, whose labels are learnt, and the images to evaluate, and log which these are.

    Returns DATA that describes the images to evaluate, the training images, and the images to evaluate.
    """
    config = trained.config
    data, notes = _labelled_data(trained, given.keys)
    if asked.probe and not {"TRAIN.CLASS_WEIGHTS", "DATA.SAMPLER"}.isdisjoint(given.keys):
        notes.append(UNWEIGHTED)
    neighbours = NEIGHBOURS_BESIDE_PROBE if asked.probe else asked.knn
    flag = "-probe" if asked.probe else "-knn"
    device = trained.precision.device
    train_set, val_set = open_labelled(data, neighbours, config.SEED, device, flag, FLAGS_FOR_LABELS, asked.probe)
    log.setLevel("INFO" if world.first else "WARNING")
    log.info("%s: %s", asked.path or config.MODEL.PRETRAINED, trained.chosen.words)
    log_lines(f"{note}." for note in notes)
    return data, train_set, val_set


def _look_alike(counts: Sequence[int], split: str) -> str:
    """Return a remark that images look like training images, if any do; else ''. `counts`: of `count_alike`."""
    words = alike_in_words(counts, f"images of the {split} look like training images")
    if not words:
        return ""
    consequence = "" if copies_unknown(counts) else " This may raise the metrics."
    return f"{words}.{consequence}"


def _labelled_data(trained: Trained, given: Collection[str]) -> tuple[DataConfig, list[str]]:
    """Choose the data whose labels are learnt and predicted, and give notes on the choice for the log.

    `given`: settings on the command line.
    """
    config = trained.config
    names_data = any(key in given for key in deciding("source"))  # such as DATA.DATA_PATH
    if config.measures_knn and not names_data and not has_labels(config.DATA):
        data = labelled_data(config).changed(PART=config.DATA.PART)
        return data, [f"The run's images have no labels: those of TRAIN.KNN are taken, {source_of(data)}"]
    weights = trained.chosen if trained.chosen.meta else None
    return data_for_evaluation(config, weights, given, needs_labels=True)


def _pools_to_evaluate(model: Any, features: Features, asked: Namespace) -> list[str]:
    """Choose the poolings: the one that -pool names; else for -knn the model's, and for -probe all that differ."""
    if asked.pool:
        return [asked.pool]
    if not asked.probe:  # -knn
        return [pool_of(model)]
    if hasattr(model, "head_dist"):  # a distilled model has two classifiers, which MODEL.POOL cannot replace
        return [POOLED]
    # The model's own pooling is POOLED. In many ViTs, that is the class token.
    pools = list(features.pools)
    if "class" in pools and np.array_equal(features.of("class"), features.of(POOLED)):
        pools.remove("class")
    return pools


class Probes(NamedTuple):
    """Linear classifiers, one per pooling, and how good they are."""

    rows: list[list[str]]
    """Rows of the table: one per pooling and metric"""
    results: dict[str, Any]
    """Metrics for the JSON file, by pooling"""
    chosen_pool: str
    """The pooling whose classifier is best in folds of the training images"""
    remarks: list[str]
    """Sentences for the log on the classifier of this pooling"""


def _fit_probes(
    trained: Trained, training: Features, evaluated: Features, pools: list[str], fold_of: np.ndarray
) -> Probes:
    """Fit a linear classifier per pooling to the training images, and evaluate it.

    `trained`: the model, with the classes of these images in place of its own. `fold_of`: the fold of each training
    image. A classifier is also evaluated in folds: on each training image by a classifier fitted to the other folds.
    """
    if trained.config.DATA.MULTI_LABEL:
        classes = training.labels.shape[1]
    else:  # named, or by the largest label
        classes = len(trained.chosen.classes or ()) or int(training.labels.max()) + 1
    trained = replace(trained, config=trained.config.changed(MODEL={"NUM_CLASSES": classes, "MAE_PRETRAIN": False}))
    metrics = [trained.task.kind.best]
    if not trained.config.DATA.MULTI_LABEL:
        metrics.append(BALANCED)
    keys_in_folds = ["images"] + [metric.name for metric in metrics] + ["intervals"]
    rows = list[list[str]]()
    results = dict[str, Any]()
    remarks = dict[str, list[str]]()
    for pool in progress_bar(pools, "poolings"):
        classifier, logits_in_folds = fit(
            training.of(pool), training.labels, fold_of, classes, trained.precision.device
        )
        outputs = (classifier.logits(evaluated.of(pool)).float(), torch.from_numpy(evaluated.labels))
        evaluation = evaluation_of(trained, [outputs], evaluated.groups)
        logits = torch.from_numpy(logits_in_folds).split(AT_ONCE)
        labels = torch.from_numpy(training.labels).split(AT_ONCE)
        evaluation_in_folds = evaluation_of(trained, zip(logits, labels, strict=True), training.groups)
        for metric in metrics:
            row = [f"linear {metric.words}, {pool}", f"{classifier.strength:.2g}"]
            for each in (evaluation_in_folds, evaluation):
                row.append(measured(each.values[metric], each.intervals[metric.name]))
            rows.append(row)
        edge = ", the weakest that is tried" if classifier.strength == STRENGTHS[-1] else ""
        words = f"Chosen by the folds: linear, {pool}, strength {classifier.strength:.2g}{edge}."
        # `figure`: top-1 or mAP in folds
        remarks[pool] = [words] + [doubt.words() for doubt in evaluation.strange(trained, classifier.figure)]
        json_in_folds = evaluation_in_folds.as_json()
        results[pool] = {
            "strength": classifier.strength,
            "folds": classifier.figure,
            "in_folds": {key: json_in_folds[key] for key in keys_in_folds},
            **evaluation.as_json(),
        }
    chosen_pool = max(pools, key=lambda pool: results[pool]["folds"])
    return Probes(rows, results, chosen_pool, remarks[chosen_pool])


def _classify_by_neighbours(
    training: Features, evaluated: Features, pools: list[str], count: int, device: torch.device
) -> tuple[dict[str, Any], list[list[str]]]:
    """Classify the evaluated images by their `count` nearest training images.

    Returns the metrics by pooling, and a row per pooling for the table.
    """
    results = {}
    rows = []
    for pool in pools:
        guesses, labels = classify(evaluated.rows(pool, device), training.rows(pool, device), count)
        is_right = (guesses == labels).cpu().numpy()
        top1 = 100 * int(is_right.sum()) / len(is_right)
        interval = wilson(top1, effective_images(is_right, evaluated.groups))
        # Columns: metric, strength, in folds (only of linear classifiers), on the evaluated images.
        rows.append([f"{KNN.words}, {pool}", f"{count} nearest", "", measured(top1, interval)])
        results[pool] = {"images": len(labels), TOP1.name: top1, "intervals": {TOP1.name: list(interval)}}
    return results, rows


SECTIONS = ("MODEL.", "DATA.", "AMP.", "SEED", "USE", "DEVICE", "THREADS", "SPEED", "DETERMINISTIC")
"""Settings of the new run that are those of the old one"""


def save_probe(trained: Trained, data: DataConfig, pool: str, out: str) -> None:
    """Save the model with the classifier of this pooling as a run in the folder `out`.

    It is a run without epochs, which fits the classifier anew to the features that are kept.
    """
    from engine.preflight import check, fill_in
    from engine.run import run

    config = trained.config.changed(DATA=data)
    chosen = trained.chosen
    settings = {}
    for key, value in values_to_keep(config).items():
        if key.startswith(SECTIONS) and not key.startswith(("MODEL.MAE", "MODEL.LORA")):
            settings[key] = value
    weights = chosen.file if chosen.meta else config.MODEL.PRETRAINED  # weights of another program have no meta.json
    settings |= {
        "DATA.PART": "auto",
        "DATA.DROP_LAST": False,
        "MODEL.PRETRAINED": f"{weights}",
        "MODEL.NEW_CLASSIFIER": "probe",
        "MODEL.NUM_CLASSES": "auto",
        "MODEL.POOL": None if pool == POOLED else pool,
        "MODEL.FREEZE": "backbone",
        "TRAIN.NUM_EPOCHS": 0,
        "TRAIN.WARMUP_EPOCHS": 0,
        "OUTPUT": out,
    }
    source = Source("-probe", Kind.TOOL)
    loaded = fill_in(load_config(None, {key: (value, source) for key, value in settings.items()}))
    check(loaded.config)
    with quiet_terminal():  # what a run logs is about training
        run(loaded, ALONE, dry=False)
    trust = " -trust" if config.USE else ""
    use = f"`{tool('predict')} {shlex.quote(out)}{trust} IMAGE.jpg` uses it"
    log.info("The model with this classifier is saved as a run in %s: %s.", out, use)
