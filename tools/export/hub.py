"""The format `hub`: a folder that timm loads by itself, and -push OWNER/NAME, which uploads it to the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import timm.models
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from timm.data.config import resolve_model_data_config
from torch import Tensor

from engine.checkpoint.folder import raising_os_errors
from tools.common.report_page.runs import read_runs
from tools.export import CARD, CONFIG, CURVES, HUB_FILES, WEIGHTS
from tools.export.card import card_of
from tools.export.formats import Export, Format, first_line
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.record.run_folder import is_run_folder
from vitamp.checkpoints import run_folder_of

KEPT = ("architecture", "fixed_input_size", "first_conv", "classifier")
"""What timm notes about an architecture. The rest of its notes are about weights of its own."""
LONGEST_REASON = 300
"""Characters of an error of the Hub that are shown; it can be a page long."""


class Hub(Format):
    name = "hub"
    flag = "-output"

    def __init__(self, repository: str | None, license: str | None) -> None:
        """`repository`: OWNER/NAME on the Hub, if the folder is pushed."""
        self.repository, self.license = repository, license

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
        title = self.repository.partition("/")[2] if self.repository else file.name
        card = card_of(export, title, self.repository, self.license, run, (file / CURVES).exists())
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


def check_push(name: str, public: bool, overwrite: bool) -> bool:
    """Ask the Hub whether `name` can be pushed to, and return whether it is or will be private. Creates nothing."""
    where, hub = f"-push {name}", huggingface_hub.constants
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{where}: {error}") from None
    if hub.HF_HUB_OFFLINE:
        raise UserError(f"{where}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or leave -push out.")
    token = huggingface_hub.get_token()
    if token is None:
        raise UserError(
            f"{where}: there is no token for the Hugging Face Hub. Create one with write permission in your account's "
            "settings, and log in with `hf auth login`, or set HF_TOKEN."
        )
    api = huggingface_hub.HfApi()
    try:
        _check_owner(where, name.partition("/")[0], api.whoami(token))
        existing = api.model_info(name)
    except UserError:
        raise
    except RepositoryNotFoundError:
        chosen = "public (-public)" if public else "private (-public makes it public)"
        log.info("%s: the repository does not exist on %s; it will be created, %s", where, hub.ENDPOINT, chosen)
        return not public
    except Exception as error:  # the hub's client passes on the errors of its HTTP library
        raise UserError(f"{where}: the request to {hub.ENDPOINT} failed ({_reason(error)}).") from None
    files = sorted({file.rfilename for file in existing.siblings or ()} & set(HUB_FILES))
    if files and not overwrite:
        raise UserError(
            f"{where}: the repository already has {', '.join(files)}; choose another name, or give -overwrite, which "
            "replaces them (the repository's history keeps the old files)."
        )
    log.info("%s: the repository exists and stays %s", where, "private" if existing.private else "public")
    return bool(existing.private)


def push(name: str, private: bool, folder: Path) -> None:
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=[file for file in HUB_FILES if (folder / file).exists()],
            commit_message=f"Upload {name.partition('/')[2]}, exported by vitamp",
        )
    except Exception as error:  # as above
        raise TrainingError(
            f"-push {name}: the upload failed ({_reason(error)}). {folder} is complete and checked; "
            "repeat the command with -overwrite to push again."
        ) from None
    log.info("%s: pushed, %s", url, "private" if private else "public")
    log.info('  timm.create_model("hf-hub:%s", pretrained=True)', name)


def _check_owner(where: str, owner: str, account: dict[str, Any]) -> None:
    """`account`: the Hub's answer about the token."""
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError(f"{where}: the token of {account.get('name')} can only read; create one that can write.")
    owners = [str(one) for one in (account.get("name"), *(group.get("name") for group in account.get("orgs") or ()))]
    if owner.casefold() not in (known.casefold() for known in owners):
        raise UserError(f"{where}: the token cannot write to {owner}; it can write to {', '.join(owners)}.")


def _reason(error: Exception) -> str:
    """The first line of an error, which may be a page long."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.server_message:
        text = " ".join(error.server_message.split())
    return text[:LONGEST_REASON]
