"""Which kernels are used: compiled ones where they can be had, else the reference; decided when they are first needed.

The bits are the same, so ranks may choose differently. Each process says once in its log which kernels a kind of device
has. A failure to compile costs speed alone, unless the variable FULMEN_EXCHANGE_KERNELS says otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import structlog

from fulmen_exchange.kernels.loader import KernelsUnavailable, cache_folder, load

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "FULMEN_EXCHANGE_KERNELS"
C_COMPILERS = ("cc", "gcc", "clang")
_log = structlog.get_logger()


class Kernels(Protocol):
    """What each implementation has; see `reference`."""

    def threshold_of(self, sample: Tensor, share: float) -> float:
        """See `reference.threshold_of`."""

    def feedback_select(self, gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.feedback_select`."""

    def dgc_select(
        self,
        gradient: Tensor,
        velocity: Tensor,
        accumulated: Tensor,
        momentum: float,
        nesterov: bool,
        threshold: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.dgc_select`."""

    def correct(self, gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
        """See `reference.correct`."""

    def add_sparse(self, counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
        """See `reference.add_sparse`."""

    def quantise(self, values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `reference.quantise`."""

    def nearest(self, values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
        """See `reference.nearest`."""

    def add_quantised(self, packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
        """See `reference.add_quantised`."""


class Mode(StrEnum):
    """What FULMEN_EXCHANGE_KERNELS may say."""

    AUTO = "auto"
    REFERENCE = "reference"
    NATIVE = "native"


def mode_of_environment() -> Mode:
    """Reads the variable; `auto` if it is not set.

    Raises:
        ValueError: if it says something else.
    """
    text = os.environ.get(VARIABLE, Mode.AUTO)
    if text not in set(Mode):
        raise ValueError(f"{VARIABLE} is {text!r}, and must be one of {', '.join(Mode)}")
    return Mode(text)


@dataclass(kw_only=True)
class KernelSelector:
    """Finds the kernels of a device when they are first needed, once.

    Attributes:
        mode: Says which may be used.
        folder: Says where compiled libraries are kept.
        path: Folders in which a compiler is looked for; those of PATH if None.
    """

    mode: Callable[[], Mode] = mode_of_environment
    folder: Callable[[], Path] = cache_folder
    path: str | None = None
    _found: dict[str, Kernels] = field(default_factory=dict)
    # Several threads may need them at once: one compiles, the others wait for it.
    _lock: Lock = field(default_factory=Lock)

    def of(self, device: str) -> Kernels:
        """Returns the kernels of a kind of device, such as `cpu`.

        Raises:
            KernelsUnavailable: if only compiled ones will do, and there are none.
            ValueError: if the variable is wrong.
        """
        found = self._found.get(device)
        if found is None:
            with self._lock:
                found = self._found.get(device)
                if found is None:
                    found = self._found[device] = self._find(device)
        return found

    def _find(self, device: str) -> Kernels:
        from fulmen_exchange.kernels import reference

        mode = self.mode()
        if mode is Mode.REFERENCE:
            _log.info("kernels_chosen", device=device, kernels="reference")
            return reference
        try:
            found = self._compiled(device)
        except KernelsUnavailable as error:
            if mode is Mode.NATIVE:
                raise KernelsUnavailable(f"{VARIABLE} is {mode}, but {error}") from error
            _log.warning("kernels_not_compiled", device=device, kernels="reference", reason=str(error))
            return reference
        _log.info("kernels_chosen", device=device, kernels="native")
        return found

    def _compiled(self, device: str) -> Kernels:
        if device == "cpu":
            from fulmen_exchange.kernels.native import NativeKernels

            return NativeKernels(load(self.folder(), path=self.path))
        if device == "cuda":
            if not any(shutil.which(name, path=self.path) for name in C_COMPILERS):
                raise KernelsUnavailable("triton needs a C compiler; install one (Debian: apt-get install gcc)")
            try:
                from fulmen_exchange.kernels import triton_kernels
            except ImportError as error:
                raise KernelsUnavailable(
                    f"triton cannot be imported ({error}); it comes with torch for CUDA"
                ) from error
            return triton_kernels
        raise KernelsUnavailable(f"none are written for devices of kind {device}")
