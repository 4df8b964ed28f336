"""The model card: README.md of a shared model, with the metadata that the Hugging Face Hub reads at its top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

from datasets.base import HUB_PREFIX
from datasets.decoding.background import OPAQUE
from datasets.shards import hub as hub_data
from models import count_parameters
from models.names import is_timm_name
from tools.common.report_page.runs import Run
from tools.common.weights import needed_by_tools
from tools.export.formats import Export
from tools.export.hub_files import CURVES
from utils.config.keys import default_of
from utils.config.values import one_line
from utils.record.tasks import LOSS, METRICS, ONE_LABEL

TASK = "image-classification"
HUB_IDS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}
"""DATA.DATASET -> its name on the Hub, where that differs"""
IMAGENET, IMAGENET_SAMPLES = "ILSVRC/imagenet-1k", {"train": 1_281_167, "val": 50_000}
LAYOUTS = ("csv", "imagefolder", "imagenet2012", "shards")
"""Values of DATA.DATASET that say how images are stored, not which they are"""
UNKNOWN = "unknown"
SHOWN_SECTIONS = ("MODEL.", "DATA.", "TRAIN.", "AMP.", "SEED")
MOST_CLASSES = 50
"""Class names in the card; all are in config.json"""
RESIZED = {
    "center": "resized",
    "squash": "resized without keeping the aspect ratio",
    "border": "resized with a border of the mean colour",
}
"""What happens before the centre is cropped, by `crop_mode`"""
SHOWN = (*(metric.name for metric in ONE_LABEL.metrics if metric != LOSS), LOSS.name)
"""Metrics in the card"""


@dataclass(frozen=True)
class Card:
    export: Export
    title: str
    repository: str | None
    license: str | None
    run: Run | None
    has_curves: bool

    def text(self) -> str:
        parts = [
            f"---\n{self._metadata().to_yaml()}\n---",
            f"# {self.title}",
            self._summary(),
            f"## Load it\n\n{self._loading()}",
            f"## Data\n\n{self._data()}",
            f"## Results\n\n{self._results()}",
            f"## Settings\n\n{self._settings()}",
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def metrics(self) -> dict[str, float]:
        """Validation metrics of the exported weights, as far as they are known."""
        metrics = self.export.trained.chosen.metrics
        return {name: metrics[name] for name in SHOWN if name in metrics}

    @property
    def public_settings(self) -> dict[str, Any]:
        """The run's settings without those that hold paths of its machine."""
        return needed_by_tools(self.export.trained.chosen)["settings"]

    @property
    def dataset(self) -> str | None:
        """Name of the data set, if the run knows it; None for a layout. Never a path."""
        name = self.export.trained.config.DATA.DATASET
        if name.startswith(HUB_PREFIX):
            place = name.removeprefix(HUB_PREFIX)
            return None if hub_data.is_path(place) else hub_data.repository_of(place)[0]
        if name == "imagenet2012" and self.samples == IMAGENET_SAMPLES and self.export.metadata["num_classes"] == 1000:
            return IMAGENET
        return None if name in LAYOUTS else HUB_IDS.get(name, name)

    @property
    def on_hub(self) -> list[str] | None:
        """The data set, if it has a name on the Hub."""
        return [self.dataset] if self.dataset is not None and "/" in self.dataset else None

    @property
    def samples(self) -> dict[str, int]:
        """Number of images of each split, as far as it is known."""
        return self.run.about.get("samples", {}) if self.run else {}

    @property
    def base_model(self) -> str | None:
        """Name on the Hub of the timm weights that training began with; None if it began without, or with a file."""
        name = self.export.trained.chosen.settings.get("MODEL.PRETRAINED")
        if not isinstance(name, str) or not is_timm_name(name):
            return None
        config = timm.get_pretrained_cfg(name)
        return config.hf_hub_id if config is not None else None

    def _metadata(self) -> ModelCardData:
        results = [
            EvalResult(
                task_type=TASK,
                dataset_type=self.dataset or UNKNOWN,
                dataset_name=self.dataset or UNKNOWN,
                dataset_split="validation",
                metric_type="accuracy",
                metric_name=METRICS[name].heading,
                metric_value=round(value, 4),
            )
            for name, value in self.metrics.items()
            if name != LOSS.name
        ]
        return ModelCardData(
            tags=[TASK, "timm", "vitamp"],
            library_name="timm",
            pipeline_tag=TASK,
            license=self.license,
            base_model=self.base_model,
            datasets=self.on_hub,
            metrics=["accuracy"],
            model_name=self.title,
            eval_results=results or None,
        )

    def _summary(self) -> str:
        about, module = self.export.metadata, self.export.model.module
        parameters, _ = count_parameters(module)
        base = f", fine-tuned from {_code(self.base_model)}" if self.base_model else ""
        data = f" on {_code(self.dataset)}" if self.dataset else ""
        return (
            f"An image classifier: timm's {type(module).__name__} ({_code(about['model'])}) with {parameters:,} "
            f"parameters and {about['num_classes']:,} classes, trained with vitamp{data}{base}."
        )

    def _loading(self) -> str:
        names = 'model.pretrained_cfg["label_names"]' if self.export.trained.chosen.classes else None
        rotated = self.export.metadata["exif_rotate"]
        source = f"hf-hub:{self.repository}" if self.repository else f"local-dir:{self.title}"
        return "\n".join(
            (
                "```python",
                "import sys",
                "",
                "import numpy as np",
                "import timm",
                "import torch",
                f"from PIL import Image{', ImageOps' if rotated else ''}",
                "",
                f'model = timm.create_model("{source}", pretrained=True).eval()'
                + ("" if self.repository else "  # the path of this folder"),
                "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
                f"names = {names}" if names else f"names = range({self.export.metadata['num_classes']})",
                "",
                "",
                *self._opening(),
                "",
                "",
                "for path in sys.argv[1:]:",
                "    image = transform(opened(path))",
                "    with torch.no_grad():",
                f"        probabilities = {self._calibrated('model(image[None])')}.softmax(1)[0]",
                "    label = int(probabilities.argmax())",
                '    print(path, names[label], f"{probabilities[label]:.3f}")',
                "```",
            )
        )

    def _calibrated(self, logits: str) -> str:
        temperature = self.export.trained.temperature
        return f"({logits} / {temperature:.6g})" if temperature != 1 else logits

    def _opening(self) -> list[str]:
        """A function that opens an image as vitamp does."""
        about = self.export.metadata
        lines = ["def opened(path):", "    image = Image.open(path)"]
        if about["exif_rotate"]:
            lines.append("    image = ImageOps.exif_transpose(image)")
        lines += [
            '    if image.mode.startswith("I"):  # 16 bits',
            "        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))",
        ]
        if about["background"] is not None:
            lines += [
                "    if image.has_transparency_data:",
                '        image = image.convert("RGBA")',
                f'        behind = Image.new("RGBA", image.size, {(*about["background"], OPAQUE)})',
                "        image = Image.alpha_composite(behind, image)",
            ]
        return [*lines, f'    return image.convert("{"L" if about["channels"] == 1 else "RGB"}")']

    def _data(self) -> str:
        about, samples = self.export.metadata, self.samples
        size, names = about["image_size"], self.export.trained.chosen.classes
        colours = "grey" if about["channels"] == 1 else "RGB"
        if about["crop"] == "none":
            how = f"resized to {size} x {size} without keeping the aspect ratio"
        else:
            how = f"{RESIZED[about['crop_mode']]}, then the centre cropped to {size} x {size}"
            how += f" (`crop_pct` {about['crop_pct']:g})"
        listed = ", ".join(_code(name) for name in (names or [])[:MOST_CLASSES])
        more = f", and {len(names) - MOST_CLASSES:,} more in config.json" if names and len(names) > MOST_CLASSES else ""
        rows = {
            "data set": _code(self.dataset) if self.dataset else f"{UNKNOWN}: the run knows no name of it",
            "training images": f"{samples['train']:,}" if "train" in samples else "",
            "validation images": f"{samples['val']:,}" if "val" in samples else "",
            "classes": f"{about['num_classes']:,}{': ' if listed else ''}{listed}{more}",
            "input": f"{colours}, {how}, {about['interpolation']}",
            "transparent pixels": "dropped alpha"
            if about["background"] is None
            else f"composited on RGB {', '.join(map(str, about['background']))}",
            "temperature": self._temperature(),
            "mean": ", ".join(f"{value:g}" for value in about["mean"]),
            "standard deviation": ", ".join(f"{value:g}" for value in about["std"]),
        }
        return _table(("", ""), rows)

    def _temperature(self) -> str:
        kept = self.export.metadata.get("calibration")
        if kept is None:
            return ""
        return (
            f"{kept['temperature']:.6g}, fitted on {kept['images']:,} validation images: divide the logits by it, and "
            "the probabilities are calibrated. The weights are as they were trained"
        )

    def _results(self) -> str:
        if not self.metrics:
            mean = f" They are the mean of {len(averaged)} checkpoints." if (averaged := self._averaged) else ""
            return f"These weights were not validated by their run: their accuracy is unknown.{mean}"
        chosen = self.export.trained.chosen
        epoch, update = chosen.meta.get("epoch"), chosen.meta.get("update")
        when = f" after epoch {epoch} (update {update:,})" if epoch is not None and update is not None else ""
        dtype = self.export.options.dtype
        stored = "" if dtype == "fp32" else f" They are stored in {dtype} here."
        rows = {METRICS[by].words: METRICS[by].number(value) for by, value in self.metrics.items()}
        about = f"Measured in training, on the validation split, with the {chosen.which.label} weights{when}.{stored}"
        curves = f"\n\n![Loss and accuracy by epoch]({CURVES})" if self.has_curves else ""
        return f"{about}\n\n{_table(('metric', 'value'), rows)}{curves}"

    @property
    def _averaged(self) -> list[str]:
        return self.export.metadata.get("averaged", [])

    def _settings(self) -> str:
        differing = {
            key: value
            for key, value in self.public_settings.items()
            if key.startswith(SHOWN_SECTIONS) and one_line(value) != one_line(_listed(default_of(key)))
        }
        if HUB_PREFIX in str(differing.get("DATA.DATASET")):
            differing["DATA.DATASET"] = self.dataset or "parquet"
        lines = "\n".join(f"{key}={one_line(value)}" for key, value in differing.items())
        versions = self.run.about.get("versions", {}) if self.run else {}
        trained_in = f"Precision: {self.run.precision}. " if self.run else ""
        installed = ", ".join(f"{name} {number}" for name, number in versions.items())
        return (
            f"{trained_in}{f'Trained with {installed}. ' if installed else ''}Settings that differ from vitamp's "
            f"defaults:\n\n```text\n{lines}\n```"
        )


def _listed(value: Any) -> Any:
    """As JSON returns it: one_line writes tuples and lists alike only in this form."""
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _code(text: str) -> str:
    """As code, so that no character of a class name is read as Markdown or ends a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _table(header: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join((f"| {header[0]} | {header[1]} |", "|---|---|", *lines))
