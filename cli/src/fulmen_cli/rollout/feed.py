"""Prints the completion feed; a stream that breaks is opened again at the cursor."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

from rich.text import Text

from fulmen.client import Client
from fulmen.errors import Unavailable
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console, enum_word

__all__ = ["watch_groups"]

PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5
# The store sends a keep-alive every 15 s.
SILENCE_LIMIT_S: Final = 45.0


async def watch_groups(client: Client, *, training_run: str, cursor: str, as_json: bool) -> None:
    """Prints every finished group from the cursor on, until cancelled.

    Raises:
        CommandFailed: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    reached = time.monotonic()
    while True:
        request = rollout_service_pb2.WatchRolloutsRequest(training_run=training_run, cursor=cursor)
        stream = client.rollouts.WatchRollouts(request)
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    answer = await anext(stream, None)
                if answer is None:
                    break
                reached = time.monotonic()
                for group in answer.groups:
                    _print(group, as_json=as_json)
                cursor = answer.cursor or cursor
        except (Unavailable, TimeoutError):
            if time.monotonic() - reached > PATIENCE_S:
                raise CommandFailed(
                    f"The store could not be reached for {PATIENCE_S:.0f} s; go on later with --cursor {cursor}."
                ) from None
            await asyncio.sleep(REOPEN_WAIT_S)
        finally:
            stream.cancel()


def _print(group: rollout_service_pb2.FinishedGroup, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(as_dict(group), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    words = [_rollout_words(rollout) for rollout in group.rollouts]
    console().print(Text(f"{group.group_id}: " + ", ".join(words)))


def _rollout_words(rollout: rollout_pb2.Rollout) -> str:
    rewards = [each.value for each in rollout.attempts[-1].rewards] if rollout.attempts else []
    failure = enum_word(rollout, "failure_kind")
    return " ".join([enum_word(rollout, "state"), *([failure] if failure else []), *(f"{each:g}" for each in rewards)])
