"""Sums that no server can take apart, after Bonawitz et al. (CCS 2017, section 4), and noise that bounds what a sum reveals about a
rank.

Each rank adds to its gradients a mask for every other rank, which that one subtracts: a server sees whole numbers that are
uniformly distributed, and their sum, in which the masks cancel. The server is honest but curious: it sums what it gets and hands
on public keys unchanged. A server that replaced keys could read what follows; ranks that share what they know with it reveal
the sum of the others.

Every sum has keys of its own (X25519, one exchange of 4 KiB), so no mask is used twice, whatever is repeated after a
restart. A rank that is removed between the keys and the sum leaves masks that do not cancel. Elements that every rank sets to 1
show it, and the sum is repeated with new keys among those that are left.

Numbers are multiples of one step that all ranks share, so that sums are exact in any order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.codecs.codec import RESIDUAL, Bucket, CodecEntry, LinearCodec, Round, State
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.policies.settings import FixedPolicy
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from torch import Tensor

MAX_RANKS = 128
KEY_WORDS = 8
"""Of 32 bits in a public key."""
_WORDS = struct.Struct(f"<{KEY_WORDS}i")
SHOWN = 4
"""Elements that show whether all masks cancel: by chance they do once in 2^128 sums."""
ATTEMPTS = 3
INTEGERS = 2**30
"""Largest magnitude of a sum of whole numbers; the 31st bit is for what rounding adds."""
TAILS = 6.0
"""Standard deviations of the noise below the limit: one element in 10^9 is cut."""


class MaskedSettings(CodecSettings):
    """Settings of `masked`: servers see only sums, never the gradients of one rank; 4 bytes per element, as without a
    codec.

    All parameters are masked, the small ones too, in all rounds. Norms of own gradients are not reported to others.

    Attributes:
        limit: Largest magnitude of a rank's element, by which the step is chosen: `limit * ranks / 2^30`. Amounts beyond it are
            sent later.
        clip: Norm, over the square root of the number of ranks, to which each rank's gradients are clipped; 0 for none.
        noise: Standard deviation of the noise in a sum, over the largest norm of a rank's gradients (Abadi et al., CCS 2016,
            algorithm 1); 0 for none. `fulmen_exchange.epsilon` computes its guarantee. Needs `clip`.
    """

    uses_ring = True
    is_private = True
    codec: Literal["masked"] = "masked"
    limit: float = Field(default=16.0, gt=0, le=1e6)
    clip: float = Field(default=0.0, ge=0)
    noise: float = Field(default=0.0, ge=0, le=1000)

    @model_validator(mode="after")
    def _hides_all(self) -> Self:
        problems = []
        if not isinstance(self.policy, FixedPolicy):
            problems.append(f"policy: {self.policy.kind!r} may send a round unmasked; use 'fixed'")
        if isinstance(self.link, GrpcLinkSettings) and self.link.quorum < 1:
            problems.append("link.quorum: masks cancel only in a sum of all ranks; set it to 1")
        if self.dense:
            problems.append("dense: these parameters would be sent unmasked; remove it")
        if self.noise and not self.clip:
            problems.append("noise: guarantees nothing unless the norm of gradients is bounded; set clip")
        if self.limit < self.clip * (1 + TAILS * self.noise):
            problems.append(
                f"limit: must be at least {self.clip * (1 + TAILS * self.noise):g} with this clip and noise"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked(LinearCodec):
    """Sums masked whole numbers.

    Attributes:
        limit: See `MaskedSettings`.
        local_clip: See `BaseCodec`.
        noise: See `MaskedSettings`.
    """

    limit: float
    local_clip: float | None = None
    noise: float = 0.0
    name = "masked"
    version = 1

    @property
    def residual_name(self) -> str | None:  # type: ignore[override]
        """See `BaseCodec`; with noise there is none: it would add to a sum more than the clipped norm."""
        return None if self.noise else RESIDUAL

    def new_state(self, bucket: Bucket) -> State:
        """See `LinearCodec`."""
        return {} if self.noise else {RESIDUAL: bucket.flat.new_zeros(bucket.flat.numel())}

    def reduce(self, bucket: Bucket, state: State, all_reduce: Callable[[Tensor], None], round_: Round) -> None:
        """See `LinearCodec`; makes two sums: of public keys, and of masked numbers.

        One rank alone sends nothing.

        Raises:
            ExchangeFailed: if ranks were lost in the midst of each attempt, one is left, whose gradients would be the sum, a
                rank's public key is not usable, or there are more than 128.
        """
        flat, step = bucket.flat, self.limit * round_.world_size / INTEGERS
        if RESIDUAL in state:
            flat.add_(state[RESIDUAL])
        if round_.world_size == 1:
            all_reduce = _alone
        for _ in range(ATTEMPTS):
            keys = _Keys(round_, flat, all_reduce)
            own = self._numbers(flat, step, keys)
            sum_ = flat.new_empty(flat.numel() + SHOWN, dtype=_int32())
            sum_[: flat.numel()] = own
            sum_[flat.numel() :] = int(keys.is_member)
            if keys.is_member:
                sum_ += keys.mask(sum_)
            all_reduce(sum_)
            if bool((sum_[flat.numel() :] == len(keys.members)).all()):
                break
        else:
            raise ExchangeFailed(f"{self.name}: ranks were lost in {ATTEMPTS} sums, one after another")
        if RESIDUAL in state:
            state[RESIDUAL].copy_(flat).sub_(own.to(flat.dtype) * step)
        flat.copy_(sum_[: flat.numel()]).mul_(step)

    def _numbers(self, gradient: Tensor, step: float, keys: _Keys) -> Tensor:
        """Returns what this rank adds to the sum, as multiples of the step."""
        if not keys.is_member:
            return gradient.new_zeros(gradient.numel(), dtype=_int32())
        if self.noise and self.local_clip:
            # The sum of the noises of all has the variance that one would have.
            deviation = self.noise * self.local_clip / (keys.world_size * len(keys.members)) ** 0.5
            gradient = gradient + _normal(gradient) * deviation
        return gradient.clamp(-self.limit, self.limit).div(step).round_().to(_int32())


class _Keys:
    """The keys of one sum.

    Attributes:
        members: Ranks whose public keys all have.
        is_member: Whether this rank is among them; one that was removed is not, and returns with the next round.
        world_size: Number of ranks of the round.
    """

    def __init__(self, round_: Round, like: Tensor, all_reduce: Callable[[Tensor], None]) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # the extra `masked`

        if round_.rank >= MAX_RANKS:
            raise ExchangeFailed(f"masked: rank {round_.rank}; there can be at most {MAX_RANKS}")
        private = X25519PrivateKey.generate()
        own = private.public_key().public_bytes_raw()
        # When ranks have left there may be higher numbers than there are ranks.
        rows = like.new_zeros((MAX_RANKS, KEY_WORDS), dtype=_int32())
        rows[round_.rank] = rows.new_tensor(_WORDS.unpack(own))
        all_reduce(rows)
        keys = {rank: _WORDS.pack(*row) for rank, row in enumerate(rows.tolist()) if any(row)}
        self._private: X25519PrivateKey = private
        self._keys = keys
        self._rank = round_.rank
        self.members = sorted(keys)
        self.is_member = keys.get(round_.rank) == own
        self.world_size = round_.world_size
        if round_.world_size > 1 and len(keys) < 2:
            raise ExchangeFailed("masked: one rank is left, and the sum would be its gradients")

    def mask(self, like: Tensor) -> Tensor:
        """Returns the sum of this rank's masks, int32 [n]; those of all members sum to zero, modulo 2^32."""
        import numpy
        import torch

        sum_ = numpy.zeros(like.numel(), dtype=numpy.uint32)
        for other in self.members:
            if other != self._rank:
                shared = numpy.frombuffer(self._stream(other, like.numel() * 4), dtype="<u4")
                # Unsigned numbers wrap around.
                sum_ = sum_ + shared if self._rank < other else sum_ - shared
        return torch.from_numpy(sum_.view(numpy.int32)).to(like.device)

    def _stream(self, other: int, size: int) -> bytes:
        """Returns bytes that this rank and another one alone can compute: ChaCha20 (RFC 8439) under a key of HKDF (RFC 5869)."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        pair = sorted((self._rank, other))
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(self._keys[other]))
        except ValueError:  # of low order: everybody would know the secret (RFC 7748, section 6.1)
            raise ExchangeFailed(f"masked: rank {other} sent no usable public key") from None
        both = b"".join(self._keys[rank] for rank in pair)
        key = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"fulmen masked sum 1" + both).derive(secret)
        return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def _alone(tensor: Tensor) -> None:
    """Leaves a tensor as it is: the sum of one rank."""


def _normal(like: Tensor) -> Tensor:
    """Draws from the normal distribution; from the system's randomness, since who knows the seed can subtract the noise."""
    import torch

    source = torch.Generator(device=like.device).manual_seed(int.from_bytes(os.urandom(8)) >> 1)
    return torch.randn(like.numel(), generator=source, device=like.device, dtype=like.dtype)


def _int32() -> torch.dtype:
    import torch

    return torch.int32


def _make(settings: MaskedSettings) -> Masked:
    return Masked(limit=settings.limit, local_clip=settings.clip or None, noise=settings.noise)


ENTRIES = (CodecEntry(settings=MaskedSettings, make=_make),)
