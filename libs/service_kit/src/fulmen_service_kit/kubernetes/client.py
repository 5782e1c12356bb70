"""Creates, watches and deletes Jobs of a Kubernetes cluster. Needs the extra `kubernetes`.

The client library provides authentication; documents are plain JSON, because its typed models cost memory and time
without benefit here.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
from kubernetes_asyncio import client, config

from fulmen_service_kit.kubernetes.errors import DocumentRejected, KubernetesError

CALL_TIMEOUT_S = 30.0
RETRY_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 1.0
PAGE_ITEMS = 500
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "default"

_OK = 200
_GONE = 404
_CONFLICT = 409
_REFUSED = frozenset({400, 422})
_MERGE_PATCH = "application/merge-patch+json"
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a Job, and the resource version of the list."""

    items: list[dict[str, Any]]
    version: str


class KubernetesCluster:
    """A namespace of a cluster."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        # Any: with `_preload_content=False` they return raw responses.
        self._core: Any = client.CoreV1Api(api)
        self._batch: Any = client.BatchV1Api(api)

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.close()

    async def create_secret(self, secret: Mapping[str, Any]) -> None:
        """Creates a Secret with a unique name. Raises KubernetesError."""
        await self._create(lambda: self._core.create_namespaced_secret(self.namespace, dict(secret), **_RAW))

    async def create_job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Creates a Job with a unique name and returns it.

        Raises:
            DocumentRejected: If the cluster rejects it as invalid.
            KubernetesError: If the cluster rejects it for another reason, or does not answer.
        """
        made = await self._create(lambda: self._batch.create_namespaced_job(self.namespace, dict(job), **_RAW))
        if made is None:
            name = job["metadata"]["name"]
            made = await self._retried(lambda: self._batch.read_namespaced_job(name, self.namespace, **_RAW))
        return made

    async def resume_job(self, name: str) -> None:
        """Lets a suspended Job create its pod. Raises KubernetesError."""
        patch = {"spec": {"suspend": False}}
        await self._retried(
            lambda: self._batch.patch_namespaced_job(name, self.namespace, patch, _content_type=_MERGE_PATCH, **_RAW)
        )

    async def job(self, name: str) -> dict[str, Any] | None:
        """Returns a Job, or None. Raises KubernetesError."""
        try:
            return await self._json(lambda: self._batch.read_namespaced_job(name, self.namespace, **_RAW))
        except KubernetesError as error:
            if error.status == _GONE:
                return None
            raise

    async def pods(self, job: str) -> Pods:
        """Returns the pods of a Job. Raises KubernetesError."""
        found = await self._json(
            lambda: self._core.list_namespaced_pod(self.namespace, label_selector=f"job-name={job}", **_RAW)
        )
        return Pods(items=found["items"], version=found["metadata"].get("resourceVersion", ""))

    async def pods_changed(self, job: str, version: str, timeout_s: float) -> None:
        """Waits for a change since a resource version, or until the timeout. Raises KubernetesError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s + CALL_TIMEOUT_S)
        try:
            response = await self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"job-name={job}",
                resource_version=version,
                watch=True,
                timeout_seconds=max(1, int(timeout_s)),
                _preload_content=False,
                _request_timeout=timeout,
            )
            async with response:
                if response.status != _OK:
                    raise KubernetesError(_reason(await response.read()), response.status)
                # The content is ignored: the caller lists the pods again.
                await response.content.readany()
        except (TimeoutError, aiohttp.ClientError, client.ApiException) as error:
            raise KubernetesError(_text(error)) from None

    async def log(self, pod: str, container: str) -> AsyncGenerator[bytes, None]:
        """Yields the log of a container as it comes. Raises KubernetesError."""
        try:
            response = await self._core.read_namespaced_pod_log(pod, self.namespace, container=container, **_RAW)
            async with response:
                if response.status != _OK:
                    raise KubernetesError(_reason(await response.read()), response.status)
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    yield chunk
        except (TimeoutError, aiohttp.ClientError, client.ApiException) as error:
            raise KubernetesError(_text(error)) from None

    async def delete_job(self, name: str, propagation: Literal["Background", "Foreground"] = "Background") -> None:
        """Deletes a Job with its pods and its Secret, if it exists. Raises KubernetesError.

        Args:
            name: Its name.
            propagation: Whether the Job is deleted before its pods, or exists until they are deleted.
        """
        await self._unless_gone(
            lambda: self._batch.delete_namespaced_job(name, self.namespace, propagation_policy=propagation, **_RAW)
        )

    async def jobs(self, selector: str) -> list[dict[str, Any]]:
        """Returns the Jobs that match a label selector. Raises KubernetesError."""
        found = await self._json(
            lambda: self._batch.list_namespaced_job(self.namespace, label_selector=selector, **_RAW)
        )
        return list(found["items"])

    async def nodes(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the nodes of the cluster. Raises KubernetesError."""
        async for node in self._pages(self._core.list_node):
            yield node

    async def lasting_pods(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the scheduled pods of all namespaces that do not end by themselves. Raises KubernetesError."""
        lasting = "spec.restartPolicy=Always,status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="
        async for pod in self._pages(self._core.list_pod_for_all_namespaces, field_selector=lasting):
            yield pod

    async def _pages(
        self, call: Callable[..., Awaitable[Any]], **selection: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Lists a page at a time, since a large cluster has more than fits a message."""
        further: dict[str, Any] = {"limit": PAGE_ITEMS}
        while True:
            page = await self._json(partial(call, **selection, **further, **_RAW))
            for item in page["items"]:
                yield item
            token = page["metadata"].get("continue", "")
            if not token:
                return
            further = {"limit": PAGE_ITEMS, "_continue": token}

    async def _create(self, create: Callable[[], Awaitable[Any]]) -> dict[str, Any] | None:
        """Creates an object; returns None if an earlier try, whose answer was lost, has created it."""
        try:
            return await self._retried(create)
        except KubernetesError as error:
            if error.status in _REFUSED:
                raise DocumentRejected(error.reason, error.status) from None
            if error.status != _CONFLICT:
                raise
            return None

    async def _retried(self, call: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        """Calls with retries on transient errors, for up to `RETRY_TIMEOUT_S`."""
        deadline = time.monotonic() + RETRY_TIMEOUT_S
        while True:
            try:
                return await self._json(call)
            except KubernetesError as error:
                if not error.is_transient or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _unless_gone(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._json(call)
        except KubernetesError as error:
            if error.status != _GONE:
                raise

    async def _json(self, call: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                response = await call()
                async with response:
                    body = await response.read()
        except (TimeoutError, aiohttp.ClientError, client.ApiException) as error:
            raise KubernetesError(_text(error)) from None
        if not 200 <= response.status <= 299:
            raise KubernetesError(_reason(body), response.status)
        try:
            document: dict[str, Any] = json.loads(body)
        except ValueError:
            raise KubernetesError("response is not JSON", response.status) from None
        return document


_RAW: dict[str, Any] = {"_preload_content": False}


async def connect(*, kubeconfig: str, context: str, namespace: str, in_cluster: bool) -> KubernetesCluster:
    """Loads the configuration of a cluster, without connecting.

    Args:
        kubeconfig: Path of a kubeconfig.
        context: Context of the kubeconfig; empty for its current one.
        namespace: Namespace; empty for the context's or the pod's.
        in_cluster: Whether to use the pod's service account instead of a kubeconfig.

    Raises:
        KubernetesError: If the configuration cannot be loaded.
    """
    configuration = client.Configuration()
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=configuration)
            found = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.is_file() else ""
        else:
            await config.load_kube_config(
                config_file=kubeconfig, context=context or None, client_configuration=configuration
            )
            found = _namespace(kubeconfig, context)
    except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        raise KubernetesError(f"its configuration cannot be loaded: {error}") from None
    return KubernetesCluster(client.ApiClient(configuration), namespace or found or DEFAULT_NAMESPACE)


def _namespace(kubeconfig: str, context: str) -> str:
    contexts, active = config.list_kube_config_contexts(kubeconfig)
    chosen = next((each for each in contexts if each["name"] == context), active) if context else active
    return str(chosen["context"].get("namespace", "")) if chosen else ""


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
