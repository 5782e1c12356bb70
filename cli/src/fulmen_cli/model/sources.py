"""Where the configuration of a model is read from: a folder, a file, a hub, or the command line itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fulmen.models.base_names import HUB_PREFIX, HubName
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.shape import ModelShape, ShapeUnknown

__all__ = ["hub_library", "model_config", "model_shape", "shape_of"]

HIDDEN: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
CONFIG: Final = "config.json"
FORMS: Final = "a folder, a config.json, hf:organisation/name, or sizes such as hidden_size=1024,num_hidden_layers=28"


def model_shape(given: str) -> ModelShape:
    """Returns the shape of a model: of a folder, a `config.json`, `hf:organisation/name@revision`, or of sizes.

    Raises:
        CommandFailed: if it cannot be read or has not the numbers that are needed.
    """
    return shape_of(given, model_config(given))


def model_config(given: str) -> Mapping[str, Any]:
    """Returns the configuration of such a model.

    Raises:
        CommandFailed: if it cannot be read.
    """
    if given.startswith(HUB_PREFIX):
        return _read(_from_hub(given))
    if "=" in given and not Path(given).exists():
        return _sizes(given)
    path = Path(given).expanduser()
    return _read(path / CONFIG if path.is_dir() else path)


def shape_of(given: str, config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a model with this configuration.

    Raises:
        CommandFailed: if it has not the numbers that are needed.
    """
    try:
        return ModelShape.read(config)
    except ShapeUnknown as error:
        raise CommandFailed(f"The memory of {given} is not known: {error}.", exit_code=Exit.USAGE) from None


def hub_library() -> ModuleType:
    """Returns `huggingface_hub`.

    Raises:
        CommandFailed: if it is not installed.
    """
    try:
        import huggingface_hub.errors
    except ImportError:
        raise CommandFailed("The library for model hubs is not installed: `pip install 'fulmen-cli[hub]'`.") from None
    return huggingface_hub


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        text = f"{file} cannot be read: {error.strerror}. Give {FORMS}."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
    except (ValueError, RecursionError):
        raise CommandFailed(f"{file} is not JSON.", exit_code=Exit.USAGE) from None
    if not isinstance(config, dict):
        raise CommandFailed(f"{file} is not a model's configuration.", exit_code=Exit.USAGE)
    return config


def _from_hub(given: str) -> Path:
    try:
        name = HubName.parse(given)
    except ValueError as error:
        raise CommandFailed(f"{given} is not a model: it {error}.", exit_code=Exit.USAGE) from None
    hub = hub_library()
    try:
        return Path(hub.hf_hub_download(name.repository, CONFIG, revision=name.revision))
    except hub.errors.GatedRepoError:
        text = f"{name} is gated: accept its terms at the hub, then `hf auth login` or set HF_TOKEN."
        raise CommandFailed(text) from None
    except hub.errors.RevisionNotFoundError:
        text = f"{name.repository} has no revision {name.revision}."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
    except (hub.errors.HTTPError, OSError) as error:
        # Without a token a hub does not distinguish a private model from one that does not exist.
        if isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code in HIDDEN:
            text = f"The hub has no model {name.repository}, or it is private: `hf auth login`, or set HF_TOKEN."
            raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
        text = f"The configuration of {name} cannot be read from the hub; offline, give the folder of the model."
        raise CommandFailed(text) from None


def _sizes(given: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for pair in given.split(","):
        name, _, value = pair.partition("=")
        try:
            config[name.strip()] = json.loads(value)
        except ValueError:
            text = f"{pair!r} is not a size: write it as in config.json, such as hidden_size=1024."
            raise CommandFailed(text, exit_code=Exit.USAGE) from None
    return config
