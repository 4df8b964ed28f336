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
from tools.common.report_page.runs import LAYOUTS, Run, read_runs
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
"""Class names in the card; all are in config.json"""
RESIZED = {
    "center": "resized",
    "squash": "resized without keeping the aspect ratio",
    "border": "resized with a border of the mean colour",
}
"""What happens before the centre is cropped, by `crop_mode`"""
SHOWN = [metric for metric in ONE_LABEL.metrics if metric != LOSS] + [LOSS]
"""Metrics in the card"""

# Code that classifies images, and opens them as vitamp does; its lines for upright images, and for a background
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
    """`run`: of the weights, if it is known."""
    trained = export.trained
    about = export.metadata(False)
    chosen = trained.chosen
    metrics = {}
    for metric in SHOWN:
        if metric.trivial < about["num_classes"] and metric.name in chosen.metrics:
            metrics[metric] = chosen.metrics[metric.name]
    samples = run.about.get("samples", {}) if run else {}
    dataset = _public_name(trained.config.DATA.DATASET)
    base = _on_the_hub(settings_of(chosen).get("MODEL.PRETRAINED"))
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
        f"An image classifier: timm's {type(export.model).__name__} ({_code(about['model'])}) with "
        f"{count_parameters(export.model)[0]:,} parameters and {about['num_classes']:,} classes, trained with vitamp"
    )
    if dataset:
        summary += f" on {_code(dataset)}"
    if base:
        summary += f", fine-tuned from {_code(base)}"
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {title}",
        f"{summary}.",
        f"## Load it\n\n{_loading(export, about, title)}",
        f"## Data\n\n{_data(about, chosen.classes, dataset, samples)}",
        f"## Results\n\n{_results(export, metrics, has_curves)}",
    ]
    return "\n\n".join(parts) + "\n"


def _on_the_hub(pretrained: object) -> str | None:
    """Where the Hub has the weights of MODEL.PRETRAINED; None without weights, or with those of a file."""
    if not isinstance(pretrained, str) or not is_timm_name(pretrained):
        return None
    weights = timm_weights(pretrained)
    return None if weights is None else weights.hf_hub_id


def _eval_results(metrics: dict[Metric, float], dataset: str) -> list[EvalResult]:
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
    """Name of the data set, if the run knows one; never a path."""
    if not dataset.startswith(HUB_PREFIX):
        return None if dataset.partition(":")[0] in LAYOUTS else dataset
    place = dataset.removeprefix(HUB_PREFIX)
    return None if hub_data.is_path(place) else hub_data.repository_of(place)[0]


def _loading(export: Export, about: dict[str, Any], title: str) -> str:
    temperature = export.trained.temperature
    background = about["background"]
    rotates = about["exif_rotate"]
    names = f"range({about['num_classes']})"
    if export.trained.chosen.classes:
        names = 'model.pretrained_cfg["label_names"]'
    return CODE.format(
        imported="Image, ImageOps" if rotates else "Image",
        title=title,
        names=names,
        upright=UPRIGHT if rotates else "",
        composite="" if background is None else COMPOSITE.format(colour=tuple(background) + (OPAQUE,)),
        mode="L" if about["channels"] == 1 else "RGB",
        logits="model(image[None])" if temperature == 1 else f"(model(image[None]) / {temperature:.6g})",
    )


def _data(about: dict[str, Any], names: list[str] | None, dataset: str | None, samples: dict[str, int]) -> str:
    rows = {"data set": _code(dataset) if dataset else f"{UNKNOWN}: the run knows no name of it"}
    for part, words in (("train", "training images"), ("val", "validation images")):
        if part in samples:
            rows[words] = f"{samples[part]:,}"
    rows["classes"] = f"{about['num_classes']:,}"
    if names:
        rows["classes"] += f": {', '.join(map(_code, names[:MOST_CLASSES]))}"
        if len(names) > MOST_CLASSES:
            rows["classes"] += f", and {len(names) - MOST_CLASSES:,} more in config.json"
    size = in_pixels(about["image_size"])
    how = f"resized to {size} without keeping the aspect ratio"
    if about["crop"] != "none":
        how = f"{RESIZED[about['crop_mode']]}, then the centre cropped to {size}"
        how += f" (`crop_pct` {about['crop_pct']:g})"
    colours = "grey" if about["channels"] == 1 else "RGB"
    rows["input"] = f"{colours}, {how}, {about['interpolation']}"
    behind = about["background"]
    if behind is None:
        rows["transparent pixels"] = "dropped alpha"
    else:
        rows["transparent pixels"] = f"composited on RGB {', '.join(map(str, behind))}"
    kept = about.get("calibration")
    if kept is not None:
        fitted = "{temperature:.6g}, fitted on {images:,} images: divide the logits by it, as above"
        rows["temperature"] = fitted.format_map(kept)
    rows["mean"] = ", ".join(f"{value:g}" for value in about["mean"])
    rows["standard deviation"] = ", ".join(f"{value:g}" for value in about["std"])
    return _table(("", ""), rows)


def _results(export: Export, metrics: dict[Metric, float], has_curves: bool) -> str:
    if not metrics:
        return "These weights were not validated by their run: their accuracy is unknown."
    chosen = export.trained.chosen
    epoch = chosen.meta.get("epoch")
    update = int(chosen.meta.get("update") or 0)  # a file's header has text
    when = f" after epoch {epoch} (update {update:,})" if epoch is not None and update else ""
    found = f"Measured in training, on the validation split, with the {chosen.which.label} weights{when}."
    if export.dtype != "fp32":
        found += f" They are stored in {export.dtype} here."
    rows = {metric.words: metric.number(value) for metric, value in metrics.items()}
    found += f"\n\n{_table(('metric', 'value'), rows)}"
    if has_curves:
        found += f"\n\n![Loss and accuracy by epoch]({CURVES})"
    return found


def _code(text: str) -> str:
    """As code, so that no character of a class name is read as Markdown or ends a table's cell."""
    shown = " ".join(text.split()).replace("`", "'").replace("|", r"\|")
    return f"`{shown}`"


def _table(header: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)


KEPT = ("architecture", "fixed_input_size", "first_conv", "classifier")
"""What timm notes about an architecture. The rest of its notes are about weights of its own."""


class Hub(Safetensors):
    name = "hub"
    flag = "-output"

    def __init__(self, license: str | None) -> None:
        self.license = license

    def check(self, trained: Trained) -> None:
        if trained.task.kind != ONE_LABEL:
            raise UserError(
                "-to hub: this model has several labels per image, but the Hub and timm's example code apply a "
                "softmax, which fits only one label; use safetensors, whose header names the sigmoid."
            )
        super().check(trained)
        if not trained.config.DATA.is_plain:
            raise UserError("-to hub: for 8-bit grey and RGB images, and this model takes others; use -to safetensors.")

    def write(self, export: Export, file: Path) -> str:
        own: Any = export.model.pretrained_cfg
        kept = {key: own[key] for key in KEPT if own.get(key) is not None}
        classes = export.trained.config.MODEL.NUM_CLASSES
        chosen = export.trained.chosen
        config = kept | _data_config(export) | {"num_classes": classes, "custom_load": False}
        vars(export.model)["pretrained_cfg"] = config
        names = {"label_names": export.trained.names()} if chosen.classes else {}
        tensors = export.tensors()
        export.model.register_state_dict_post_hook(lambda _, found, *__: found.update(tensors))
        with raising_os_errors(file):
            timm.models.save_for_hf(
                export.model, str(file), model_config=names, model_args=export.timm_arguments, safe_serialization=True
            )
        # A checkpoint may have been moved out of its run, or be a file of weights alone.
        folder = run_folder_of(chosen.place) if chosen.checkpoint else None
        run = read_runs([folder])[0] if folder is not None and is_run_folder(folder) else None
        if run is not None and (run.folder / CURVES).is_file():
            shutil.copyfile(run.folder / CURVES, file / CURVES)
        card = card_of(export, file.name, self.license, run=run, has_curves=(file / CURVES).exists())
        (file / CARD).write_text(card, encoding="utf-8", errors="replace")
        present = [name for name in (CONFIG, WEIGHTS, CARD, CURVES) if (file / name).exists()]
        return f"{', '.join(present)}, {export.input_summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        try:
            model = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        except Exception as error:  # timm and its models raise many types
            raise TrainingError(f"timm cannot load {export.trained.config.MODEL.NAME}: {first_line(error)}") from None
        found = resolve_model_data_config(model)
        wrong = []
        for key, value in _data_config(export).items():
            own = tuple(found[key]) if isinstance(found[key], list) else found[key]  # JSON has no tuples
            if own != value:
                wrong.append(f"{key} {own} instead of {value}")
        if wrong:
            raise TrainingError(f"timm would prepare images differently: {'; '.join(wrong)}")
        return (model(batch) / export.trained.temperature for batch in batches)

    def how_to_load(self, export: Export, out: Path) -> str:
        return f'timm.create_model("local-dir:{out}", pretrained=True)'


def _data_config(export: Export) -> dict[str, Any]:
    """The preprocessing of validation, in the words of timm.data."""
    about = export.metadata(False)
    high, wide = sides(about["image_size"])
    return {
        "input_size": (about["channels"], high, wide),
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "interpolation": about["interpolation"],
        "crop_pct": about["crop_pct"],
        "crop_mode": about["crop_mode"],
    }
