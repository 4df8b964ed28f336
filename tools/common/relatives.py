"""Finds evaluated images that are copies or look-alikes of the training images of a model's run."""

from contextlib import suppress

import numpy as np

from datasets import ImageDataset
from engine.evaluation.alike import count_alike
from engine.evaluation.data import copies_in_training
from engine.evaluation.features import features_of
from engine.trained.model import Trained, pretrained, split_of_run
from utils.config.load import config_of_weights
from utils.config.resumed import settings_of
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import unheard
from utils.record.run_folder import ALIKE, alike_in_words, may_be_copies
from vitamp.pooling import pool_of


def related_to_training(trained: Trained, dataset: ImageDataset, labels: np.ndarray) -> tuple[set[int], str]:
    """Find images of `dataset` that have a relative among the training images: of equal bytes, or one that looks alike.

    Returns their indices, and a sentence if images look alike that may be no copies, which then do not count; else ''.
    `labels`: of the images, as the model numbers its classes.
    """
    copies = copies_in_training(trained.chosen, dataset.single_images())
    related = set(copies.images) if copies else set[int]()
    counts, images_alike = _alike_in_training(trained, dataset, labels)
    if may_be_copies(counts):
        return related.union(images_alike), ""
    return related, f"{alike_in_words(counts, 'images look like training images')}."


def _alike_in_training(trained: Trained, dataset: ImageDataset, labels: np.ndarray) -> tuple[list[int], list[int]]:
    """Count the images of `dataset` that look like training images, and list them, as `count_alike` does.

    They are compared by the weights that the run began with, if its start has compared validation images so; else both
    lists are empty. The features of the training images, which its start has kept, are computed again if they are gone.
    """
    chosen = trained.chosen
    if dataset.data.CHECK == "off" or not chosen.choices.get(ALIKE):
        return [], []
    weights = {"PRETRAINED": settings_of(chosen)["MODEL.PRETRAINED"], "NEW_CLASSIFIER": "zero"}
    config = config_of_weights(chosen).changed(MODEL=weights, DATA={"DOWNLOAD": False})
    with suppress(UserError):  # the training images or the weights may be gone
        with unheard():
            at_start = pretrained(config, ALONE)
            train_set = split_of_run(at_start, "train")
        with at_start.computing(config.DATA.val_batch):
            training = features_of(at_start, config, train_set, train_set.data)
            features = features_of(at_start, config, dataset, dataset.data)._replace(labels=labels)
            return count_alike(at_start, dataset, features, training, pool_of(at_start.model), dataset.data)
    return [], []
