"""Libraries of extras: imported where they are used, with an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fulmen.row_files import ExtraMissing

__all__ = ["ExtraMissing", "imported"]


def imported(module: str, *, extra: str, purpose: str) -> Any:
    """Returns a module of an extra.

    Args:
        module: name of the module.
        extra: the extra of the distribution `fulmen` that installs it.
        purpose: what needs it, such as `to_pandas()`.

    Raises:
        ExtraMissing: if it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        distribution = module.partition(".")[0]
        raise ExtraMissing(f'{purpose} needs {distribution}: pip install "fulmen[{extra}]"') from None
