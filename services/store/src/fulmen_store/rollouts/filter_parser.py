"""Parses the filter of a list: the subset of AIP-160 in the contract of `ListRollouts`.

    filter     = conjunction
    conjunction = disjunction { "AND" disjunction }
    disjunction = term { "OR" term }                      OR binds more tightly than AND, as in AIP-160
    term       = [ "NOT" | "-" ] ( "(" conjunction ")" | field [ "." key ] ( operator value | ":" ( "*" | text ) ) )

A text field is searched for the text after the colon; for every field, `:*` is true if it is set. Source: AIP-160,
https://google.aip.dev/160.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_store.rollouts.filter import (
    HAS,
    ROLLOUTS,
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Negation,
    Operator,
    Presence,
    Schema,
    Search,
    Value,
)

__all__ = ["MAX_FILTER_CHARS", "parse_filter"]

MAX_FILTER_CHARS: Final = 2048
MAX_DEPTH: Final = 32
MAX_SHOWN: Final = 40

# How many bits the integers of a type have.
_BITS: Final[Mapping[str, int]] = {"int": 32, "bigint": 64}


def parse_filter(text: str, schema: Schema = ROLLOUTS) -> Expression | None:
    """Decodes a filter over the fields of a schema; None if it is empty and selects everything.

    Raises:
        ArgumentInvalid: With every problem of the filter, each with the position of its character, from 1.
    """
    if len(text) > MAX_FILTER_CHARS:
        raise _refused([(0, f"has {len(text)} characters, at most {MAX_FILTER_CHARS} are allowed")])
    parser = _Parser(text, schema)
    expression = parser.whole()
    if parser.problems:
        raise _refused(sorted(parser.problems))
    return expression


def _refused(problems: list[tuple[int, str]]) -> ArgumentInvalid:
    return ArgumentInvalid(
        "The filter is malformed.",
        violations=[
            Violation(field="filter", description=f"at character {position}: {text}" if position else text)
            for position, text in problems
        ],
    )


class _Kind(Enum):
    OPEN = auto()
    CLOSE = auto()
    OPERATOR = auto()
    QUOTED = auto()
    WORD = auto()
    KEYWORD = auto()
    BROKEN = auto()
    END = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    kind: _Kind
    text: str
    position: int

    @property
    def shown(self) -> str:
        """The token as quoted in a problem."""
        if self.kind is _Kind.END:
            return "the end"
        return f"`{self.text}`" if len(self.text) <= MAX_SHOWN else f"`{self.text[:MAX_SHOWN]}...`"


_KEYWORDS: Final = frozenset({"AND", "OR", "NOT"})
_TOKEN: Final = re.compile(
    r"""(?P<SPACE>\s+) | (?P<OPEN>\() | (?P<CLOSE>\)) | (?P<OPERATOR><=|>=|!=|=|<|>)
    | (?P<QUOTED>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*') | (?P<WORD>[^\s()=<>!"'\\]+) | (?P<BROKEN>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_NAME: Final = re.compile(r"projects/[a-z0-9-]{1,63}/rollouts/([0-9a-f-]{0,36})(\*?)")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ZEROS: Final = "00000000-0000-0000-0000-000000000000"
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)


def _tokens(text: str) -> list[_Token]:
    found = []
    for match in _TOKEN.finditer(text):
        name, part = str(match.lastgroup), match.group()
        if name == "SPACE":
            continue
        if part in _KEYWORDS:
            name = "KEYWORD"
        found.append(_Token(kind=_Kind[name], text=part, position=match.start() + 1))
    return [*found, _Token(kind=_Kind.END, text="", position=len(text) + 1)]


class _Parser:
    """Reads tokens from left to right, and continues after a problem to find them all."""

    def __init__(self, text: str, schema: Schema) -> None:
        self.problems: list[tuple[int, str]] = []
        self._schema = schema
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0
        self._gave_up = False

    def whole(self) -> Expression | None:
        """Reads the whole filter."""
        if self._peek().kind is _Kind.END:
            return None
        expression = self._conjunction()
        while self._peek().kind is not _Kind.END:
            # Only a parenthesis too many stops a conjunction early.
            self._note(self._take(), "closes a parenthesis that was not opened")
            if self._took("AND") or self._took("OR"):
                self._conjunction()
        return expression

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._peek()
        if token.kind is not _Kind.END:
            self._at += 1
        return token

    def _took(self, keyword: str) -> bool:
        if self._peek().kind is _Kind.KEYWORD and self._peek().text == keyword:
            self._at += 1
            return True
        return False

    def _note(self, token: _Token, text: str) -> None:
        self.problems.append((token.position, text))

    def _conjunction(self) -> Expression | None:
        operands = [self._disjunction()]
        while self._peek().kind not in (_Kind.END, _Kind.CLOSE):
            if not self._took("AND"):
                self._note(self._peek(), f"expected AND or OR, found {self._peek().shown}")
                if self._peek().kind in (_Kind.OPERATOR, _Kind.QUOTED, _Kind.BROKEN):
                    self._skip()
                    continue
            operands.append(self._disjunction())
        return _joined(Conjunction, operands)

    def _disjunction(self) -> Expression | None:
        operands = [self._term()]
        while self._took("OR"):
            operands.append(self._term())
        return _joined(Disjunction, operands)

    def _term(self) -> Expression | None:
        negated = False
        while self._took("NOT"):
            negated = not negated
        if self._peek().kind is _Kind.WORD and self._peek().text.startswith("-"):
            negated = not negated
            self._drop_minus()
        operand = self._nested() if self._peek().kind is _Kind.OPEN else self._comparison()
        return operand if operand is None or not negated else Negation(operand)

    def _drop_minus(self) -> None:
        word = self._peek()
        if word.text == "-":
            self._take()
        else:
            self._tokens[self._at] = _Token(kind=_Kind.WORD, text=word.text[1:], position=word.position + 1)

    def _nested(self) -> Expression | None:
        opened = self._take()
        if self._depth == MAX_DEPTH:
            self._note(opened, f"parentheses are nested more than {MAX_DEPTH} deep")
            self._gave_up, self._at = True, len(self._tokens) - 1
            return None
        self._depth += 1
        expression = self._conjunction()
        self._depth -= 1
        if self._peek().kind is _Kind.CLOSE:
            self._take()
        elif not self._gave_up:
            self._note(opened, "the parenthesis is not closed")
        return expression

    def _comparison(self) -> Expression | None:
        self._split_at_colon()
        name = self._peek()
        if name.kind is not _Kind.WORD:
            self._note(name, f"expected a field, found {name.shown}")
            self._skip()
            return None
        self._take()
        key = self._key(name)
        self._split_at_colon()
        operator = self._peek()
        if operator.kind is not _Kind.OPERATOR:
            self._note(
                operator, f"expected one of = != < <= > >= : after `{name.text[:MAX_SHOWN]}`, found {operator.shown}"
            )
            self._skip()
            return None
        self._take()
        value = self._peek()
        if value.kind not in (_Kind.WORD, _Kind.QUOTED):
            self._note(value, f"expected a value, found {value.shown}")
            self._skip()
            return None
        self._take()
        return self._checked(name, key, operator, value)

    def _split_at_colon(self) -> None:
        """Splits a word that contains the operator `:`, which is part of words otherwise."""
        word = self._peek()
        if word.kind is not _Kind.WORD or HAS not in word.text:
            return
        before, _, after = word.text.partition(HAS)
        at = word.position + len(before)
        self._tokens[self._at : self._at + 1] = [
            *([_Token(kind=_Kind.WORD, text=before, position=word.position)] if before else []),
            _Token(kind=_Kind.OPERATOR, text=HAS, position=at),
            *([_Token(kind=_Kind.WORD, text=after, position=at + 1)] if after else []),
        ]

    def _key(self, name: _Token) -> str:
        """Reads the key of a field of a map: what follows its first dot, in quotes if it holds other than a word does."""
        field, dot, key = name.text.partition(".")
        if field not in self._schema.maps:
            return ""
        if dot and not key and self._peek().kind is _Kind.QUOTED:
            key = _unquoted(self._take())
        if not key:
            self._note(name, f"{field} is a map: compare the value of a key, {field}.KEY")
        return key

    def _skip(self) -> None:
        """Skips to where the next term may begin."""
        while self._peek().kind not in (_Kind.END, _Kind.CLOSE) and self._peek().text not in ("AND", "OR"):
            self._take()

    def _checked(self, name: _Token, key: str, sign: _Token, value: _Token) -> Expression | None:
        of_map = name.text.partition(".")[0]
        field = self._schema.find(of_map if of_map in self._schema.maps else name.text)
        if field is None:
            self._note(name, f"{name.shown} is not one of {self._schema.shown}")
            return None
        if sign.text == HAS:
            return self._had(field, key, value)
        if field in self._schema.texts:
            self._note(sign, f"{field} is searched: write {field}:TEXT")
            return None
        operator = Operator(sign.text)
        if operator not in self._schema.operators_of(field):
            self._note(sign, f"{field} has no order: only = and != compare it")
        read = self._value(field, value)
        return None if read is None else Comparison(field=field, key=key, operator=operator, value=read)

    def _had(self, field: str, key: str, value: _Token) -> Expression | None:
        if value.kind is _Kind.WORD and value.text == "*":
            return Presence(field=field, key=key)
        text = value.text if value.kind is _Kind.WORD else _unquoted(value)
        if field in self._schema.texts and text:
            return Search(field=field, text=text)
        searched = ", ".join(sorted(self._schema.texts)) or "no field"
        self._note(value, f"only * may follow {field}: (whether it is set); of texts, {searched} can be searched")
        return None

    def _value(self, field: str, token: _Token) -> Value | None:
        text = token.text if token.kind is _Kind.WORD else _unquoted(token)
        kind = self._schema.types[field]
        if field in self._schema.words:
            number = self._schema.words[field].get(text)
            if number is None:
                self._note(token, f"{token.shown} is not one of {', '.join(self._schema.words[field])}")
            return number
        if kind in _BITS:
            bits = _BITS[kind]
            if _INTEGER.fullmatch(text) and abs(int(text)) < 1 << bits - 1:
                return int(text)
            self._note(token, f"{token.shown} is not an integer of {bits} bits")
            return None
        if kind == "float8":
            return self._number(token, text, unit="s" if field in self._schema.durations else "")
        if kind == "timestamptz":
            return self._time(token, text)
        if field in self._schema.names:
            return self._name(token, text)
        if "\0" in text:
            self._note(token, "contains a NUL character")
            return None
        return text

    def _number(self, token: _Token, text: str, *, unit: str) -> float | None:
        digits = text.removesuffix("s") if unit else text
        if text.endswith(unit) and _NUMBER.fullmatch(digits) and math.isfinite(float(digits)):
            return float(digits)
        wanted = "a number of seconds followed by s, such as 1.5s" if unit else "a finite number"
        self._note(token, f"{token.shown} is not {wanted}")
        return None

    def _name(self, token: _Token, text: str) -> str | None:
        """Reads the name of a rollout, or its beginning; the project is that of the list."""
        match = _NAME.fullmatch(text)
        given = match[1] if match is not None else ""
        whole = given + _ZEROS[len(given) :]
        if match is not None and _UUID.fullmatch(whole) and (match[2] or len(given) == len(_ZEROS)):
            return given
        self._note(token, f"{token.shown} is not projects/PROJECT/rollouts/UUID, or a prefix of it followed by *")
        return None

    def _time(self, token: _Token, text: str) -> datetime.datetime | None:
        if token.kind is _Kind.QUOTED and _TIME.fullmatch(text):
            try:
                return datetime.datetime.fromisoformat(text.upper()).astimezone(datetime.UTC)
            except (ValueError, OverflowError):
                pass
        self._note(token, f'{token.shown} is not a time of RFC 3339 in quotes, such as "2026-03-14T10:15:00Z"')
        return None


def _unquoted(token: _Token) -> str:
    return _ESCAPE.sub(r"\1", token.text[1:-1])


def _joined(kind: type[Conjunction] | type[Disjunction], operands: list[Expression | None]) -> Expression | None:
    """Combines the operands that could be parsed."""
    known = tuple(operand for operand in operands if operand is not None)
    if len(known) > 1:
        return kind(known)
    return known[0] if known else None
