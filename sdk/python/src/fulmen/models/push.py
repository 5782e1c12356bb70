"""Uploads a folder of a model to a repository of a hub, through `huggingface_hub`."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fulmen.models.base_names import HUB_PREFIX, HubName

__all__ = ["PushFailed", "hub_repository", "push_model", "pushed_files"]

CONFIG: Final = "config.json"
# Weights and the files that are read with them; nothing that runs code, and nothing of a working folder.
PUSHED: Final = frozenset({".safetensors", ".json", ".jinja", ".txt", ".model", ".md", ".png"})


class PushFailed(Exception):
    """Raised when a hub does not accept a model or cannot be reached; the message has the remedy."""


def hub_repository(text: str) -> HubName:
    """Reads `organisation/name`, also with `@revision`.

    Raises:
        ValueError: if it has another form.
    """
    try:
        return HubName.parse(f"{HUB_PREFIX}{text.removeprefix(HUB_PREFIX)}")
    except ValueError:
        raise ValueError(f"{text!r} is not a repository: write it as organisation/name.") from None


def pushed_files(folder: Path) -> dict[str, int]:
    """Returns the files that are uploaded, at the top of the folder, with their sizes in bytes.

    Raises:
        FileNotFoundError: if the folder contains no model.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} contains no model: {CONFIG} is missing.")
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.stat().st_size for path in found if path.suffix in PUSHED}


def push_model(hub: Any, folder: Path, name: HubName, *, public: bool) -> str:
    """Uploads a model to a repository, which is created if it does not exist; returns the URL of the commit.

    Args:
        hub: the module `huggingface_hub`; server and token are its own: HF_ENDPOINT, HF_TOKEN, `hf auth login`.
        folder: the folder.
        name: the repository, and its branch.
        public: whether a new repository is public.

    Raises:
        FileNotFoundError: if the folder contains no model.
        PushFailed: if the hub refuses or cannot be reached; uploaded files are kept.
    """
    files = pushed_files(folder)
    api = hub.HfApi()
    try:
        api.create_repo(name.repository, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            allow_patterns=[*files],
            commit_message="Uploaded by Fulmen",
            revision=name.revision,
        )
    except hub.errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise PushFailed(
                f"The hub does not let you write to {name.repository}: `hf auth login`, or set HF_TOKEN to a token with write access."
            ) from None
        raise PushFailed(f"The hub answered {status}; try again.") from None
    except (hub.errors.HTTPError, OSError, RuntimeError):
        raise PushFailed("The hub cannot be reached; uploaded files are kept, try again.") from None
    return str(done.commit_url)
