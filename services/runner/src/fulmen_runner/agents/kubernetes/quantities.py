"""Kubernetes quantities. Source: apimachinery, pkg/api/resource, `Quantity`."""

import re
from decimal import Decimal

_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FORM = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?)(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]?))")


def quantity(value: object) -> float:
    """Parses a quantity, such as `512Mi` bytes or `500m` processors.

    Raises:
        ValueError: If it is malformed.
    """
    form = _FORM.fullmatch(str(value)) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
    if form is None:
        raise ValueError(f"{str(value)[:40]!r} is not a quantity such as 500m or 512Mi")
    number, exponent, suffix = form.groups()
    if exponent:
        return float(Decimal(number) * Decimal(10) ** int(exponent))
    if suffix in _BINARY:
        return float(Decimal(number) * 1024 ** _BINARY[suffix])
    return float(Decimal(number) * Decimal(10) ** _DECIMAL[suffix or ""])
