"""Writes the reference of the contracts, for the documentation's site: every service, message and enum with its comment.

buf build protos --output - | python tools/proto_reference.py build/protos.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

Place = tuple[int, ...]
# Numbers of fields of FileDescriptorProto and DescriptorProto, of which places of comments consist.
MESSAGES, ENUMS, SERVICES, FIELDS, NESTED, NESTED_ENUMS, VALUES, METHODS = 4, 5, 6, 2, 3, 4, 2, 2
INTRODUCTION = """\
# Contracts

The rpcs and messages of the services, generated from `protos/`. The reasons of errors are in `fulmen/errors/v1/reasons.proto`.
"""


class Comments:
    """The comments of a file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        """Keeps the comments before or after each element."""
        self._texts = {tuple(x.path): x.leading_comments or x.trailing_comments for x in file.source_code_info.location}

    def __getitem__(self, place: Place) -> str:
        """Returns the comment of a place, empty if there is none."""
        return self._texts.get(place, "").strip()

    def cell(self, place: Place) -> str:
        """Returns the comment of a place for a table."""
        return re.sub(r"\s+", " ", self[place]).replace("|", "\\|").replace("<", "&lt;")

    def text(self, place: Place) -> str:
        """Returns the comment of a place as paragraphs."""
        return "\n".join(line.removeprefix(" ") for line in self[place].split("\n")).replace("<", "&lt;")


def type_of(field: FieldDescriptorProto) -> str:
    """Returns the type of a field as protos write it."""
    name = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yields a table."""
    lines = [f"| `{name}` | {f'`{kind}`' if kind else ''} | {comment} |" for name, kind, comment in rows]
    if lines:
        yield "\n".join(["| | | |", "|---|---|---|", *lines])


def service(one: ServiceDescriptorProto, place: Place, comments: Comments) -> Iterator[str]:
    """Yields the texts of a service."""
    yield f"### {one.name}"
    yield comments.text(place)
    for number, method in enumerate(one.method):
        asked, answered = method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2]
        streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
        yield f"#### {one.name}.{method.name}"
        yield f"`({streams[0]}{asked}) → {streams[1]}{answered}`"
        yield comments.text((*place, METHODS, number))


def message(one: DescriptorProto, place: Place, comments: Comments, above: str = "") -> Iterator[str]:
    """Yields the texts of a message and of those in it; entries of maps are none of their own."""
    name = f"{above}{one.name}"
    yield f"### {name}"
    yield comments.text(place)
    yield from table((f.name, type_of(f), comments.cell((*place, FIELDS, n))) for n, f in enumerate(one.field))
    for number, inner in enumerate(one.nested_type):
        if not inner.options.map_entry:
            yield from message(inner, (*place, NESTED, number), comments, f"{name}.")
    for number, values in enumerate(one.enum_type):
        yield from enum(values, (*place, NESTED_ENUMS, number), comments, f"{name}.")


def enum(one: EnumDescriptorProto, place: Place, comments: Comments, above: str = "") -> Iterator[str]:
    """Yields the texts of an enum."""
    yield f"### {above}{one.name}"
    yield comments.text(place)
    yield from table((v.name, str(v.number), comments.cell((*place, VALUES, n))) for n, v in enumerate(one.value))


def parts(file: FileDescriptorProto) -> Iterator[str]:
    """Yields the texts of a file."""
    comments = Comments(file)
    yield f"## {file.name}"
    for number, each in enumerate(file.service):
        yield from service(each, (SERVICES, number), comments)
    for number, found in enumerate(file.message_type):
        yield from message(found, (MESSAGES, number), comments)
    for number, values in enumerate(file.enum_type):
        yield from enum(values, (ENUMS, number), comments)


def main() -> None:
    """Reads the descriptors from standard input and writes the page."""
    files = [f for f in FileDescriptorSet.FromString(sys.stdin.buffer.read()).file if f.package.startswith("fulmen.")]
    texts = [INTRODUCTION, *(text for file in sorted(files, key=lambda f: f.name) for text in parts(file) if text)]
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
