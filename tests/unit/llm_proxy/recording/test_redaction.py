"""Redaction replaces what its rules find, everywhere in a call, or gives up in time."""

from __future__ import annotations

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.kinds import REDACTIONS, pattern_problem
from fulmen.llm_proxy.v1 import route_pb2
from fulmen_llm_proxy.recording.redaction import Redactor
from fulmen_llm_proxy.routing.codec import decode_route
from fulmen_llm_proxy.routing.table import Recording


def redactor(*patterns: tuple[str, str], redact: tuple[str, ...] = REDACTIONS) -> Redactor:
    return Redactor(Recording(sample_rate=1.0, redact=redact, patterns=patterns, retention_s=3600))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("Write to alice.b+c@mail.example.org, please.", "Write to [email], please."),
        ("ärger@müller.de", "[email]"),
        ("Call +49 (30) 1234-5678 or 030 1234567 today", "Call [phone] or [phone] today"),
        ("(415) 555-2671", "[phone]"),
        ("Order 12345678 of 2026-11-27 costs 1,234.56", "Order 12345678 of 2026-11-27 costs 1,234.56"),
        ("Card 4111 1111 1111 1111.", "Card [card_number]."),
        ("Not a card: 4111 1111 1111 1112", "Not a card: 4111 1111 1111 1112"),
        ("key sk-proj-abcdefghijklmnopqrstuvwx!", "key [api_key]!"),
        ("Authorization: Bearer abcdefghijklmnop1234", "Authorization: [api_key]"),
        ("eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ4In0123.c2lnbmF0dXJl", "[api_key]"),
        ("-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----", "[api_key]"),
        ("AKIAIOSFODNN7EXAMPLE ghp_abcdefghijklmnopqrstuv", "[api_key] [api_key]"),
        ("a\0b c@d", "a\0b c@d"),
    ],
)
def test_the_built_in_rules_find_what_they_are_called_by(text: str, redacted: str) -> None:
    assert redactor().redact(text) == redacted


def test_every_text_of_a_call_is_redacted_names_of_fields_too() -> None:
    value = {"messages": [{"content": [{"text": "a@b.de"}]}, {"x": {"c@d.de": 1, "n": [None, True, 2.5]}}]}
    assert redactor(redact=("email",)).redact(value) == {
        "messages": [{"content": [{"text": "[email]"}]}, {"x": {"[email]": 1, "n": [None, True, 2.5]}}]
    }


def test_the_arguments_of_a_tool_call_are_read_before_they_are_redacted() -> None:
    call = {"function": {"arguments": '{"to": "m\\u00fcller\\u0040example.org", "n": 1}'}}
    assert redactor().redact(call) == {"function": {"arguments": '{"to": "[email]", "n": 1}'}}
    assert redactor().redact({"arguments": "not JSON: a@b.de"}) == {"arguments": "not JSON: [email]"}


def test_own_patterns_come_first_and_no_rules_change_nothing() -> None:
    assert redactor(("customer", r"C-\d{4}")).redact("C-1234 a@b.de") == "[customer] [email]"
    assert redactor(redact=()).redact("C-1234 a@b.de") == "C-1234 a@b.de"


def test_a_pattern_that_would_take_for_ever_is_given_up() -> None:
    assert pattern_problem(r"(a+)+$") == ""
    with pytest.raises(TimeoutError):
        redactor(("slow", r"(a+)+$")).redact(["a" * 5000 + "b"])


@pytest.mark.parametrize("expression", ["", "(", "a" * 257, "(?P<n>a)(?P<n>b)", "[z-a]", "a{99999999999}"])
def test_a_pattern_that_can_be_none_is_refused(expression: str) -> None:
    assert pattern_problem(expression)


def test_a_route_that_finds_the_empty_text_is_refused_and_none_is_searched_for_ever() -> None:
    hostile = "(|a?)" * 40 + "(?=x)"
    assert pattern_problem(hostile) == ""  # The store compiles it, and searches nothing with it.
    rules = [route_pb2.RedactionPattern(name=f"p{i}", expression=each) for i, each in enumerate(("x*", hostile, "x+"))]
    route = route_pb2.Route(
        name="routes/x",
        targets=[route_pb2.RouteTarget(backend="backends/one")],
        recording=route_pb2.Recording(sample_rate=1.0, patterns=rules),
    )
    with pytest.raises(ArgumentInvalid) as refused:
        decode_route(route)
    assert "route.recording.patterns[0].expression" in {violation.field for violation in refused.value.violations}
    assert "route.recording.patterns[2].expression" not in {violation.field for violation in refused.value.violations}
