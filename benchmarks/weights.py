"""What bringing a model to a deployment and back costs: MB/s and CPU of an upload and a download over loopback.

The service and the client are processes of their own, the disk is that of the temporary folder, and the token is one for all
projects, so that no rate of a project holds it back. CPU seconds are those of both processes for each gigabyte.

    python -m benchmarks.weights --megabytes 1000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import psutil

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.models.transfer import download_weights, upload_model
from fulmen.rpc.channel import open_channel
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.service_kit.key_store import KeyService, serving_keys
from tests.support.service_kit.processes import serving_process

KEY = "k" * 32
FILES = 4


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of this process and another one."""
    times = [psutil.Process(each).cpu_times() for each in (os.getpid(), pid)]
    return sum(each.user + each.system for each in times)


def made_model(folder: Path, size_bytes: int) -> Path:
    """Makes a folder with random weights in several files."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(FILES):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(size_bytes // FILES))
    return folder


async def measure(megabytes: int) -> None:
    """Uploads and downloads a model once, and prints what it took."""
    token = TokenSigner(KEY).issue(Role.SERVICE, subject="bench", ttl_s=7200)
    with tempfile.TemporaryDirectory() as place:
        folder = made_model(Path(place) / "model", megabytes * 1_000_000)
        settings = {"token": token, "port": 0, "metrics_port": 0, "state_dir": f"{place}/state", "warm_start": "false"}
        async with (
            serving_keys(KeyService(KEY)) as store,
            serving_process("fulmen_algorithm", {**settings, "store_target": store}) as service,
            open_channel(f"127.0.0.1:{service.port}", token=token) as channel,
        ):
            weights = WeightServiceStub(channel)
            for name in ("upload", "download"):
                began_s, spent_s = time.perf_counter(), cpu_s(service.pid)
                if name == "upload":
                    model = (await upload_model(weights, folder)).model
                else:
                    await download_weights(weights, pb.WeightSource(model=model.name), Path(place) / "back")
                took_s, cpu = time.perf_counter() - began_s, cpu_s(service.pid) - spent_s
                print(f"{name}: {megabytes / took_s:.0f} MB/s, {cpu / megabytes * 1000:.1f} CPU s per GB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="Size of the model, MB.")
    asyncio.run(measure(parser.parse_args().megabytes))
