"""Page tokens, cursors of feeds and watches, names, sealed ids: opaque or structured texts that clients send back."""

from __future__ import annotations

import base64
import contextlib
import random
from uuid import UUID

from fulmen.errors import FulmenError
from fulmen.ids import parse_attempt_name, parse_runner_name
from fulmen.llm_proxy.v1.route_pb2 import Route
from fulmen_llm_proxy.calls.responses.response_ids import ResponseIds
from fulmen_llm_proxy.capture.span_place import place_of
from fulmen_llm_proxy.transport.paging import page_of
from fulmen_store.resources.watch_cursor import WatchSelection, decode_cursor
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.transport.page_tokens import decode_token, encode_token
from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import PureTarget, check_text, text_of

_SELECTION = Selection(project_id=1)
_IDS = ResponseIds(lambda: [b"secret"])
_ATTEMPT = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd/attempts/2"
_READERS = (
    lambda text: decode_token(text, listed="x", key_bytes=16),
    lambda text: Cursor.decode(text, _SELECTION),
    lambda text: decode_cursor(text, WatchSelection(project_id=1)),
    lambda text: page_of([("a", Route()), ("b", Route())], page_size=1, page_token=text),
    parse_attempt_name,
    parse_runner_name,
    lambda text: _IDS.opened(text, project="projects/default"),
    lambda text: place_of(text, _ATTEMPT),
)


def run(data: bytes) -> None:
    """Gives a text to every reader of one."""
    text = data.decode("utf-8", "replace")
    for read in _READERS:
        with contextlib.suppress(FulmenError):
            try:
                read(text)
            except FulmenError as error:
                check_text(text_of(error))
                raise


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a text, or what it encodes."""
    if rng.random() < 0.5:
        with contextlib.suppress(ValueError):
            packed = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
            return base64.urlsafe_b64encode(mutate_bytes(packed, rng)).rstrip(b"=" * rng.randrange(2))
    return mutate_bytes(data, rng)


TARGET = PureTarget(
    run=run,
    seeds=[
        b"",
        encode_token(b"k" * 16, listed="x").encode(),
        Cursor(xid=7, rollout_id=UUID(int=9)).encode(_SELECTION).encode(),
        base64.urlsafe_b64encode(b"\x01" + WatchSelection(project_id=1).digest() + bytes(8)),
        base64.urlsafe_b64encode(b"a"),
        _ATTEMPT.encode(),
        b"runners/0190a0b0-1234-7000-8000-00000000abcd",
        _IDS.sealed("r", backend_id="b", project="projects/default").encode(),
        b"00-0190a0b012347000800000000000abcd-0190a0b012347000-01",
    ],
    mutate=mutate,
)
