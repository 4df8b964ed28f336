"""evaluate.py -knn and -probe: how well a model's features separate classes, whatever the model itself was trained on.

-knn compares images with the most similar training images, -probe fits linear classifiers. Both read features that are
computed once and kept.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from datasets import ImageDataset, auto_workers, has_labels, source_of
from engine.evaluation.data import data_for_evaluation, title_of
from engine.evaluation.features import Extractor, Features, Rows, features_of
from engine.evaluation.knn import TEMPERATURE, classify, labelled_data, open_labelled
from engine.evaluation.linear import FOLDS, Classifier, fit, folds_of
from engine.trained.model import Trained, batch_size
from tools.common.evaluation import INTERVALS, OneLabel, SeveralLabels, measured
from tools.common.tables import in_columns
from tools.common.turns import progress, progress_bar
from utils.cli import CommandLine
from utils.config import load_config
from utils.config.data import DataConfig
from utils.config.keys import values_to_keep
from utils.distributed.world import ALONE, World
from utils.log import log
from utils.text import wilson
from vitamp.metrics import KNN, TOP1, always_guessing
from vitamp.pooling import POOLED, check_pool, pools_of

COUNT = 20
"""Of neighbours beside -probe"""
NAMED_BY = "-dataset imagefolder -data_path DIR"


def evaluate_features(trained: Trained, given: CommandLine, asked: Namespace, world: World) -> dict[str, Any] | None:
    """Log the accuracy, and return what the JSON file says of the evaluation. None: another process does so."""
    which, config, model = trained.chosen.which, trained.config, trained.model
    if asked.pool is not None:
        check_pool(model, asked.pool)
    data, notes = _data(trained, given)
    count, flag = (COUNT, "-probe") if asked.probe else (asked.knn, "-knn")
    bank, images = open_labelled(data, count, config.SEED, trained.precision.device, flag, NAMED_BY, asked.probe)
    log.setLevel("INFO" if world.first else "WARNING")
    log.info("%s: %s", asked.path or config.MODEL.PRETRAINED, trained.chosen.words)
    for note in notes:
        log.info("%s.", note)
    of_bank = data.model_copy(update={"PART": "train"})
    classes = len(images.classes) if images.classes else int(config.MODEL.NUM_CLASSES)

    def features(dataset: ImageDataset, data: DataConfig) -> Features:
        workers = config.DATA.NUM_WORKERS if config.DATA.NUM_WORKERS is not None else auto_workers(world)
        with progress_bar(len(dataset), "images") as bar:
            how = (trained.inputs, trained.precision, config.MODEL.NAME, batch_size(trained), workers, world)
            return features_of(Extractor(model, *how, bar.update), dataset, data, classes, title_of(data))

    known, seen = features(bank, of_bank), features(images, data)
    if not world.first:
        return None
    log.info("%s of %s, in %s", config.MODEL.NAME, trained.chosen.place, trained.precision.name)
    found = {
        "model": config.MODEL.NAME,
        "source": f"{trained.chosen.place}",
        "precision": trained.precision.name,
        "data": title_of(data),
        "bank": title_of(of_bank),
        "bank_images": len(bank),
    }
    if asked.probe:
        return found | _probe(trained, asked, known, seen, bank, images, of_bank)
    figures = _neighbours(trained, known, seen, asked.knn, asked.pool or POOLED)
    largest = figures["largest_class_percent"]
    log.info("%s: %s images; %s", title_of(data), f"{len(images):,}", always_guessing(largest))
    log.info("%s: %s images, of which the %d nearest vote.", title_of(of_bank), f"{len(bank):,}", asked.knn)
    log.info("Features: %s; cosine similarity s, votes weighted by exp(s / %g).", asked.pool or POOLED, TEMPERATURE)
    table = in_columns([["", which.mark or which.name], [KNN.words, figures["words"]]])
    log.info("\n%s", "\n".join([*table, INTERVALS]))
    of_set = {"images": len(images), TOP1.name: figures[TOP1.name], "intervals": {TOP1.name: figures["interval"]}}
    return found | {
        "knn": asked.knn,
        "pool": asked.pool or POOLED,
        "largest_class_percent": largest,
        "figures": {which.name: of_set},
    }


def _data(trained: Trained, given: CommandLine) -> tuple[DataConfig, list[str]]:
    config, named = trained.config, {*given.flags, *given.words}
    if config.measures_knn and not named & {"DATA.DATASET", "DATA.DATA_PATH"} and not has_labels(config.DATA):
        data = labelled_data(config)
        return data, [f"The run's images have no labels: those of TRAIN.KNN are taken, {source_of(data)}"]
    saved = trained.chosen if trained.chosen.meta else None
    return data_for_evaluation(config, saved, named)


def _neighbours(trained: Trained, known: Features, seen: Features, count: int, pool: str) -> dict[str, Any]:
    device = trained.precision.device

    def rows(features: Features) -> Iterator[Rows]:
        return features.rows(pool, device)

    guesses, truth = classify(rows(seen), rows(known), count)
    top1 = 100 * int((guesses == truth).sum()) / len(truth)
    interval = wilson(top1, len(truth))
    largest = 100 * float(truth.bincount().max()) / len(truth)
    words = measured(top1, interval)
    return {TOP1.name: top1, "interval": [*interval], "words": words, "largest_class_percent": largest}


def _probe(
    trained: Trained,
    asked: Namespace,
    known: Features,
    seen: Features,
    bank: ImageDataset,
    images: ImageDataset,
    data: DataConfig,
) -> dict[str, Any]:
    """Fit a classifier for each pooling, and show them beside k-NN; and all metrics of the one that folds choose."""
    config, device = trained.config, trained.precision.device
    one_label = not data.MULTI_LABEL
    classes = len(images.classes or ()) or int(known.labels.max()) + 1 if one_label else seen.labels.shape[1]
    fold_of, words = folds_of(bank, known.labels, data)
    log.info("%s", words)
    # The classes of these images, not those of the model.
    named = replace(trained.chosen, meta={**trained.chosen.meta, "classes": images.classes, "thresholds": {}})
    settings = config.model_copy(
        update={"DATA": data, "MODEL": config.MODEL.model_copy(update={"NUM_CLASSES": classes, "MAE_PRETRAIN": False})}
    )
    of_data = replace(trained, chosen=named, config=settings)
    fitted: dict[str, Classifier] = {}
    results: dict[str, OneLabel | SeveralLabels] = {}
    rows = [["", "strength", f"in {FOLDS} folds", title_of(data.model_copy(update={"PART": "val"}))]]
    pools = [asked.pool] if asked.pool else list(pools_of(trained.model))
    for pool in progress(pools, "poolings"):
        one = fitted[pool] = fit(known.of(pool), known.labels, fold_of, classes, device)
        logits, labels = one.logits(seen.of(pool)).float(), torch.from_numpy(seen.labels)
        result = results[pool] = (OneLabel if one_label else SeveralLabels).of(of_data, [(logits, labels)])
        best = of_data.task.kind.best
        value = measured(result.values[best], result.intervals[best.name])
        rows.append([f"linear, {pool}", f"{one.strength:.2g}", f"{one.figure:.2f} %", value])
    figures: dict[str, Any] = {}
    if one_label:
        nearest = {pool: _neighbours(trained, known, seen, min(COUNT, len(bank)), pool) for pool in pools}
        rows += [[f"{KNN.words}, {pool}", "", "", one["words"]] for pool, one in nearest.items()]
        figures = {pool: one[TOP1.name] for pool, one in nearest.items()}
    chosen = max(fitted, key=lambda pool: fitted[pool].figure)
    log.info("\n%s", "\n".join([*in_columns(rows), INTERVALS]))
    log.info("Chosen by the folds: linear, %s, strength %.2g.", chosen, fitted[chosen].strength)
    return {
        "probes": {
            pool: {"strength": one.strength, "folds": one.figure, **results[pool].as_json()}
            for pool, one in fitted.items()
        },
        "knn": figures,
        "chosen": chosen,
        "settings": data.model_dump(mode="json"),
    }


SECTIONS = ("MODEL.", "DATA.", "AMP.", "SEED", "DEVICE", "THREADS", "SPEED", "DETERMINISTIC")
"""Settings of the new run that are those of the old one"""


def save_probe(trained: Trained, found: dict[str, Any], asked: Namespace) -> int:
    """A run of no epochs, which fits the chosen classifier anew, from the features that are kept. Returns its code."""
    from engine.preflight import check, resolve
    from engine.run import run

    config, chosen = trained.config, trained.chosen
    start = f"{chosen.file if chosen.meta else config.MODEL.PRETRAINED}"
    settings = {key: value for key, value in values_to_keep(config).items() if key.startswith(SECTIONS)}
    settings |= {f"DATA.{key}": value for key, value in found["settings"].items()}
    settings = {key: value for key, value in settings.items() if not key.startswith(("MODEL.MAE", "MODEL.LORA"))}
    settings |= {
        "DATA.PART": "auto",
        "MODEL.PRETRAINED": start,
        "MODEL.NEW_CLASSIFIER": "probe",
        "MODEL.NUM_CLASSES": "auto",
        "MODEL.POOL": None if found["chosen"] == POOLED else found["chosen"],
        "MODEL.FREEZE": "backbone",
        "TRAIN.NUM_EPOCHS": 0,
        "OUTPUT": asked.out,
    }
    loaded = resolve(load_config(None, {key: (value, "-probe") for key, value in settings.items()}))
    check(loaded.config)
    return run(loaded, ALONE, dry=False)
