"""Selects the kernels of a device on first use: compiled ones if possible, otherwise the reference.

All give the same bits, so ranks may differ. Each process logs once per kind of device which kernels it uses. A failed
compilation only costs speed, unless FULMEN_EXCHANGE_KERNELS requires compiled kernels.
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
    """The interface of an implementation; see `reference`."""

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

    def nonzero_select(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.nonzero_select`."""

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
    """Values of FULMEN_EXCHANGE_KERNELS."""

    AUTO = "auto"
    REFERENCE = "reference"
    NATIVE = "native"


def mode_of_environment() -> Mode:
    """Returns the value of the variable; `auto` if unset.

    Raises:
        ValueError: if the value is unknown.
    """
    text = os.environ.get(VARIABLE, Mode.AUTO)
    if text not in set(Mode):
        raise ValueError(f"{VARIABLE} is {text!r}, must be one of {', '.join(Mode)}")
    return Mode(text)


@dataclass(kw_only=True)
class KernelSelector:
    """Selects the kernels of each device once, on first use.

    Attributes:
        mode: Returns which kernels may be used.
        folder: Returns the folder of compiled libraries.
        path: Search path for a compiler; PATH if None.
    """

    mode: Callable[[], Mode] = mode_of_environment
    folder: Callable[[], Path] = cache_folder
    path: str | None = None
    _found: dict[str, Kernels] = field(default_factory=dict)
    # If several threads need kernels at the same time, one compiles and the others wait.
    _lock: Lock = field(default_factory=Lock)

    def of(self, device: str) -> Kernels:
        """Returns the kernels of a kind of device, such as `cpu`.

        Raises:
            KernelsUnavailable: if compiled kernels are required and unavailable.
            ValueError: if the variable is invalid.
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
                raise KernelsUnavailable("triton requires a C compiler; install one (Debian: apt-get install gcc)")
            try:
                from fulmen_exchange.kernels import triton_kernels
            except ImportError as error:
                raise KernelsUnavailable(f"cannot import triton ({error}); it comes with torch for CUDA") from error
            return triton_kernels
        raise KernelsUnavailable(f"no kernels for device {device}")
