"""The registry of codecs: every module of `codecs` with `ENTRIES`, and entry points of installed packages."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, TypeAdapter

from fulmen_exchange import codecs as compression
from fulmen_exchange.codecs.codec import AnyEntry, Codec, CodecEntry
from fulmen_exchange.settings import CodecSettings

ENTRIES = "ENTRIES"
ENTRY_POINTS = "fulmen.codecs"


class CodecsInvalid(Exception):
    """A codec cannot be loaded; the message names the file or package."""


@lru_cache(maxsize=1)
def load_codecs() -> Mapping[str, AnyEntry]:
    """Loads every codec.

    Raises:
        CodecsInvalid: if an entry is not a `CodecEntry`, or two codecs have the same name.
    """
    found: dict[str, AnyEntry] = {}
    for origin, entry in _all():
        if not isinstance(entry, CodecEntry):
            raise CodecsInvalid(f"{origin}: {ENTRIES} must be a tuple of CodecEntry")
        if entry.name in found:
            raise CodecsInvalid(f"{origin}: codec {entry.name!r} is already registered")
        found[entry.name] = entry
    return found


def make_codec(settings: CodecSettings) -> Codec:
    """Builds the codec of its settings."""
    return next(entry for entry in load_codecs().values() if type(settings) is entry.settings).make(settings)


def settings_of(codec: CodecSettings | str, **settings: Any) -> CodecSettings:
    """Returns settings unchanged, or builds a codec's settings by its name.

    Raises:
        ValidationError: if the name is unknown or settings are invalid; lists all problems.
        TypeError: if there are settings in addition to an object of settings.
    """
    if isinstance(codec, CodecSettings):
        if settings:
            raise TypeError(f"{', '.join(settings)}: already in the given settings")
        return codec
    found: CodecSettings = TypeAdapter(ExchangeSettings).validate_python({"codec": codec, **settings})
    return found


def _all() -> Iterator[tuple[str, Any]]:
    for module in pkgutil.iter_modules(compression.__path__, f"{compression.__name__}."):
        yield from ((module.name, entry) for entry in getattr(import_module(module.name), ENTRIES, ()))
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        origin = f"entry point {point.name} = {point.value}"
        try:
            loaded = point.load()
        except Exception as error:  # third-party code may raise anything
            raise CodecsInvalid(f"{origin}: {type(error).__name__}: {error}") from error
        yield from ((origin, entry) for entry in getattr(loaded, ENTRIES, loaded))


if TYPE_CHECKING:
    ExchangeSettings = CodecSettings
    """Settings of any registered codec, discriminated by `codec`."""
else:
    ExchangeSettings = Annotated[
        Union[tuple(entry.settings for entry in load_codecs().values())],  # noqa: UP007 - known at run time alone
        Field(discriminator="codec"),
    ]
"""Settings of any registered codec, discriminated by `codec`."""
