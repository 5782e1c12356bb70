"""Importing this module makes `agentlightning` and its modules aliases of `fulmen.compat.agentlightning`, in this
process.

It must be imported before `agentlightning` is; an installed agentlightning is then not found. Modules that have no counterpart of
their own (`agentlightning.tracer.agentops`) are the one that has their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIAS = "agentlightning"
HOME = "fulmen.compat.agentlightning"

_MODULES = {
    "adapter": "adapter",
    "algorithm": "algorithm",
    "emitter": "emitter",
    "env_var": "env_var",
    "execution": "replaced",
    "litagent": "litagent",
    "llm_proxy": "replaced",
    "logging": "replaced",
    "reward": "reward",
    "runner": "replaced",
    "semconv": "attributes",
    "store": "replaced",
    "tracer": "replaced",
    "trainer": "trainer",
    "types": "records",
    "utils": "emitter",
}
"""Our module for each of theirs."""


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of Agent Lightning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a specification of a module of theirs, if it has a counterpart."""
        del path, target
        parts = fullname.split(".")
        if parts[0] != ALIAS or (len(parts) > 1 and parts[1] not in _MODULES):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns a module with all names of ours."""
        parts = spec.name.split(".")
        ours = importlib.import_module(HOME if len(parts) == 1 else f"{HOME}.{_MODULES[parts[1]]}")
        made = ModuleType(spec.name, ours.__doc__)
        made.__dict__.update({name: value for name, value in vars(ours).items() if not name.startswith("__")})
        made.__dict__["__all__"] = list(getattr(ours, "__all__", ()))
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the names exist."""


if not any(isinstance(each, _Finder) for each in sys.meta_path):
    if ALIAS in sys.modules:
        raise ImportError("Import fulmen.compat.agentlightning.alias before agentlightning.")
    sys.meta_path.insert(0, _Finder())
