"""The format `hub`: a folder that timm loads by itself, and that the Hugging Face Hub shows as a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor

from engine.checkpoint.folder import raising_os_errors
from tools.common.report_page.runs import Run, read_runs
from tools.export.card import Card
from tools.export.formats import Export, Format, first_line
from tools.export.hub_files import CARD, CONFIG, CURVES, WEIGHTS
from utils.errors import TrainingError
from utils.record.run_folder import is_run_folder, run_folder_of

KEPT = ("architecture", "fixed_input_size", "first_conv", "classifier")
"""What timm notes about an architecture. The rest of its notes are about weights of its own."""


@dataclass(frozen=True)
class Hub(Format):
    repository: str | None = None
    """OWNER/NAME on the Hub, if the folder is pushed"""
    license: str | None = None

    name = "hub"
    flag = "-output"

    def write(self, export: Export, file: Path) -> str:
        module = export.model.module
        vars(module)["pretrained_cfg"] = _pretrained_cfg(export)
        names = {"label_names": export.trained.names()} if export.trained.chosen.classes else {}
        with raising_os_errors(file):
            timm.models.save_for_hf(
                module, str(file), model_config=names, model_args=export.model.arguments, safe_serialization=True
            )
        run = _run_of(export)
        curves = run.folder / CURVES if run else None
        if curves is not None and curves.is_file():
            shutil.copyfile(curves, file / CURVES)
        title = self.repository.partition("/")[2] if self.repository else file.name
        card = Card(export, title, self.repository, self.license, run, (file / CURVES).exists())
        (file / CARD).write_text(card.text(), encoding="utf-8")
        present = [name for name in (CONFIG, WEIGHTS, CARD, CURVES) if (file / name).exists()]
        return f"{', '.join(present)}, {export.input_summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        try:
            model = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        except Exception as error:  # timm and its models raise many types
            raise TrainingError(f"timm cannot load {export.metadata['model']}: {first_line(error)}") from None
        found, wanted = resolve_model_data_config(model), _data_config(export)
        found |= {key: tuple(value) for key, value in found.items() if isinstance(value, list)}  # JSON has no tuples
        if wrong := [f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] != value]:
            raise TrainingError(f"timm would prepare images differently: {'; '.join(wrong)}")
        return torch.cat([model(batch) for batch in batches])

    def how_to_load(self, export: Export, out: Path) -> str:
        return f'timm.create_model("local-dir:{out}", pretrained=True)'


def _pretrained_cfg(export: Export) -> dict[str, Any]:
    own: Any = export.model.module.pretrained_cfg
    kept = {key: own[key] for key in KEPT if own.get(key) is not None}
    return {**kept, **_data_config(export), "num_classes": export.metadata["num_classes"], "custom_load": False}


def _data_config(export: Export) -> dict[str, Any]:
    """The preprocessing of validation, in the words of timm.data."""
    about = export.metadata
    return {
        "input_size": (about["channels"], about["image_size"], about["image_size"]),
        "interpolation": about["interpolation"],
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "crop_pct": about["crop_pct"],
        "crop_mode": about["crop_mode"],
    }


def _run_of(export: Export) -> Run | None:
    """The run of a checkpoint; None for a checkpoint that was moved out of its run, or a file of weights alone."""
    chosen = export.trained.chosen
    folder = run_folder_of(chosen.place) if chosen.checkpoint else None
    return read_runs([folder])[0] if folder is not None and is_run_folder(folder) else None
