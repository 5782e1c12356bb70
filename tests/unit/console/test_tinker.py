"""Tinker's wire and losses without services: bytes, rows, the order of calls, and bounds of what waits to be fetched."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, FulmenError, NotFound, QuotaExceeded
from fulmen_console.tinker import futures as futures_module
from fulmen_console.tinker import models as models_module
from fulmen_console.tinker import requests as given
from fulmen_console.tinker import wire
from fulmen_console.tinker.futures import Answered, Futures
from fulmen_console.tinker.losses import plan_of
from fulmen_console.tinker.models import Model
from fulmen_console.tinker.names import BaseNames, path_of, read_path
from fulmen_console.tinker.wire import Datum, Pass, encoded_pass, read_pass

# Written by tinker 0.38.0: two chunks of text, targets, weights, a setting of the loss; a forward pass.
BYTES_OF_THE_PACKAGE = bytes.fromhex(
    "0a09733a747261696e3a3010031a6a0a0c0a0a0a0808000000090000000a080a060a040a00000012300a0d7461726765745f746f6b656e73121f0a18"
    "09000000000000000a000000000000000b000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000003f18012201"
    "03220d63726f73735f656e74726f70792a0f0a046265746111000000000000e03f30013a110a0462657461120909000000000000e03f"
)
PROJECT = "projects/p"


def passed(loss: str, data: list[tuple[list[int], dict[str, list[float]]]], **config: float) -> Pass:
    read = [
        Datum(tokens=x, inputs={name: (each, (len(each),)) for name, each in inputs.items()}, problems=())
        for x, inputs in data
    ]
    return Pass(model_id="m", seq_id=1, data=read, loss=loss, config=config, forward_only=False)


def test_what_the_package_sends_is_read() -> None:
    found = read_pass(BYTES_OF_THE_PACKAGE)
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("s:train:0", 3, "cross_entropy", True)
    assert found.config == {"beta": 0.5}
    [datum] = found.data
    assert list(datum.tokens) == [8, 9, 10]
    assert {name: list(values) for name, (values, _) in datum.inputs.items()} == {
        "target_tokens": [9, 10, 11],
        "weights": [0.0, 1.0, 0.5],
    }
    assert not datum.problems
    assert encoded_pass([[1.0, 2.0], [3.0]], {"loss:sum": 2.0}).startswith(b"\n\x0bArrayRecord")


def test_a_row_has_the_input_and_the_last_target_and_no_weight_where_a_target_is_another_token() -> None:
    inputs = {"target_tokens": [0, 10, 11], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 0.5, -0.5]}
    plan = plan_of(passed("importance_sampling", [([8, 9, 10], inputs)]))
    [row] = plan.rows
    assert list(row.token_ids) == [8, 9, 10, 11]
    assert list(row.weights) == [0.0, 0.0, 1.0, 1.0]
    assert list(row.advantages) == [0.0, 0.0, 0.5, -0.5]
    assert list(row.sampler_logprobs) == [0.0, 0.0, -1.0, -2.0]
    assert plan.loss == "importance"


def test_clips_are_given_as_distances_to_the_clip_loss_and_as_bounds_to_cispo() -> None:
    data = [([8], {"target_tokens": [9], "logprobs": [0.0], "advantages": [1.0]})]
    ppo = plan_of(passed("ppo", data, clip_high_threshold=1.28)).settings
    assert ppo == pytest.approx({"low": 0.2, "high": 0.28})
    cispo = plan_of(passed("cispo", data, clip_low_threshold=0.0, clip_high_threshold=5.0)).settings
    assert cispo == {"ratio_min": 0.0, "ratio_max": 5.0}
    for loss, config in (("ppo", {"clip_low_threshold": 0.0}), ("cispo", {"clip_high_threshold": 1.0}), ("dro", {})):
        with pytest.raises(ArgumentInvalid) as refused:
            plan_of(passed(loss, data, **config))
        assert len(refused.value.violations) == 1


def test_dro_is_linearized_with_its_own_derivative() -> None:
    chance = random.Random(0)
    x, beta = list(range(10, 16)), 0.7
    inputs = {
        "target_tokens": [*map(float, x[1:]), 3.0],
        "logprobs": [-chance.random() for _ in x],
        "advantages": [chance.gauss(0, 1) for _ in x],
    }
    plan = plan_of(passed("dro", [(x, inputs)], beta=beta))
    pi = [0.0, *(-chance.random() for _ in x)]

    def loss(logprobs: list[float]) -> float:
        return plan.linearized([logprobs])[1]

    def expected(logprobs: list[float]) -> float:
        each = zip(logprobs[1:], inputs["logprobs"], inputs["advantages"], strict=True)
        return -sum(lp * a - beta / 2 * (lp - q) ** 2 for lp, q, a in each)

    assert loss(pi) == pytest.approx(expected(pi), rel=1e-5)
    [row] = plan.linearized([pi])[0].rows
    for index in range(1, len(pi)):
        moved = [lp + (1e-3 if at == index else 0.0) for at, lp in enumerate(pi)]
        # The term of `reinforce` is -A log pi.
        assert (expected(moved) - expected(pi)) / 1e-3 == pytest.approx(-row.advantages[index], abs=1e-3)


def model() -> Model:
    return Model("s:train:0", PROJECT, "s", pb.Trainer(name=f"{PROJECT}/trainers/t"), base="b")


async def test_calls_are_carried_out_by_number_also_after_one_that_failed() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)
        if number == 2:
            raise NotFound("gone")

    one = model()
    numbers = list(range(1, 30))
    random.Random(1).shuffle(numbers)
    results = await asyncio.gather(
        *(one.in_turn(number, lambda number=number: work(number)) for number in numbers), return_exceptions=True
    )
    assert done == sorted(numbers)
    assert [type(each) for each in results if each is not None] == [NotFound]
    for number in (29, 30 + models_module.MAX_AHEAD):
        with pytest.raises(ArgumentInvalid):
            await one.in_turn(number, lambda: work(0))


async def test_a_call_whose_predecessor_never_comes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "GAP_S", 0.01)

    async def work() -> None:
        raise AssertionError("it is not its turn")

    with pytest.raises(NotFound, match="Call 1 of the model"):
        await model().in_turn(2, work)


async def test_answers_expire_and_are_one_projects_alone() -> None:
    now = 0.0
    futures = Futures(clock=lambda: now)

    async def work() -> Answered:
        return Answered(b"x" * 100, b"application/json")

    future = futures.begin("a", PROJECT, work, size_bytes=7)
    assert futures.held_bytes == 7
    assert futures.begin("a", PROJECT, work) is future
    await future.done.wait()
    assert futures.held_bytes == 100
    for project in ("projects/other", ""):
        with pytest.raises(NotFound):
            futures.find("a", project)
    now = futures_module.KEEP_S - 1
    futures.fetched(futures.find("a", PROJECT))
    now += futures_module.KEEP_FETCHED_S
    with pytest.raises(NotFound):
        futures.find("a", PROJECT)
    assert (len(futures), futures.held_bytes) == (0, 0)


async def test_what_waits_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MAX_FUTURES", 2)
    monkeypatch.setattr(futures_module, "MAX_BYTES", 1000)
    futures, hold = Futures(), asyncio.Event()

    async def work() -> Answered:
        await hold.wait()
        return Answered(b"", b"")

    # A project holds as much as it leaves free: half of it, if it is alone.
    for refused in (600, 501):
        with pytest.raises(QuotaExceeded):
            futures.begin("a", PROJECT, work, size_bytes=refused)
    futures.begin("a", PROJECT, work, size_bytes=500)
    with pytest.raises(QuotaExceeded):
        futures.begin("b", "projects/other", work, size_bytes=300)
    futures.begin("b", PROJECT, work)
    with pytest.raises(QuotaExceeded):
        futures.begin("c", PROJECT, work)
    futures.begin("c", "projects/other", work)
    await futures.close()
    errors: list[Any] = [futures.find(each, PROJECT).error for each in "ab"]
    assert all(isinstance(each, FulmenError) for each in errors)


async def test_answers_for_which_there_is_no_room_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MAX_BYTES", 1000)
    futures = Futures()

    async def work() -> Answered:
        return Answered(b"x" * 300, b"")

    begun = [futures.begin(str(number), PROJECT, work) for number in range(4)]
    begun.append(futures.begin("other", "projects/other", work))
    for future in begun:
        await future.done.wait()
    assert [future.answer is not None for future in begun] == [True, False, False, False, True]
    assert all(future.task is None for future in begun)
    assert isinstance(begun[1].error, QuotaExceeded)
    assert futures.held_bytes == 600


MANY = 300_000
BEGIN = b'{"sampling_session_id":"s","seq_id":1,"sampling_params":{},"prompt":{"chunks":['


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (given.Sample, BEGIN + b"0," * MANY + b"0]}}"),
        (given.Sample, BEGIN + b'{"tokens":[' + b'"",' * MANY + b"0]}]}}"),
        (given.Sample, BEGIN + b'{"tokens":[' + b"1," * MANY + b"1]}]}}"),
        (given.Sample, BEGIN + b'{"tokens":[' + b"1," * 3 * MANY * 3 + b"1]}]}}"),
        (given.OptimStep, b'{"model_id":"m","seq_id":1,"adam_params":[' + b"0," * MANY + b"0]}"),
        (given.OfModel, b"[" * MANY),
    ],
    ids=["chunks", "texts", "tokens", "bytes", "settings", "depth"],
)
def test_a_body_with_very_many_problems_is_refused_with_a_few_of_them(kind: Any, body: bytes) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        given.read(kind, body)
    assert 1 <= len(refused.value.violations) <= given.MAX_REPORTED
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("stop", [[2**31], [-1], [10**30], [1] * 65, ["a"] * 17, [1] * 30_000])
def test_stops_are_ids_and_texts_that_a_trainer_takes(stop: list[Any]) -> None:
    body = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {"stop": stop}}
    with pytest.raises(ArgumentInvalid, match=r"sampling_params\.stop"):
        given.read(given.Sample, json.dumps(body).encode())


def test_a_pass_of_very_many_parts_is_refused_by_their_numbers() -> None:
    entry = b"\x12\x05\x0a\x03"  # an input with a name of three bytes
    inputs = b"".join(entry + b"%03d" % number for number in range(900))
    names = b"".join(b"\x2a\x05\x0a\x03%03d" % number for number in range(900))
    for body, field in (
        (b"\x1a\x00" * 5000, "data"),
        (b"\x1a\x80\x80\x10" + b"\x0a\x00" * 131_072, "data.model_input"),
        (b"\x1a" + bytes([len(inputs) & 127 | 128, len(inputs) >> 7]) + inputs, "data.loss_fn_inputs"),
        (names, "loss_fn_config"),
    ):
        with pytest.raises(ArgumentInvalid) as refused:
            read_pass(body)
        assert [each.field for each in refused.value.violations] == [field]


def test_a_shape_of_very_many_dimensions_is_not_quoted() -> None:
    message: Any = wire._CLASSES["Request"]()
    message.ParseFromString(BYTES_OF_THE_PACKAGE)
    message.data[0].loss_fn_inputs["weights"].shape.extend(range(100_000))
    [problem] = read_pass(message.SerializeToString()).data[0].problems
    assert len(problem.description) < 100


def test_paths_name_checkpoints_of_the_callers_project_alone() -> None:
    path = path_of(f"{PROJECT}/trainers/t-1", "weights", "000010")
    assert path == "tinker://t-1/weights/000010"
    trainer, kind, checkpoint = read_path(path, PROJECT)
    assert (trainer, kind) == (f"{PROJECT}/trainers/t-1", "weights")
    assert checkpoint == f"{PROJECT}/trainers/t-1/checkpoints/weights.000010"
    for bad in (
        "tinker://../weights/x",
        "tinker://t/other/x",
        "tinker://t/weights/X!",
        "x",
        "tinker://t/weights/" + "x" * 60,
    ):
        with pytest.raises(ArgumentInvalid):
            read_path(bad, PROJECT)


def test_names_of_base_models_are_those_of_the_setting_or_of_the_hub() -> None:
    names = BaseNames({"ours": "model:support", "Qwen/Qwen3-8B": "/models/8b"})
    assert names.policy("ours").base == "model:support"
    assert names.policy("Qwen/Qwen3-8B").path == "/models/8b"
    hub = names.policy("Qwen/Qwen3-0.6B")
    assert (hub.base, hub.name) == ("hf:Qwen/Qwen3-0.6B", "tinker-qwen3-0.6b")
    assert [names.name_of(names.policy(each)) for each in ("ours", "Qwen/Qwen3-0.6B")] == ["ours", "Qwen/Qwen3-0.6B"]
    with pytest.raises(ArgumentInvalid, match="Known are: Qwen/Qwen3-8B, ours"):
        names.policy("nothing")
