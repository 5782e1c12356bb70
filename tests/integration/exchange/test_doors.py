"""The library's functions for training loops: the programs of their page, on real ranks, and sites with a server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import fulmen_exchange
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.ranks import Ranks
from tests.support.exchange.world import RUN, Site

# Ends at once: when the interpreter is taken down while a thread of Gloo still drops tensors of the last collective, torch 2.13
# aborts ("terminate called without an active exception"), now and then on a busy machine, with or without an exchange.
SAME_EVERYWHERE = """
import hashlib, os, sys
from torch.distributed.tensor import DTensor

digest = hashlib.sha256()
for parameter in model.parameters():
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    digest.update(whole.detach().numpy().tobytes())
digests = [None] * dist.get_world_size()
dist.all_gather_object(digests, digest.hexdigest())
assert len(set(digests)) == 1, digests
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def programs(repository_root: Path) -> dict[str, str]:
    """Returns the programs of the page, by the function that each calls."""
    page = (repository_root / "docs/exchange-library.md").read_text(encoding="utf-8")
    found = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_process_group" in block]
    return {re.findall(r"fulmen_exchange\.(\w+)\(", block)[0]: block for block in found}


@pytest.mark.long(short=True)
@pytest.mark.serial
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("door", "rounds"), [("register", 200), ("register_fsdp2", 200), ("OuterLoop", 20)])
def test_the_program_of_the_page_learns_and_all_ranks_have_the_same_weights(
    door: str, rounds: int, size: int, repository_root: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(programs(repository_root)[door] + SAME_EVERYWHERE, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        str(script),
    ]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = re.findall(r"loss (\S+), (\d+) rounds", ended.stdout)
    assert [int(each[1]) for each in told] == [rounds] * size
    assert all(float(each[0]) < 0.1 for each in told), told


async def test_two_sites_without_a_process_group_exchange_through_a_server(site: Site) -> None:
    def train(rank: int) -> list[Tensor]:
        model = nn.Linear(96, 96)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        draw = torch.Generator().manual_seed(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with fulmen_exchange.OuterLoop(
            model, optimizer, "topk_quantised", sync_every=5, ratio=10, link=f"grpc://{site.target}",
            ranks=Ranks(rank=rank, world_size=2), access=ServerAccess(training_run=RUN),
        ) as outer:  # fmt: skip
            for _ in range(12):
                rows = torch.randn(32, 96, generator=draw)
                optimizer.zero_grad()
                (model(rows) - rows).square().mean().backward()
                optimizer.step()
            outer.synchronize()
            assert outer.rounds == 3
            assert outer.drain().metrics["exchange_ratio"] > 2
        return [parameter.detach().clone() for parameter in model.parameters()]

    one, other = await asyncio.gather(*(asyncio.to_thread(train, rank) for rank in range(2)))
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    assert float(one[0].diagonal().mean()) > 0.1


def test_all_problems_of_settings_are_told_at_once_and_nothing_is_opened() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError) as caught:
        fulmen_exchange.OuterLoop(model, optimizer, "topk", ratio=0.5, colour="red")
    assert {error["loc"][-1] for error in caught.value.errors()} == {"ratio", "colour"}
    with pytest.raises(ValidationError, match="needs the gradients of every step"):
        fulmen_exchange.OuterLoop(model, optimizer, "dgc")
    with pytest.raises(ValueError, match="must be torch or grpc://"):
        fulmen_exchange.OuterLoop(model, optimizer, "topk", link="http://x")
