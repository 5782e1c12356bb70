"""Pagination of an in-memory list ordered by name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, Violation
from fulmen_service_kit.rpc.message_sizes import fitting

Item = TypeVar("Item", bound=Message)

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


def page_of(items: Sequence[tuple[str, Item]], *, page_size: int, page_token: str) -> tuple[list[Item], str]:
    """Returns one page of items that are ordered by name, and the token of the next.

    A token names the last item of its page, so changes in between cause no repeats.

    Raises:
        ArgumentInvalid: if the page size is out of range.
        PageTokenInvalid: if the token is malformed.
    """
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        problem = Violation(field="page_size", description=f"must be 1 to {MAX_PAGE_SIZE}")
        raise ArgumentInvalid("The request is malformed.", violations=[problem])
    after = _decode(page_token)
    rest = [(name, item) for name, item in items if name > after]
    page = fitting(item for _, item in rest[: page_size or DEFAULT_PAGE_SIZE])
    more = len(rest) > len(page)
    return page, _encode(rest[len(page) - 1][0]) if more else ""


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise PageTokenInvalid("Invalid page token.") from None
