"""Pages of lists."""

from collections.abc import Sequence
from typing import TypeVar

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, Violation

DEFAULT_PAGE = 50
MAX_PAGE = 1000
Item = TypeVar("Item")


def page(items: Sequence[Item], page_size: int, page_token: str) -> tuple[Sequence[Item], str]:
    """Cuts a page out of a list; the token is the number of items before it."""
    if page_size < 0:
        violation = Violation(field="page_size", description="must not be negative")
        raise ArgumentInvalid("The request is malformed.", violations=[violation])
    if page_token and not page_token.isdecimal():
        raise PageTokenInvalid("The page token belongs to another list.")
    start = int(page_token or 0)
    end = start + min(page_size or DEFAULT_PAGE, MAX_PAGE)
    return items[start:end], str(end) if end < len(items) else ""
