"""The codec that docs/exchange.md writes in one file does what it says, wherever it is installed from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import Payload, PayloadInvalid, Round, SegmentCodec
from tests.support.exchange.codec_cases import gradient

SIZE, CUTS = 9001, (0, 4096, 8192, 8192, 9001)
MODULE = "documented_sign"


@pytest.fixture(scope="module")
def text(repository_root: Path) -> str:
    """Returns the example, as the page has it."""
    page = (repository_root / "docs/exchange.md").read_text(encoding="utf-8")
    [found] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ENTRIES" in block]
    return str(found)


@pytest.fixture(scope="module")
def codec(text: str) -> SegmentCodec:
    """Returns the codec, made of its default settings."""
    module = ModuleType(MODULE)
    exec(compile(text, "docs/exchange.md", "exec", dont_inherit=True), module.__dict__)
    [entry] = module.ENTRIES
    made = entry.make(entry.settings())
    assert isinstance(made, SegmentCodec)
    assert made.name == entry.name
    return made


def decoded(codec: SegmentCodec, payloads: Sequence[Payload]) -> Tensor:
    """Sends payloads over the wire and adds them up."""
    out = torch.zeros(SIZE)
    for payload, (left, right) in zip(payloads, pairwise(CUTS), strict=True):
        codec.add(wire.decode(wire.encode(payload)), out[left:right])
    return out


def test_what_is_decoded_and_what_is_kept_back_is_what_was_given(codec: SegmentCodec) -> None:
    state, given, got = codec.new_state(torch.zeros(SIZE)), torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(1, 6):
        given += gradient(SIZE, number)
        payloads = codec.encode(gradient(SIZE, number), state, CUTS, Round(number=number))
        assert sum(payload.nbytes for payload in payloads) < SIZE * 4 / 15
        got += decoded(codec, payloads)
    assert codec.residual_name is not None
    torch.testing.assert_close(got + state[codec.residual_name], given, rtol=1e-4, atol=1e-4)

    codec.credit(payloads[1], state, CUTS[1])
    got -= decoded(codec, payloads) * ((torch.arange(SIZE) >= CUTS[1]) & (torch.arange(SIZE) < CUTS[2]))
    torch.testing.assert_close(got + state[codec.residual_name], given, rtol=1e-4, atol=1e-4)

    got += decoded(codec, codec.encode(torch.zeros(SIZE), state, CUTS, Round(number=6, flush=True)))
    torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-4)
    assert not state[codec.residual_name].any()


def test_a_shard_sums_what_ranks_have_sent(codec: SegmentCodec) -> None:
    shard, sum_ = Shard(codec), torch.zeros(809)
    for number in range(1, 100):
        sent = [codec.encode(torch.ones(809) * rank, codec.new_state(sum_), [0, 809], Round(number=number))[0]
                for rank in (1, 2, 3)]  # fmt: skip
        codec.reply().add(shard.reduce(0, sent, Round(number=number)), sum_)
    torch.testing.assert_close(sum_, torch.full((809,), 99 * 6.0), rtol=1e-3, atol=0)


def spoilt(payload: Payload) -> Iterator[Payload]:
    first, *rest = payload.parts
    yield replace(payload, version=2)
    yield replace(payload, size=SIZE - 1)
    yield replace(payload, parts=(first[1:], *rest))
    yield replace(payload, parts=(first.to(torch.int16), *rest))
    yield replace(payload, parts=(*payload.parts[:-1], payload.parts[-1] * float("inf")))


@pytest.mark.parametrize("flush", [False, True])
def test_what_it_does_not_make_is_refused_and_nothing_of_it_is_added(codec: SegmentCodec, flush: bool) -> None:
    [payload] = codec.encode(
        gradient(SIZE), codec.new_state(torch.zeros(SIZE)), [0, SIZE], Round(number=1, flush=flush)
    )
    for bad in spoilt(payload):
        out = torch.zeros(SIZE)
        with pytest.raises(PayloadInvalid):
            codec.add(bad, out)
        assert not out.any()


def test_a_run_can_name_it_once_its_package_is_installed(text: str, tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text(text)
    about = tmp_path / f"{MODULE}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[fulmen.codecs]\nsign = {MODULE}\n")
    program = (
        "import sys\n"
        "from pydantic import ValidationError\n"
        "from fulmen_algorithm.runs.algorithm import AlgorithmSettings\n"
        "ranks = {'parallel': {'kind': 'ddp', 'ranks': 2}, 'exchange': {'codec': 'sign'}}\n"
        "print(AlgorithmSettings(**ranks, optimizer={'kind': 'sgd'}).exchange.name)\n"
        "try:\n"
        "    AlgorithmSettings(**ranks)\n"
        "except ValidationError as error:\n"
        "    print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sign\n")
    assert "sign needs kind sgd" in done.stdout
