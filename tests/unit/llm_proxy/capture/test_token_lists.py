"""The compiled packing of tokens does what Python does, or leaves it to Python."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fulmen_llm_proxy.capture.token_lists import ids_in_python, logprobs_in_python
from fulmen_llm_proxy.native.library import LibraryUnavailable, open_library
from fulmen_llm_proxy.native.tokens import TokenPacker, load

_NO_PACKING = (msgspec.DecodeError, UnicodeDecodeError, struct.error, OverflowError)

_SPACE = st.sampled_from(["", "", " ", "\n", "\t ", "\r\n"])
_TEXT = st.text(max_size=8)
_NUMBERS = st.one_of(
    st.integers(-3, 2**31 + 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-40, 0),
    st.floats(-1e-3, 0),
    st.sampled_from([0, -0.0, 1e22, 1e23, 3.4028235e38, 3.4028236e38, 1e39, 5e-324, 1e-45, 1.1754943e-38, 0.1, -1e-7]),
)
_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)
_PIECE_OF_IDS = st.one_of(
    st.none(),
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
    st.lists(st.one_of(_NUMBERS, st.none(), _TEXT), max_size=3),
)
_ENTRY = st.builds(
    lambda fields, logprob: fields | ({} if logprob is None else {"logprob": logprob}),
    st.dictionaries(st.sampled_from(["token", "bytes", "top_logprobs", "é", 'a"b']), _ANYTHING, max_size=3),
    st.one_of(st.floats(-40, 0), _NUMBERS, st.none()),
)
_PIECE_OF_LOGPROBS = st.one_of(
    st.builds(lambda entries: {"content": entries}, st.one_of(st.none(), st.lists(_ENTRY, max_size=4))),
    st.builds(lambda entries, more: {"refusal": more, "content": entries}, st.lists(_ENTRY, max_size=2), _ANYTHING),
    st.builds(lambda values: {"token_logprobs": values}, st.lists(_NUMBERS, max_size=3)),
    _ANYTHING,
)


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> TokenPacker:
    return load(tmp_path_factory.mktemp("libraries"))


def written(value: object, draw: st.DataObject) -> bytes:
    """Writes JSON in one of the ways in which servers write it."""
    comma, colon = (draw.draw(_SPACE) + mark + draw.draw(_SPACE) for mark in ",:")
    text = json.dumps(value, separators=(comma, colon), ensure_ascii=draw.draw(st.booleans()))
    return text.encode("utf-8", "surrogatepass")


def expect_same(compiled: object, in_python: object) -> None:
    assert compiled is None or compiled == in_python


def ids_of(joined: bytes) -> tuple[bytes, list[int]] | None:
    try:
        packed, lengths = ids_in_python(joined)
    except _NO_PACKING:
        return None
    return packed, list(lengths)


def logprobs_of(joined: bytes) -> tuple[bytes, bytes, list[int]] | None:
    try:
        logprobs, text, sizes = logprobs_in_python(joined)
    except _NO_PACKING:
        return None
    return logprobs, text, list(sizes)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(_PIECE_OF_IDS, max_size=4), draw=st.data())
def test_ids_are_packed_alike(packer: TokenPacker, pieces: list[object], draw: st.DataObject) -> None:
    joined = written(pieces, draw)
    expect_same(packer.ids(joined, len(pieces)), ids_of(joined))


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(_PIECE_OF_LOGPROBS, max_size=3), draw=st.data())
def test_logprobs_are_packed_alike(packer: TokenPacker, pieces: list[object], draw: st.DataObject) -> None:
    joined = written(pieces, draw)
    expect_same(packer.logprobs(joined), logprobs_of(joined))


@settings(max_examples=200, deadline=None)
@given(
    place=st.floats(0, 1),
    bytes_=st.binary(max_size=3),
    cut=st.integers(0, 3),
    of_ids=st.booleans(),
)
@example(place=0.5, bytes_=b"\x00", cut=1, of_ids=True)
def test_damaged_lists_are_refused_alike(
    packer: TokenPacker, place: float, bytes_: bytes, cut: int, of_ids: bool
) -> None:
    entry = {
        "token": " a\\u00e9",
        "logprob": -0.25,
        "bytes": [32, 97],
        "top_logprobs": [{"token": "x", "logprob": -1e-7}],
    }
    whole = (
        b"[[1,22,333],null,[4]]" if of_ids else json.dumps([{"content": [entry, entry]}, {"content": None}]).encode()
    )
    at = int(place * len(whole))
    damaged = whole[:at] + bytes_ + whole[at + cut :]
    if of_ids:
        expect_same(packer.ids(damaged, 3), ids_of(damaged))
    else:
        expect_same(packer.logprobs(damaged), logprobs_of(damaged))


def test_a_usual_answer_is_packed_without_python(packer: TokenPacker) -> None:
    chance = random.Random(0)
    values = [-chance.expovariate(1.0) * 10.0 ** -chance.randrange(12) for _ in range(20_000)]
    content = [{"token": "é", "logprob": value, "bytes": [1, 2], "top_logprobs": []} for value in values]
    joined = json.dumps([{"content": content}]).encode()
    packed = packer.logprobs(joined)
    assert packed is not None
    assert packed == logprobs_in_python(joined)
    assert (packed[1], packed[2][:2]) == ("é".encode() * 20_000, [2, 2])
    ids = [chance.randrange(200_000) for _ in range(20_000)]
    assert packer.ids(json.dumps([ids, None]).encode(), 2) == (struct.pack("<20000i", *ids), [20_000, 0])


@pytest.mark.parametrize("token", ["a", r" \n\t\"\\\/", r"\u00e9\u0000", "é€😀", ""])
def test_texts_of_tokens_are_packed_without_python(packer: TokenPacker, token: str) -> None:
    joined = b'[{"content":[{"token":"%b","logprob":-1.0},{"logprob":-2.0}]}]' % token.encode()
    packed = packer.logprobs(joined)
    assert packed is not None
    assert packed == logprobs_of(joined)
    assert packed[2] == [len(json.loads(f'"{token}"').encode()), 0]


@pytest.mark.parametrize("token", ["\ufffd", r"\ufffd", r"\ud83d\ude00", r"\q", "\x01"])
def test_parts_of_characters_and_damaged_texts_are_left_to_python(packer: TokenPacker, token: str) -> None:
    assert packer.logprobs(b'[{"content":[{"token":"%b","logprob":-1.0}]}]' % token.encode()) is None


@pytest.mark.parametrize(
    "text", ["-0", "-0.0", "01", "1.", ".5", "1e", "+1", "1e400", "12345678901234567890", "NaN", "1e-400"]
)
def test_a_number_in_doubt_is_left_to_python(packer: TokenPacker, text: str) -> None:
    assert packer.logprobs(b'[{"content":[{"logprob":%b}]}]' % text.encode()) is None


def test_a_double_near_the_middle_of_two_floats_is_rounded_as_python_does(packer: TokenPacker) -> None:
    low = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    high = struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", low))[0] + 1))[0]
    for step in range(-40, 41):
        value = (low + high) / 2 + step * math.ulp(low)
        joined = b'[{"content":[{"logprob":%b}]}]' % repr(value).encode()
        expect_same(packer.logprobs(joined), logprobs_of(joined))


def test_a_library_that_is_damaged_or_written_by_others_is_compiled_again(tmp_path: Path) -> None:
    load(tmp_path)
    (library,) = tmp_path.glob("*.so")
    good = library.read_bytes()
    library.unlink()
    library.write_bytes(good[:-1])
    load(tmp_path)
    assert len(list(tmp_path.glob("*.so"))) == 1
    library.chmod(0o777)
    load(tmp_path)
    assert not library.stat().st_mode & 0o022


def test_a_source_that_is_gone_leaves_the_work_to_python(tmp_path: Path) -> None:
    with pytest.raises(LibraryUnavailable):
        open_library(tmp_path / "gone.cpp", tmp_path / "cache")


def test_without_a_compiler_it_is_said_what_would_help(tmp_path: Path) -> None:
    source = tmp_path / "tokens.cpp"
    source.write_text("int none;")
    with pytest.raises(LibraryUnavailable, match="install one"):
        open_library(source, tmp_path / "cache", path=str(tmp_path))
