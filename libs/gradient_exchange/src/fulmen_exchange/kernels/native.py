"""The kernels of `native.cpp` for CPU tensors; see `reference` for what each of them does.

Calls release the GIL. Tensors are contiguous and float32, as checked by `kernels`.
"""

from __future__ import annotations

import ctypes

import numpy
import torch
from torch import Tensor

from fulmen_exchange.kernels.loader import KernelsUnavailable
from fulmen_exchange.kernels.reference import BLOCK, SPARSE_INVALID, count_of

_AT, _SIZE, _INT, _WORD, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_LOW = 0xFFFFFFFF
SIGNATURES = {
    "threshold_of": ([_AT, _SIZE, _SIZE], _FLOAT),
    "feedback_select": ([_AT, _AT, _SIZE, _FLOAT, _AT, _AT, _AT], _SIZE),
    "dgc_select": ([_AT, _AT, _AT, _SIZE, _FLOAT, _INT, _FLOAT, _AT, _AT, _AT], _SIZE),
    "nonzero_select": ([_AT, _SIZE, _AT, _AT, _AT], _SIZE),
    "correct": ([_AT, _AT, _SIZE, _FLOAT, _INT, _AT], None),
    "add_sparse": ([_AT, _SIZE, _AT, _AT, _SIZE, _AT, _SIZE], _INT),
    "nearest": ([_AT, _SIZE, _INT, _SIZE, _AT, _AT], None),
    "quantise": ([_AT, _SIZE, _INT, _SIZE, _WORD, _WORD, _WORD, _AT, _AT], None),
    "add_quantised": ([_AT, _AT, _AT, _SIZE, _INT, _SIZE], None),
    "checks_quickly": ([], _INT),
    "checksum": ([_AT, _SIZE, _WORD], _WORD),
}


class NativeKernels:
    """The compiled kernels.

    Args:
        library: Library returned by `loader.load`.

    Raises:
        KernelsUnavailable: if it is another library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (arguments, result) in SIGNATURES.items():
            try:
                function = getattr(library, f"fulmen_{name}")
            except AttributeError as error:
                raise KernelsUnavailable(f"compiled library lacks function {name}") from error
            function.argtypes, function.restype = arguments, result
        self._library = library
        self.checks_quickly = bool(library.fulmen_checks_quickly())

    def threshold_of(self, sample: Tensor, share: float) -> float:
        """See `reference.threshold_of`."""
        size, sample = sample.numel(), sample.contiguous()
        keep = count_of(size, share)
        return float(self._library.fulmen_threshold_of(sample.data_ptr(), size, keep)) if keep < size else 0.0

    def feedback_select(self, gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.feedback_select`."""
        counts, indices, values = _sparse_outputs(residual.numel())
        taken = self._library.fulmen_feedback_select(
            *(gradient.data_ptr(), residual.data_ptr(), residual.numel(), threshold),
            *(counts.data_ptr(), indices.data_ptr(), values.data_ptr()),
        )
        return counts, indices[:taken].clone(), values[:taken].clone()

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
        counts, indices, values = _sparse_outputs(accumulated.numel())
        taken = self._library.fulmen_dgc_select(
            *(gradient.data_ptr(), velocity.data_ptr(), accumulated.data_ptr(), accumulated.numel()),
            *(momentum, nesterov, threshold, counts.data_ptr(), indices.data_ptr(), values.data_ptr()),
        )
        return counts, indices[:taken].clone(), values[:taken].clone()

    def nonzero_select(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.nonzero_select`."""
        counts, indices, taken_values = _sparse_outputs(values.numel())
        taken = self._library.fulmen_nonzero_select(
            *(values.data_ptr(), values.numel()),
            *(counts.data_ptr(), indices.data_ptr(), taken_values.data_ptr()),
        )
        return counts, indices[:taken].clone(), taken_values[:taken].clone()

    def correct(self, gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
        """See `reference.correct`."""
        self._library.fulmen_correct(
            gradient.data_ptr(), velocity.data_ptr(), out.numel(), momentum, nesterov, out.data_ptr()
        )

    def add_sparse(self, counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
        """See `reference.add_sparse`."""
        wrong = indices.numel() != values.numel() or self._library.fulmen_add_sparse(
            *(counts.data_ptr(), counts.numel(), indices.data_ptr(), values.data_ptr(), values.numel()),
            *(out.data_ptr(), out.numel()),
        )
        if wrong:
            raise ValueError(SPARSE_INVALID)

    def quantise(self, values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `reference.quantise`."""
        packed, scales = _quantised_outputs(values.numel(), bits, block)
        self._library.fulmen_quantise(
            *(values.data_ptr(), values.numel(), bits, block, begin & _LOW, seed & _LOW, (seed >> 32) & _LOW),
            *(packed.data_ptr(), scales.data_ptr()),
        )
        return packed, scales

    def nearest(self, values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
        """See `reference.nearest`."""
        packed, scales = _quantised_outputs(values.numel(), bits, block)
        self._library.fulmen_nearest(
            values.data_ptr(), values.numel(), bits, block, packed.data_ptr(), scales.data_ptr()
        )
        return packed, scales

    def add_quantised(self, packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
        """See `reference.add_quantised`."""
        self._library.fulmen_add_quantised(
            packed.data_ptr(), scales.data_ptr(), out.data_ptr(), out.numel(), bits, block
        )

    def checksum(self, data: bytes | memoryview, value: int = 0) -> int:
        """Returns the CRC-32 of flat bytes, like `zlib.crc32`; faster than that only if `checks_quickly`."""
        bytes_ = numpy.frombuffer(data, dtype=numpy.uint8)
        return int(self._library.fulmen_checksum(bytes_.ctypes.data, bytes_.size, value))


def _quantised_outputs(size: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    kind, count = (torch.int8, size) if bits == 8 else (torch.uint8, -(-size // 8) * bits)
    return torch.empty(count, dtype=kind), torch.empty(-(-size // block))


def _sparse_outputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates outputs for all elements: untouched pages take no memory, and counting first would read everything twice."""
    counts = torch.empty(-(-size // BLOCK), dtype=torch.int16)
    return counts, torch.empty(size, dtype=torch.int16), torch.empty(size, dtype=torch.bfloat16)
