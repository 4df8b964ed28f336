"""`-push OWNER/NAME`: upload the folder of -to hub to the Hugging Face Hub, after checks that need no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from tools.export.hub_files import HUB_FILES
from utils.errors import TrainingError, UserError
from utils.log import log

LONGEST_REASON = 300
"""Characters of an error of the Hub that are shown; it can be a page long."""


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub that this user may write to, as far as the Hub says so beforehand."""

    name: str
    private: bool
    """The repository's own visibility if it exists, else the one it is created with"""

    @property
    def visibility(self) -> str:
        return "private" if self.private else "public"

    def push(self, folder: Path) -> None:
        api = huggingface_hub.HfApi()
        try:
            url = api.create_repo(self.name, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                allow_patterns=[name for name in HUB_FILES if (folder / name).exists()],
                commit_message=f"Upload {self.name.partition('/')[2]}, exported by vitamp",
            )
        except Exception as error:  # the hub's client passes on the errors of its HTTP library
            raise TrainingError(
                f"-push {self.name}: the upload failed ({_reason(error)}). {folder} is complete and checked; "
                "repeat the command with -overwrite to push again."
            ) from None
        log.info("%s: pushed, %s", url, self.visibility)
        log.info('  timm.create_model("hf-hub:%s", pretrained=True)', self.name)


def check_push(name: str, public: bool, overwrite: bool) -> Repository:
    """Ask the Hub whether `name` can be pushed to. Creates nothing."""
    where = f"-push {name}"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{where}: {error}") from None
    hub = huggingface_hub.constants
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
        existing = _existing(api, name)
    except UserError:
        raise
    except Exception as error:  # as above
        raise UserError(f"{where}: the request to {hub.ENDPOINT} failed ({_reason(error)}).") from None
    if existing is None:
        chosen = "public (-public)" if public else "private (-public makes it public)"
        log.info("%s: the repository does not exist on %s; it will be created, %s", where, hub.ENDPOINT, chosen)
        return Repository(name, private=not public)
    repository = Repository(name, private=bool(existing.private))
    files = sorted({file.rfilename for file in existing.siblings or ()} & set(HUB_FILES))
    if files and not overwrite:
        raise UserError(
            f"{where}: the repository already has {', '.join(files)}; choose another name, or give -overwrite, which "
            "replaces them (the repository's history keeps the old files)."
        )
    log.info("%s: the repository exists and stays %s", where, repository.visibility)
    return repository


def _existing(api: huggingface_hub.HfApi, name: str) -> huggingface_hub.ModelInfo | None:
    try:
        return api.model_info(name)
    except RepositoryNotFoundError:
        return None


def _check_owner(where: str, owner: str, account: dict[str, Any]) -> None:
    """`account`: the Hub's answer about the token."""
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError(f"{where}: the token of {account.get('name')} can only read; create one that can write.")
    owners = [account.get("name"), *(group.get("name") for group in account.get("orgs") or ())]
    if owner.casefold() not in (str(known).casefold() for known in owners):
        raise UserError(f"{where}: the token cannot write to {owner}; it can write to {_listed(owners)}.")


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names)


def _reason(error: Exception) -> str:
    """The first line of an error, which may be a page long."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.server_message:
        text = " ".join(error.server_message.split())
    return text[:LONGEST_REASON]
