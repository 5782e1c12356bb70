"""What the runner gives an agent's own Python: folders with links to modules.

Invariant: of the runner's packages, an agent's Python finds the SDK, the child's side of the runner and, where the
environment lacks them, `wrapt` and `structlog`, which run on any Python. Nothing else of the runner's Python is mixed in.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_SDK: Final = ("fulmen",)
_FIRST: Final = (*_SDK, "fulmen_runner", "fulmen_service_kit")
_LAST: Final = ("structlog", "wrapt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePaths:
    """Folders of links to the runner's modules.

    Attributes:
        sdk: The SDK, for commands.
        first: The SDK and the runner, before the packages of the environment.
        last: After the packages of the environment.
    """

    sdk: Path
    first: Path
    last: Path

    @classmethod
    def made(cls, parent: Path) -> "ModulePaths":
        """Makes the folders."""
        folder = parent / "modules"
        paths = cls(sdk=folder / "sdk", first=folder / "first", last=folder / "last")
        for place, names in ((paths.sdk, _SDK), (paths.first, _FIRST), (paths.last, _LAST)):
            place.mkdir(parents=True)
            for name in names:
                spec = find_spec(name)
                assert spec is not None  # A dependency of the runner.
                assert spec.origin is not None
                (place / name).symlink_to(Path(spec.origin).parent)
        return paths
