"""A Kubernetes API server for tests: real REST paths over a real socket, the documents held against the API's schema.

Pods run as processes of this machine (`kubelet`), on nodes that a scheduler chooses (`nodes`). What a cluster does to pods
beside running them is chosen by the image (`fates`).
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.support.kubernetes.fates import EVICTED, Fate, fated, status_of, unscheduled
from tests.support.kubernetes.kubelet import Kubelet, agent_of
from tests.support.kubernetes.nodes import node_document, node_for
from tests.support.kubernetes.schema import schema_problems

__all__ = ["Fate", "KubernetesApi"]

NAMESPACE = "agents"
TOKEN = "a token of the tests' cluster"
INDEX = "batch.kubernetes.io/job-completion-index"
_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
_CORE = "/api/v1/namespaces/{namespace}"
_LARGE: dict[str, Any] = {"cpu": "1000", "memory": "1Ti"}


class KubernetesApi:
    """The server. Tests read `jobs`, `pods`, `secrets` and what was sent in `created`.

    Attributes:
        failing: How many further calls are answered 503.
        failing_writes: Of calls that make or change something: how many go through, and how many are then answered 503.
        unanswered: How many further calls make something, and get no answer.
        others: Pods of other namespaces.
        image_environment: Variables that every image has.
        forbidden: Paths that the caller may not ask for.
        unknown: Fields of a Job's specification that the server drops, as older ones do.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Iterable[dict[str, Any]] | None = None,
        image_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.nodes = {each["metadata"]["name"]: each for each in nodes or [node_document("node-a", **_LARGE)]}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.others: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.forbidden: set[str] = set()
        self.unknown: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.failing = 0
        self.failing_writes = (0, 0)
        self.unanswered = 0
        self.url = ""
        self._version = 0
        self._changed = asyncio.Condition()
        self.image_environment = dict(image_environment or {})
        self._kubelet = Kubelet(folder, self.secrets, self.image_environment)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """Serves, on a free port; or again, on the port that it had."""
        app = web.Application(middlewares=[self._edge])
        app.router.add_post(_JOBS, self._create_job)
        app.router.add_get(_JOBS, self._list_jobs)
        app.router.add_get(_JOBS + "/{name}", self._get_job)
        app.router.add_patch(_JOBS + "/{name}", self._patch_job)
        app.router.add_delete(_JOBS + "/{name}", self._delete_job)
        app.router.add_get(_CORE + "/pods", self._list_pods)
        app.router.add_get(_CORE + "/pods/{name}/log", self._log)
        app.router.add_post(_CORE + "/secrets", self._create_secret)
        app.router.add_get("/api/v1/nodes", self._list_nodes)
        app.router.add_get("/api/v1/pods", self._list_all_pods)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def go_away(self) -> int:
        """Stops serving, while pods run on; returns the port."""
        assert self._runner is not None
        port: int = self._runner.addresses[0][1]
        await self._runner.cleanup()
        return port

    async def close(self) -> None:
        """Stops, and kills what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kubelet.close()
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
        if request.match_info.get("namespace", "") != (NAMESPACE if "/namespaces/" in request.path else ""):
            return _status(403, "this namespace is none of the caller's")
        if request.path in self.forbidden:
            return _status(403, f"the caller has no role for {request.path}")
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
        job["spec"] = {name: value for name, value in job["spec"].items() if name not in self.unknown}
        spec = job["spec"]
        one_by_one = spec.get("completionMode") == "Indexed" and spec["template"]["spec"]["restartPolicy"] == "Never"
        if "backoffLimitPerIndex" in spec and not one_by_one:
            return _status(422, "backoffLimitPerIndex: needs completionMode Indexed and restartPolicy Never")
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
        policy = request.query.get("propagationPolicy")
        if policy not in ("Background", "Foreground"):
            return _status(400, "pods would be left")
        job = self.jobs.get(request.match_info["name"])
        if job is None:
            return _status(404, "no such Job")
        if policy == "Foreground":
            # The Job is seen until its pods have gone.
            job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            await self._touch(job)
            self._run(self._remove(job))
        else:
            await self._remove(job)
        return _status(200, "", "Success")

    async def _remove(self, job: dict[str, Any]) -> None:
        """Deletes a Job and what belongs to it."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        await self._delete_pods(name)
        self.jobs.pop(name, None)
        for secret in list(self.secrets.values()):
            if any(owner["uid"] == uid for owner in secret["metadata"].get("ownerReferences", [])):
                del self.secrets[secret["metadata"]["name"]]
        await self._touch(job)

    async def _list_nodes(self, request: web.Request) -> web.Response:
        return self._listed("NodeList", self.nodes, request)

    async def _list_all_pods(self, request: web.Request) -> web.Response:
        assert "spec.restartPolicy=Always" in request.query["fieldSelector"]
        lasting = {name: pod for name, pod in self.others.items() if pod["spec"]["restartPolicy"] == "Always"}
        return self._listed("PodList", lasting, request)

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
        return web.Response(body=self._kubelet.log(name), content_type="text/plain")

    def _listed(self, kind: str, known: dict[str, dict[str, Any]], request: web.Request) -> web.Response:
        items, begin = self._selected(known, request), int(request.query.get("continue") or 0)
        end = begin + int(request.query.get("limit", len(items)))
        metadata = {"resourceVersion": str(self._version), **({"continue": str(end)} if end < len(items) else {})}
        return web.json_response({"kind": kind, "metadata": metadata, "items": items[begin:end]})

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
        """Makes the Job's pods."""
        template, spec, name = job["spec"]["template"], job["spec"], job["metadata"]["name"]
        if agent_of(template["spec"])["image"] == Fate.NO_POD:
            return
        labels = {**template["metadata"].get("labels", {}), "job-name": name}
        for index in range(spec.get("parallelism", 1)):
            copy = json.loads(json.dumps(template["spec"]))
            pod = {"metadata": {"name": f"{name}-x7k2p", "labels": labels, "annotations": {}}, "spec": copy}
            if spec.get("completionMode") == "Indexed":
                pod["metadata"] = {
                    "name": f"{name}-{index}-x7k2p",
                    "labels": {**labels, INDEX: str(index)},
                    "annotations": {INDEX: str(index)},
                }
                reference = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
                agent_of(copy).setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": reference})
            pod["status"] = {"phase": "Pending"}
            self.pods[pod["metadata"]["name"]] = pod
            await self._touch(pod)
            self._run(self._live(pod, job))

    async def _live(self, pod: dict[str, Any], job: dict[str, Any]) -> None:
        """Lets a pod meet its fate."""
        agent = agent_of(pod["spec"])
        status = fated(agent["image"], agent["name"])
        if status is None:
            name = pod["metadata"]["name"]
            await self._schedule(pod)
            await self.until(lambda: self._kubelet.has_secrets(pod) or name not in self.pods)
            if name not in self.pods:
                return
            await self._kubelet.start(pod)
            pod["status"] = status_of(agent["name"], {"running": {}}, "Running")
            await self._touch(pod)
            code = await self._kubelet.ended(name)
            if pod["status"]["phase"] != "Running":
                return
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            status = status_of(agent["name"], {"terminated": ended}, "Failed" if code else "Succeeded")
        pod["status"] = status
        await self._touch(pod)
        await self._settle(job)

    async def _schedule(self, pod: dict[str, Any]) -> None:
        """Waits until a node has room for a pod, or the pod is deleted."""
        while pod["metadata"]["name"] in self.pods:
            name, problem = node_for(pod, self.pods.values(), self.nodes)
            if name:
                pod["spec"]["nodeName"] = name
                pod["status"] = {"phase": "Pending"}
                return
            pod["status"] = unscheduled(problem)
            await self._touch(pod)
            version = self._version
            await self.until(lambda seen=version: self._version > seen, deadline_s=3600)

    async def _settle(self, job: dict[str, Any]) -> None:
        """Ends a Job whose pods have ended. The first that fails ends the others, too, unless each has a limit of its own."""
        name, count, limit = job["metadata"]["name"], job["spec"].get("parallelism", 1), "backoffLimitPerIndex"
        assert not job["spec"].get(limit), "no pod is started anew here"
        phases = [pod["status"]["phase"] for pod in self._pods_of(name)]
        has_failed, left = "Failed" in phases, count - phases.count("Succeeded") - phases.count("Failed")
        if job.get("status") or (left and not (has_failed and limit not in job["spec"])):
            return
        failed = "FailedIndexes" if limit in job["spec"] else "BackoffLimitExceeded"
        kind, reason = ("Failed", failed) if has_failed else ("Complete", "CompletionsReached")
        job["status"] = {"conditions": [{"type": kind, "status": "True", "reason": reason}]}
        await self._delete_pods(name, {"Pending", "Running"})
        await self._touch(job)
        await asyncio.sleep(job["spec"]["ttlSecondsAfterFinished"])
        if self.jobs.get(name) is job:
            await self._remove(job)

    async def evict(self, name: str) -> None:
        """Ends a pod as a node without memory does."""
        pod = self.pods[name]
        pod["status"] = dict(EVICTED)
        await self._kubelet.kill(name)
        await self._touch(pod)
        self._run(self._settle(self.jobs[pod["metadata"]["labels"]["job-name"]]))

    async def _deadline(self, job: dict[str, Any]) -> None:
        await asyncio.sleep(job["spec"]["activeDeadlineSeconds"])
        job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
        await self._delete_pods(job["metadata"]["name"])
        await self._touch(job)

    def _pods_of(self, job: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"]["job-name"] == job]

    async def _delete_pods(self, job: str, phases: Iterable[str] = ()) -> None:
        """Deletes the pods of a Job: those in some phases, or all."""
        for pod in self._pods_of(job):
            name = pod["metadata"]["name"]
            if not phases or pod["status"]["phase"] in phases:
                self.pods.pop(name, None)
                await self._kubelet.kill(name)
                await self._touch(pod)


def _status(code: int, message: str, status: str = "Failure") -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": status, "message": message, "code": code}
    return web.json_response(body, status=code)
