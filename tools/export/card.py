"""The format `hub`, a folder that timm loads by itself, and its model card with metadata for the Hugging Face Hub."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import timm
import timm.models
from huggingface_hub import EvalResult, ModelCardData
from timm.data.config import resolve_model_data_config
from torch import Tensor

from datasets.base import HUB_PREFIX
from datasets.shards import hub as hub_data
from engine.checkpoint.folder import raising_os_errors
from engine.trained.model import Trained
from models.build import is_timm_name, timm_weights
from models.parts import count_parameters
from tools.common.report_page.runs import LAYOUTS, Run, doubts_about, read_runs, validated
from tools.export import CARD, CONFIG, CURVES, WEIGHTS
from tools.export.formats import Export, Safetensors
from utils.config.resumed import settings_of
from utils.errors import TrainingError, UserError, first_line
from utils.record.run_folder import is_run_folder
from vitamp.checkpoints import run_folder_of
from vitamp.colours import OPAQUE
from vitamp.metrics import LOSS, MACRO_F1, ONE_LABEL, Metric
from vitamp.sizes import in_pixels, sides

TASK = "image-classification"
UNKNOWN = "unknown"
MOST_CLASSES = 50
"""Most class names in the card; all are in config.json"""
RESIZED = {
    "center": "resized",
    "squash": "resized without keeping the aspect ratio",
    "border": "resized with a border of the mean colour",
}
"""`crop_mode` -> words for how an image is resized before its centre is cropped"""
SHOWN = [metric for metric in ONE_LABEL.metrics if metric != LOSS] + [LOSS]
"""Metrics in the card, in this order"""

# The card's example code, which opens and classifies images as vitamp does; its lines that apply EXIF rotation, and
# those that put transparent images on a background
CODE = """```python
import sys

import numpy as np
import timm
import torch
from PIL import {imported}

# The path of this folder; on the Hugging Face Hub, hf-hub:OWNER/{title}
model = timm.create_model("local-dir:{title}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
names = {names}


def opened(path):
    image = Image.open(path)
{upright}    if image.mode.startswith("I"):  # 16 bits
        opaque = np.uint8(255) * (np.asarray(image) != image.info.get("transparency"))
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        image.putalpha(Image.fromarray(opaque))
{composite}    return image.convert("{mode}")


for path in sys.argv[1:]:
    image = transform(opened(path))
    with torch.no_grad():
        probabilities = {logits}.softmax(1)[0]
    label = int(probabilities.argmax())
    print(path, names[label], f"{{probabilities[label]:.3f}}")
```"""
UPRIGHT = "    image = ImageOps.exif_transpose(image)\n"
COMPOSITE = """    if image.has_transparency_data:
        behind = Image.new("RGBA", image.size, {colour})
        image = Image.alpha_composite(behind, image.convert("RGBA"))
"""


def card_of(export: Export, title: str, license: str | None, run: Run | None, has_curves: bool) -> str:
    """Write the model card in Markdown, with metadata for the Hub at its head.

    `title`: name of the model. `license`: None for a card without one. `run`: the run of the weights, which knows the
    number of images; None if it is unknown. `has_curves`: whether the folder has the picture of the curves.
    """
    trained = export.trained
    metadata = export.metadata(program=False)
    chosen = trained.chosen

    # The metrics of the last validation, except those that are always 100 % with so few classes, as top-5 of five.
    metrics = {}
    for metric in SHOWN:
        always_100_percent = metadata["num_classes"] <= metric.trivial
        if not always_100_percent and metric.name in chosen.metrics:
            metrics[metric] = chosen.metrics[metric.name]

    # The head, by which the Hub finds the model. Its `metrics` are the Hub's names of metrics, not values.
    samples = run.about.get("samples", {}) if run else {}
    dataset = _public_name(trained.config.DATA.DATASET)
    base = _hub_id(settings_of(chosen).get("MODEL.PRETRAINED"))
    head = ModelCardData(
        tags=[TASK, "timm", "vitamp"],
        library_name="timm",
        pipeline_tag=TASK,
        license=license,
        base_model=base,
        datasets=[dataset] if dataset is not None and "/" in dataset else None,
        metrics=["accuracy"],
        model_name=title,
        eval_results=_eval_results(metrics, dataset or UNKNOWN) or None,
    )

    summary = (
        f"An image classifier: timm's {type(export.model).__name__} ({_code(metadata['model'])}) with "
        f"{count_parameters(export.model)[0]:,} parameters and {metadata['num_classes']:,} classes, trained with vitamp"
    )
    if dataset:
        summary += f" on {_code(dataset)}"
    if base:
        summary += f", fine-tuned from {_code(base)}"
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {title}",
        f"{summary}.",
        f"## Load it\n\n{_loading(export, metadata, title)}",
        f"## Data\n\n{_data(metadata, chosen.classes, dataset, samples)}",
        f"## Results\n\n{_results(export, metrics, has_curves)}",
    ]
    found = doubts_about(run, validated(run)) if run else []
    if found:
        # Without advice, whose commands name files of this machine.
        parts.append("## How far to trust this\n\n" + "\n".join(f"- {doubt.words(advice=False)}" for doubt in found))
    return "\n\n".join(parts) + "\n"


def _hub_id(pretrained: object) -> str | None:
    """Return the Hub's repository of the weights that MODEL.PRETRAINED names.

    None without such weights, for those of a file, or if they are not on the Hub.
    """
    if not isinstance(pretrained, str) or not is_timm_name(pretrained):
        return None
    weights = timm_weights(pretrained)
    return None if weights is None else weights.hf_hub_id


def _eval_results(metrics: dict[Metric, float], dataset: str) -> list[EvalResult]:
    """Convert the metrics to entries of the card's metadata; the loss has none."""
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split="validation",
            metric_type="f1" if metric is MACRO_F1 else "accuracy",
            metric_name=metric.heading,
            metric_value=round(value, 4),
        )
        for metric, value in metrics.items()
        if metric != LOSS
    ]


def _public_name(dataset: str) -> str | None:
    """Return the name of the data set in `dataset`, the value of DATA.DATASET, to be published in the card.

    None if it has no such name: if it is only the layout of a folder, such as imagefolder, or has the path of a folder
    of this machine, which must not be published.
    """
    if not dataset.startswith(HUB_PREFIX):
        layout = dataset.partition(":")[0]
        return None if layout in LAYOUTS else dataset
    source = dataset.removeprefix(HUB_PREFIX)
    if hub_data.is_path(source):
        return None
    repository, _folder, _revision = hub_data.repository_of(source)
    return repository


def _loading(export: Export, metadata: dict[str, Any], title: str) -> str:
    """Write the card's example code, which loads the model and classifies images as vitamp does.

    It fills the template CODE. `metadata`: from `Export.metadata`.
    """
    rotates = metadata["exif_rotate"]
    names = f"range({metadata['num_classes']})"
    if export.trained.chosen.classes:
        names = 'model.pretrained_cfg["label_names"]'
    composite = ""
    background = metadata["background"]
    if background is not None:
        composite = COMPOSITE.format(colour=tuple(background) + (OPAQUE,))  # RGBA
    logits = "model(image[None])"
    temperature = export.trained.temperature
    if temperature != 1:
        logits = f"(model(image[None]) / {temperature:.6g})"
    return CODE.format(
        imported="Image, ImageOps" if rotates else "Image",
        title=title,
        names=names,
        upright=UPRIGHT if rotates else "",
        composite=composite,
        mode="L" if metadata["channels"] == 1 else "RGB",
        logits=logits,
    )


def _data(metadata: dict[str, Any], names: list[str] | None, dataset: str | None, samples: dict[str, int]) -> str:
    """Write the card's table of the data: its size, the classes, and how validation prepares an image.

    `metadata`: from `Export.metadata`. `names`: those of the classes; None if they have none. `dataset`: public name of
    the data set; None if it has none. `samples`: split -> number of images, without splits whose number is unknown.
    """
    # The images and their classes.
    rows = {"data set": _code(dataset) if dataset else f"{UNKNOWN}: the run knows no name of it"}
    for part, heading in (("train", "training images"), ("val", "validation images")):
        if part in samples:
            rows[heading] = f"{samples[part]:,}"
    rows["classes"] = f"{metadata['num_classes']:,}"
    if names:
        rows["classes"] += f": {', '.join(map(_code, names[:MOST_CLASSES]))}"
        if len(names) > MOST_CLASSES:
            rows["classes"] += f", and {len(names) - MOST_CLASSES:,} more in config.json"

    # How an image is prepared.
    size = in_pixels(metadata["image_size"])
    resizing = f"resized to {size} without keeping the aspect ratio"
    if metadata["crop"] != "none":
        resizing = f"{RESIZED[metadata['crop_mode']]}, then the centre cropped to {size}"
        resizing += f" (`crop_pct` {metadata['crop_pct']:g})"
    colours = "grey" if metadata["channels"] == 1 else "RGB"
    rows["input"] = f"{colours}, {resizing}, {metadata['interpolation']}"
    background = metadata["background"]
    if background is None:
        rows["transparent pixels"] = "dropped alpha"
    else:
        rows["transparent pixels"] = f"composited on RGB {', '.join(map(str, background))}"

    calibration = metadata.get("calibration")
    if calibration is not None:
        template = "{temperature:.6g}, fitted on {images:,} images: divide the logits by it, as above"
        rows["temperature"] = template.format_map(calibration)
    rows["mean"] = ", ".join(f"{value:g}" for value in metadata["mean"])
    rows["standard deviation"] = ", ".join(f"{value:g}" for value in metadata["std"])
    return _table(("", ""), rows)


def _results(export: Export, metrics: dict[Metric, float], has_curves: bool) -> str:
    """Write the card's section of results: when the weights were validated, their metrics, and the curves."""
    if not metrics:
        return "These weights were not validated by their run: their accuracy is unknown."
    chosen = export.trained.chosen
    # When the weights were validated. Numbers are text if they are from the header of a file of weights.
    epoch = chosen.meta.get("epoch")
    update = int(chosen.meta.get("update") or 0)
    when = ""
    if epoch is not None and update > 0:
        when = f" after epoch {epoch} (update {update:,})"
    section = f"Measured in training, on the validation split, with the {chosen.which.label} weights{when}."
    if export.dtype != "fp32":
        section += f" They are stored in {export.dtype} here."
    rows = {metric.words: metric.number(value) for metric, value in metrics.items()}
    section += f"\n\n{_table(('metric', 'value'), rows)}"
    if has_curves:
        section += f"\n\n![Loss and accuracy by epoch]({CURVES})"
    return section


def _code(text: str) -> str:
    """Write text as Markdown code, so that no character of a class name has a meaning or ends a table's cell."""
    one_line = " ".join(text.split())
    escaped = one_line.replace("`", "'").replace("|", r"\|")
    return f"`{escaped}`"


def _table(header: tuple[str, str], rows: dict[str, str]) -> str:
    """Write a Markdown table of two columns."""
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)


ARCHITECTURE_KEYS = ("architecture", "fixed_input_size", "first_conv", "classifier")
"""Entries of timm's pretrained_cfg about an architecture. The others are about weights of its own."""


class Hub(Safetensors):
    """A folder that timm loads by itself, with weights, config, model card and curves.

    `license`: for the model card; None if it has none.
    """

    name = "hub"
    flag = "-output"

    def __init__(self, license: str | None) -> None:
        self.license = license

    def check(self, trained: Trained) -> None:
        """Raise UserError for a model that timm cannot build, or whose images or outputs it handles differently."""
        if trained.task.kind != ONE_LABEL:
            raise UserError(
                "-to hub: this model has several labels per image, but the Hub and timm's example code apply a "
                "softmax, which fits only one label; use safetensors, whose header names the sigmoid."
            )
        super().check(trained)
        if not trained.config.DATA.is_plain:
            raise UserError("-to hub: for 8-bit grey and RGB images, and this model takes others; use -to safetensors.")

    def write(self, export: Export, file: Path) -> str:
        """Write the folder `file`: weights and config by timm, the run's curves, and the model card.

        Returns a summary: the names of the written files, and the model's input.
        """
        # The config that timm writes must say how vitamp prepares images, and nothing about timm's own weights.
        timm_config: Any = export.model.pretrained_cfg
        architecture = {key: timm_config[key] for key in ARCHITECTURE_KEYS if timm_config.get(key) is not None}
        classes = export.trained.config.MODEL.NUM_CLASSES
        chosen = export.trained.chosen
        config = architecture | _data_config(export) | {"num_classes": classes, "custom_load": False}
        vars(export.model)["pretrained_cfg"] = config  # the type of the attribute does not allow a dictionary
        names = {"label_names": export.trained.names()} if chosen.classes else {}

        # timm saves the model's state_dict. Copies replace its tensors there, because safetensors refuses tensors that
        # share memory.
        tensors = export.tensors()
        export.model.register_state_dict_post_hook(lambda _model, state_dict, *_others: state_dict.update(tensors))
        with raising_os_errors(file):
            timm.models.save_for_hf(
                export.model, str(file), model_config=names, model_args=export.timm_arguments, safe_serialization=True
            )

        # Curves and card. A checkpoint may have been moved out of its run, or be a file of weights alone.
        folder = run_folder_of(chosen.place) if chosen.checkpoint else None
        run = read_runs([folder])[0] if folder is not None and is_run_folder(folder) else None
        if run is not None and (run.folder / CURVES).is_file():
            shutil.copyfile(run.folder / CURVES, file / CURVES)
        card = card_of(export, file.name, self.license, run=run, has_curves=(file / CURVES).exists())
        (file / CARD).write_text(card, encoding="utf-8", errors="replace")
        written = [name for name in (CONFIG, WEIGHTS, CARD, CURVES) if (file / name).exists()]
        return f"{', '.join(written)}, {export.input_summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Check that timm loads the folder and prepares images as vitamp does, and compute the logits for each batch.

        They are those of timm's model, divided by the temperature of the calibration, which is not in the file. The
        check is made at once, and a batch is computed when it is asked for.
        """
        try:
            model = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        except Exception as error:  # timm and its models raise many types
            raise TrainingError(f"timm cannot load {export.trained.config.MODEL.NAME}: {first_line(error)}") from None
        timm_data_config = resolve_model_data_config(model)
        differences = []
        for key, expected in _data_config(export).items():
            value = timm_data_config[key]
            if isinstance(value, list):  # JSON has no tuples
                value = tuple(value)
            if value != expected:
                differences.append(f"{key} {value} instead of {expected}")
        if differences:
            raise TrainingError(f"timm would prepare images differently: {'; '.join(differences)}")
        return (model(batch) / export.trained.temperature for batch in batches)

    def how_to_load(self, export: Export, out: Path) -> str:
        return f'timm.create_model("local-dir:{out}", pretrained=True)'


def _data_config(export: Export) -> dict[str, Any]:
    """Return how validation prepares images, under the names of timm.data."""
    metadata = export.metadata(program=False)
    high, wide = sides(metadata["image_size"])
    mean = tuple(metadata["mean"])
    std = tuple(metadata["std"])
    if "range" in metadata:  # timm knows no DATA.RANGE: it subtracts the mean from pixel / 255
        low, most = metadata["range"]
        mean = tuple((low + (most - low) * value) / 255 for value in mean)
        std = tuple((most - low) * value / 255 for value in std)
    return {
        "input_size": (metadata["channels"], high, wide),
        "mean": mean,
        "std": std,
        "interpolation": metadata["interpolation"],
        "crop_pct": metadata["crop_pct"],
        "crop_mode": metadata["crop_mode"],
    }
