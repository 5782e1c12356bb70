"""The bytes of every segment codec are those of protos/testdata/exchange, to which decoders of others are held.

`python -m tests.unit.exchange.codecs.test_golden` writes the files anew: only together with another version of a codec.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard_sum import sum_payload
from fulmen_exchange.codecs.codec import PayloadInvalid, Round
from tests.support.exchange.codec_cases import plainly_decoded, segment
from tests.support.exchange.golden import FOLDER, NAMES, bits_of, golden

ROUND = {"number": 3, "world_size": 2, "ratio": 4.0, "rank": 1, "seed": 42, "flush": False}
FEW = [[0, 1.0], [1, -0.25], [2, 0.1], [5, 3.0], [7, -2.75], [8, 0.5], [12, -1e-3], [19, 1.7]]
"""Of 20 elements."""
FAR = [[0, 1.0], [3, -6.0], [4095, 2.5], [8192, 0.75], [8193, -0.30078125], [8195, 0.01], [12287, -1e-5], [12290, -0.7]]
"""Of 12291 elements: four blocks; nothing is in the second, and the last has 3 elements."""
WIDE = [[place, round(((place * 37) % 101 - 50) / 16, 4)] for place in range(0, 1030, 3)]
"""Of 1030 elements: three blocks of 512, of which the last has 6 elements."""
SPARSE = {
    "few": {"size": 20, "input": FEW},
    "several_blocks": {"size": 12291, "input": FAR, "state": {"residual": [[3, -0.5], [8195, 0.125], [9, 0.0625]]}},
    "the_second_of_two_segments": {"size": 12291, "cuts": [0, 4096, 12291], "segment": 1, "input": FAR},
    "flush": {"size": 12291, "input": FAR, "round": {"flush": True}},
    "zeros": {"size": 4097, "input": []},
    "no_elements": {"size": 20, "cuts": [0, 0, 20], "segment": 0, "input": FEW},
}
DENSE = {
    "few": {"size": 20, "input": FEW},
    "several_blocks": {"size": 1030, "input": WIDE},
    "a_huge_element": {"size": 20, "input": [*FEW[:-1], [19, 1e30]]},
    "zeros": {"size": 20, "input": []},
}


def of_bits(cases, key, bits, way="up"):
    """Makes each case for several numbers of bits."""
    return {
        f"{way}_{name}_{each}_bits": {**case, "settings": {key: each}, "way": way}
        for name, case in cases.items()
        for each in bits
    }


def with_bits(cases, bits):
    """Sets the bits of each case."""
    return {name: {**case, "settings": {**case.get("settings", {}), "bits": bits}} for name, case in cases.items()}


def accumulated(case, otherwise=()):
    """Makes the state of `dgc` of the residual of another codec's case."""
    return {"velocity": [[3, 0.5]], "accumulated": case.get("state", {}).get("residual", list(otherwise))}


FLUSHED = {"flush": {**DENSE["few"], "round": {"flush": True}, "state": {"residual": [[2, 0.5]]}}}
DOWN = {
    "down": {"size": 20, "input": FEW, "way": "down"},
    "down_of_most_elements": {"size": 8, "input": FEW[:5], "way": "down"},
    "down_of_several_blocks": {"size": 12291, "input": FAR, "way": "down"},
    "down_with_a_ratio": {
        **SPARSE["several_blocks"],
        "settings": {"ratio": 100.0, "ratio_down": 200.0},
        "way": "down",
    },
}
CASES = {
    "topk": {**SPARSE, **DOWN},
    "dgc": {
        **{name: {**case, "state": accumulated(case)} for name, case in SPARSE.items()},
        "nesterov": {"size": 20, "input": FEW, "settings": {"nesterov": True}, "state": accumulated({}, FEW[5:7])},
        **DOWN,
    },
    "qsgd": of_bits(DENSE, "bits", (4, 5, 6, 7, 8)),
    "double_quantization": {
        **of_bits(DENSE, "bits_up", (4, 8)),
        **of_bits(DENSE, "bits_down", (2, 3, 4, 8), "down"),
        **of_bits(FLUSHED, "bits_down", (4,), "down"),
    },
    "topk_quantised": {**of_bits(SPARSE, "bits", (2, 3, 4, 8)), **with_bits(DOWN, 4)},
}
"""What goes in; what comes out is in the files. A test sees to it that no codec is left out."""


def dense_of(pairs, size):
    """Makes a tensor of the elements that are not zero."""
    out = torch.zeros(size)
    for place, value in pairs:
        out[place] = value
    return out


def pairs_of(tensor):
    """Names the elements that are not zero; a float32 is exact as a number of JSON."""
    return [[place, float(tensor[place])] for place in tensor.nonzero().flatten().tolist()]


def computed(codec_name, case):
    """Runs a case; returns it with all that it leaves to defaults, and what comes out."""
    codec = segment(codec_name, **case.get("settings", {}))
    if case.get("way", "up") == "down":
        codec = codec.reply()
    size, round_ = case["size"], {**ROUND, **case.get("round", {})}
    offsets, which = case.get("cuts", [0, size]), case.get("segment", 0)
    state = codec.new_state(torch.zeros(size))
    before = {name: case.get("state", {}).get(name, []) for name in state}
    state = {name: dense_of(pairs, size) for name, pairs in before.items()}
    payload = codec.encode(dense_of(case["input"], size), state, offsets, Round(**round_))[which]
    out = torch.zeros(payload.size)
    codec.add(payload, out)
    return {
        "codec": payload.codec,
        "settings": case.get("settings", {}),
        "way": case.get("way", "up"),
        "round": round_,
        "size": size,
        "cuts": offsets,
        "segment": which,
        "input": case["input"],
        "state_before": before,
        "state_after": {name: pairs_of(tensor) for name, tensor in state.items()},
        "payload": bytes(wire.encode(payload)).hex(),
        "decoded": pairs_of(out),
    }


def refused(codec_name):
    """Damages the payload of `few` or one like it in several ways; all of them have a right checksum."""
    case = next(each for name, each in CASES[codec_name].items() if "few" in name)
    payload = wire.decode(bytes.fromhex(computed(codec_name, case)["payload"]))
    parts = payload.parts
    damaged = {
        "another codec": replace(payload, codec="other"),
        "another version": replace(payload, version=2),
        "more elements than its parts have": replace(payload, size=5000),
        "a part too few": replace(payload, parts=parts[:-1]),
        "a part cut short": replace(payload, parts=(*parts[:-1], parts[-1][:0])),
        "a part of another kind": replace(payload, parts=(parts[0].float(), *parts[1:])),
        "a number that is not finite": replace(payload, parts=(*parts[:-1], torch.full_like(parts[-1], float("nan")))),
    }
    if len(parts) > 2:
        indices = {
            "an element that is not there": parts[1] + 20,
            "an element twice": parts[1][:1].expand(len(parts[1])),
        }
        indices["a place below zero"] = parts[1] - 1 - parts[1][:1]
        indices["places not in order"] = parts[1].flip(0)
        damaged.update(
            {why: replace(payload, parts=(parts[0], each.contiguous(), *parts[2:])) for why, each in indices.items()}
        )
        damaged["a count too small"] = replace(payload, parts=(parts[0] - 1, *parts[1:]))
    return {
        "codec": codec_name,
        "settings": case.get("settings", {}),
        "way": case.get("way", "up"),
        "size": payload.size,
        "payloads": {why: bytes(wire.encode(each)).hex() for why, each in damaged.items()},
    }


def text_of(document):
    """Makes the text of a file: one case to a line."""
    cases = [f"    {json.dumps(name)}: {json.dumps(case)}" for name, case in document["cases"].items()]
    head = f'{{\n  "codec": "{document["codec"]}",\n  "version": {document["version"]},\n  "cases": {{\n'
    return head + ",\n".join(cases) + f'\n  }},\n  "refused": {json.dumps(document["refused"])}\n}}\n'


def made(codec_name):
    """Makes the file of a codec."""
    cases = {name: computed(codec_name, case) for name, case in CASES[codec_name].items()}
    return {"codec": codec_name, "version": 1, "cases": cases, "refused": refused(codec_name)}


SUMS = {
    kind: {"values": [0.0, 1.0, -2.5, 0.0, *more]}
    for kind, more in {
        "float32": (3.0e-39, 1e30, 0.1),
        "bfloat16": (1e30, 0.1, 3.0e-39),
        "float16": (65504.0, -6e-8, 0.1, 6.0e-5),
        "int16": (-32768, 32767),
        "int8": (-128, 127),
        "uint8": (255,),
    }.items()
} | {"no_elements": {"values": []}}
"""Tensors that no codec encodes, by the kind of their numbers; kinds without a sign or a fraction lose them."""


def summed():
    """Makes the file of `sum`."""
    cases = {}
    for name, case in SUMS.items():
        kind = getattr(torch, name, torch.float32)
        wide = torch.tensor(case["values"], dtype=torch.float64)
        tensor = (wide.abs() if kind is torch.uint8 else wide).to(kind)
        cases[name] = {
            "codec": "sum",
            "settings": {},
            "way": "down",
            "size": len(tensor),
            "cuts": [0, len(tensor)],
            "segment": 0,
            "payload": bytes(wire.encode(sum_payload(tensor))).hex(),
            "decoded": pairs_of(tensor),
        }
    payload = sum_payload(torch.arange(4.0))
    damaged = {
        "another codec": replace(payload, codec="topk"),
        "another version": replace(payload, version=2),
        "more elements than its part has": replace(payload, size=5),
        "a part too few": replace(payload, parts=()),
        "a part too many": replace(payload, parts=(*payload.parts, *payload.parts)),
        "a part cut short": replace(payload, parts=(payload.parts[0][:3],)),
    }
    return {
        "codec": "sum",
        "version": 1,
        "cases": cases,
        "refused": {
            "codec": "sum",
            "settings": {},
            "way": "down",
            "size": 4,
            "payloads": {why: bytes(wire.encode(each)).hex() for why, each in damaged.items()},
        },
    }


def test_every_segment_codec_has_its_vectors():
    assert sorted(CASES) == NAMES == sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "sum")


def test_the_bytes_of_tensors_as_they_are_are_those_of_their_file():
    assert summed() == golden("sum")
    for case in golden("sum")["cases"].values():
        [part] = wire.decode(bytes.fromhex(case["payload"])).parts
        assert pairs_of(part) == case["decoded"]


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_the_files(name):
    expected = golden(name)
    assert (expected["codec"], expected["version"]) == (name, segment(name).version)
    assert sorted(expected["cases"]) == sorted(CASES[name])
    for each, case in CASES[name].items():
        assert computed(name, case) == expected["cases"][each], each
    assert refused(name) == expected["refused"]


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_that_shares_nothing_with_the_codecs_reads_them(name):
    for case in golden(name)["cases"].values():
        found = plainly_decoded(bytes.fromhex(case["payload"]), bits_of(case)).astype(np.float32)
        left, right = case["cuts"][case["segment"] : case["segment"] + 2]
        assert np.array_equal(found, dense_of(case["decoded"], right - left).numpy())


@pytest.mark.parametrize("name", NAMES)
def test_what_the_files_say_is_refused_is_refused(name):
    vectors = golden(name)["refused"]
    codec = segment(name, **vectors["settings"])
    assert len(vectors["payloads"]) >= 7
    for data in vectors["payloads"].values():
        with pytest.raises(PayloadInvalid):
            codec.add(wire.decode(bytes.fromhex(data)), torch.zeros(vectors["size"]))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for each in NAMES:
        (FOLDER / f"{each}.json").write_text(text_of(made(each)))
    (FOLDER / "sum.json").write_text(text_of(summed()))
