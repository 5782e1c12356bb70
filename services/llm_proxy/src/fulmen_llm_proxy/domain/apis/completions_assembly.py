"""Puts the events of a completions stream back together as the answer that they amount to."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = dict[str, Any]  # Any: the events are the backend's own, of any depth

_DECODE = msgspec.json.Decoder(JSON).decode
_ENCODE = msgspec.json.Encoder().encode


def assemble_completion(payloads: list[bytes]) -> bytes:
    """Returns the `text_completion` object that the events of a stream amount to, as JSON.

    Events that are not JSON objects are left out: the call is marked malformed by then.
    """
    answer: JSON = {}
    choices: dict[int, JSON] = {}
    for payload in payloads:
        try:
            event = _DECODE(payload)
        except msgspec.DecodeError:
            continue
        for chunk in event.pop("choices", None) or ():
            _add(choices.setdefault(chunk.get("index", 0), {}), chunk)
        answer.update({key: value for key, value in event.items() if value is not None})
    answer["object"] = "text_completion"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return _ENCODE(answer)


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
