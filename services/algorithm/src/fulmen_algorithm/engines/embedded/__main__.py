"""Command line of the engine: `python -m fulmen_algorithm.engines.embedded --model DIR`.

Invariant: the process ends when its parent does, which closes its standard input.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulmen_algorithm.engines.embedded.adapters import add_adapters
from fulmen_algorithm.engines.embedded.chat import ChatRenderer
from fulmen_algorithm.engines.embedded.generator import Generator, GeneratorLimits
from fulmen_algorithm.engines.embedded.routing import RoutingTape
from fulmen_algorithm.engines.embedded.server import EngineServer
from fulmen_algorithm.engines.embedded.weights import describe
from fulmen_algorithm.training.settings import DEFAULT_ADAPTER
from fulmen_algorithm.weights.tensor_files import read_folder
from fulmen_service_kit.heartbeat import heartbeat
from fulmen_service_kit.standard_streams import never_raise

TOKEN_VARIABLE = "FULMEN_ENGINE_TOKEN"  # noqa: S105 (the name of a variable, not a secret)
SHUTDOWN_GRACE_S = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="fulmen_algorithm.engines.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory with config, safetensors and tokenizer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free port")
    parser.add_argument("--served-model-name", action="append", default=[], help="public name; may be repeated")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="an adapter of peft; may be repeated"
    )
    parser.add_argument("--version", type=int, default=0, help="policy version of the weights in --model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0, help="default seed of requests")
    parser.add_argument("--max-batch-size", type=int, default=GeneratorLimits().max_batch_size)
    parser.add_argument("--max-batch-tokens", type=int, default=GeneratorLimits().max_batch_tokens)
    parser.add_argument("--max-waiting", type=int, default=GeneratorLimits().max_waiting)
    parser.add_argument("--queue-deadline-s", type=float, default=GeneratorLimits().queue_deadline_s)
    parser.add_argument("--router-replay", action="store_true", help="answers say which experts computed each token")
    parser.add_argument("--ignore-stdin", action="store_true", help="do not end when standard input ends")
    return parser.parse_args(argv)


def build(options: argparse.Namespace, token: str | None) -> tuple[Generator, EngineServer]:
    """Loads the model and connects the parts.

    Raises:
        OSError: if the directory holds no model or tokenizer.
        ValueError: if the tokenizer has no chat template, or neither padding nor end-of-sequence token, or a model without
            experts is to report them.
    """
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, local_files_only=True)
    adapters = {name: Path(folder) for name, _, folder in (one.partition("=") for one in options.adapter)}
    model_names = served_names(tuple(options.served_model_name) or ("policy",), tuple(adapters))
    if not tokenizer.chat_template:
        raise ValueError(f"The tokenizer in {options.model} has no chat template.")
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError(f"The tokenizer in {options.model} has neither a padding nor an end-of-sequence token.")
    add_adapters(model, adapters)
    tape = RoutingTape(model) if options.router_replay else None
    generator = Generator(
        tape=tape,
        model=model.to(options.device).eval().requires_grad_(False),
        served=describe(read_folder(options.model)),
        pad_token_id=pad,
        eos_token_ids=frozenset(eos_ids),
        version=options.version,
        seed=options.seed,
        limits=GeneratorLimits(
            max_batch_size=options.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            max_waiting=options.max_waiting,
            queue_deadline_s=options.queue_deadline_s,
        ),
    )
    server = EngineServer(
        generator=generator,
        renderer=ChatRenderer(tokenizer=tokenizer, max_model_tokens=model.config.max_position_embeddings),
        model_names=model_names,
        token=token,
    )
    return generator, server


def served_names(names: tuple[str, ...], adapters: tuple[str, ...]) -> dict[str, str]:
    """Maps model names to adapters: a single adapter without role answers under every name, the adapter of a
    role under `{name}.{role}`, and the weights without adapters under every other name.
    """
    plain = DEFAULT_ADAPTER if DEFAULT_ADAPTER in adapters else ""
    roles = [adapter for adapter in adapters if adapter != DEFAULT_ADAPTER]
    return dict.fromkeys(names, plain) | {f"{name}.{role}": role for name in names for role in roles}


async def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or the end of standard input."""
    heartbeat()  # so that no child of this process inherits the pipe
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and options.host not in LOOPBACK:
        raise SystemExit(f"{TOKEN_VARIABLE} must be set to serve on {options.host}.")
    torch.set_num_threads(options.threads)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not options.ignore_stdin:
        watcher = threading.Thread(target=_watch_stdin, args=(loop, stop), name="stdin", daemon=True)
        watcher.start()
    generator, server = build(options, token)
    async with generator:
        runner = web.AppRunner(
            server.application(), access_log=None, shutdown_timeout=SHUTDOWN_GRACE_S, handler_cancellation=True
        )
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port)
        await site.start()
        port = runner.addresses[0][1]
        # Before the port is known: its parent process watches it from then on.
        heartbeat().beat()
        heartbeat().start()
        sys.stdout.write(msgspec.json.encode({"port": port, "pid": os.getpid()}).decode() + "\n")
        sys.stdout.flush()
        stopped = asyncio.create_task(stop.wait(), name="stop")
        # Ends on a signal, with the parent, or with the batcher: an engine that cannot generate must not stay up.
        await asyncio.wait({stopped, generator.batcher}, return_when=asyncio.FIRST_COMPLETED)
        await runner.cleanup()
        if generator.batcher.done():
            generator.batcher.result()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # A blocking read in a daemon thread also works for files and terminals, which an event loop cannot watch.
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


def main() -> None:
    """Runs the engine."""
    never_raise()
    asyncio.run(serve(arguments()))


if __name__ == "__main__":
    main()
