"""`POST /v1/effects`: side effects that agents declare, so that an attempt that continues elsewhere does not repeat
them.

The request names an effect, and a token of one execution. The answer says whether the caller has to do it (`begun`), or what
came of it (`done`, with the `result`), or that this is unknown (`unknown`). With a `result`, the request records that it was
done.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import effect_service_pb2 as pb
from fulmen.store.v1 import effect_service_pb2_grpc
from fulmen_llm_proxy.apis.api import UNREADABLE, encode, wrong
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard

PATH: Final = "/v1/effects"
_DEADLINE_S: Final = 10.0
_STATES: Final = {
    pb.EFFECT_STATE_BEGUN: "begun", pb.EFFECT_STATE_DONE: "done", pb.EFFECT_STATE_UNKNOWN: "unknown"
}  # fmt: skip


class _Request(msgspec.Struct):
    name: str
    token: str
    key: str = ""
    result: msgspec.Raw = msgspec.Raw()


_REQUEST: Final = msgspec.json.Decoder(_Request)


class Effects:
    """Answers for effects, from the store."""

    def __init__(self, channel: FulmenChannel, *, guard: AttemptGuard) -> None:
        """Sets the store's channel, whose token must have the role `service`."""
        self._stub = effect_service_pb2_grpc.EffectServiceStub(channel)
        self._guard = guard

    async def answer(self, caller: Caller, body: bytes) -> bytes:
        """Returns the answer to a request, JSON.

        Raises:
            PermissionDenied: if the caller is not an attempt.
            AttemptOver: if its attempt has ended.
            ArgumentInvalid: if the request is malformed.
            FulmenError: if the store does not answer.
        """
        if caller.attribution is None:
            raise PermissionDenied("Effects belong to attempts: use an attempt key.")
        self._guard.require(caller.attribution)
        try:
            request = _REQUEST.decode(body)
        except UNREADABLE as error:
            raise ArgumentInvalid(f"The body is not a request of an effect: {wrong(error)}.") from None
        names = {"attempt": caller.attempt, "name": request.name, "key": request.key, "token": request.token}
        effect: pb.Effect
        if result := bytes(request.result):
            ending = pb.EndEffectRequest(**names, result_json=result)
            effect = (await self._stub.EndEffect(ending, timeout=_DEADLINE_S)).effect
        else:
            effect = (await self._stub.BeginEffect(pb.BeginEffectRequest(**names), timeout=_DEADLINE_S)).effect
        shown = {
            "object": "effect", "name": effect.name, "key": effect.key, "state": _STATES[effect.state],
            "attempt": effect.attempt,
        }  # fmt: skip
        return encode({**shown, "result": msgspec.Raw(effect.result_json)} if effect.result_json else shown)
