"""Writes docs/reliability.md from the results."""

from pathlib import Path
from typing import Any


def write_page(document: dict[str, Any], path: Path) -> None:
    """Writes the page."""
