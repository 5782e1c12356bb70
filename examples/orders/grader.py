"""Scores an order: every field must occur once and be right."""

FIELDS = ("name", "count", "item", "city")


def parse(text: str) -> dict[str, str]:
    """Parses `name: anna count: two item: lamps city: oslo`; returns no fields for another format."""
    words = text.split()
    keys, values = words[::2], words[1::2]
    if [key.removesuffix(":") for key in keys] != list(FIELDS) or len(values) != len(FIELDS):
        return {}
    return dict(zip(FIELDS, values, strict=True))


def grade(task: dict, outcome: str) -> float:
    """Returns 1.0 if the order is right, else 0.0."""
    return float(parse(outcome) == task["order"])
