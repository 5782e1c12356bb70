"""A Kubernetes API server for tests: real REST paths over a real socket, the documents held against the API's schema.

A Job's agent runs as a process of this machine, with the environment and the files that its pod would have: paths below
a mounted volume are those of a folder. What a cluster does to pods beside running them is chosen by the image, `Fate`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from aiohttp import web

__all__ = ["Fate", "KubernetesApi", "schema_problems"]

VERSION = "1.33"
NAMESPACE = "agents"
TOKEN = "a token of the tests' cluster"
_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
_CORE = "/api/v1/namespaces/{namespace}"


class Fate(StrEnum):
    """What becomes of a pod with this image; any other image runs."""

    NO_SUCH_IMAGE = "fate/no-such-image:1"
    NO_REGISTRY = "fate/no-registry:1"
    BAD_NAME = "fate/BAD NAME"
    NO_NODE = "fate/no-node:1"
    NO_POD = "fate/no-pod:1"
    OUT_OF_MEMORY = "fate/out-of-memory:1"
    EVICTED = "fate/evicted:1"
    PREEMPTED = "fate/preempted:1"
    NODE_LOST = "fate/node-lost:1"
    CANNOT_START = "fate/cannot-start:1"


_WAITING = {
    Fate.NO_SUCH_IMAGE: ("ImagePullBackOff", "rpc error: code = NotFound: fate/no-such-image:1: not found"),
    Fate.NO_REGISTRY: ("ErrImagePull", "dial tcp 192.0.2.1:443: i/o timeout"),
    Fate.BAD_NAME: ("InvalidImageName", "couldn't parse image reference"),
}
_TERMINATED = {
    Fate.OUT_OF_MEMORY: {"exitCode": 137, "reason": "OOMKilled"},
    Fate.CANNOT_START: {"exitCode": 128, "reason": "StartError", "message": "exec: no-such-program: not found"},
}
_DISRUPTED = {
    Fate.PREEMPTED: {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "for another",
    },
    Fate.NODE_LOST: {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "the node",
    },
}


def schema_problems(document: Mapping[str, Any]) -> str:
    """Returns what the API's schema says against a document, empty if nothing. Blocks."""
    try:
        kubernetes_validate.validate(dict(document), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


@dataclass(kw_only=True)
class _Process:
    handle: asyncio.subprocess.Process
    output: bytearray = field(default_factory=bytearray)


class KubernetesApi:
    """The server. Tests read `jobs`, `pods`, `secrets` and what was sent in `created`.

    Attributes:
        failing: How many further calls are answered 503.
        failing_writes: Of calls that make or change something: how many go through, and how many are then answered 503.
        unanswered: How many further calls make something, and get no answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.failing = 0
        self.failing_writes = (0, 0)
        self.unanswered = 0
        self.url = ""
        self._version = 0
        self._changed = asyncio.Condition()
        self._processes: dict[str, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serves on a free port."""
        app = web.Application(middlewares=[self._edge])
        app.router.add_post(_JOBS, self._create_job)
        app.router.add_get(_JOBS, self._list_jobs)
        app.router.add_get(_JOBS + "/{name}", self._get_job)
        app.router.add_patch(_JOBS + "/{name}", self._patch_job)
        app.router.add_delete(_JOBS + "/{name}", self._delete_job)
        app.router.add_get(_CORE + "/pods", self._list_pods)
        app.router.add_get(_CORE + "/pods/{name}/log", self._log)
        app.router.add_post(_CORE + "/secrets", self._create_secret)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stops, and kills what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            await _kill(process)
        if self._runner is not None:
            await self._runner.cleanup()

    def kubeconfig(self) -> Path:
        """Writes a kubeconfig for this server and returns its path."""
        path = self.folder / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {"server": self.url}}],
            "users": [{"name": "tests", "user": {"token": TOKEN}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests", "namespace": NAMESPACE}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    async def until(self, condition: Any, deadline_s: float = 90.0) -> None:
        """Waits until something is true of what the server holds."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(condition)

    # --- calls ---

    @web.middleware
    async def _edge(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if request.match_info.get("namespace") != NAMESPACE:
            return _status(403, "this namespace is none of the caller's")
        if self.failing:
            self.failing -= 1
            return _status(503, "the server is currently unable to handle the request")
        if request.method not in ("POST", "PATCH"):
            return await handler(request)
        before, failing = self.failing_writes
        self.failing_writes = (before - 1, failing) if before else (0, max(0, failing - 1))
        if not before and failing:
            return _status(503, "the server is currently unable to handle the request")
        answer: web.StreamResponse = await handler(request)
        if self.unanswered and request.method == "POST" and request.transport is not None:
            self.unanswered -= 1
            request.transport.close()
        return answer

    async def _create_job(self, request: web.Request) -> web.Response:
        job = await request.json()
        answer = await self._create(job, self.jobs)
        if answer is not None:
            return answer
        if not job["spec"].get("suspend"):
            self._begin(job)
        return web.json_response(job, status=201)

    async def _patch_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["name"])
        if job is None:
            return _status(404, "no such Job")
        if request.content_type != "application/merge-patch+json":
            return _status(415, request.content_type)
        was_suspended = job["spec"].get("suspend", False)
        job["spec"] |= (await request.json())["spec"]
        if was_suspended and not job["spec"]["suspend"]:
            self._begin(job)
        await self._touch(job)
        return web.json_response(job)

    def _begin(self, job: dict[str, Any]) -> None:
        self._run(self._control(job))
        self._run(self._deadline(job))

    async def _create_secret(self, request: web.Request) -> web.Response:
        secret = await request.json()
        return await self._create(secret, self.secrets) or web.json_response(secret, status=201)

    async def _create(self, document: dict[str, Any], known: dict[str, dict[str, Any]]) -> web.Response | None:
        problem = await asyncio.to_thread(schema_problems, document)
        name = document["metadata"]["name"]
        if problem:
            return _status(422, f"{document['kind']} {name!r} is invalid: {problem}")
        if name in known:
            return _status(409, f"{name!r} already exists")
        self.created.append(json.loads(json.dumps(document)))
        document["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": NAMESPACE}
        known[name] = document
        await self._touch(document)
        return None

    async def _get_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["name"])
        return _status(404, "no such Job") if job is None else web.json_response(job)

    async def _list_jobs(self, request: web.Request) -> web.Response:
        return self._listed("JobList", self.jobs, request)

    async def _delete_job(self, request: web.Request) -> web.Response:
        if request.query.get("propagationPolicy") != "Background":
            return _status(400, "pods would be left")
        name = request.match_info["name"]
        job = self.jobs.pop(name, None)
        if job is None:
            return _status(404, "no such Job")
        await self._delete_pods(name)
        uid = job["metadata"]["uid"]
        for secret in list(self.secrets.values()):
            if any(owner["uid"] == uid for owner in secret["metadata"].get("ownerReferences", [])):
                del self.secrets[secret["metadata"]["name"]]
        await self._touch(job)
        return _status(200, "", "Success")

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch", "").lower() != "true":
            return self._listed("PodList", self.pods, request)
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])), self._changed:
                await self._changed.wait_for(lambda: self._version > since)
        except TimeoutError:
            return response
        for pod in self._selected(self.pods, request):
            if int(pod["metadata"]["resourceVersion"]) > since:
                await response.write(json.dumps({"type": "MODIFIED", "object": pod}).encode() + b"\n")
        return response

    async def _log(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return _status(404, "no such pod")
        process = self._processes.get(name)
        return web.Response(body=bytes(process.output) if process else b"", content_type="text/plain")

    def _listed(self, kind: str, known: dict[str, dict[str, Any]], request: web.Request) -> web.Response:
        items = self._selected(known, request)
        return web.json_response({"kind": kind, "metadata": {"resourceVersion": str(self._version)}, "items": items})

    def _selected(self, known: dict[str, dict[str, Any]], request: web.Request) -> list[dict[str, Any]]:
        key, _, value = request.query.get("labelSelector", "").partition("=")
        return [each for each in known.values() if not key or each["metadata"].get("labels", {}).get(key) == value]

    # --- what controllers and nodes do ---

    def _run(self, assignment: Any) -> None:
        task = asyncio.create_task(assignment)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _touch(self, document: dict[str, Any]) -> None:
        async with self._changed:
            self._version += 1
            document["metadata"]["resourceVersion"] = str(self._version)
            self._changed.notify_all()

    async def _control(self, job: dict[str, Any]) -> None:
        """Makes the Job's pod and lets it meet its fate."""
        template = job["spec"]["template"]
        name = job["metadata"]["name"]
        image = next(
            each["image"]
            for each in template["spec"]["containers"]
            if len(template["spec"]["containers"]) == 1 or each["name"] == "agent"
        )
        if image == Fate.NO_POD:
            return
        labels = {**template["metadata"].get("labels", {}), "job-name": name}
        pod = {"metadata": {"name": f"{name}-x7k2p", "labels": labels}, "spec": template["spec"]}
        pod["status"] = {"phase": "Pending"}
        self.pods[pod["metadata"]["name"]] = pod
        await self._touch(pod)
        if image == Fate.NO_NODE:
            pod["status"]["conditions"] = [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes: no memory",
                }
            ]
        elif image in _WAITING:
            reason, message = _WAITING[Fate(image)]
            self._state(pod, {"waiting": {"reason": reason, "message": message}})
        elif image in _TERMINATED:
            self._state(pod, {"terminated": _TERMINATED[Fate(image)]}, "Failed")
        elif image in _DISRUPTED:
            self._state(pod, {"terminated": {"exitCode": 143, "reason": "Error"}}, "Failed")
            pod["status"]["conditions"] = [_DISRUPTED[Fate(image)]]
        elif image == Fate.EVICTED:
            pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        else:
            await self._execute(pod)
        await self._touch(pod)

    async def _deadline(self, job: dict[str, Any]) -> None:
        await asyncio.sleep(job["spec"]["activeDeadlineSeconds"])
        job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
        await self._delete_pods(job["metadata"]["name"])
        await self._touch(job)

    def _state(self, pod: dict[str, Any], state: dict[str, Any], phase: str = "Pending") -> None:
        names = [each["name"] for each in pod["spec"]["containers"]]
        agent = "agent" if "agent" in names else names[0]
        pod["status"] = {"phase": phase, "containerStatuses": [{"name": agent, "state": state}]}

    async def _execute(self, pod: dict[str, Any]) -> None:
        """Runs the agent as a process."""
        containers = pod["spec"]["containers"]
        agent = next((each for each in containers if each["name"] == "agent"), containers[0])
        places = self._mounted(pod, agent)
        environment = {"PATH": os.environ["PATH"]}
        for variable in agent["env"]:
            environment[variable["name"]] = self._value(variable)
        argv = [_local(text, places) for text in [*agent.get("command", []), *agent.get("args", [])]]
        handle = await asyncio.create_subprocess_exec(
            *argv,
            env={name: _local(value, places) for name, value in environment.items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        process = self._processes[pod["metadata"]["name"]] = _Process(handle=handle)
        self._state(pod, {"running": {}}, "Running")
        await self._touch(pod)
        assert handle.stdout is not None
        while chunk := await handle.stdout.read(65_536):
            process.output += chunk
        code = await handle.wait()
        exit_code = 128 - code if code < 0 else code
        reason = "Error" if exit_code else "Completed"
        phase = "Failed" if exit_code else "Succeeded"
        self._state(pod, {"terminated": {"exitCode": exit_code, "reason": reason}}, phase)

    def _mounted(self, pod: dict[str, Any], agent: dict[str, Any]) -> dict[str, Path]:
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        places = {}
        for mount in agent["volumeMounts"]:
            place = self.folder / pod["metadata"]["name"] / mount["name"]
            place.mkdir(parents=True)
            places[mount["mountPath"]] = place
            secret = volumes[mount["name"]].get("secret")
            if secret:
                for item in secret["items"]:
                    data = self.secrets[secret["secretName"]]["data"][item["key"]]
                    (place / item["path"]).write_bytes(base64.b64decode(data))
        return places

    def _value(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return base64.b64decode(self.secrets[reference["name"]]["data"][reference["key"]]).decode()

    async def _delete_pods(self, job: str) -> None:
        for name, pod in list(self.pods.items()):
            if pod["metadata"]["labels"]["job-name"] == job:
                if name in self._processes:
                    await _kill(self._processes[name])
                self.pods.pop(name, None)
                await self._touch(pod)


def _local(text: str, places: Mapping[str, Path]) -> str:
    for path, place in places.items():
        text = text.replace(path, str(place))
    return text


def _status(code: int, message: str, status: str = "Failure") -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": status, "message": message, "code": code}
    return web.json_response(body, status=code)


async def _kill(process: _Process) -> None:
    if process.handle.returncode is None:
        os.killpg(process.handle.pid, signal.SIGKILL)
        await process.handle.wait()
