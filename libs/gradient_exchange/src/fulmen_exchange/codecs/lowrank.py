"""Shared parts of the low-rank codecs: one step of the power method for each matrix of a bucket.

Source: PowerSGD, arXiv:1905.13727, algorithms 1 and 2. M is a rank's matrix (gradient plus residual), P [rows, r] and
Q [columns, r] are its factors. P = M Q is summed over the ranks and orthonormalised, Q = M^T P is summed, and P Q^T is the
result, so only sums are exchanged. Differences from the paper:

- Sums are not divided by the number of ranks.
- The residual of a rank is M - P Q^T with its own Q, whereas torch's hook uses the summed one: differences between the
  ranks within the sent directions would stay in the residuals and grow. The sum of all residuals is the same.
- Zero columns of Q, as at the start and after a gradient without rank, are redrawn, so no matrix is lost for good. Q is
  orthonormalised before use, which changes nothing in exact arithmetic and helps float32.

All ranks share the bits of the factors; P Q^T has the same bits on ranks with the same kind of machine and number of
threads. On a GPU, products must be computed in float32: TensorFloat-32 makes sent plus residual differ from the input by
a thousandth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from pydantic import Field

from fulmen_exchange.codecs.codec import RESIDUAL, Bucket, LinearCodec, Round, State
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

RIGHT = "right"
"""Q of all matrices, the starting point of the next round."""
DEPENDENT = 1e-5
"""Share of a column's norm. If less remains after orthogonalisation, it is rounding and the column becomes zero."""
_LOW = 2**64 - 1


class LowRankSettings(CodecSettings):
    """Settings of all low-rank codecs.

    Attributes:
        matrix_rank: r, columns of the factors; 1 to 64, default 4.
        min_ratio: Matrices whose factors are not this many times smaller are summed uncompressed; default 2.0.
    """

    matrix_rank: int = Field(default=4, ge=1, le=64)
    min_ratio: float = Field(default=2.0, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGroup:
    """Matrices of one shape in a bucket.

    Attributes:
        rows: Rows of each matrix.
        columns: Columns of each matrix.
        rank: r.
        begins: First elements of the matrices in the bucket.
        right: First element of their Q in the tensor of all Q.
    """

    rows: int
    columns: int
    rank: int
    begins: tuple[int, ...]
    right: int

    def of(self, bucket: Tensor, which: int) -> Tensor:
        """Returns one matrix of a bucket: [rows, columns], a view."""
        begin = self.begins[which]
        return bucket[begin : begin + self.rows * self.columns].view(self.rows, self.columns)

    def right_of(self, factors: Tensor) -> Tensor:
        """Returns Q of all matrices: [matrices, columns, r], a view."""
        size = len(self.begins) * self.columns * self.rank
        return factors[self.right : self.right + size].view(len(self.begins), self.columns, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How each matrix of a bucket is sent.

    Attributes:
        groups: Matrices sent as factors.
        dense: First and last element of those summed uncompressed.
        right_size: Elements of all Q.
    """

    groups: tuple[ShapeGroup, ...]
    dense: tuple[tuple[int, int], ...]
    right_size: int

    @classmethod
    def of(cls, matrices: Sequence[tuple[int, int, int]], *, matrix_rank: int, min_ratio: float) -> Plan:
        """Returns the plan; deterministic."""
        shapes: dict[tuple[int, int], list[int]] = {}
        dense: list[tuple[int, int]] = []
        for begin, rows, columns in matrices:
            rank = min(matrix_rank, rows, columns)
            if (rows + columns) * rank * min_ratio > rows * columns:
                dense.append((begin, begin + rows * columns))
            else:
                shapes.setdefault((rows, columns), []).append(begin)
        groups, right = [], 0
        for (rows, columns), begins in shapes.items():
            rank = min(matrix_rank, rows, columns)
            groups.append(ShapeGroup(rows=rows, columns=columns, rank=rank, begins=tuple(begins), right=right))
            right += len(begins) * columns * rank
        return cls(groups=tuple(groups), dense=tuple(dense), right_size=right)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(LinearCodec):
    """One step of the power method per matrix, with error feedback and warm start.

    Attributes:
        matrix_rank: r.
        min_ratio: See `LowRankSettings`.
    """

    matrix_rank: int
    min_ratio: float
    shared = (RIGHT,)

    @abstractmethod
    def sum_factors(
        self, factors: list[Tensor], dense: Tensor, all_reduce: Callable[[Tensor], None], round_: Round
    ) -> list[Tensor]:
        """Sums the factors of all matrices of a bucket and the dense part over the ranks.

        Args:
            factors: P or Q, float32 [matrices, n, r] per shape; overwritten by this rank's contribution to the sums.
            dense: float32 [n], summed uncompressed.
            all_reduce: See `LinearCodec.reduce`.
            round_: The round.

        Returns:
            The sums: those of `factors`, then that of `dense`.
        """

    def new_state(self, bucket: Bucket) -> State:
        """See `LinearCodec`: the residual and Q."""
        flat = bucket.flat
        return {RESIDUAL: flat.new_zeros(flat.numel()), RIGHT: flat.new_zeros(self._plan(bucket).right_size)}

    def reduce(self, bucket: Bucket, state: State, all_reduce: Callable[[Tensor], None], round_: Round) -> None:
        """See `LinearCodec`."""
        flat, residual = bucket.flat, state[RESIDUAL]
        residual += flat
        if round_.flush:
            flat.copy_(residual)
            residual.zero_()
            all_reduce(flat)
            return
        plan = self._plan(bucket)
        rights = [group.right_of(state[RIGHT]) for group in plan.groups]
        lefts = []
        for group, q in zip(plan.groups, rights, strict=True):
            _fill(q, seed=round_.seed, number=round_.number, place=(bucket.index << 32) + group.begins[0])
            orthonormalise(q)
            lefts.append(q.new_zeros(len(group.begins), group.rows, group.rank))
            for which, p in enumerate(lefts[-1]):
                p.addmm_(group.of(residual, which), q[which], beta=0)
        pieces = [residual[begin:end] for begin, end in plan.dense]
        *lefts, dense = self.sum_factors(lefts, concatenate([*pieces, residual[:0]]), all_reduce, round_)
        for (begin, end), piece, sum_ in zip(plan.dense, pieces, split_like(dense, pieces), strict=True):
            flat[begin:end] = sum_
            piece.zero_()
        for group, ps, q in zip(plan.groups, lefts, rights, strict=True):
            orthonormalise(ps)
            for which, p in enumerate(ps):
                q[which].addmm_(group.of(residual, which).T, p, beta=0)
        *sums, _ = self.sum_factors(rights, residual[:0], all_reduce, round_)
        for group, ps, q, sum_ in zip(plan.groups, lefts, rights, sums, strict=True):
            for which, p in enumerate(ps):
                group.of(residual, which).addmm_(p, q[which].T, alpha=-1)
                group.of(flat, which).addmm_(p, sum_[which].T, beta=0)
            q.copy_(sum_)

    def _plan(self, bucket: Bucket) -> Plan:
        return Plan.of(bucket.matrices, matrix_rank=self.matrix_rank, min_ratio=self.min_ratio)


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates at least one tensor into a flat one."""
    flat = tensors[0].new_zeros(sum(each.numel() for each in tensors))
    for part, each in zip(split_like(flat, tensors), tensors, strict=True):
        part.copy_(each)
    return flat


def split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Splits a flat tensor into views with the shapes of others."""
    return [part.view_as(each) for part, each in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _fill(factors: Tensor, *, seed: int, number: int, place: int) -> None:
    """Redraws zero columns, uniform in [-1, 1), from the seed, the round's number and the place alone.

    Any distribution with a density reaches every direction with probability 1. Philox, because its bits are guaranteed not
    to change.
    """
    empty = (factors == 0).all(dim=1)
    if not bool(empty.any()):
        return
    source = numpy.random.Philox(counter=number << 64, key=[seed & _LOW, place & _LOW])
    words = source.random_raw(factors.numel()) >> numpy.uint64(40)
    drawn = factors.new_tensor(words.astype(numpy.float32) * numpy.float32(2.0**-23) - numpy.float32(1.0))
    factors.copy_(drawn.view_as(factors).where(empty[:, None, :], factors))


def orthonormalise(factors: Tensor) -> None:
    """Makes the columns of each matrix orthonormal, in place; linearly dependent columns become zero.

    Modified Gram-Schmidt in float64, for all matrices together, with the same operations on every device.

    Args:
        factors: float32 [matrices, n, r].
    """
    work = factors.double()
    norms = work.square().sum(dim=1, keepdim=True).sqrt_()
    for index in range(work.shape[2]):
        column = work[:, :, index : index + 1]
        norm = column.square().sum(dim=1, keepdim=True).sqrt_()
        counts = norm > norms[:, :, index : index + 1] * DEPENDENT
        column.mul_(counts / (norm + norm.eq(0)))
        rest = work[:, :, index + 1 :]
        rest -= column * (column * rest).sum(dim=1, keepdim=True)
    factors.copy_(work)
