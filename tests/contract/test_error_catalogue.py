"""The classes of `fulmen.errors` are the reasons of `reasons.proto`, one for one, with the canonical codes named there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fulmen.errors import ERROR_DOMAIN, ArgumentInvalid, Code, FulmenError, all_error_classes, error_class
from fulmen.errors.v1 import reasons_pb2

PREFIX = "ERROR_REASON_"
UNSPECIFIED = "UNSPECIFIED"
# The comment of a reason begins with its canonical code.
DOCUMENTED_REASON = re.compile(r"// ([A-Z_]+)\.[^\n]*\n(?:\s*//[^\n]*\n)*\s*ERROR_REASON_([A-Z_]+) = \d+;")


@pytest.fixture(scope="module")
def documented_codes(repository_root: Path) -> dict[str, str]:
    """Returns the canonical code of every reason, as its comment says."""
    text = (repository_root / "protos/fulmen/errors/v1/reasons.proto").read_text(encoding="utf-8")
    return {reason: code for code, reason in DOCUMENTED_REASON.findall(text)}


def classes_with_reason() -> list[type[FulmenError]]:
    """Returns the classes that are sent as they are: neither the root, nor an abstract group, nor a service's own."""
    own = [cls for cls in all_error_classes() if cls.__module__ == ArgumentInvalid.__module__]
    return [cls for cls in own if cls.reason != UNSPECIFIED]


def served_reasons() -> set[str]:
    return {name.removeprefix(PREFIX) for name in reasons_pb2.ErrorReason.keys()} - {UNSPECIFIED}  # noqa: SIM118


def test_every_reason_names_its_canonical_code(documented_codes: dict[str, str]) -> None:
    assert set(documented_codes) == served_reasons()
    assert set(documented_codes.values()) <= {code.value for code in Code}


def test_every_reason_has_one_class_with_its_code(documented_codes: dict[str, str]) -> None:
    codes_of_classes = [(cls.reason, cls.code.value) for cls in classes_with_reason()]

    assert sorted(codes_of_classes) == sorted(documented_codes.items())


def test_a_reason_on_the_wire_finds_its_class() -> None:
    for cls in classes_with_reason():
        assert error_class(cls.reason) is cls


def test_the_domain_is_the_one_of_the_contract(repository_root: Path) -> None:
    text = (repository_root / "protos/fulmen/errors/v1/reasons.proto").read_text(encoding="utf-8")

    assert f"`{ERROR_DOMAIN}`" in " ".join(text.split("\n// "))
