"""Deltas and adapters are loaded into a running engine after a check; a refused one changes nothing."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fulmen_algorithm.engines.embedded.__main__ import arguments
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.torch_tensors import published_tensors
from tests.support.algorithm.embedded_engine import GATE_DEADLINE_S, Hold, logprobs_in, teacher_forced


@dataclass(kw_only=True)
class Trained:
    """A policy that changes a little at each call, and writes itself."""

    policy: PolicyModel
    folder: Path
    written: list[WrittenWeights]

    def change(self, scale: float = 1e-6) -> None:
        torch.manual_seed(len(self.written))
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter -= scale * torch.randn_like(parameter).sign()

    def write(self, *, delta: bool = True) -> Path:
        """Writes the present weights; returns the folder."""
        base = self.written[-1].sha256 if delta and self.written else ""
        folder = self.folder / f"{len(self.written)}-{'delta' if base else 'full'}"
        order = WeightsOrder(dtype="bfloat16", base_sha256=base, keep=True)
        written = self.policy.publish(folder, order)
        assert written is not None
        self.written.append(written)
        return folder


@pytest.fixture
def trained(model_dirs: list[Path], tmp_path: Path) -> Trained:
    """The first model, published once in full."""
    made = Trained(policy=PolicyModel.load(model_dirs[0]), folder=tmp_path, written=[])
    made.write()
    return made


@pytest.fixture
def options(trained: Trained) -> Any:
    return arguments(["--model", str(trained.folder / "0-full")])


async def load(engine: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    body = {key: str(value) if isinstance(value, Path) else value for key, value in body.items()}
    async with engine.client.post("/admin/weights", json=body) as response:
        return response.status, await response.json()


async def test_a_chain_of_deltas_ends_at_the_weights_of_the_folder(engine, trained):
    for version in range(1, 4):
        trained.change()
        folder = trained.write()
        sha256 = trained.written[-1].sha256
        assert trained.written[-1].kind is WeightsKind.DELTA
        status, answer = await load(engine, kind="delta", path=folder, version=version, sha256=sha256)
        assert (status, answer["version"], answer["sha256"]) == (200, version, sha256)
        assert answer["size_bytes"] == trained.written[-1].size_bytes < trained.written[-1].full_bytes / 4
    full = trained.write(delta=False)
    loaded = PolicyModel.load(full)
    for name, tensor in published_tensors(loaded.model).items():
        assert torch.equal(tensor, published_tensors(engine.generator.model)[name]), name
    _, answer = await engine.chat(temperature=0)
    assert logprobs_in(answer) == pytest.approx(teacher_forced(loaded, answer), abs=1e-4)


async def test_an_answer_continues_over_a_delta_and_names_the_version_of_each_token(
    engine, trained, greedy_without_end
):
    body = {"messages": [{"role": "user", "content": greedy_without_end}], "max_tokens": 50, "temperature": 0}
    hold = Hold(engine, at=10)
    running = asyncio.create_task(engine.chat(**body))
    await hold.reached()
    trained.change(scale=2e-4)
    order = {"kind": "delta", "path": trained.write(), "version": 7, "sha256": trained.written[-1].sha256}
    loading = asyncio.create_task(load(engine, **order))
    async with asyncio.timeout(GATE_DEADLINE_S):
        while engine.generator._swaps.empty():  # noqa: ASYNC110 - nobody is told that it waits
            await asyncio.sleep(0)
    hold.release()
    assert (await loading)[0] == 200
    status, answer = await running
    assert status == 200
    ranges = answer["weight_versions"]
    assert [r["version"] for r in ranges] == [0, 7]
    assert ranges[0]["end"] == ranges[1]["start"] == 10
    assert (await engine.stats())["swaps_in_mid_batch"] == 1


async def test_a_delta_of_other_weights_is_answered_with_409_and_nothing_changes(engine, trained):
    trained.change()
    trained.write()
    trained.change()
    later = trained.write()
    before = await engine.chat(temperature=0)
    status, answer = await load(engine, kind="delta", path=later, version=9)
    assert (status, answer["error"]["type"]) == (409, "invalid_request_error")
    after = await engine.chat(temperature=0)
    assert before[1]["choices"] == after[1]["choices"]
    assert engine.generator.version == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-4] + bytes(b ^ 0x55 for b in content[-4:]),
        lambda content: b"",
    ],
)
async def test_a_damaged_delta_is_refused_and_the_next_good_one_is_taken(engine, trained, spoil):
    trained.change()
    folder = trained.write()
    file = folder / "delta.safetensors"
    content = file.read_bytes()
    file.write_bytes(spoil(content))
    status, _ = await load(engine, kind="delta", path=folder, version=1)
    assert status == 422
    assert engine.generator.version == 0
    file.write_bytes(content)
    assert (await load(engine, kind="delta", path=folder, version=1))[0] == 200


async def test_a_checksum_that_was_named_must_be_met(engine, trained):
    trained.change()
    delta = trained.write()
    full = trained.write(delta=False)
    for kind, folder in (("delta", delta), ("full", full)):
        status, answer = await load(engine, kind=kind, path=folder, version=1, sha256="0" * 64)
        assert (status, answer["error"]["param"]) == (422, "sha256")
    assert (await load(engine, kind="full", path=full, version=1, sha256=trained.written[-1].sha256))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "half", "path": "x", "version": 1}, "kind"),
        ({"kind": "delta", "version": 1}, "path"),
        ({"path": "x", "version": -1}, "version"),
        ({"kind": "lora", "adapters": ["x"], "version": 1}, "adapters"),
        ({"path": "x", "version": 1, "sha256": 5}, "sha256"),
    ],
)
async def test_an_invalid_order_is_refused_with_its_parameter(engine, body, param):
    status, answer = await load(engine, **body)
    assert (status, answer["error"]["param"]) == (400, param)
