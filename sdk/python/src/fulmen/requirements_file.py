"""Reads the requirements file of an agent: packages by name, and nothing else that pip or uv would accept.

Invariant: what is returned are names with extras, versions, markers and hashes. No line of it is an option, a path or a URL,
so that an installer reads no file and calls no server that the file chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["MAX_REQUIREMENTS", "MAX_REQUIREMENTS_BYTES", "RequirementsInvalid", "has_hashes", "read_requirements"]

MAX_REQUIREMENTS_BYTES: Final = 1024 * 1024
MAX_REQUIREMENTS: Final = 2000
MAX_LINE_CHARS: Final = 64 * 1024
"""Enough for the hashes of a package with hundreds of files."""

_SHOWN_CHARS: Final = 80
_HASH: Final = " --hash="

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION: Final = r"(?:===|==|~=|!=|<=|>=|<|>)[ \t]*[A-Za-z0-9][A-Za-z0-9._*+!-]*"
_VERSIONS: Final = rf"{_VERSION}(?:[ \t]*,[ \t]*{_VERSION})*"
_REQUIREMENT: Final = re.compile(
    rf"(?P<name>{_NAME})[ \t]*(?:\[[ \t]*{_NAME}(?:[ \t]*,[ \t]*{_NAME})*[ \t]*\])?"
    rf"[ \t]*(?:{_VERSIONS}|\([ \t]*{_VERSIONS}[ \t]*\))?[ \t]*(?:;[ \t]*[A-Za-z0-9_.'\"<>=!~()*+, \t-]+)?"
)
_HASHES: Final = re.compile(r"(?:[ \t]+--hash[= \t][ \t]*sha(?:256|384|512):[0-9a-f]{64,128})+[ \t]*\Z")
_COMMENT: Final = re.compile(r"(?:\A|[ \t])#.*")
_ARCHIVES: Final = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".tbz", ".txz", ".tlz", ".lz", ".lzma")


class RequirementsInvalid(ValueError):
    """A requirements file has lines that are not allowed; `problems` has one text for each."""

    def __init__(self, problems: list[str]) -> None:
        """Stores the problems."""
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


def read_requirements(content: bytes) -> tuple[str, ...]:
    """Returns the requirements of a file, one per line, without comments.

    Raises:
        RequirementsInvalid: With every problem that was found.
    """
    if len(content) > MAX_REQUIREMENTS_BYTES:
        raise RequirementsInvalid([f"has {len(content)} bytes: at most {MAX_REQUIREMENTS_BYTES}"])
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise RequirementsInvalid(["is not UTF-8"]) from None
    problems: list[str] = []
    found: list[str] = []
    for number, raw in _lines(text.removeprefix("\ufeff")):
        # Runs of blanks become one, which also keeps the time of matching linear.
        line = re.sub(r"[ \t]+", " ", raw)
        problem = _problem(line)
        if problem:
            problems.append(f"line {number}: {line[:_SHOWN_CHARS]!r}: {problem}")
        else:
            found.append(_plain_hashes(line))
    if len(found) > MAX_REQUIREMENTS:
        problems.append(f"has {len(found)} requirements: at most {MAX_REQUIREMENTS}")
    hashed = [_HASH in line for line in found]
    if any(hashed) and not all(hashed):
        bare = [line.partition(";")[0] for line, known in zip(found, hashed, strict=True) if not known]
        problems.append(f"some requirements have hashes, but these have none: {', '.join(bare)[:_SHOWN_CHARS]}")
    if not (found or problems):
        problems.append("has no requirement")
    if problems:
        raise RequirementsInvalid(problems)
    return tuple(found)


def has_hashes(requirements: tuple[str, ...]) -> bool:
    """Returns whether requirements are locked by hashes."""
    return any(_HASH in line for line in requirements)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Returns the logical lines with their numbers from 1: continued lines joined, comments removed."""
    joined, begun = "", 0
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        line = _COMMENT.sub("", raw)
        begun = begun or number
        if line.endswith("\\"):
            joined += f"{line[:-1]} "
            continue
        line = (joined + line).strip(" \t")
        if line:
            yield begun, line
        joined, begun = "", 0
    if joined.strip(" \t"):
        yield begun, joined.strip(" \t")


def _plain_hashes(line: str) -> str:
    return re.sub(r"[ \t]+--hash[= \t][ \t]*", _HASH, line)


def _problem(line: str) -> str:
    """Returns why a line is not allowed; empty if it is."""
    if len(line) > MAX_LINE_CHARS:
        return f"at most {MAX_LINE_CHARS} characters"
    hashes = _HASHES.search(line)
    requirement = line[: hashes.start()] if hashes else line
    match = _REQUIREMENT.fullmatch(requirement)
    if match is not None and not match["name"].lower().endswith(_ARCHIVES) and " --" not in requirement:
        return ""
    if line.startswith("-"):
        return "options are not allowed; indexes are settings of the runner, and the files of the agent need no installation"
    if "://" in line or " @ " in line or "@" in requirement.partition(";")[0]:
        return "URLs are not allowed; name a package of the runner's index"
    if "/" in line or line.startswith(".") or (match and match["name"].lower().endswith(_ARCHIVES)):
        return "paths are not allowed; name a package of the runner's index"
    return 'not a requirement, such as "name==1.2" or "name[extra]>=1.2,<2"'
