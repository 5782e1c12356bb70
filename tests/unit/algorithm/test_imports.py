import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "services" / "algorithm" / "src" / "fulmen_algorithm"
FORBIDDEN = ("asyncpg", "fulmen", "fulmen_service_kit", "google", "grpc")


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


# The engine reads the files that training writes, with the same code.
ALLOWED = {"training": ("training",), "engine": ("engine", "training")}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_the_model_side_imports_nothing_of_the_service(package):
    allowed = tuple(f"fulmen_algorithm.{name}" for name in ALLOWED[package])
    for file in (SOURCES / package).glob("*.py"):
        for name in imported(file):
            assert name.split(".")[0] not in FORBIDDEN, (file, name)
            if name.startswith("fulmen_algorithm"):
                assert name.startswith(allowed), (file, name)
