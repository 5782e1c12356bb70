"""Rollouts for the browser tests: of a short training of the agent that `fulmen init` writes, one of 10,000 spans, and one whose
every text is hostile.

    python -m tests.support.browser_rollouts FOLDER   # the state directory of a running stack

Prints one line of JSON: `{"run": "name of the training", "large": "projects/default/rollouts/…", "hostile": "…"}`. The last two have
no agent: what runner and proxy would have written is written in their place.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import uuid7
from fulmen.model_call import pack_logprobs, pack_token_ids
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import attempt_pb2, rollout_pb2, rollout_service_pb2, span_pb2
from fulmen.type.v1 import model_call_pb2
from tests.support.sdk.trajectory_cases import attribute
from tests.support.store.running import Runner, Stubs
from tests.support.store.spans import append

LARGE: Final = 10_000
CHUNK: Final = 500
TRAIN_LIMIT_S: Final = 240
# What is shortened of the configuration: enough for an agent that calls its tool.
SHORT: Final = {
    "steps = 300": "steps = 60",
    "steps = 30\n": "steps = 2\n",
    "prompts_per_step = 10": "prompts_per_step = 4",
    "group_size = 8": "group_size = 4",
}
BEGIN_NS: Final = 1_700_000_000_000_000_000
MS: Final = 1_000_000
MARK: Final = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
STRANGE: Final = "\u202egnp.exe\u202c \u0000\u001b[31m \u200b\u2028 ']);--"
MEGABYTE: Final = "x" * 1_000_000
IMAGE: Final = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' onload=\"document.title='hacked'\"/>"


def span(
    name: str, span_id: int, start_ms: float, lasts_ms: float, parent: int = 0, **attributes: Any
) -> trace_pb2.Span:
    """Makes a span; ids are numbers, and 0 is none."""
    start_ns = BEGIN_NS + round(start_ms * MS)
    return trace_pb2.Span(
        trace_id=bytes(15) + b"\1",
        span_id=span_id.to_bytes(8),
        parent_span_id=parent.to_bytes(8) if parent else b"",
        name=name,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=start_ns + round(lasts_ms * MS),
        attributes=[attribute(key, value) for key, value in attributes.items()],
    )


def large_spans() -> list[trace_pb2.Span]:
    """Makes ten thousand spans: a hundred steps of an agent with some tools each, and what these do."""
    spans = [span("agent", 1, 0, 100_000)]
    for number in range(2, LARGE + 1):
        step, within = divmod(number - 2, 100)
        if within == 0:
            spans.append(span(f"step {step}", number, step * 1000, 990, 1))
        elif within % 10 == 1:
            spans.append(span("tool call", number, step * 1000 + within * 9, 95, number - within, tool="search"))
        else:
            parent = number - (within - 1) % 10
            spans.append(span("query", number, step * 1000 + within * 9, 8, parent, **{"db.statement": "select 1"}))
    return spans


def hostile_records() -> list[span_pb2.SpanRecord]:
    """Makes spans and a model call, of which every text tries something."""
    request = {
        "model": MARK,
        "messages": [
            {"role": "system", "content": f"{MARK} {STRANGE}"},
            {"role": f"user{STRANGE}", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
            {"role": "user", "content": MEGABYTE},
            {"role": "assistant", "tool_calls": [{"function": {"name": MARK, "arguments": "{" * 5000}}]},
            {"role": "tool", "content": f"{STRANGE}\n" * 1000},
        ],
    }
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": f"{MARK}{STRANGE}"}}]}
    texts = [MARK.encode(), b"\xf0\x9f", b"\x98\x80", b"\xff", STRANGE.encode(), b"", b"\n"]
    call = model_call_pb2.ModelCallRecord(
        model=MARK, policy=STRANGE, agent_name=MARK, finish_reason=STRANGE, usable=False, unusable_reason=MARK,
        prompt_token_ids=pack_token_ids([1, 2, 3]), completion_token_ids=pack_token_ids(range(len(texts))),
        completion_logprobs=pack_logprobs([-0.01, -0.5, -1.0, -3.0, -9.0, 0.0, -0.2]),
        policy_versions=[model_call_pb2.PolicyVersionRange(version=2, start=0, end=4),
                         model_call_pb2.PolicyVersionRange(version=3, start=4, end=len(texts))],
        request_json=json.dumps(request).encode(), response_json=json.dumps(answer).encode(),
        completion_token_text=b"".join(texts), completion_token_sizes=[len(each) for each in texts],
    )  # fmt: skip
    failed = span(f"{MARK}{STRANGE}", 2, 10, 50, 1, **{MARK: STRANGE, "big": MEGABYTE})
    failed.status.code, failed.status.message = trace_pb2.Status.STATUS_CODE_ERROR, f"{MARK} {STRANGE}"
    plain = [
        span("root", 1, 0, 400), failed, span("no parent", 4, 5, 10, 99), span("circle one", 5, 100, 10, 6),
        span("circle two", 6, 101, 5, 5), span("other clock", 7, -200, 300, 1), span("", 8, 20, 1, 1),
    ]  # fmt: skip
    records = [span_pb2.SpanRecord(otlp_span=each.SerializeToString(), scope=MARK) for each in plain]
    own = span("chat", 3, 60, 300, 1)
    records.append(
        span_pb2.SpanRecord(
            otlp_span=own.SerializeToString(), scope="fulmen.llm_proxy", model_call=call.SerializeToString()
        )
    )
    return records


class Writer:
    """Writes rollouts in the place of a runner and a proxy."""

    def __init__(self, people: Stubs, services: Stubs) -> None:
        self._people = people
        self._services = services

    async def write(
        self, label: str, records: list[span_pb2.SpanRecord], *, result: dict[str, Any], **rollout: Any
    ) -> str:
        """Creates a rollout, leases it, gives it spans and a result, and returns its name."""
        request = rollout_service_pb2.BatchCreateRolloutsRequest(
            rollouts=[rollout_pb2.Rollout(project="projects/default", required_labels={"for": label}, **rollout)]
        )
        (created,) = (await self._people.rollouts.BatchCreateRollouts(request)).rollouts
        runner = await Runner(self._services).open(labels={"for": label})
        (assignment,) = await runner.take(1)
        for start in range(0, len(records), CHUNK):
            await self._append(assignment.attempt, records[start : start + CHUNK])
        await runner.complete([assignment], **result)
        runner.stream.cancel()
        return created.name

    async def _append(self, attempt: str, records: list[span_pb2.SpanRecord]) -> None:
        payload = zstandard.ZstdCompressor().compress(span_pb2.SpanBatch(spans=records).SerializeToString())
        chunk = span_pb2.SpanChunk(
            attempt=attempt,
            chunk_id=str(uuid7()),
            span_count=len(records),
            codec=span_pb2.SPAN_CODEC_ZSTD,
            payload=payload,
        )
        answer = await append(self._services, chunk)
        if answer.rejected:
            raise ValueError(answer.rejected[0].message)


def train(folder: Path) -> str:
    """Trains the tiny model of `fulmen init` for two steps, with its own engine; returns the name that its runs begin with."""
    with tempfile.TemporaryDirectory() as made:
        agent = Path(made) / "orders"
        _fulmen("init", str(agent))
        config = agent / "train.toml"
        text = config.read_text()
        for before, after in SHORT.items():
            if before not in text:
                raise ValueError(f"{before} is not in the train.toml of `fulmen init`")
            text = text.replace(before, after)
        config.write_text(text)
        _fulmen("train", str(config), "--state-dir", str(folder))
    return "orders"


def _fulmen(*words: str) -> None:
    command = [sys.executable, "-m", "fulmen_cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_LIMIT_S, check=False)
    if done.returncode:
        raise ValueError(f"{words[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


async def main(folder: Path) -> None:
    """Writes the rollouts and prints their names."""
    run = await asyncio.to_thread(train, folder)
    store = json.loads((folder / "stack.json").read_bytes())["targets"]["store"]
    tokens = [(folder / name).read_text().strip() for name in ("client.token", "service.token")]
    async with open_channel(store, token=tokens[0]) as people, open_channel(store, token=tokens[1]) as services:
        writer = Writer(Stubs(people), Stubs(services))
        plain = [span_pb2.SpanRecord(otlp_span=each.SerializeToString(), scope="bench") for each in large_spans()]
        names = {
            "run": run,
            "large": await writer.write("large", plain, result={}, input=b"{}"),
            "hostile": await writer.write(
                "hostile",
                hostile_records(),
                result={
                    "output": f"{MARK}{STRANGE}".encode(),
                    "output_content_type": "text/plain",
                    "printed": attempt_pb2.PrintedTail(stdout=f"{MARK}\n{STRANGE}", stderr="x" * 32_000),
                },
                input=json.dumps({"q": f"{MARK}{STRANGE}"}).encode(),
                metadata={"m": MARK},
            ),
        }
    print(json.dumps(names))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
