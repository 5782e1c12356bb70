"""What the repository is made of: each distribution, its import root and where its sources lie."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "cli/src/fulmen_cli/init/files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One installable part of the repository."""

    folder: Path
    import_root: str

    @property
    def sources(self) -> Path:
        """The folder of its package."""
        return self.folder / "src" / self.import_root

    @property
    def project(self) -> dict[str, Any]:
        """The `[project]` table of its pyproject.toml."""
        text = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        return project

    def modules(self) -> Iterator[tuple[Path, ast.Module]]:
        """Yields every hand-written module, parsed; files of users' projects are none."""
        for path in sorted(self.sources.rglob("*.py")):
            if "_pb2" not in path.name and not path.is_relative_to(TEMPLATES):
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


SDK = Distribution(folder=ROOT / "sdk/python", import_root="fulmen")
CLI = Distribution(folder=ROOT / "cli", import_root="fulmen_cli")
SERVICE_KIT = Distribution(folder=ROOT / "libs/service_kit", import_root="fulmen_service_kit")
GRADIENT_EXCHANGE = Distribution(folder=ROOT / "libs/gradient_exchange", import_root="fulmen_exchange")
SERVICES = tuple(
    Distribution(folder=ROOT / "services" / name, import_root=f"fulmen_{name}")
    for name in ("store", "runner", "llm_proxy", "algorithm", "console")
)
DISTRIBUTIONS = (SDK, CLI, SERVICE_KIT, GRADIENT_EXCHANGE, *SERVICES)
