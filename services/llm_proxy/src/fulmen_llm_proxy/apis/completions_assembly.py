"""Puts the events of a completions stream back together as the answer that they amount to."""

from __future__ import annotations

from fulmen_llm_proxy.apis.chat_assembly import JSON, put_together


def assemble_completion(payloads: list[bytes]) -> bytes:
    """Returns the `text_completion` object that the events of a stream amount to, as JSON.

    Events that are not JSON objects are left out: the call is marked malformed by then.
    """
    return put_together(payloads, "text_completion", _add)


def _add(choice: JSON, chunk: JSON) -> None:
    for key, value in chunk.items():
        held = choice.get(key)
        if key == "text" and held is not None:
            choice[key] = held + (value or "")
        elif key == "logprobs" and held is not None and value is not None:
            _extend(held, value)
        elif key == "token_ids" and held is not None:
            held.extend(value or ())
        elif value is not None or key not in choice:
            choice[key] = value


def _extend(held: JSON, piece: JSON) -> None:
    """Extends each list of the log-probabilities: they run in parallel, an entry for each token."""
    for key, values in piece.items():
        if isinstance(held.get(key), list) and isinstance(values, list):
            held[key].extend(values)
        elif held.get(key) is None:
            held[key] = values
