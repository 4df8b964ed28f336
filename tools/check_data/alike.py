"""Images that look like one of another split, as edited copies do: by the features of a model with weights.

How similar is too similar depends on the model and on the images. So validation images are edited here, and the
similarity of the edited copies to them is the limit.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torchvision.transforms import functional

from datasets import ImageDataset, ValLoader, comes_unsplit, open_dataset, source_of
from datasets.base import Part
from datasets.exclude import line_of
from datasets.labels import ANY_LABEL, distinct_names
from engine.evaluation.features import columns_of, features_of
from engine.trained.model import Trained, pretrained
from tools.check_data.findings import Split, text_of_list
from tools.common.output_file import writing
from tools.common.report_page.evaluations import pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import log
from utils.progress import Progress
from utils.seeding import generator_of
from utils.text import counted
from vitamp.files import write_atomically
from vitamp.pooling import pool_of

PARTS: dict[str, Part] = {"training": "train", "validation": "val", "test": "test"}
EDITS = "mirrored, turned by 10 degrees, blurred, cropped by a tenth"
EDITED = 512
"""Images that are edited, at most"""
MOST_SHOWN = 100
"""Pairs with pictures"""
AT_ONCE = 1024
"""Images that are compared with all others at once"""


def edited(images: Tensor) -> list[Tensor]:
    """Each of EDITS, of images (B x C x H x W)."""
    high, wide = images.shape[-2:]
    whole = images.float()
    copies = [
        whole.flip(-1),
        functional.rotate(whole, 10, functional.InterpolationMode.BILINEAR),
        functional.gaussian_blur(whole, [9, 9], [min(high, wide) / 112] * 2),
        functional.resize(functional.center_crop(whole, [high * 9 // 10, wide * 9 // 10]), [high, wide]),
    ]
    return [copy.round().to(images.dtype) for copy in copies]


class Images:
    """The images of all splits, numbered through, and the directions of their features from the mean of training's."""

    def __init__(self, config: Config, splits: Sequence[Split]) -> None:
        trained = pretrained(config, ALONE)
        self.data, self.splits, pool = config.DATA, splits, pool_of(trained.model)
        self.sets, tables = list[ImageDataset](), list[np.ndarray]()
        for split in splits:
            data = config.DATA.changed(PART=PARTS[split.title])
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
            with trained.computing(data.val_batch):
                tables.append(np.asarray(features_of(trained, config, dataset, data).of(pool)))
            self.sets.append(dataset)
        self.begins = np.cumsum([0, *map(len, tables)])
        mean = tables[0].mean(0)
        self.features = _directions(np.concatenate(tables), mean)
        self.limit = float(np.median(_to_edited_copies(trained, self.sets[1], mean)))
        self.labels = np.concatenate([split.samples.labels for split in splits])
        self.classes = distinct_names(splits[0].samples.classes or range(int(self.labels.max()) + 1))

    def name(self, number: int) -> str:
        split, index = self._place(number)
        return self.splits[split].samples.name(index)

    def label(self, number: int) -> str:
        label = self.labels[number]
        return "|".join(self.classes[one] for one in (np.flatnonzero(label) if label.ndim else [int(label)]))

    def shown(self, number: int) -> dict[str, Any]:
        split, index = self._place(number)
        about = pictured(self.sets[split], index, self.data)
        return {**about, "title": self.splits[split].title, "label": self.label(number)}

    def _place(self, number: int) -> tuple[int, int]:
        """Its split, and its index there."""
        split = int(np.searchsorted(self.begins, number, side="right")) - 1
        return split, number - int(self.begins[split])

    def nearest(self, of: slice, among: slice) -> tuple[np.ndarray, np.ndarray]:
        """Of each of these images the nearest one of the others, and how similar it is."""
        found, others = list[tuple[np.ndarray, np.ndarray]](), self.features[among]
        for first in range(of.start, of.stop, AT_ONCE):
            similar = self.features[first : min(first + AT_ONCE, of.stop)] @ others.T
            found.append((similar.argmax(1) + among.start, similar.max(1)))
        places, similarities = zip(*found, strict=True)
        return np.concatenate(places), np.concatenate(similarities)

    def groups(self) -> np.ndarray:
        """The number of each image's group: images that are as similar as edited copies, and those as similar to
        these."""
        groups, shape = np.arange(len(self.features)), (len(self.features),) * 2
        for first in range(0, len(groups), AT_ONCE):
            one, other = np.nonzero(self.features[first : first + AT_ONCE] @ self.features.T >= self.limit)
            links = csr_array((np.ones(len(one), bool), (groups[first + one], groups[other])), shape)
            groups = connected_components(links, directed=False)[1][groups]
        return groups


def _directions(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    features = features[:, : len(mean)] - mean
    return features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)


def _to_edited_copies(trained: Trained, dataset: ImageDataset, mean: np.ndarray) -> np.ndarray:
    """Similarities of images to their edited copies."""
    batch = trained.config.DATA.val_batch
    chosen = np.sort(generator_of("edited").permutation(len(dataset))[:EDITED])
    plan = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
    loader = ValLoader(dataset, batch, 0, 1, 0, trained.precision.device, shard=lambda *_: plan)
    found = list[np.ndarray]()
    with trained.computing(batch), Progress(loader, len(plan), "batches", "edited copies") as batches:
        for images, _, indices in batches:
            read = images[indices >= 0]
            whole, *copies = (columns_of(trained, one).cpu().numpy() for one in (read, *edited(read)))
            found += [(_directions(whole, mean) * _directions(copy, mean)).sum(1) for copy in copies]
    loader.close()
    return np.concatenate(found)


def write_alike(config: Config, splits: Sequence[Split], folder: Path) -> None:
    """Write the page of the most similar images of two splits, and a table that keeps them out of one of them."""
    if len(splits) < 2:
        raise UserError(f"-alike compares two splits whose images are files; {source_of(config.DATA)} has not two.")
    images = Images(config, splits)
    nearest, similar = np.zeros(len(images.features), np.int64), np.full(len(images.features), -1.0)
    for begin, end in itertools.pairwise(images.begins[1:].tolist()):  # of each split, among those before it
        nearest[begin:end], similar[begin:end] = images.nearest(slice(begin, end), slice(0, begin))
    order = np.argsort(-similar, kind="stable")[: len(similar) - images.begins[1]]
    alike = int((similar >= images.limit).sum())
    found = f"{alike:,} of {counted(len(order), 'image')} are as similar to one of another split"
    about = f"Validation images and their edited copies ({EDITS}) have a median similarity of {images.limit:.2f}."
    log.info("%s %s: they may be edited copies of it, or photographs of one thing or place.", about, found)

    page = folder / "alike.html"
    with writing(page, "-alike"):
        folder.mkdir(parents=True, exist_ok=True)
    shown = progress_bar(order[:MOST_SHOWN].tolist(), "pictures")
    pairs = [(similar[one], [images.shown(one), images.shown(int(nearest[one]))]) for one in shown]
    title = f"Images of {source_of(images.data)} that look like one of another split"
    values = {"title": title, "found": found, "about": about, "pairs": pairs, "limit": images.limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)

    if alike and comes_unsplit(images.data) and images.labels.ndim == 1 and splits[0].samples.stored == "files":
        _write_groups(images, folder / "groups.csv")
    elif alike:
        _write_list(images, folder / "exclude.txt")


def _write_groups(images: Images, table: Path) -> None:
    """Write a table of all images, with their groups, which a split keeps whole."""
    groups, text = images.groups(), io.StringIO()
    root = Path(images.data.DATA_PATH or "").expanduser()
    root = root if root.is_dir() else root.parent
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "target", "group"])
    for number, group in enumerate(groups.tolist()):
        rows.writerow([os.path.relpath(images.name(number), root), images.label(number), group])
    with writing(table, "-alike"):
        write_atomically(table, text.getvalue())
    largest = counted(int(np.bincount(groups).max()), "image")
    log.info(
        "%s: similar images are a group, the largest of %s. To keep each on one side of the split,", table, largest
    )
    log.info("copy it to %s, and train with -data_path %s DATA.GROUP=group", root, root / table.name)


def _write_list(images: Images, listed: Path) -> None:
    """Write a list of the training images that are as similar to one of another split."""
    training, others = slice(0, int(images.begins[1])), slice(int(images.begins[1]), len(images.features))
    nearest, similar = images.nearest(training, others)
    alike = np.flatnonzero(similar >= images.limit).tolist()
    lines = [line_of(images.name(one), f"like {images.name(int(nearest[one]))}", images.data) for one in alike]
    with writing(listed, "-alike"):
        write_atomically(listed, text_of_list(lines, images.data))
    log.info(
        "%s: %s; to leave them out, train with DATA.EXCLUDE=%s", listed, counted(len(lines), "training image"), listed
    )
