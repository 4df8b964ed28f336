"""evaluate.py -knn and -probe: how well a model's features separate classes, whatever the model itself was trained on.

-knn compares images with the most similar training images, -probe fits linear classifiers. Both read features that are
computed once and kept.
"""

import shlex
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

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

COUNT = 20
"""Of neighbours beside -probe"""
NAMED_BY = "-dataset imagefolder -data_path DIR"


def evaluate_features(trained: Trained, given: CommandLine, asked: Namespace, world: World) -> dict[str, Any]:
    """Log the accuracy, and return what the JSON file says of the evaluation. Empty: another process does so."""
    which = trained.chosen.which
    config = trained.config
    model = trained.model
    check_pool(model, asked.pool or POOLED)
    data, bank, images = _open(trained, given, asked, world)
    count = min(COUNT if asked.probe else asked.knn, len(bank))
    of_bank = data.changed(PART="train")
    fold_of, words = folds_of(bank, bank.sample_labels(), data) if asked.probe else (np.empty(0), "")
    parts = []
    for dataset, about in ((bank, of_bank), (images, data)):
        with trained.computing(trained.config.DATA.val_batch):
            parts.append(features_of(trained, config, dataset, about, world))
    if not world.first:
        return {}
    known, seen = parts
    pools = _pools(model, seen, asked)
    found: dict[str, Any] = {
        "model": config.MODEL.NAME,
        "parameters": count_parameters(model)[0],
        "source": f"{trained.chosen.place}",
        "precision": trained.precision.name,
        "data": title_of(data),
        "bank": title_of(of_bank),
        "bank_images": len(bank),
        "knn": count,
    }
    log.info("%s of %s, in %s", config.MODEL.NAME, trained.chosen.place, trained.precision.name)
    said: list[str] = []
    part = TITLES[part_of(data, False)]
    title = which.mark or which.name
    rows = [["", "strength", "in folds", f"{title}, {part}"]]
    if asked.probe:
        log.info("%s", words)
        about = replace(trained.chosen, meta={**trained.chosen.meta, "classes": images.classes, "thresholds": {}})
        of_data = replace(trained, chosen=about, config=config.changed(DATA=data))
        found["probes"], found["chosen"], said = _probes(of_data, known, seen, pools, fold_of, rows)
    if not data.MULTI_LABEL:
        found["largest_class_percent"] = 100 * float(np.bincount(seen.labels).max()) / len(images)
        log.info("%s", always_guessing(found["largest_class_percent"]))
        neighbours = _neighbours(known, seen, pools, count, trained.precision.device, rows)
        if asked.knn is not None:
            found |= {"pool": pools[0], "figures": {which.name: neighbours[pools[0]]}}
        found["neighbours"] = neighbours
    if asked.probe and data.PART not in MEMORISED and data.CHECK != "off" and images.single_images() is not None:
        with trained.computing(data.val_batch):
            alike = count_alike(trained, images, seen, known, pools[0], data)
        said.append(_look_alike(alike, part))
    said.append(of_groups(seen.groups))
    log.info("\n%s", "\n".join(in_columns(rows) + [INTERVALS] + list(filter(None, said))))
    if asked.out:
        save_probe(trained, data, found["chosen"], asked.out)
    return found


def _open(
    trained: Trained, given: CommandLine, asked: Namespace, world: World
) -> tuple[DataConfig, ImageDataset, ImageDataset]:
    """The images whose labels are learnt and predicted: both splits, and how DATA describes them. Logs the choice."""
    config = trained.config
    data, notes = _labelled(trained, given.keys)
    if asked.probe and not {"TRAIN.CLASS_WEIGHTS", "DATA.SAMPLER"}.isdisjoint(given.keys):
        notes.append(UNWEIGHTED)
    count = COUNT if asked.probe else asked.knn
    flag = "-probe" if asked.probe else "-knn"
    bank, images = open_labelled(data, count, config.SEED, trained.precision.device, flag, NAMED_BY, asked.probe)
    log.setLevel("INFO" if world.first else "WARNING")
    log.info("%s: %s", asked.path or config.MODEL.PRETRAINED, trained.chosen.words)
    log_lines(f"{note}." for note in notes)
    return data, bank, images


def _look_alike(alike: Sequence[int], part: str) -> str:
    """A sentence about images that look like training images; '' without any."""
    words = alike_in_words(alike, f"images of the {part} look like training images")
    if not words:
        return ""
    more = "" if copies_unknown(alike) else " This may raise the metrics."
    return f"{words}.{more}"


def _labelled(trained: Trained, given: Collection[str]) -> tuple[DataConfig, list[str]]:
    """The images whose labels are learnt and predicted, and notes on them. `given`: settings on the command line."""
    config = trained.config
    names_data = not set(deciding("source")).isdisjoint(given)
    if config.measures_knn and not names_data and not has_labels(config.DATA):
        data = labelled_data(config).changed(PART=config.DATA.PART)
        return data, [f"The run's images have no labels: those of TRAIN.KNN are taken, {source_of(data)}"]
    return data_for_evaluation(config, trained.chosen if trained.chosen.meta else None, given, True)


def _pools(model: Any, seen: Features, asked: Namespace) -> list[str]:
    """The poolings to evaluate: the one that is asked for, of -knn the model's, of -probe all that differ."""
    if asked.pool or not asked.probe:
        return [asked.pool or pool_of(model)]
    if hasattr(model, "head_dist"):  # a distilled model has two classifiers, which MODEL.POOL cannot replace
        return [POOLED]
    same = "class" in seen.pools and np.array_equal(seen.of("class"), seen.of(POOLED))
    return [pool for pool in seen.pools if not (same and pool == "class")]


def _probes(
    trained: Trained, known: Features, seen: Features, pools: list[str], fold_of: np.ndarray, rows: list[list[str]]
) -> tuple[dict[str, Any], str, list[str]]:
    """Fit linear classifiers to the features `known`, and evaluate them on those `seen`. `rows`: of the table.

    The results by pooling, the pooling that the folds choose, and lines about it.
    """
    # The classes are those of these images, not the model's.
    if trained.config.DATA.MULTI_LABEL:
        number = known.labels.shape[1]
    else:
        number = len(trained.chosen.classes or ()) or int(known.labels.max()) + 1
    model = {"NUM_CLASSES": number, "MAE_PRETRAIN": False}
    trained = replace(trained, config=trained.config.changed(MODEL=model))
    metrics = [trained.task.kind.best]
    if not trained.config.DATA.MULTI_LABEL:
        metrics.append(BALANCED)
    in_both = ["images"] + [metric.name for metric in metrics] + ["intervals"]
    found = dict[str, Any]()
    said = dict[str, list[str]]()
    for pool in progress_bar(pools, "poolings"):
        one, of_others = fit(known.of(pool), known.labels, fold_of, number, trained.precision.device)
        outputs = (one.logits(seen.of(pool)).float(), torch.from_numpy(seen.labels))
        result = evaluation_of(trained, [outputs], seen.groups)
        logits = torch.from_numpy(of_others).split(AT_ONCE)
        labels = torch.from_numpy(known.labels).split(AT_ONCE)
        of_folds = evaluation_of(trained, zip(logits, labels, strict=True), known.groups)
        for metric in metrics:
            row = [f"linear {metric.words}, {pool}", f"{one.strength:.2g}"]
            for each in (of_folds, result):
                row.append(measured(each.values[metric], each.intervals[metric.name]))
            rows.append(row)
        edge = ", the weakest that is tried" if one.strength == STRENGTHS[-1] else ""
        words = f"Chosen by the folds: linear, {pool}, strength {one.strength:.2g}{edge}."
        said[pool] = [words] + result.strange(trained, one.figure)
        kept = of_folds.as_json()
        in_folds = {key: kept[key] for key in in_both}
        found[pool] = {"strength": one.strength, "folds": one.figure, "in_folds": in_folds, **result.as_json()}
    chosen = max(pools, key=lambda pool: found[pool]["folds"])
    return found, chosen, said[chosen]


def _neighbours(
    known: Features, seen: Features, pools: list[str], count: int, device: torch.device, rows: list[list[str]]
) -> dict[str, Any]:
    """Classify the images `seen` by the nearest of those `known`. `rows`: of the table."""
    found = {}
    for pool in pools:
        guesses, truth = classify(seen.rows(pool, device), known.rows(pool, device), count)
        right = (guesses == truth).cpu().numpy()
        top1 = 100 * int(right.sum()) / len(right)
        interval = wilson(top1, effective_images(right, seen.groups))
        rows.append([f"{KNN.words}, {pool}", f"{count} nearest", "", measured(top1, interval)])
        found[pool] = {"images": len(truth), TOP1.name: top1, "intervals": {TOP1.name: list(interval)}}
    return found


SECTIONS = ("MODEL.", "DATA.", "AMP.", "SEED", "USE", "DEVICE", "THREADS", "SPEED", "DETERMINISTIC")
"""Settings of the new run that are those of the old one"""


def save_probe(trained: Trained, data: DataConfig, pool: str, out: str) -> None:
    """A run without epochs: it fits the chosen classifier anew, to the features that are kept."""
    from engine.preflight import check, fill_in
    from engine.run import run

    config = trained.config.changed(DATA=data)
    chosen = trained.chosen
    settings = {}
    for key, value in values_to_keep(config).items():
        if key.startswith(SECTIONS) and not key.startswith(("MODEL.MAE", "MODEL.LORA")):
            settings[key] = value
    weights = chosen.file if chosen.meta else config.MODEL.PRETRAINED
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
    loaded = fill_in(load_config(None, {key: (value, Source("-probe", Kind.TOOL)) for key, value in settings.items()}))
    check(loaded.config)
    with quiet_terminal():  # what a run logs is about training
        run(loaded, ALONE, dry=False)
    trust = " -trust" if config.USE else ""
    use = f"`{tool('predict')} {shlex.quote(out)}{trust} IMAGE.jpg` uses it"
    log.info("The model with this classifier is saved as a run in %s: %s.", out, use)
