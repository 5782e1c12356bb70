"""The decoder of the client for Node, made from docs/exchange-wire.md and the .proto files, reads what the codecs make."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard_sum import sum_payload
from tests.support.clients import built
from tests.support.exchange.golden import NAMES, bits_of, golden

DECODER = Path(__file__).with_suffix(".mjs")
LIMIT_S = 60


def decoded_by_node(payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Has Node decode payloads; returns what it says of each."""
    built("node")
    node = shutil.which("node")
    assert node is not None, "Node.js is needed: install it (Debian: apt-get install nodejs npm)"
    lines = "".join(json.dumps(payload) + "\n" for payload in payloads)
    ended = subprocess.run([node, DECODER], input=lines, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def asked(name: str, case: dict[str, Any], payload: str, size: int) -> dict[str, Any]:
    """Asks for a payload of a golden file; that of the way down may be another codec's."""
    version = golden(name)["version"]
    return {"payload": payload, "codec": case["codec"], "version": version, "size": size, "bits": bits_of(case)}


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_payload_is_read(name: str) -> None:
    cases = golden(name)["cases"]
    sizes = [case["cuts"][case["segment"] + 1] - case["cuts"][case["segment"]] for case in cases.values()]
    found = decoded_by_node(
        [asked(name, case, case["payload"], size) for case, size in zip(cases.values(), sizes, strict=True)]
    )
    assert found == [{"decoded": case["decoded"]} for case in cases.values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_payload_that_must_be_refused_is_refused(name: str) -> None:
    refused = golden(name)["refused"]
    payloads = [asked(name, refused, each, refused["size"]) for each in refused["payloads"].values()]
    assert len(payloads) >= 7
    for why, found in zip(refused["payloads"], decoded_by_node(payloads), strict=True):
        assert "refused" in found, why
        assert found["refused"] != "checksum", why


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["none", "bf16"])
def test_sums_of_tensors_as_they_are_are_read(kind: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 3.0e-39, 1e30, -0.0, 0.1, 65504.0]).to(kind)
    payload = wire.encode(sum_payload(values)).hex()
    [found] = decoded_by_node([{"payload": payload, "codec": "sum", "version": 1, "size": 8, "bits": 0}])
    assert found == {"decoded": [[place, value] for place, value in enumerate(values.tolist()) if value]}


def test_a_payload_that_was_damaged_on_the_way_is_refused() -> None:
    data = bytes.fromhex(golden("topk")["cases"]["few"]["payload"])
    damaged = [data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in range(len(data))]
    damaged += [data[:place] for place in range(len(data))] + [data + b"\0"]
    payloads = [{"payload": d.hex(), "codec": "topk", "version": 1, "size": 20, "bits": 0} for d in damaged]
    assert all("refused" in found for found in decoded_by_node(payloads))
