"""A delta gives back exactly the weights that it was made from, or nothing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file

from fulmen_algorithm.weights.delta import (
    DeltaDamaged,
    TensorsDiffer,
    WrongBase,
    apply,
    encode,
    read_header,
)
from fulmen_algorithm.weights.tensor_files import (
    RawTensor,
    TensorFileDamaged,
    Weights,
    read_folder,
    read_tensors,
    write_tensors,
)
from fulmen_algorithm.weights.varints import pack_varints, unpack_varints

GOLDEN = Path(__file__).parent / "golden"
WORD_TYPES = {"BF16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "F64": np.uint64}


def raw(words: list[int], dtype: str = "BF16", shape: tuple[int, ...] | None = None) -> RawTensor:
    return RawTensor(dtype=dtype, shape=shape or (len(words),), words=np.array(words, dtype=WORD_TYPES[dtype]))


def weights(**tensors: RawTensor) -> Weights:
    return Weights(tensors=tensors)


def same(one: Weights, other: Weights) -> bool:
    assert list(one.tensors) == list(other.tensors)
    return all(np.array_equal(t.words, other.tensors[n].words) for n, t in one.tensors.items())


@st.composite
def changed_weights(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Draws weights and what they become: few changes or many, neighbours or anything."""
    before, after = {}, {}
    for name in draw(st.sets(st.sampled_from("abcd"), max_size=3)):
        dtype = draw(st.sampled_from(sorted(WORD_TYPES)))
        words = draw(arrays.arrays(WORD_TYPES[dtype], st.integers(0, 300)))
        changed = draw(arrays.arrays(np.bool_, words.size, elements=st.booleans()))
        steps = draw(arrays.arrays(WORD_TYPES[dtype], words.size, fill=st.just(1)))
        before[name] = RawTensor(dtype=dtype, shape=(words.size,), words=words)
        after[name] = RawTensor(dtype=dtype, shape=(words.size,), words=np.where(changed, words + steps, words))
    return Weights(tensors=before), Weights(tensors=after)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=changed_weights())
def test_any_weights_come_back_word_by_word(pair, tmp_path):
    base, new = pair
    size = encode(base, new, tmp_path / "delta")
    given_back = apply(Weights(tensors=base.tensors), tmp_path / "delta")
    assert same(given_back, new)
    assert given_back.sha256() == Weights(tensors=new.tensors).sha256() == read_header(tmp_path / "delta").sha256
    assert size.changed == sum(int((base.tensors[n].words != t.words).sum()) for n, t in new.tensors.items())


@settings(deadline=None)
@given(numbers=arrays.arrays(np.uint64, st.integers(0, 200)))
def test_varints_come_back(numbers):
    assert np.array_equal(unpack_varints(pack_varints(numbers), numbers.size), numbers)


def test_varints_are_those_of_leb128():
    assert pack_varints(np.array([0, 127, 128, 624485], dtype=np.uint64)).tobytes() == b"\x00\x7f\x80\x01\xe5\x8e\x26"


@pytest.mark.parametrize(
    ("packed", "count"), [(b"\x80", 1), (b"\x01\x80", 1), (b"\x01", 2), (b"\x80" * 11 + b"\x01", 1)]
)
def test_bytes_that_are_no_varints_are_refused(packed, count):
    with pytest.raises(ValueError, match="number"):
        unpack_varints(np.frombuffer(packed, dtype=np.uint8), count)


def test_payloads_of_nan_and_signs_of_zero_are_kept(tmp_path):
    base = weights(w=raw([0x7FC1, 0x0000, 0x7FC0, 0x8000, 0xFFFF, 0x3F80] * 100))
    new = weights(w=raw([0x7FC2, 0x8000, 0xFFC0, 0x0000, 0x7F81, 0x3F80] * 100))
    size = encode(base, new, tmp_path / "delta")
    assert size.changed == 500
    assert same(apply(base, tmp_path / "delta"), new)


def test_an_equal_number_of_other_bits_is_a_change_and_an_unchanged_tensor_costs_nothing(tmp_path):
    base = weights(big=raw([5] * 10_000), zero=raw([0x0000] * 8))
    new = weights(big=raw([5] * 10_000), zero=raw([0x8000] + [0x0000] * 7))
    assert encode(base, new, tmp_path / "delta").changed == 1
    assert set(read_header(tmp_path / "delta").tensors) == {"zero"}
    given_back = apply(base, tmp_path / "delta")
    assert given_back.tensors["big"] is base.tensors["big"]
    assert given_back.tensors["zero"].words[0] == 0x8000


def test_each_tensor_takes_the_shortest_form(tmp_path):
    chance = np.random.default_rng(0)
    old = {n: chance.integers(0, 2**16, 40_000, dtype=np.uint16) for n in ("sparse", "half", "all")}
    new = {n: words.copy() for n, words in old.items()}
    new["sparse"][::997] += 1
    new["half"][chance.random(40_000) < 0.3] ^= np.uint16(0x5555)
    new["all"] = chance.integers(0, 2**16, 40_000, dtype=np.uint16)
    base, after = (
        Weights(tensors={n: RawTensor(dtype="BF16", shape=(200, 200), words=w) for n, w in side.items()})
        for side in (old, new)
    )
    size = encode(base, after, tmp_path / "delta")
    forms = {n: (e.positions, e.values) for n, e in read_header(tmp_path / "delta").tensors.items()}
    assert forms == {"sparse": ("gaps", "steps"), "half": ("bitmap", "words"), "all": ("", "dense")}
    assert same(apply(base, tmp_path / "delta"), after)
    assert size.full_bytes == 240_000
    assert size.size_bytes < 80_000 + 30_000 + 1_000


@pytest.mark.parametrize(
    "other",
    [
        weights(w=raw([1, 2, 3, 4]), v=raw([1])),
        weights(v=raw([1, 2, 3, 4])),
        weights(w=raw([1, 2, 3, 4], shape=(2, 2))),
        weights(w=raw([1, 2, 3, 4], dtype="F32")),
    ],
)
def test_weights_of_another_layout_have_no_delta(other, tmp_path):
    with pytest.raises(TensorsDiffer):
        encode(weights(w=raw([1, 2, 3, 4])), other, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_delta_is_applied_to_its_base_only(tmp_path):
    base, new = weights(w=raw([1, 2, 3])), weights(w=raw([1, 2, 4]))
    encode(base, new, tmp_path / "delta")
    with pytest.raises(WrongBase):
        apply(new, tmp_path / "delta")
    assert new.tensors["w"].words.tolist() == [1, 2, 4]


@pytest.fixture
def rich_delta(tmp_path: Path) -> tuple[Weights, Weights, Path]:
    chance = np.random.default_rng(1)
    old = [chance.integers(0, 2**16, 600, dtype=np.uint16) for _ in range(3)]
    few, half = old[0].copy(), old[1].copy()
    few[::50] += 1
    half[chance.random(600) < 0.4] ^= np.uint16(0x7777)
    new = [few, half, chance.integers(0, 2**16, 600, dtype=np.uint16)]
    base, after = (
        Weights(tensors={f"t{i}": RawTensor(dtype="BF16", shape=(600,), words=w) for i, w in enumerate(side)})
        for side in (old, new)
    )
    encode(base, after, tmp_path / "delta")
    return base, after, tmp_path / "delta"


def test_a_delta_that_is_cut_off_anywhere_is_refused(rich_delta):
    base, _, path = rich_delta
    content = path.read_bytes()
    for end in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(DeltaDamaged):
            apply(base, path)


def test_a_bit_that_is_flipped_anywhere_is_noticed(rich_delta):
    base, after, path = rich_delta
    content = path.read_bytes()
    harmless = 0
    for at in range(0, len(content), 23):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            harmless += same(apply(base, path), after)
        except DeltaDamaged:
            continue
    # Padding of a bitmap or of the header says nothing; whatever is applied is what was encoded.
    assert harmless <= 3


def test_a_file_that_inflates_to_more_than_it_says_is_refused(tmp_path):
    base = weights(w=raw([7] * 5000))
    encode(base, weights(w=raw([8] * 5000)), tmp_path / "delta")
    parts, metadata = read_tensors(tmp_path / "delta")
    header = json.loads(metadata["fulmen.delta"])
    assert header["tensors"]["w"]["deflated"]
    header["tensors"]["w"]["deflated"] = {"positions": 10, "values": 10}
    text = json.dumps(header)
    metadata = {"fulmen.delta": text, "fulmen.delta.sha256": hashlib.sha256(text.encode()).hexdigest()}
    write_tensors(tmp_path / "lying", parts, metadata)
    with pytest.raises(DeltaDamaged):
        apply(base, tmp_path / "lying")


def test_a_dense_tensor_with_too_few_words_is_refused(rich_delta):
    base, _, path = rich_delta
    parts, metadata = read_tensors(path)
    words = parts["t2/values"].words[:-2]
    cut = {**parts, "t2/values": RawTensor(dtype="U8", shape=(words.size,), words=words)}
    write_tensors(path.with_name("cut"), cut, metadata)
    with pytest.raises(DeltaDamaged, match="'t2' in the delta cannot be read"):
        apply(base, path.with_name("cut"))


def test_the_format_is_that_of_the_golden_file(tmp_path):
    """The file was written by format 1; later code must read it, and whoever changes the format must say so."""
    vectors = json.loads((GOLDEN / "delta_v1.json").read_text())
    base, new = (
        Weights(tensors={n: raw(t["words"], t["dtype"], tuple(t["shape"])) for n, t in vectors[side].items()})
        for side in ("base", "new")
    )
    assert same(apply(base, GOLDEN / "delta_v1.safetensors"), new)
    assert (base.sha256(), new.sha256()) == (vectors["base_sha256"], vectors["sha256"])
    encode(base, new, tmp_path / "delta")
    assert (tmp_path / "delta").read_bytes() == (GOLDEN / "delta_v1.safetensors").read_bytes()


def test_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.tensor([[1.5, -0.0], [float("nan"), 3e38]], dtype=torch.bfloat16),
        "single": torch.randn(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_folder(tmp_path)
    assert read.tensors["half"].words.tolist() == tensors["half"].view(torch.uint16).flatten().tolist()
    write_tensors(tmp_path / "again.safetensors", read.tensors, {"format": "pt"})
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(again[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content.replace(b'"BF16"', b'"XF16"'),
        lambda content: content.replace(b"[2,2]", b"[2,3]"),
        lambda content: content + b"x",
    ],
)
def test_a_damaged_file_is_refused(spoil, tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"w": raw([1, 2, 3, 4], shape=(2, 2))}, {})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(TensorFileDamaged):
        read_tensors(path)
