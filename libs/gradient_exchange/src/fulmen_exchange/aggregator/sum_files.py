"""The files of a shard: the newest sum of every call and bucket, and the residual after it.

They are safetensors files. Invariant: a file is complete and on disk before it replaces the one before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open

from fulmen_exchange import wire
from fulmen_exchange.aggregator.effects import Reply, SumDue
from fulmen_exchange.aggregator.folders import sync_folder
from fulmen_exchange.aggregator.held_folder import FolderLost
from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.terms import CallTerms, Terms
from fulmen_exchange.codecs.codec import PayloadInvalid, State

SUFFIX = ".safetensors"
REPLY, STATE, METADATA = "reply", "state.", "metadata"
BUCKET = "bucket-"

_log = structlog.get_logger()


class TermsMismatch(Exception):
    """A file belongs to a run with other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSum:
    """Contents of a file.

    Attributes:
        key: Round and call of the sum.
        terms: Terms of the sum.
        contributors: Incarnations of the ranks whose payloads it includes.
        member_count: Members of which it was expected.
        data: The encoded sum.
        state: The shard's state of the bucket after it.
        epoch: Epoch of the membership.
        history: Identifier of the exchange.
    """

    key: Key
    terms: CallTerms
    contributors: dict[int, str]
    member_count: int
    data: bytes = field(repr=False)
    state: State = field(repr=False)
    epoch: int
    history: str


@dataclass(frozen=True, slots=True)
class SumFiles:
    """The files of one shard.

    Attributes:
        folder: Folder of the files.
        terms: Terms of the run; files of other runs are ignored.
        is_synced: Whether files must survive a crash of the machine.
    """

    folder: Path
    terms: Terms
    is_synced: bool = True

    def write(self, due: SumDue, reply: Reply, state: State, *, epoch: int, history: str) -> None:
        """Stores a sum, replacing that of the round before: ranks are never more than a sum apart.

        Raises:
            FolderLost: if another server has taken the folder; nothing is stored then.
        """
        number, call = due.key
        metadata = {
            "round": number,
            "call": call,
            "epoch": epoch,
            "history": history,
            "terms": asdict(due.terms),
            "contributors": {str(rank): incarnation for rank, incarnation in due.contributors.items()},
            "member_count": due.member_count,
            "run": _name_of(self.terms),
        }
        name = f"call-{call}" if due.terms.is_plain else f"{BUCKET}{due.terms.bucket}"
        path = self.folder / f"{name}{SUFFIX}"
        aside = path.with_suffix(".new")
        tensors = {f"{STATE}{key}": tensor.contiguous().view(torch.uint8).numpy().data for key, tensor in state.items()}
        try:
            with aside.open("wb") as file:
                file.write(_header(metadata, {key: len(view) for key, view in tensors.items()}, reply.size))
                for piece in (*tensors.values(), *reply.chunks()):
                    file.write(piece)
                file.flush()
                if self.is_synced:
                    os.fsync(file.fileno())
            aside.replace(path)
            if self.is_synced:
                sync_folder(self.folder)
        except FileNotFoundError:
            raise FolderLost(f"another server has taken {self.folder.stem}") from None

    def read(self) -> tuple[list[StoredSum], list[str]]:
        """Returns the stored sums, and the names of unreadable files."""
        sums, bad = [], []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                sums.append(self._read(path))
            except TermsMismatch:
                continue
            except (SafetensorError, OSError, KeyError, TypeError, ValueError, PayloadInvalid) as error:
                _log.warning("stored_sum_unreadable", file=path.name, error=type(error).__name__)
                bad.append(path.name)
        return sums, bad

    def _read(self, path: Path) -> StoredSum:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads(file.metadata()[METADATA])
            if metadata["run"] != _name_of(self.terms):
                raise TermsMismatch
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        data = tensors.pop(REPLY).numpy().tobytes()
        size = wire.decode(data).size
        state = {name.removeprefix(STATE): value for name, value in tensors.items()}
        if any(value.numel() != size for value in state.values()):
            raise ValueError("of another size")
        return StoredSum(
            key=(int(metadata["round"]), int(metadata["call"])),
            terms=CallTerms(**metadata["terms"]),
            contributors={int(rank): str(incarnation) for rank, incarnation in metadata["contributors"].items()},
            member_count=int(metadata["member_count"]),
            data=data,
            state=state,
            epoch=int(metadata["epoch"]),
            history=str(metadata["history"]),
        )


def _header(metadata: object, states: dict[str, int], reply_bytes: int) -> bytes:
    """Returns the beginning of a file: float32 tensors first and bytes last, which aligns all of them."""
    places: dict[str, object] = {"__metadata__": {METADATA: json.dumps(metadata)}}
    for name, begin, end in _consecutive({**states, REPLY: reply_bytes}):
        kind, width = ("U8", 1) if name == REPLY else ("F32", 4)
        places[name] = {"dtype": kind, "shape": [(end - begin) // width], "data_offsets": [begin, end]}
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _consecutive(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for name, size in sizes.items():
        yield name, begin, begin + size
        begin += size


def _name_of(terms: Terms) -> str:
    return json.dumps([terms.layout_digest, terms.codec, terms.codec_version, terms.settings_json, terms.shard_count])
