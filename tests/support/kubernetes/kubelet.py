"""Pods as processes of this machine, with the environment and the files that their container would have.

Paths below a mounted volume are those of a folder; claims are at their path on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GROUP = "metadata.annotations['"


@dataclass(kw_only=True)
class _Process:
    handle: asyncio.subprocess.Process
    output: bytearray = field(default_factory=bytearray)


class Kubelet:
    """Runs pods.

    Args:
        folder: Where volumes are.
        secrets: The Secrets of the namespace, by name.
        image_environment: Variables that every image has.
    """

    def __init__(
        self, folder: Path, secrets: Mapping[str, dict[str, Any]], image_environment: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._secrets = secrets
        self._image_environment = image_environment
        self._processes: dict[str, _Process] = {}

    def has_secrets(self, pod: Mapping[str, Any]) -> bool:
        """Whether the Secrets that a pod mounts are there; it does not start before."""
        named = [volume["secret"]["secretName"] for volume in pod["spec"].get("volumes", []) if "secret" in volume]
        return all(name in self._secrets for name in named)

    async def start(self, pod: dict[str, Any]) -> None:
        """Starts the process of a pod's agent, or only container."""
        agent = agent_of(pod["spec"])
        places = self._mounted(pod, agent)
        variables = {each["name"]: _local(self._value(pod, each), places) for each in agent.get("env", [])}
        # The program is the image's, wherever this machine has it.
        words: list[str] = [*agent.get("command", []), *agent.get("args", [])]
        argv = [words[0], *(_local(text, places) for text in words[1:])]
        handle = await asyncio.create_subprocess_exec(
            *argv,
            env={"PATH": os.environ["PATH"], **self._image_environment, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[pod["metadata"]["name"]] = _Process(handle=handle)

    async def ended(self, name: str) -> int:
        """Waits until a pod's process ends; returns its status as a container has it."""
        process = self._processes[name]
        assert process.handle.stdout is not None
        while chunk := await process.handle.stdout.read(65_536):
            process.output += chunk
        code = await process.handle.wait()
        return 128 - code if code < 0 else code

    def log(self, name: str) -> bytes:
        """Returns what a pod has written."""
        process = self._processes.get(name)
        return bytes(process.output) if process else b""

    async def kill(self, name: str) -> None:
        """Kills a pod's process, if it has one."""
        process = self._processes.get(name)
        if process is not None and process.handle.returncode is None:
            # It may have ended a moment ago.
            with suppress(ProcessLookupError):
                os.killpg(process.handle.pid, signal.SIGKILL)
            await process.handle.wait()

    async def close(self) -> None:
        """Kills what still runs."""
        for name in self._processes:
            await self.kill(name)

    def _mounted(self, pod: dict[str, Any], agent: dict[str, Any]) -> dict[str, Path]:
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        places = {}
        for mount in agent.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "persistentVolumeClaim" in volume:
                continue
            place = self._folder / pod["metadata"]["name"] / mount["name"]
            place.mkdir(parents=True)
            places[mount["mountPath"]] = place
            if secret := volume.get("secret"):
                data = self._secrets[secret["secretName"]]["data"]
                items = secret.get("items") or [{"key": key, "path": key} for key in data]
                for item in items:
                    (place / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
        return places

    def _value(self, pod: Mapping[str, Any], variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            path: str = source["fieldRef"]["fieldPath"]
            if path.startswith(_GROUP):
                return str(pod["metadata"]["annotations"][path.removeprefix(_GROUP).removesuffix("']")])
            part, _, name = path.partition(".")
            return str(pod[part][name])
        reference = source["secretKeyRef"]
        return base64.b64decode(self._secrets[reference["name"]]["data"][reference["key"]]).decode()


def agent_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the container of a pod's specification that is run."""
    containers: list[dict[str, Any]] = pod["containers"]
    return next((each for each in containers if each["name"] == "agent"), containers[0])


def _local(text: str, places: Mapping[str, Path]) -> str:
    if not places:
        return text
    # In one go: what takes the place of a path may contain another.
    mounted = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({mounted})(?![\w.-])", lambda found: str(places[found[1]]), text)
