"""The experts of a mixture that computed each token, so that a trainer can use the same experts (router replay).

Engines report them as a `.npy` file of shape [tokens, layers, choices], as vLLM does (`enable_return_routed_experts`).
Invariant: entries are unsigned and little-endian, one or two bytes each, and their number matches the spans.

Source: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]

MAX_BYTES = 2**20
"""Largest record of one call: 2700 tokens of a model with 48 layers of 8 experts. The oldest tokens are left out."""
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([|<])u([12])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,5}), (\d{1,5})\), \} *\n"
)
_VERSION_1, _SIZE_AT, _HEADER_AT = b"\x01\x00", 8, 10
_ALIGNMENT = 64


class RoutedExpertsInvalid(ValueError):
    """Recorded experts do not match their declared form, or do not fit the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of some tokens of a sequence; the others are unknown.

    Attributes:
        layers: L, layers per token.
        top_k: K, experts per token and layer.
        entry_bytes: Bytes of one entry, 1 or 2.
        spans: Ranges [start, end) of the tokens that are known, in order, apart from each other.
        packed: Expert ids by token of the spans, layer and choice.
    """

    layers: int
    top_k: int
    entry_bytes: int
    spans: tuple[Span, ...]
    packed: bytes

    def __post_init__(self) -> None:
        """Checks the invariant.

        Raises:
            RoutedExpertsInvalid: with every problem.
        """
        problems = []
        if self.layers < 1 or self.top_k < 1:
            problems.append(f"{self.layers} layers of {self.top_k} experts")
        if self.entry_bytes not in (1, 2):
            problems.append(f"entries of {self.entry_bytes} bytes")
        flat = [edge for span in self.spans for edge in span]
        if any(start >= end for start, end in self.spans) or flat != sorted(flat) or (flat and flat[0] < 0):
            problems.append("ranges of tokens that are empty or not in order")
        elif len(self.packed) != self.token_count * self.token_bytes:
            problems.append(f"{len(self.packed)} bytes for {self.token_count} tokens of {self.token_bytes} bytes")
        if problems:
            raise RoutedExpertsInvalid(f"Recorded experts have {'; '.join(problems)}.")

    @property
    def token_bytes(self) -> int:
        """Size of the entries of one token."""
        return self.layers * self.top_k * self.entry_bytes

    @property
    def token_count(self) -> int:
        """Number of tokens that are known."""
        return sum(end - start for start, end in self.spans)

    @property
    def form(self) -> tuple[int, int, int]:
        """The form that all records of one model share: layers, choices and bytes of an entry."""
        return self.layers, self.top_k, self.entry_bytes

    def newest(self, max_bytes: int = MAX_BYTES) -> RoutedExperts:
        """Returns the record of one range without its oldest tokens, so that it has at most `max_bytes` bytes."""
        start, end = self.spans[0]
        start = max(start, end - max_bytes // self.token_bytes)
        kept = self.packed[len(self.packed) - (end - start) * self.token_bytes :]
        return replace(self, spans=((start, end),) if kept else (), packed=kept)


def read_npy(data: bytes) -> RoutedExperts:
    """Reads an engine's file of uint8 or uint16 [tokens, layers, choices]; the first token is the prompt's.

    Raises:
        RoutedExpertsInvalid: if it is another file.
    """
    header_end = _HEADER_AT + int.from_bytes(data[_SIZE_AT:_HEADER_AT], "little")
    header = _HEADER.fullmatch(data[_HEADER_AT:header_end])
    if not data.startswith(_MAGIC + _VERSION_1) or header is None:
        raise RoutedExpertsInvalid(
            "Recorded experts are not an array of small unsigned integers by token, layer and choice."
        )
    tokens, layers, top_k = (int(size) for size in header.groups()[2:])
    spans = ((0, tokens),) if tokens else ()
    return RoutedExperts(layers=layers, top_k=top_k, entry_bytes=int(header[2]), spans=spans, packed=data[header_end:])


def write_npy(experts: RoutedExperts) -> bytes:
    """Writes the record of one range that starts at the first token; see `read_npy`."""
    kind = "|u1" if experts.entry_bytes == 1 else "<u2"
    shape = (experts.token_count, experts.layers, experts.top_k)
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = -(_HEADER_AT + len(text) + 1) % _ALIGNMENT + len(text) + 1
    header = text.ljust(size - 1) + b"\n"
    return b"".join((_MAGIC, _VERSION_1, size.to_bytes(2, "little"), header, experts.packed))


def merged(records: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
    """Merges the records of calls of one sequence; for each token the first record that has it counts. None if there are
    none.

    The first is the call that sampled the token, or that first had it in its prompt.

    Raises:
        RoutedExpertsInvalid: if they belong to different models.
    """
    known = [record for record in records if record is not None]
    if not known:
        return None
    if len(forms := {record.form for record in known}) > 1:
        raise RoutedExpertsInvalid(f"Calls of one sequence have experts of different forms: {sorted(forms)}.")
    pieces: list[tuple[Span, bytes]] = []
    for record in known:
        pieces = sorted([*pieces, *_missing(record, [span for span, _ in pieces])])
    return replace(known[0], spans=_joined([span for span, _ in pieces]), packed=b"".join(part for _, part in pieces))


def _missing(record: RoutedExperts, spans: Sequence[Span]) -> list[tuple[Span, bytes]]:
    """Returns the parts of a record outside of some spans, in order."""
    found, before = [], 0
    for start, end in record.spans:
        edges = [start, *(min(max(edge, start), end) for span in spans for edge in span), end]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            if low < high:
                at = before + low - start
                size = record.token_bytes
                found.append(((low, high), record.packed[at * size : (at + high - low) * size]))
        before += end - start
    return found


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Joins spans, in order, of which one begins where another ends."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
