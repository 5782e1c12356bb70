"""Fetches the weights of versions, and puts complete ones together here from differences.

Files come from another agent of the run where the order names one, and otherwise, or as far as that one fails, from the
algorithm service. Every file is checked against the SHA-256 of its manifest, which comes from the service alone, and
complete weights that are put together against their checksum. The folders of earlier versions are removed.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from opentelemetry import metrics

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1 import weight_service_pb2 as weights_pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import FulmenError
from fulmen.models.files import manifest_digest, read_manifest
from fulmen.models.peer import Peer, PeerFailure
from fulmen.models.transfer import READ_TIMEOUT_S, TransferFailed, download_weights
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen_algorithm.persistence.model_folders import ModelFolders
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, PublishedPolicy
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weight_agent.held import HeldVersions

_log = structlog.get_logger()
_BASE = "base"


@dataclass(slots=True)
class Counted:
    """What was fetched for an order.

    Attributes:
        size_bytes: Bytes of all files.
        peer_bytes: Those that another agent has sent.
        peer_failure: What was wrong with that one.
    """

    size_bytes: int = 0
    peer_bytes: int = 0
    peer_failure: PeerFailure = PeerFailure.NONE


class VersionFetcher:
    """Fetches the versions of one policy, one at a time."""

    def __init__(
        self,
        weights: WeightServiceStub,
        folder: Path,
        *,
        project: str,
        held: HeldVersions | None = None,
        peer_tls: TlsFiles | None = None,
    ) -> None:
        """Removes what an earlier process has left in `folder`, but the base of adapters.

        Args:
            weights: The algorithm service.
            folder: For the versions.
            project: Project of the policy.
            held: Is informed of present and arriving files, for other agents.
            peer_tls: The TLS files for calls to these; None for no TLS.
        """
        self._weights = weights
        self._folder = folder
        self._project = project
        self._held = HeldVersions() if held is None else held
        self._peer_tls = peer_tls
        self._whole: tuple[str, Path] | None = None
        self._has_base = False
        self._line: tuple[tuple[str, str], FulmenChannel] | None = None
        meter = metrics.get_meter("fulmen.weight_agent")
        self._fetched = meter.create_counter(
            "fulmen.weight_agent.fetched.bytes", unit="By", description="Bytes of weights fetched."
        )
        self._failures = meter.create_counter(
            "fulmen.weight_agent.peer.failures",
            description="Versions whose rest was fetched from the service after another agent failed.",
        )
        for source in ("service", "peer"):
            self._fetched.add(0, {"source": source})
        for failure in (PeerFailure.SLOW, PeerFailure.WRONG):
            self._failures.add(0, {"failure": failure.value})
        folder.mkdir(parents=True, exist_ok=True)
        self._remove(keep=())

    async def fetch(self, order: pb.LoadWeights, *, loaded_sha256: str, fetched: Counted) -> PublishedPolicy:
        """Fetches what an engine needs for a version.

        Args:
            order: The version.
            loaded_sha256: Checksum of the weights that the engine has; empty for none.
            fetched: Counts the bytes, and notes what was wrong with another agent.

        Raises:
            FulmenError: the service's last answer.
            TransferFailed: if it sends data that does not match its manifest.
            OSError: if a file cannot be written.
        """
        version = _number(order.policy_version)
        kept = [] if self._whole is None else [self._whole[1]]
        await asyncio.to_thread(self._remove, keep=kept)
        self._held.begin(version, keep=[*kept, self._folder / _BASE])
        match order.kind:
            case pb.WEIGHTS_KIND_LORA:
                base = await self._base_of(order, fetched)
                path = self._folder / f"{version}-adapters"
                await self._download(order, weights_pb.WEIGHT_FORM_ADAPTERS, path, fetched)
                return PublishedPolicy(
                    name=order.policy_version,
                    version=version,
                    path=path,
                    kind=WeightsKind.LORA,
                    sha256=order.sha256,
                    base_model=base,
                    adapters={name: path / name for name in order.adapters},
                )
            case pb.WEIGHTS_KIND_DELTA if self._knows_base(order, loaded_sha256):
                path = self._folder / f"{version}-delta"
                await self._download(order, weights_pb.WEIGHT_FORM_DELTA, path, fetched)
                return PublishedPolicy(
                    name=order.policy_version,
                    version=version,
                    path=path,
                    kind=WeightsKind.DELTA,
                    sha256=order.sha256,
                    base_version=order.base_version,
                    base_sha256=order.base_sha256,
                    rebuild=self._rebuilding(order, path, fetched),
                )
            case _:
                path = await self._complete(order, fetched)
                return PublishedPolicy(name=order.policy_version, version=version, path=path, sha256=order.sha256)

    async def _base_of(self, order: pb.LoadWeights, fetched: Counted) -> Path:
        """Returns the model that adapters apply to. One of an earlier process may be another run's."""
        base, form = self._folder / _BASE, weights_pb.WEIGHT_FORM_BASE
        if not self._has_base and base.is_dir():
            request = weights_pb.GetWeightsRequest(source=self._source(order, form))
            found = await self._weights.GetWeights(request, timeout=READ_TIMEOUT_S)
            if manifest_digest(await asyncio.to_thread(read_manifest, base)) != found.digest:
                await asyncio.to_thread(shutil.rmtree, base)
        await self._download(order, form, base, fetched)
        self._has_base = True
        return base

    def _source(self, order: pb.LoadWeights, form: "weights_pb.WeightForm") -> weights_pb.WeightSource:
        return weights_pb.WeightSource(policy_version=order.policy_version, project=self._project, form=form)

    def _knows_base(self, order: pb.LoadWeights, loaded_sha256: str) -> bool:
        known = (loaded_sha256, self._whole[0] if self._whole is not None else "")
        return bool(order.base_sha256) and order.base_sha256 in known

    def _rebuilding(self, order: pb.LoadWeights, delta: Path, fetched: Counted) -> Callable[[], "asyncio.Future[Path]"]:
        async def rebuild() -> Path:
            if self._whole is None or self._whole[0] != order.base_sha256:
                return await self._complete(order, fetched)
            base = ChainLink(path=self._whole[1], sha256=order.base_sha256)
            chain = [base, ChainLink(path=delta, sha256=order.sha256)]
            try:
                path = await ModelFolders(self._folder / "whole").rebuild(chain, _number(order.policy_version))
            except RunFailed as error:
                _log.warning("weights_not_put_together", version=order.policy_version, reason=error.message)
                return await self._complete(order, fetched)
            self._whole = (order.sha256, path)
            return path

        return lambda: asyncio.ensure_future(rebuild())

    async def _complete(self, order: pb.LoadWeights, fetched: Counted) -> Path:
        path = self._folder / f"{_number(order.policy_version)}-full"
        await self._download(order, weights_pb.WEIGHT_FORM_FULL, path, fetched)
        self._whole = (order.sha256, path)
        return path

    async def _download(
        self, order: pb.LoadWeights, form: "weights_pb.WeightForm", path: Path, fetched: Counted
    ) -> None:
        source = self._source(order, form)
        self._held.add(source, path)
        if path.is_dir():
            return  # it appeared whole, for an order that was given up, or it is the base of all adapters
        try:
            async with self._peer(order, fetched) as peer:
                downloaded = await download_weights(
                    self._weights, source, path, peer=peer, on_progress=lambda done, total: self._held.moved()
                )
        except BaseException:
            self._held.remove(source)
            raise
        self._held.moved()
        fetched.size_bytes += downloaded.size_bytes
        from_peer = 0 if peer is None else peer.received_bytes
        self._fetched.add(max(downloaded.size_bytes - from_peer, 0), {"source": "service"})

    @asynccontextmanager
    async def _peer(self, order: pb.LoadWeights, fetched: Counted) -> AsyncIterator[Peer | None]:
        """Has the agent that an order names asked, unless it has failed before."""
        if not order.HasField("peer") or fetched.peer_failure:
            yield None
            return
        line = await self._line_to(order.peer)
        peer = Peer(WeightServiceStub(line), patience_s=order.peer.patience.ToTimedelta().total_seconds())
        try:
            yield peer
        finally:
            fetched.peer_bytes += peer.received_bytes
            fetched.peer_failure = peer.failure
            self._fetched.add(peer.received_bytes, {"source": "peer"})
            if peer.failure:
                _log.warning("peer_failed", target=order.peer.target, failure=peer.failure.value)
                self._failures.add(1, {"failure": peer.failure.value})
                await self.close()

    async def _line_to(self, peer: pb.Peer) -> FulmenChannel:
        """Returns the connection to an agent: mostly the one that the version before has come through."""
        at = (peer.target, peer.key)
        if self._line is None or self._line[0] != at:
            await self.close()
            self._line = (at, open_channel(peer.target, token=peer.key, tls=self._peer_tls))
        return self._line[1]

    async def close(self) -> None:
        """Closes the connection to another agent."""
        line, self._line = self._line, None
        if line is not None:
            await line[1].close()

    def _remove(self, *, keep: "list[Path] | tuple[Path, ...]") -> None:
        """Removes all folders except those to keep, their parents, and the base of adapters."""
        for path in [*self._folder.iterdir(), *(self._folder / "whole").glob("*")]:
            is_kept = any(each == path or each.is_relative_to(path) for each in keep)
            if path.name != _BASE and not is_kept and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


FETCH_ERRORS: tuple[type[Exception], ...] = (FulmenError, TransferFailed, OSError)


def _number(policy_version: str) -> int:
    return int(policy_version.rpartition("/")[2])
