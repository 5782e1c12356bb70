"""Programs of Tinker's API over real HTTP, by requests as bytes: losses, order, samplers, checkpoints, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.models import small_model
from tests.support.console import console_of
from tests.support.store.running import StoreHandle
from tests.support.tinker import NAME, Failed, Program, datum, program_of, served

TOKENS = [[8, 9, 10, 11], [12, 13, 14], [9, 9, 8, 15, 16]]
TARGETS = [[9, 10, 11, 12], [13, 14, 15], [9, 8, 15, 16, 17]]
WEIGHTS = [[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 2.0], [0.0, -1.0, 1.0, 0.25, 1.0]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def program(store: StoreHandle, tmp_path: Path, model_folder: Path) -> AsyncIterator[Program]:
    async with served(store, tmp_path, model_folder) as url, program_of(url, store) as opened:
        yield opened


def weighted() -> list[object]:
    return [datum(x, target_tokens=t, weights=w) for x, t, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True)]


def rated(logprobs: list[list[float]], advantages: list[list[float]]) -> list[object]:
    given = zip(TOKENS, TARGETS, logprobs, advantages, strict=True)
    return [datum(x, target_tokens=t, logprobs=q, advantages=a) for x, t, q, a in given]


async def test_a_program_learns_saves_samples_and_goes_on_from_a_checkpoint(program: Program) -> None:
    assert (await program.call("client/config"))["parallel_fwdbwd_chunks"] is False
    assert (await program.call("get_server_capabilities", method="GET"))["supported_models"][0]["model_name"] == NAME
    model = await program.model()
    info = await program.call("get_info", {"model_id": model})
    assert (info["model_data"]["model_name"], info["lora_rank"]) == (NAME, 4)

    # The answers are asked for after all was sent.
    data = [datum(x, target_tokens=t) for x, t in zip(TOKENS, TARGETS, strict=True)][:2]
    waiting = []
    for _ in range(25):
        waiting.append((await program.call("forward_backward", program.data(model, data)))["request_id"])
        body = program.numbered(model, adam_params={"learning_rate": 5e-2})
        waiting.append((await program.call("optim_step", body))["request_id"])
    answers = [await program.fetch(each) for each in waiting]
    assert answers[-1]["metrics"]["optimizer_steps"] == 25
    _, before = await program.backward(await program.model(5), data, forward_only=True)
    program.number = len(waiting)
    logprobs, after = await program.backward(model, data, forward_only=True)
    # The frozen embedding of an untrained model allows no more.
    assert after["loss:sum"] < 0.9 * before["loss:sum"]

    saved = await program.do("save_weights", program.numbered(model, path="000025"))
    with pytest.raises(Failed, match="exists; set overwrite"):
        await program.do("save_weights", program.numbered(model, path="000025"))
    kept = await program.do("save_weights_for_sampler", program.numbered(model, path="000025"))
    assert [saved["path"].split("/")[3:], kept["path"].split("/")[3:]] == [
        ["weights", "000025"],
        ["sampler_weights", "000025"],
    ]
    sampling = {"session_id": program.session, "sampling_session_seq_id": 7, "model_path": kept["path"]}
    named = (await program.call("create_sampling_session", sampling))["sampling_session_id"]
    assert (await program.call(f"samplers/{named}", method="GET"))["base_model"] == NAME
    drawn = await program.sample(named, [12], temperature=0, max_tokens=3)
    assert drawn == await program.sample(await program.sampler(model, 8), [12], temperature=0, max_tokens=3)

    load = {"session_id": program.session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    other = (await program.do("load_weights", load))["model_id"]
    assert other == f"{program.session}:train:1"
    program.number = 0
    again, _ = await program.backward(other, data, forward_only=True)
    for found, expected in zip(again, logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


async def test_losses_are_those_of_the_documentation(program: Program) -> None:
    model = await program.model()
    pi, metrics = await program.backward(model, weighted())
    assert metrics["loss:sum"] == pytest.approx(
        -sum(w * lp for ws, lps in zip(WEIGHTS, pi, strict=True) for w, lp in zip(ws, lps, strict=True)), rel=1e-5
    )
    q = [[lp + d for lp, d in zip(lps, (0.0, 0.4, -0.5, 0.1, -0.1), strict=False)] for lps in pi]
    advantages = [[0.0, 1.0, -1.0, 0.5], [1.0, -2.0, 0.0], [0.0, 1.0, 1.0, -1.0, 0.5]]

    def loss(term: object) -> float:
        rows = zip(pi, q, advantages, strict=True)
        return sum(term(lp, math.exp(lp - s), lp - s, a) for row in rows for lp, s, a in zip(*row, strict=True))  # type: ignore[operator]

    def clip(r: float) -> float:
        return min(max(r, 0.9), 1.2)

    for name, config, term in (
        ("importance_sampling", {}, lambda lp, r, d, a: -r * a),
        ("ppo", {"clip_low_threshold": 0.9}, lambda lp, r, d, a: -min(r * a, clip(r) * a)),
        ("cispo", {"clip_low_threshold": 0.9}, lambda lp, r, d, a: -clip(r) * lp * a),
        ("dro", {"beta": 0.3}, lambda lp, r, d, a: -(lp * a - 0.15 * d * d)),
    ):
        found, metrics = await program.backward(model, rated(q, advantages), name, **config)
        assert metrics["loss:sum"] == pytest.approx(loss(term), rel=1e-4), name
        assert [len(each) for each in found] == [4, 3, 5]


@pytest.mark.long(short=True)
async def test_the_gradient_of_dro_is_that_of_its_loss(program: Program) -> None:
    """Where the sampler is the policy, that is the one of the policy gradient; away from it, beta pulls back."""
    advantages = [[0.0, 1.0, -1.0, 0.5], [1.0, -2.0, 0.0], [0.0, 1.0, 1.0, -1.0, 0.5]]
    changes = []
    for number, (loss, config, shift) in enumerate(
        (("importance_sampling", {}, 0.0), ("dro", {"beta": 0.5}, 0.0), ("dro", {"beta": 0.5}, 1.0))
    ):
        model = await program.model(number)
        pi, _ = await program.backward(model, rated(advantages, advantages), "importance_sampling", forward_only=True)
        q = [[lp - shift for lp in row] for row in pi]
        await program.backward(model, rated(q, advantages), loss, **config)
        await program.step(model)
        changes.append(
            (await program.backward(model, rated(q, advantages), "importance_sampling", forward_only=True))[0]
        )
    flat = [[lp for row in each for lp in row] for each in changes]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    assert flat[2] != pytest.approx(flat[1], abs=1e-3)
    # The same as the policy gradient with the advantage A - beta (log pi - log q).
    model = await program.model(9)
    pi, _ = await program.backward(model, rated(advantages, advantages), "importance_sampling", forward_only=True)
    await program.backward(model, rated(pi, [[a - 0.5 for a in row] for row in advantages]), "importance_sampling")
    await program.step(model)
    expected, _ = await program.backward(model, rated(pi, advantages), "importance_sampling", forward_only=True)
    assert flat[2] == pytest.approx([lp for row in expected for lp in row], abs=1e-5)


async def test_calls_that_arrive_in_any_order_are_carried_out_in_that_of_their_numbers(program: Program) -> None:
    one, other = await program.model(0), await program.model(1)
    program.number = 0
    for _ in range(3):
        await program.backward(one, weighted())
        await program.step(one)
    expected, _ = await program.backward(one, weighted(), forward_only=True)

    program.number = 0
    bodies: list[tuple[str, object]] = []
    for _ in range(3):
        bodies.append(("forward_backward", program.data(other, weighted())))
        bodies.append(("optim_step", program.numbered(other, adam_params={"learning_rate": 1e-2})))
    # Each twice, as after a broken connection.
    sent = [await program.call(*body) for body in [*reversed(bodies), *bodies]]
    assert [each["request_id"] for each in sent[:6]] == [each["request_id"] for each in sent[:5:-1]]
    await asyncio.gather(*(program.fetch(each["request_id"]) for each in sent))
    found, _ = await program.backward(other, weighted(), forward_only=True)
    assert found == expected


async def test_a_sampler_keeps_the_weights_that_it_was_made_of(program: Program) -> None:
    model = await program.model()
    before = await program.sampler(model, 0)
    first, prompt = await program.sample(before, [8, 9, 10], 0, n=4, seed=3, logprobs=True)
    assert math.isnan(prompt[0])
    for number in range(10):
        await program.backward(model, weighted()[:2])
        await program.step(model, learning_rate=0.1)
        if number % 2:
            after = await program.sampler(model, 1 + number)
    assert await program.sample(before, [8, 9, 10], 1, n=4, seed=3, logprobs=True) != (
        first,
        prompt,
    )  # prompt[0] is nan
    again, _ = await program.sample(before, [8, 9, 10], 2, n=4, seed=3)
    assert again == first
    later, _ = await program.sample(after, [8, 9, 10], 0, n=4, seed=3)
    assert later != first
    # The log-probabilities of samples at temperature 1 are those of a pass.
    [(tokens, logprobs)], _ = await program.sample(after, [8], 1, seed=1, max_tokens=3, stop=[3])
    x = [8, *tokens[:-1]]
    found, _ = await program.backward(model, [datum(x, target_tokens=tokens)], forward_only=True)
    assert found[0] == pytest.approx(logprobs, abs=1e-4)


async def test_texts_and_tokens_end_a_completion(program: Program) -> None:
    base = {"session_id": program.session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = (await program.call("create_sampling_session", base))["sampling_session_id"]
    [(tokens, _)], _ = await program.sample(sampler, [8, 9], 0, seed=5, max_tokens=12, stop=[0])
    assert len(tokens) > 2
    [(cut, _)], _ = await program.sample(sampler, [8, 9], 1, seed=5, max_tokens=12, stop=[tokens[1]])
    assert cut == tokens[: tokens.index(tokens[1]) + 1]
    # Token 6 is "0", and so on: the characters of the arithmetic example.
    texts = {6 + number: character for number, character in enumerate("0123456789+-*/=(). ?")}
    known = next(index for index, token in enumerate(tokens) if token in texts)
    [(by_text, _)], _ = await program.sample(sampler, [8, 9], 2, seed=5, max_tokens=12, stop=texts[tokens[known]])
    assert by_text == tokens[: tokens.index(tokens[known]) + 1]


async def test_bad_data_names_every_problem_and_later_calls_go_on(program: Program) -> None:
    model = await program.model()
    bad = [
        datum([8, 9], target_tokens=[9], weights=[1.0, 1.0]),
        datum([8, 9], weights=[1.0, math.inf], advantages=[1.0, 1.0]),
        datum([8, 9], target_tokens=[7, 10], weights=[1.0, 1.0]),
        datum([], target_tokens=[]),
    ]
    with pytest.raises(Failed) as refused:
        await program.do("forward_backward", program.data(model, bad, low=1.0))
    assert refused.value.body["category"] == "user"
    assert refused.value.fields == [
        "loss_fn_config.low",
        "data[0].loss_fn_inputs.target_tokens",
        "data[1].loss_fn_inputs.advantages",
        "data[1].loss_fn_inputs.target_tokens",
        "data[1].loss_fn_inputs.weights",
        "data[2].loss_fn_inputs.target_tokens[0]",
        "data[3].model_input",
    ]
    with pytest.raises(Failed, match=r"stable_reinforce.*supported are: cross_entropy, importance_sampling"):
        await program.do("forward_backward", program.data(model, weighted(), "stable_reinforce"))
    with pytest.raises(Failed) as unknown:
        await program.do("forward_backward", program.data(model, [datum([8, 9999], target_tokens=[9999, 8])]))
    assert unknown.value.fields == ["data[0].token_ids"]
    with pytest.raises(Failed) as adam:
        await program.step(model, beta1=2.0, eps=0.0)
    assert adam.value.fields == ["adam_params.beta1", "adam_params.eps"]
    await program.backward(model, weighted())
    assert (await program.step(model))["optimizer_steps"] == 1


async def test_requests_that_make_no_sense_are_refused_at_once(program: Program) -> None:
    with pytest.raises(Failed) as no_message:
        await program.call("forward_backward", b"\xff\xff")
    assert (no_message.value.status, no_message.value.fields) == (400, ["body"])
    with pytest.raises(Failed) as create:
        await program.call(
            "create_model", {"session_id": program.session, "base_model": NAME, "lora_config": {"rank": 0}}
        )
    assert create.value.fields == ["model_seq_id", "lora_config.rank"]
    with pytest.raises(Failed, match="is neither a model of this service"):
        await program.model(base="nothing")
    with pytest.raises(Failed) as sample:
        await program.sample("x", [8], top_k=5, temperature=-1)
    assert sample.value.fields == ["sampling_params.temperature", "sampling_params.top_k"]
    load = {"session_id": program.session, "path": "tinker://x/weights/y", "optimizer": False}
    with pytest.raises(Failed) as weights:
        await program.call("load_weights", load)
    assert weights.value.fields == ["optimizer", "session_id"]
    for path, status in (("training_runs/x/checkpoints", 404), ("retrieve_future", 410)):
        with pytest.raises(Failed) as none:
            await program.call(path, {"request_id": "x"})
        assert none.value.status == status
    with pytest.raises(Failed) as session:
        await program.call("session_heartbeat", {"session_id": "x"})
    assert session.value.status == 404


async def test_only_tokens_that_may_train_train_and_projects_see_nothing_of_each_other(
    program: Program, store: StoreHandle
) -> None:
    with pytest.raises(Failed) as stranger:
        await program.call("create_session", {}, key="tml-nobody")
    assert (stranger.value.status, stranger.value.body["reason"]) == (401, "TOKEN_INVALID")
    model = await program.model()
    request = (await program.call("forward_backward", program.data(model, weighted())))["request_id"]
    for role in (Role.READER, Role.RUNNER):
        watcher = Program(program.url, program.http, store.token(role, project="projects/default"))
        for path, body in (
            ("create_session", {}),
            ("session_heartbeat", {"session_id": program.session}),
            ("retrieve_future", {"request_id": request}),
            (f"sessions/{program.session}/finish", {}),
        ):
            with pytest.raises(Failed) as refused:
                await watcher.call(path, body)
            assert (refused.value.status, refused.value.body["reason"]) == (403, "PERMISSION_DENIED")
    other = Program(program.url, program.http, f"tml-{store.token(Role.CLIENT, project='projects/other')}")
    await other.begin()
    for path, body in (
        ("get_info", {"model_id": model}),
        ("session_heartbeat", {"session_id": program.session}),
        ("retrieve_future", {"request_id": request}),
    ):
        with pytest.raises(Failed) as unseen:
            await other.call(path, body)
        assert unseen.value.status in (404, 410)
    await program.fetch(request)


async def test_a_page_of_another_site_trains_nothing_where_no_token_is_needed(store: StoreHandle) -> None:
    async with console_of(store, dev_mode=True, algorithm_target=store.target) as browser:
        request = b'{"session_id": "x"}'
        page = {"content_type": "text/plain", "origin": "https://elsewhere.example"}
        for headers, status in ((page, 403), ({"sec_fetch_site": "cross-site"}, 403), ({}, 404)):
            answer = await browser.send("POST", "/api/v1/session_heartbeat", request, **headers)
            assert answer.status == status, answer.body


async def trainers(program: Program) -> int:
    """Returns the number of trainers in the algorithm service."""
    address = f"{program.url}/fulmen.algorithm.v1.TrainerService/ListTrainers"
    async with program.http.post(address, json={}, headers={"authorization": f"Bearer {program.key}"}) as answer:
        return len((await answer.json()).get("trainers", []))


async def test_weights_that_replace_others_leave_no_trainer_behind(program: Program) -> None:
    first = await program.model()
    saved = await program.do("save_weights", program.numbered(first, path="begin"))
    other = await program.model(1)
    for _ in range(3):
        await program.do("load_weights", program.numbered(other, path=saved["path"], optimizer=True))
        await program.backward(other, weighted())
        assert await trainers(program) == 2
    assert (await program.call("get_info", {"model_id": first}))["model_name"] == NAME


async def test_a_model_that_is_made_while_its_session_ends_leaves_no_trainer_behind(program: Program) -> None:
    config = {"rank": 4, "seed": 0}
    body = {"session_id": program.session, "model_seq_id": 0, "base_model": NAME, "lora_config": config}
    request = (await program.call("create_model", body))["request_id"]
    await program.call(f"sessions/{program.session}/finish", {})
    with pytest.raises(Failed, match="session ended before"):
        await program.fetch(request)
    assert await trainers(program) == 0


@pytest.mark.long(short=True)
async def test_a_finished_session_leaves_what_was_saved(program: Program) -> None:
    kept, dropped = await program.model(0), await program.model(1)
    for model in (kept, dropped):
        program.number = 0
        await program.sampler(model, 0 if model == kept else 1)
    program.number = 1
    saved = await program.do("save_weights", program.numbered(kept, path="final"))
    await program.call(f"sessions/{program.session}/finish", {"reason": {"type": "success"}})
    with pytest.raises(Failed):
        await program.call("get_info", {"model_id": kept})
    await program.begin()
    load = {"session_id": program.session, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
    assert (await program.do("load_weights", load))["model_id"] == f"{program.session}:train:0"
