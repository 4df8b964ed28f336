"""The format `hub`: a folder that timm loads by itself, and that `hf upload` puts on the Hugging Face Hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor

from engine.checkpoint.folder import raising_os_errors
from tools.common.report_page.runs import read_runs
from tools.export import CARD, CONFIG, CURVES, WEIGHTS
from tools.export.card import card_of
from tools.export.formats import Export, Format
from utils.errors import TrainingError, first_line
from utils.record.run_folder import is_run_folder
from vitamp.checkpoints import run_folder_of

KEPT = ("architecture", "fixed_input_size", "first_conv", "classifier")
"""What timm notes about an architecture. The rest of its notes are about weights of its own."""


class Hub(Format):
    name = "hub"
    flag = "-output"

    def __init__(self, license: str | None) -> None:
        self.license = license

    def write(self, export: Export, file: Path) -> str:
        own: Any = export.model.pretrained_cfg
        kept = {key: own[key] for key in KEPT if own.get(key) is not None}
        classes, chosen = export.trained.config.MODEL.NUM_CLASSES, export.trained.chosen
        config = {**kept, **_data_config(export), "num_classes": classes, "custom_load": False}
        vars(export.model)["pretrained_cfg"] = config
        names = {"label_names": export.trained.names()} if chosen.classes else {}
        with raising_os_errors(file):
            timm.models.save_for_hf(
                export.model, str(file), model_config=names, model_args=export.timm_arguments, safe_serialization=True
            )
        # A checkpoint may have been moved out of its run, or be a file of weights alone.
        folder = run_folder_of(chosen.place) if chosen.checkpoint else None
        run = read_runs([folder])[0] if folder is not None and is_run_folder(folder) else None
        if run is not None and (run.folder / CURVES).is_file():
            shutil.copyfile(run.folder / CURVES, file / CURVES)
        card = card_of(export, file.name, self.license, run, (file / CURVES).exists())
        (file / CARD).write_text(card, encoding="utf-8")
        present = [name for name in (CONFIG, WEIGHTS, CARD, CURVES) if (file / name).exists()]
        return f"{', '.join(present)}, {export.input_summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        try:
            model = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        except Exception as error:  # timm and its models raise many types
            raise TrainingError(f"timm cannot load {export.trained.config.MODEL.NAME}: {first_line(error)}") from None
        found, wanted = resolve_model_data_config(model), _data_config(export)
        found |= {key: tuple(value) for key, value in found.items() if isinstance(value, list)}  # JSON has no tuples
        if wrong := [f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] != value]:
            raise TrainingError(f"timm would prepare images differently: {'; '.join(wrong)}")
        return torch.cat([model(batch) for batch in batches])

    def how_to_load(self, export: Export, out: Path) -> str:
        return f'timm.create_model("local-dir:{out}", pretrained=True)'


def _data_config(export: Export) -> dict[str, Any]:
    """The preprocessing of validation, in the words of timm.data."""
    about = export.metadata(False)
    return {
        "input_size": (about["channels"], about["image_size"], about["image_size"]),
        "interpolation": about["interpolation"],
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "crop_pct": about["crop_pct"],
        "crop_mode": about["crop_mode"],
    }
