"""What people call a run: its display name and tags."""

import re
from collections.abc import Sequence

from fulmen.errors import Violation

MAX_DISPLAY_NAME = 128
MAX_TAGS = 16
TAG = re.compile(r"[a-z0-9._-]{1,63}")


def description_problems(display_name: str, tags: Sequence[str]) -> list[Violation]:
    """Returns every problem of a display name and tags."""
    found = []
    if len(display_name) > MAX_DISPLAY_NAME:
        found.append(Violation(field="display_name", description=f"is longer than {MAX_DISPLAY_NAME} characters"))
    if len(tags) > MAX_TAGS:
        found.append(Violation(field="tags", description=f"has {len(tags)} entries, allowed are {MAX_TAGS}"))
    if any(not TAG.fullmatch(tag) for tag in tags):
        found.append(Violation(field="tags", description="must be 1 to 63 characters of [a-z0-9._-] each"))
    return found
