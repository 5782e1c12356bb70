"""Removes files that no process reads from an environment: `python slim.py /opt/fulmen`. For images, in which no one
debugs C code.

Symbols and debug sections of shared objects lie behind all that is loaded, and so do the section headers that name them:
the loader goes by program headers alone. Sources of extensions and stubs for type checkers are read by tools only. Half of
the bytecode of generated clients is docstrings, which stay in the sources.
"""

from __future__ import annotations

import py_compile
import struct
import sys
from importlib.util import cache_from_source
from pathlib import Path

ELF64_LITTLE = b"\x7fELF\x02\x01"
SECTION_HEADERS_AT, SECTION_COUNTS_AT = 40, 58
UNREAD = frozenset({".pyi", ".pyx", ".pxd", ".c", ".cpp", ".h", ".hpp"})
# An alternative to a module that is there, and tests of packages.
UNUSED = ("zstandard/_cffi.*.so", "google/protobuf/testdata", "certifi/tests")
GENERATED = ("kubernetes_asyncio",)
# A library is named after its own bytes and its source, and the loader compares them.
COMPARED = ("fulmen_llm_proxy", "native")


def strip(path: Path) -> None:
    """Cuts a shared object off behind its last loaded byte."""
    data = path.read_bytes()
    if not data.startswith(ELF64_LITTLE):
        return
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    end = table + size * count
    for index in range(count):
        offset, _, _, length = struct.unpack_from("<QQQQ", data, table + index * size + 8)
        end = max(end, offset + length)
    kept = bytearray(data[:end])
    struct.pack_into("<Q", kept, SECTION_HEADERS_AT, 0)
    struct.pack_into("<HHH", kept, SECTION_COUNTS_AT, 0, 0, 0)
    path.write_bytes(kept)


def main() -> None:
    """Goes through an environment."""
    packages = next(Path(sys.argv[1]).glob("lib/python*/site-packages"))
    for pattern in UNUSED:
        for found in packages.glob(pattern):
            for path in sorted(found.rglob("*"), reverse=True) if found.is_dir() else ():
                path.rmdir() if path.is_dir() else path.unlink()
            found.rmdir() if found.is_dir() else found.unlink()
    for name in GENERATED:
        for path in (packages / name).rglob("*.py"):
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(
                str(path), cache_from_source(path), optimize=2, invalidation_mode=unchecked, doraise=True
            )
    for path in packages.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.relative_to(packages).parts[: len(COMPARED)] == COMPARED:
            continue
        if path.suffix in UNREAD:
            path.unlink()
        elif ".so" in path.suffixes:
            strip(path)


if __name__ == "__main__":
    main()
