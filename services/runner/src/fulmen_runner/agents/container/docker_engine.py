"""Runs containers on a Docker engine.

Files are copied with the engine's archive API rather than mounted, so that the engine may be on another machine and the
runner in a container. Standard streams are attached; the engine keeps no log of agents' output.

Invariant: when `run` returns or raises, the container is removed, or left to `remove_leftovers` because the engine did
not answer.
"""

import asyncio
import io
import ssl
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import structlog
from aiodocker.containers import DockerContainer

from fulmen_runner.agents.container.order import ContainerEnd, ContainerOrder, PullPolicy
from fulmen_runner.agents.tail import Tail
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES

CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
PULL_TIMEOUT_S = 1800.0
REMOVE_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 1.0
STOP_GRACE_S = 2
"""Time between SIGTERM and SIGKILL."""

_STDOUT = 1
_NO_CONNECTION = 900  # aiodocker's status for a failed connection.
_GONE = (404, 409)  # Removed, or being removed.
_ABSENT = ("not found", "no such image", "denied", "manifest unknown", "invalid reference")

_log = structlog.get_logger()


class DockerEngine:
    """A Docker engine."""

    def __init__(self, address: str, *, tls_dir: Path | None = None) -> None:
        """Initializes the client; connects on first use.

        Args:
            address: `unix:///var/run/docker.sock` or `tcp://host:2376`.
            tls_dir: Directory with `ca.pem`, `cert.pem` and `key.pem`, for TCP; None for no TLS.
        """
        self.address = address
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        # No limit: every running container holds a connection.
        scheme, _, rest = address.partition("://")
        connector: aiohttp.BaseConnector
        if scheme == "unix":
            connector, url = aiohttp.UnixConnector(rest, limit=0), "unix://localhost"
        elif tls_dir is not None:
            connector, url = aiohttp.TCPConnector(ssl=_tls(tls_dir), limit=0), f"https://{rest}"
        else:
            connector, url = aiohttp.TCPConnector(limit=0), f"http://{rest}"
        self._connector = connector
        self._docker = aiodocker.Docker(url, connector=connector, timeout=timeout)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._removals: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancels pulls, waits for pending removals, and closes the connections."""
        if pulls := set(self._pulls.values()):
            for pull in pulls:
                pull.cancel()
            await asyncio.wait(pulls, timeout=CONNECT_TIMEOUT_S)
        if self._removals:
            await asyncio.wait(self._removals, timeout=REMOVE_TIMEOUT_S)
        await self._docker.close()
        await self._connector.close()

    async def check(self) -> None:
        """Raises HostUnavailable if the engine does not answer."""
        await self._call(self._docker.version())

    async def provide_image(self, image: str, policy: PullPolicy) -> None:
        """Pulls an image according to the policy; concurrent calls share one pull.

        Raises:
            AgentFailed: If the image does not exist or access is denied.
            HostUnavailable: If the engine or the registry does not answer.
        """
        if policy != "always":
            try:
                await self._docker.images.inspect(image)
            except aiodocker.DockerError as error:
                if error.status == 400:
                    raise AgentFailed(f"image name {image!r} is invalid: {error.message}") from None
                if error.status != 404:
                    raise self._unavailable(error) from None
            except (TimeoutError, aiohttp.ClientError) as error:
                raise self._unavailable(error) from None
            else:
                return
            if policy == "never":
                raise AgentFailed(f"image {image!r} is not present, and FULMEN_RUNNER_CONTAINER_PULL is `never`")
        pull = self._pulls.get(image)
        if pull is None:
            pull = self._pulls[image] = asyncio.create_task(self._pull(image), name=f"pull {image}")
            pull.add_done_callback(lambda _: self._pulls.pop(image))
        await asyncio.shield(pull)

    async def _pull(self, image: str) -> None:
        _log.info("image_pull_started", image=image)
        try:
            async with asyncio.timeout(PULL_TIMEOUT_S):
                async for _ in self._docker.images.pull(image, stream=True, timeout=None):
                    continue
        except TimeoutError:
            raise HostUnavailable(f"image {image!r} was not pulled within {PULL_TIMEOUT_S:g} s") from None
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from None
        except aiodocker.DockerError as error:
            if error.status in (400, 404) or any(word in error.message.lower() for word in _ABSENT):
                raise AgentFailed(f"image {image!r} does not exist or access is denied: {error.message}") from None
            raise HostUnavailable(f"image {image!r} cannot be pulled: {error.message}") from None
        _log.info("image_pulled", image=image)

    async def run(self, order: ContainerOrder) -> ContainerEnd:
        """Runs a container to its end. On cancellation, ends it with SIGTERM, then SIGKILL.

        Raises:
            AgentFailed: If it cannot be started because of its image, command or network.
            HostUnavailable: If the engine does not answer.
        """
        ended = False
        try:
            end = await self._run(order)
            ended = True
        except aiodocker.DockerError as error:
            if error.status in (400, 404):
                raise AgentFailed(f"container cannot be started: {error.message}") from None
            raise self._unavailable(error) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            raise self._unavailable(error) from None
        finally:
            removal = asyncio.create_task(self._remove(order.name, stop=not ended), name=f"remove {order.name}")
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            await asyncio.shield(removal)
        return end

    async def _run(self, order: ContainerOrder) -> ContainerEnd:
        container = await self._docker.containers.create(dict(order.config), name=order.name)
        for archive in order.files:
            await self._put(container, order.files_at, archive)
        stdout, stderr = Tail(order.output_kept_bytes), Tail(MAX_MESSAGE_BYTES)
        ends = Tail(order.printed.limit_bytes), Tail(order.printed.limit_bytes)
        async with container.attach(stdin=False, stdout=True, stderr=True) as output:
            feeding = asyncio.create_task(_feed(container, order.stdin), name="stdin")
            try:
                await container.start()
                flooded = False
                while not flooded and (message := await output.read_out()) is not None:
                    (stdout if message.stream == _STDOUT else stderr).add(message.data)
                    ends[message.stream != _STDOUT].add(message.data)
                    flooded = stdout.seen_bytes + stderr.seen_bytes > order.output_allowed_bytes
            finally:
                order.printed.keep(*(end.content() for end in ends))
                feeding.cancel()
                await asyncio.wait((feeding,), timeout=CONNECT_TIMEOUT_S)
        if flooded:
            exit_code, result, cut, state = 0, b"", False, {}
        else:
            exit_code = int((await container.wait())["StatusCode"])
            result, cut = await self._fetch(container, order.result_path, order.result_allowed_bytes)
            state = (await container.show())["State"]
        return ContainerEnd(
            exit_code=exit_code,
            stdout=stdout.text(),
            stderr=stderr.text(),
            flooded=flooded,
            out_of_memory=bool(state.get("OOMKilled")),
            result=result,
            result_cut=cut,
        )

    async def _put(self, container: DockerContainer, path: str, archive: bytes | Path) -> None:
        if isinstance(archive, bytes):
            await container.put_archive(path, archive)
            return
        with archive.open("rb") as file:
            await container.put_archive(path, file)

    async def _fetch(self, container: DockerContainer, path: str, limit_bytes: int) -> tuple[bytes, bool]:
        """Returns the first bytes of a file, and whether it is longer. The client's own call would read all of it."""
        url = f"{self._docker.docker_host}/{self._docker.api_version}/containers/{container.id}/archive"
        async with self._docker.session.get(url, params={"path": path}) as response:
            if response.status == 404:
                return b"", False
            response.raise_for_status()
            # The tar headers, and more than `limit_bytes`.
            archive = bytearray()
            while len(archive) <= limit_bytes + 4 * tarfile.BLOCKSIZE and (part := await response.content.readany()):
                archive += part
        return _first_file(bytes(archive), limit_bytes)

    async def _remove(self, name: str, *, stop: bool) -> None:
        """Removes a container with its volume; on timeout, leaves it to `remove_leftovers`."""
        container = self._docker.containers.container(name)
        problem = "timeout"
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                while True:
                    try:
                        if stop:
                            await _unless_gone(container.stop(t=STOP_GRACE_S))
                        await _unless_gone(container.delete(force=True, v=True))
                    except (aiodocker.DockerError, aiohttp.ClientError) as error:
                        problem = str(error)
                        await asyncio.sleep(RETRY_PAUSE_S)
                    else:
                        return
        except TimeoutError:
            _log.warning("container_not_removed", container=name, error=problem)

    async def remove_leftovers(self, label: str, is_leftover: Callable[[Mapping[str, str]], bool]) -> int:
        """Removes containers with a label whose labels satisfy `is_leftover`; returns their number.

        Raises:
            HostUnavailable: If the engine does not answer.
        """
        filters = '{"label": ["' + label + '"]}'
        found = await self._call(self._docker.containers.list(all="true", filters=filters))
        leftovers = [each for each in found if is_leftover(each["Labels"] or {})]
        for each in leftovers:
            await self._remove(each.id, stop=False)
        return len(leftovers)

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except (aiodocker.DockerError, aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> HostUnavailable:
        if isinstance(error, aiodocker.DockerError) and error.status != _NO_CONNECTION:
            return HostUnavailable(f"Docker engine at {self.address} failed: {error.message}")
        return HostUnavailable(
            f"no Docker engine answers at {self.address}: {error}. Start one, set FULMEN_RUNNER_CONTAINER_ENGINE, or "
            "require the label `runtime=docker` for rollouts of this agent."
        )


async def _unless_gone(call: Any) -> None:
    try:
        await call
    except aiodocker.DockerError as error:
        if error.status not in _GONE:
            raise


async def _feed(container: DockerContainer, data: bytes) -> None:
    """Writes the input and closes the connection, which closes the container's stdin (`StdinOnce`)."""
    try:
        async with container.attach(stdin=True, stdout=False, stderr=False) as stream:
            await stream.write_in(data)
    except (aiodocker.DockerError, aiohttp.ClientError, ConnectionError):
        # The container has exited without reading it.
        return


def _first_file(archive: bytes, limit_bytes: int) -> tuple[bytes, bool]:
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r|") as tar:
            member = tar.next()
            file = tar.extractfile(member) if member is not None and member.isreg() else None
            content = file.read(limit_bytes) if file is not None else b""
            return content, member is not None and member.size > limit_bytes
    except tarfile.TarError:
        return b"", False


def _tls(directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context
