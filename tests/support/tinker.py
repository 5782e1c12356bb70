"""A program that speaks the wire of the `tinker` package, without the package: requests as bytes over HTTP."""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from fulmen_console.tinker import wire
from fulmen_service_kit.security.tokens import Role
from tests.support.console import console_of
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle

__all__ = ["NAME", "Failed", "Program", "datum", "program_of", "served"]

NAME: Final = "tiny/model"
FORMATS: Final = {1: "f", 2: "q"}


class Failed(Exception):
    """A call failed: the status of the request that told so, and its body."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    @property
    def fields(self) -> list[str]:
        """Fields of all problems."""
        return [each["field"] for each in self.body["violations"]]


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Any:
    """Returns an example; `target_tokens` are int64, the other inputs float32."""
    message: Any = wire._CLASSES["Datum"]()
    message.model_input.add().encoded_text.tokens = struct.pack(f"<{len(tokens)}i", *tokens)
    for name, values in inputs.items():
        dtype = 2 if name == "target_tokens" else 1
        tensor = message.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values), dtype
        tensor.shape.append(len(values))
    return message


@dataclass
class Program:
    """A program with one session. Calls of a model are numbered as the package numbers them."""

    url: str
    http: aiohttp.ClientSession
    key: str
    session: str = ""
    number: int = 0

    async def call(self, path: str, body: Any = None, *, method: str = "POST", key: str | None = None) -> Any:
        """Sends a request; returns its JSON. Raises Failed."""
        headers = {"x-api-key": self.key if key is None else key}
        given = {"data": body} if isinstance(body, bytes) else {"json": body if body is not None else {}}
        if isinstance(body, bytes):
            headers["content-type"] = "application/x-protobuf"
        async with self.http.request(method, f"{self.url}/api/v1/{path}", headers=headers, **given) as answer:
            found = await answer.json(content_type=None)
            if answer.status != 200:
                raise Failed(answer.status, found)
            return found

    async def fetch(self, request_id: str) -> Any:
        """Waits for an answer: JSON, or the bytes of a message. Raises Failed."""
        while True:
            async with self.http.post(
                f"{self.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers={"x-api-key": self.key}
            ) as answer:
                if answer.status == 408:
                    continue
                if answer.content_type == "application/x-protobuf":
                    return await answer.read()
                found = await answer.json()
                if answer.status != 200 or "error" in found:
                    raise Failed(answer.status, found)
                return found

    async def do(self, path: str, body: Any) -> Any:
        """Begins a call and waits for its answer."""
        return await self.fetch((await self.call(path, body))["request_id"])

    async def begin(self) -> None:
        """Begins a session."""
        self.session = (await self.call("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]

    async def model(self, number: int = 0, *, seed: int = 0, rank: int = 4, base: str = NAME) -> str:
        """Makes a model; its calls begin with 1."""
        self.number = 0
        config = {"rank": rank, "seed": seed}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": config}
        return str((await self.do("create_model", body))["model_id"])

    def numbered(self, model: str, **body: Any) -> dict[str, Any]:
        """Returns the body of the next call of a model."""
        self.number += 1
        return {"model_id": model, "seq_id": self.number, **body}

    def data(
        self,
        model: str,
        data: Sequence[Any],
        loss: str = "cross_entropy",
        *,
        forward_only: bool = False,
        **config: float,
    ) -> bytes:
        """Returns the body of the next `forward_backward`."""
        self.number += 1
        request: Any = wire._CLASSES["Request"](
            model_id=model,
            seq_id=self.number,
            data=data,
            loss_fn=loss,
            forward_only=forward_only,
            loss_fn_config=config,
        )
        return bytes(request.SerializeToString())

    async def backward(self, *args: Any, **kwargs: Any) -> tuple[list[list[float]], dict[str, float]]:
        """Adds a gradient; returns the log-probabilities of each datum, and the metrics."""
        return _output(await self.do("forward_backward", self.data(*args, **kwargs)))

    async def step(self, model: str, **adam: float) -> dict[str, float]:
        """Takes a step."""
        body = self.numbered(model, adam_params={"learning_rate": 1e-2, **adam})
        return dict((await self.do("optim_step", body))["metrics"])

    async def sampler(self, model: str, number: int) -> str:
        """Makes a sampler of the present weights."""
        body = self.numbered(model, sampling_session_seq_id=number)
        return str((await self.do("save_weights_for_sampler", body))["sampling_session_id"])

    async def sample(
        self, sampler: str, prompt: Sequence[int], number: int = 0, *, n: int = 1, logprobs: bool = False, **params: Any
    ) -> Any:
        """Samples; returns the decoded message, whose tokens and log-probabilities are lists."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": 4, **params},
            "prompt_logprobs": logprobs,
        }
        message: Any = wire._CLASSES["SampleResponse"]()
        message.ParseFromString(await self.do("asample", body))
        found = [(_unpacked("i", each.tokens), _unpacked("f", each.logprobs)) for each in message.sequences]
        return found, _unpacked("f", message.prompt_logprobs)


@asynccontextmanager
async def served(store: StoreHandle, folder: Path, model: Path) -> AsyncIterator[str]:
    """Serves an algorithm service and a console; yields the console's address."""
    async with serving("algorithm", store, folder, model_roots="/", roles=True, trains=True) as parts:
        async with console_of(store, algorithm_target=target_of(parts), tinker_models={NAME: str(model)}) as browser:
            yield browser.url
        await parts.drain()


@asynccontextmanager
async def program_of(url: str, store: StoreHandle, **token: Any) -> AsyncIterator[Program]:
    """Yields a program of a console, with a session."""
    async with aiohttp.ClientSession() as http:
        program = Program(url, http, store.token(token.pop("role", Role.CLIENT), **token))
        await program.begin()
        yield program


def _output(body: bytes) -> tuple[list[list[float]], dict[str, float]]:
    message: Any = wire._CLASSES["Output"]()
    message.ParseFromString(body)
    [record] = message.loss_fn_outputs
    tensor = record.fields["logprobs"]
    ends = [each // 4 for each in _unpacked("q", tensor.offsets)]
    flat = _unpacked("f", tensor.data)
    return [list(flat[a:b]) for a, b in itertools.pairwise(ends)], dict(message.metrics)


def _unpacked(kind: str, content: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(content) // struct.calcsize('<' + kind)}{kind}", content))
