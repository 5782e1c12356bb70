"""What ranks must get, computed without a server, a socket or another process: by the codec and the shard alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.terms import MAX_RANKS
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec, State
from fulmen_exchange.registry import make_codec
from tests.support.exchange.processes import Response, digest_of, seeded_gradient
from tests.support.exchange.world import RESIDUAL_AT_SHARD, ROWS, layout_of, settings_named


class Reference:
    """Sums and weights of one shard, of ranks as `processes.Rank` has them: follows what they tell from round to round.

    Args:
        rows: Of the model.
        codec: Its name.
        seed: Of the gradients.
    """

    def __init__(self, *, rows: int = ROWS + 3, codec: str = "topk", seed: int = 0) -> None:
        settings = settings_named(codec, **(RESIDUAL_AT_SHARD if codec == "topk" else {}))
        made = make_codec(settings)
        assert isinstance(made, SegmentCodec)
        self._codec = made
        self._size = layout_of(settings, 1, rows=rows).size_of(0)
        self._seed = seed
        self._number = 0
        self._weights = torch.zeros(self._size)
        self._kept: dict[int, State] = {}
        self._shard = Shard(made)

    def forget_rank(self, rank: int) -> None:
        """Loses what a rank has kept back: another process comes in its place."""
        self._kept.pop(rank, None)

    def forget_shard(self) -> None:
        """Loses what the shard has kept back: its server has died, and has no files."""
        self._shard = Shard(self._codec)

    def check(self, told: Mapping[int, Sequence[Response]], *, dead: int | None = None) -> None:
        """Checks what ranks tell of the next rounds.

        Args:
            told: By rank, its answers; a rank that has none of a round took no part in it.
            dead: A rank that has died in the first of these rounds. It cannot say whether its payload is in the sum: all
                others must have the same one of both.

        Raises:
            AssertionError: if any rank has another sum, or other weights, than it must have.
        """
        last = max(answer["number"] for answers in told.values() for answer in answers)
        while self._number < last:
            self._number += 1
            of_round = {
                rank: answer for rank, answers in told.items() for answer in answers if answer["number"] == self._number
            }
            self._check(of_round, dead)
            dead = None

    def _check(self, answers: Mapping[int, Response], dead: int | None) -> None:
        inside = {rank: answer["accepted"] == [True] for rank, answer in answers.items()}
        guesses = [inside] if dead is None else [{**inside, dead: True}, inside]
        [members] = {answer["ranks"] for answer in answers.values()}
        sent = {rank: self._encoded(rank, members) for rank in sorted(guesses[0])}
        told = {(answer["sum"], answer["weights"]) for answer in answers.values()}
        wanted = []
        for guess in guesses:
            shard = deepcopy(self._shard)
            sum_ = self._summed(shard, [sent[rank] for rank in sent if guess.get(rank)], members)
            weights = self._weights + sum_
            wanted.append((digest_of(sum_), digest_of(weights)))
            if told == {wanted[-1]}:
                break
        else:
            raise AssertionError(f"round {self._number}: ranks must have one of {wanted}, and have {dict(answers)}")
        self._weights, self._shard = weights, shard
        for rank in inside:
            if not inside[rank]:
                self._codec.credit(sent[rank], self._kept[rank], 0)

    def _encoded(self, rank: int, members: int) -> Payload:
        kept = self._kept.setdefault(rank, self._codec.new_state(torch.zeros(self._size)))
        gradient = seeded_gradient(rank, self._number, self._size, seed=self._seed)
        [payload] = self._codec.encode(gradient, kept, [0, self._size], self._round(rank, members))
        return payload

    def _summed(self, shard: Shard, payloads: Sequence[Payload], members: int) -> torch.Tensor:
        as_it_comes = [wire.decode(wire.encode(payload)) for payload in payloads]
        out = torch.zeros(self._size)
        self._codec.reply().add(shard.reduce(0, as_it_comes, self._round(MAX_RANKS, members)), out)
        return out

    def _round(self, rank: int, members: int) -> Round:
        return Round(number=self._number, world_size=members, ratio=4.0, rank=rank, seed=7)
