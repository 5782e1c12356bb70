"""Exchange of gradients between ranks: codecs, what carries their payloads, and who decides how much is sent.

For training loops: `register` (DDP), `register_fsdp2` (between copies of an FSDP2 model), `OuterLoop` (between sites).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fulmen_exchange.fsdp2 import register_fsdp2
    from fulmen_exchange.hooks import register
    from fulmen_exchange.privacy import epsilon
    from fulmen_exchange.sites import OuterLoop

__all__ = ["OuterLoop", "epsilon", "register", "register_fsdp2"]

_MODULES = {"epsilon": "privacy", "register": "hooks", "register_fsdp2": "fsdp2", "OuterLoop": "sites"}


def __getattr__(name: str) -> object:
    """Imports torch with the first of these names: settings are also read where nothing is trained."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
