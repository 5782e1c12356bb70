"""Looks up or downloads one model of a hub, in a process of its own, which a pause or a deadline can end at any time.

Called as `python -m fulmen_algorithm.clients.hub_process ORDER`, with the order as JSON. It prints one JSON object per
line: `{"received": ..., "total": ...}` in bytes while it downloads, then `{"folder": ..., "commit": ...}` or
`{"problem": ..., "passes": ...}`; `passes` is true if trying again later may help, as when a hub does not answer.

Invariant: nothing is taken of a repository but weights as safetensors and files whose readers run no code. Problems are
reported in the words of this file: the hub's own may hold addresses and keys.
"""

import errno
import json
import os
import re
import sys
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of the HTTP library that it uses
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fulmen.models.base_names import HubName
from fulmen.models.files import DATA_SUFFIXES

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
WEIGHTS_SUFFIX: Final = ".safetensors"
MAX_FILES: Final = 2000
MAX_SMALL_BYTES: Final = 256 * 2**20
"""Limit of all files besides the weights, together."""
LOOK_UP_TIMEOUT_S: Final = 20.0
DOWNLOADS: Final = 4
"""Files at a time."""
SIMILAR: Final = 5
MAX_SHOWN: Final = 10

_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9._/-]{1,96}")
_REFUSED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_VARIABLE: Final = "FULMEN_ALGORITHM_HUB_TOKEN or HF_TOKEN of the algorithm service"


class Problem(Exception):
    """Why a model is not taken; the text is shown to users."""

    def __init__(self, text: str, *, passes: bool = False) -> None:
        super().__init__(text)
        self.passes = passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request to the process.

    Attributes:
        name: `hf:organisation/name@revision`.
        max_bytes: Maximum size of what is taken.
        fetches: Whether it is downloaded; if not, it is only looked up.
    """

    name: str
    max_bytes: int
    fetches: bool

    def as_argument(self) -> str:
        """Returns the argument of the process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The files of a repository at a commit, by name, in bytes."""

    name: HubName
    commit: str
    sizes: Mapping[str, int]

    @property
    def small(self) -> list[str]:
        """Files besides the weights that are taken: at the top, and data by their names."""
        return sorted(
            file
            for file in self.sizes
            if _FILE.fullmatch(file) and Path(file).suffix in DATA_SUFFIXES - {WEIGHTS_SUFFIX}
        )


def carried_out(order: Order) -> dict[str, str]:
    """Looks a model up, or downloads it; returns its commit, and its folder in the cache.

    Raises:
        Problem: if it does not exist, may not be read, or is none that may be loaded.
    """
    name = HubName.parse(order.name)
    # A commit never changes: what is cached whole needs no hub.
    cached = _cached(name) if name.commit else None
    if cached is None:
        try:
            listing = _listing(name)
            if not order.fetches:
                _check_weights(listing)
                return {"commit": listing.commit}
            cached = _downloaded(listing, order.max_bytes)
        except (OfflineModeIsEnabled, HTTPError, OSError) as error:
            cached = _instead(name, error)
    _check_loadable(cached, name)
    return {"folder": str(cached), "commit": cached.name}


def _listing(name: HubName) -> _Listing:
    try:
        found = HfApi().model_info(
            name.repository, revision=name.revision, files_metadata=True, timeout=LOOK_UP_TIMEOUT_S
        )
        if found.gated:
            # The hub shows the list of files to all.
            HfApi().auth_check(name.repository)
    except GatedRepoError as error:
        raise Problem(_gated(name)) from error
    except DisabledRepoError as error:
        raise Problem(f"{name} is disabled by the hub") from error
    except RevisionNotFoundError as error:
        raise Problem(f"{name.repository} has no revision {name.revision}{_revisions(name)}") from error
    except HfHubHTTPError as error:
        # Without a token a hub does not distinguish a private model from one that does not exist.
        is_hidden = error.response.status_code == HTTPStatus.UNAUTHORIZED and get_token() is None
        if not isinstance(error, RepositoryNotFoundError) and not is_hidden:
            raise
        text = f"the hub has no model {name.repository}, or it is private and {_VARIABLE} does not give access to it"
        raise Problem(text + _similar(name)) from error
    if found.sha is None or not _COMMIT.fullmatch(found.sha):
        raise Problem(f"the hub returned no commit for {name}")
    files = found.siblings or []
    if len(files) > MAX_FILES:
        raise Problem(f"{name} has more than {MAX_FILES} files")
    return _Listing(name=name, commit=found.sha, sizes={file.rfilename: file.size or 0 for file in files})


def _gated(name: HubName) -> str:
    return f"{name} is gated: accept its terms at the hub, and set {_VARIABLE} to a token of that account"


def _similar(name: HubName) -> str:
    """Returns names that the hub finds for the last part of one, as the end of a message; empty if it finds none."""
    words = name.repository.rpartition("/")[2]
    try:
        found = [model.id for model in HfApi().list_models(search=words, limit=SIMILAR)]
    except (HTTPError, OSError, ValueError):
        return ""
    shown = [each for each in found if _REPOSITORY.fullmatch(each)]
    return f"; similar: {', '.join(shown)}" if shown else ""


def _revisions(name: HubName) -> str:
    try:
        refs = HfApi().list_repo_refs(name.repository)
    except (HTTPError, OSError, ValueError):
        return ""
    known = [ref.name for ref in (*refs.branches, *refs.tags) if ref.name.isprintable()][:MAX_SHOWN]
    return f"; it has {', '.join(known)}" if known else ""


def _downloaded(listing: _Listing, max_bytes: int) -> Path:
    """Downloads the files of a listing that are taken; finished ones are not downloaded again."""
    _check_weights(listing)
    small = listing.small
    if CONFIG not in small:
        raise Problem(f"{listing.name} has no {CONFIG}: it is not a model in the format of transformers")
    _check_size(listing, small, min(MAX_SMALL_BYTES, max_bytes))
    name, few = listing.name.at(listing.commit), _Progress(limit_bytes=min(MAX_SMALL_BYTES, max_bytes))
    # By the name of the revision: the cache then knows its commit, also offline.
    if _take(listing.name, [CONFIG], few).name != listing.commit:
        raise Problem(f"{listing.name} has just changed", passes=True)
    folder = _take(name, small, few)
    _check_code(folder, listing.name)
    weights = _weights_of(folder, listing)
    _check_size(listing, [*small, *weights], max_bytes)
    cached = [file for file in weights if (folder / file).is_file()]
    progress = _Progress(
        limit_bytes=max_bytes,
        total_bytes=sum(listing.sizes[file] for file in weights),
        received_bytes=sum(listing.sizes[file] for file in cached),
    )
    return _take(name, weights, progress)


def _take(name: HubName, files: Collection[str], progress: "_Progress") -> Path:
    def take(file: str) -> Path:
        # Called like a class, it may be any function.
        bar: Any = progress.bar
        return Path(hf_hub_download(name.repository, file, revision=name.revision, tqdm_class=bar))

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        paths = [*pool.map(take, files)]
    return paths[0].parent


class _Progress:
    """Counts the bytes of all files, and prints them; refuses more than the limit, whatever sizes the hub has reported."""

    def __init__(self, *, limit_bytes: int, total_bytes: int = 0, received_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._total_bytes = total_bytes
        self._received_bytes = received_bytes
        self._told = -1
        self._lock = threading.Lock()

    def bar(self, *_: Any, **__: Any) -> "_Bar":
        """Returns a bar as huggingface_hub draws one for each file."""
        return _Bar(self)

    def add(self, count_bytes: int) -> None:
        """Counts bytes, negative for those that are thrown away."""
        with self._lock:
            self._received_bytes += count_bytes
            if self._received_bytes > self._limit_bytes:
                raise Problem(_too_large(self._limit_bytes))
            share = self._received_bytes * 100 // self._total_bytes if self._total_bytes else -1
            if share > self._told:
                self._told = share
                _print({"received": self._received_bytes, "total": self._total_bytes})


class _Bar:
    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self._progress.add(int(count or 0))


def _check_weights(listing: _Listing) -> None:
    if INDEX in listing.sizes or SINGLE in listing.sizes:
        return
    pickles = sorted(file for file in listing.sizes if Path(file).suffix in (".bin", ".pt", ".pth", ".ckpt"))
    named = f"; {pickles[0]} is a pickle, which can run code and is never read" if pickles else ""
    raise Problem(f"{listing.name} has no weights as safetensors ({SINGLE} or {INDEX}){named}")


def _weights_of(folder: Path, listing: _Listing) -> list[str]:
    """Returns the files of weights: one, or those that the index names. Others are copies in another format."""
    if INDEX not in listing.sizes:
        return [SINGLE]
    files = _indexed(folder / INDEX, listing.name)
    unknown = sorted(file for file in files if file not in listing.sizes)
    if unknown:
        raise Problem(f"{INDEX} of {listing.name} names a file that does not exist: {unknown[0]!a}")
    return files


def _indexed(index: Path, name: HubName) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        bad = [file for file in files if not _FILE.fullmatch(file) or not file.endswith(WEIGHTS_SUFFIX)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Problem(f"{INDEX} of {name} is not readable") from error
    if bad or not files:
        shown = f": {ascii(bad[0])[:100]}" if bad else ""
        raise Problem(f"{INDEX} of {name} names a file that is not a weights file{shown}")
    return files


def _check_size(listing: _Listing, files: Collection[str], limit_bytes: int) -> None:
    if sum(listing.sizes[file] for file in files) > limit_bytes:
        raise Problem(f"{listing.name}: {_too_large(limit_bytes)}")


def _too_large(limit_bytes: int) -> str:
    return f"its files are larger than {limit_bytes} bytes (the service's setting FULMEN_ALGORITHM_HUB_MAX_BYTES)"


def _check_code(folder: Path, name: HubName) -> None:
    """Refuses a model whose classes are in its repository, unless this machine's transformers has them."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        kind, is_foreign = config.get("model_type"), "auto_map" in config
    except (ValueError, AttributeError, RecursionError) as error:
        raise Problem(f"{CONFIG} of {name} is not readable") from error
    if not is_foreign:
        return
    # Imported late: it takes seconds, and few models need it.
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise Problem(
            f"{name} needs code of its repository (auto_map), which is never run: use a model that transformers supports itself"
        )


def _check_loadable(folder: Path, name: HubName) -> None:
    _check_code(folder, name)
    if not _is_whole(folder, name):
        raise Problem(f"the copy of {name} in the cache is incomplete", passes=True)


def _cached(name: HubName) -> Path | None:
    """Returns the folder of a complete model in the cache; None if there is none."""
    found = try_to_load_from_cache(name.repository, CONFIG, revision=name.revision)
    if not isinstance(found, str) or not _is_whole(Path(found).parent, name):
        return None
    return Path(found).parent


def _is_whole(folder: Path, name: HubName) -> bool:
    index = folder / INDEX
    return all((folder / file).is_file() for file in (_indexed(index, name) if index.is_file() else [SINGLE]))


def _instead(name: HubName, error: Exception) -> Path:
    """Returns the copy in the cache if the hub does not answer.

    Raises:
        Problem: if there is none, or the hub does answer.
    """
    if isinstance(error, GatedRepoError):
        raise Problem(_gated(name)) from error
    if isinstance(error, OSError) and error.errno in _DISK:
        raise Problem(f"the cache of models cannot be written: {os.strerror(error.errno)}", passes=True) from error
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSED:
        raise Problem(f"the hub refuses to send {name}: check {_VARIABLE}") from error
    cached = _cached(name)
    if cached is not None:
        return cached
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        raise Problem(
            f"HF_HUB_OFFLINE is set, and the cache of the algorithm service has no complete copy of {name}: "
            "download it there (`hf download`), or unset the variable"
        ) from error
    raise Problem("the hub cannot be reached, or closed the connection", passes=True) from error


def _print(line: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Carries out the order in the first argument."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer: dict[str, object] = {**carried_out(Order(**json.loads(sys.argv[1])))}
    except Problem as problem:
        answer = {"problem": str(problem), "passes": problem.passes}
    except Exception as error:  # noqa: BLE001  (whatever the library makes of an answer; its text may hold addresses)
        answer = {"problem": f"the hub's answer cannot be used ({type(error).__name__})", "passes": False}
    _print(answer)
    # Threads of downloads that are no longer wanted would keep it alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
