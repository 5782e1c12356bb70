#!/usr/bin/env python3
"""Generates the console's OpenAPI description: the rpcs that the console offers over HTTP, from protos/ and their comments.

`--check` compares instead. Source: https://spec.openapis.org/oas/v3.1.0 and https://protobuf.dev/programming-guides/json/.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for source in (
    ROOT,
    ROOT / "tools",
    *(ROOT / "services/console/src", ROOT / "sdk/python/src", ROOT / "libs/service_kit/src"),
):
    sys.path.insert(0, str(source))

from google.protobuf.descriptor_pb2 import (  # noqa: E402
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from proto_reference import ENUMS, FIELDS, MESSAGES, METHODS, NESTED, NESTED_ENUMS, SERVICES, Comments, Place  # noqa: E402
from train_toml_reference import write_or_check  # noqa: E402

from fulmen_console.gateway.methods import Target, forwarded_methods  # noqa: E402

TARGET = ROOT / "services/console/src/fulmen_console/openapi.json"
Schema = dict[str, Any]
_F = FieldDescriptorProto
NUMBERS: dict[int, Schema] = {
    _F.TYPE_DOUBLE: {"type": "number", "format": "double"},
    _F.TYPE_FLOAT: {"type": "number", "format": "float"},
    _F.TYPE_BOOL: {"type": "boolean"},
    _F.TYPE_STRING: {"type": "string"},
    _F.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    **{kind: {"type": "integer", "format": "int32"} for kind in (_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32)},
    **{kind: {"type": "integer", "format": "uint32"} for kind in (_F.TYPE_UINT32, _F.TYPE_FIXED32)},
    # As texts: JavaScript's numbers have 53 bits.
    **{kind: {"type": "string", "format": "int64"} for kind in (_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64)},
    **{kind: {"type": "string", "format": "uint64"} for kind in (_F.TYPE_UINT64, _F.TYPE_FIXED64)},
}
WELL_KNOWN: dict[str, Schema] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "string", "pattern": r"^-?\d+(\.\d+)?s$", "description": "Such as `1.5s`."},
    "google.protobuf.FieldMask": {
        "type": "string",
        "description": "Paths with commas, such as `priority,deadlineTime`.",
    },
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.Value": {},
    "google.protobuf.Empty": {"type": "object"},
    "google.protobuf.Any": {"type": "object", "properties": {"@type": {"type": "string"}}},
}
ERROR: Schema = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "Code of gRPC in lower case, such as `not_found`."},
        "message": {"type": "string"},
        "details": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "description": "Such as `google.rpc.ErrorInfo`."},
                    "value": {"type": "string", "contentEncoding": "base64"},
                },
            },
        },
    },
}
INTRODUCTION = (
    "Every rpc for people and tools as JSON over HTTP (the Connect protocol). A server stream answers with frames of "
    "`application/connect+json`: a byte of flags, four bytes of length, and a message; see docs/http-api.md."
)


class Contracts:
    """All messages, enums and rpcs with their comments."""

    def __init__(self, files: FileDescriptorSet) -> None:
        """Indexes them by full name."""
        self.messages: dict[str, tuple[DescriptorProto, Place, Comments]] = {}
        self.enums: dict[str, tuple[EnumDescriptorProto, Place, Comments]] = {}
        self.methods: dict[str, tuple[MethodDescriptorProto, str]] = {}
        for file in files.file:
            comments = Comments(file)
            for number, message in enumerate(file.message_type):
                self._add(f"{file.package}.{message.name}", message, (MESSAGES, number), comments)
            for number, enum in enumerate(file.enum_type):
                self.enums[f"{file.package}.{enum.name}"] = (enum, (ENUMS, number), comments)
            for number, service in enumerate(file.service):
                for place, method in enumerate(service.method):
                    text = flat(comments[(SERVICES, number, METHODS, place)])
                    self.methods[f"{file.package}.{service.name}.{method.name}"] = (method, text)

    def _add(self, name: str, message: DescriptorProto, place: Place, comments: Comments) -> None:
        self.messages[name] = (message, place, comments)
        for number, inner in enumerate(message.nested_type):
            self._add(f"{name}.{inner.name}", inner, (*place, NESTED, number), comments)
        for number, enum in enumerate(message.enum_type):
            self.enums[f"{name}.{enum.name}"] = (enum, (*place, NESTED_ENUMS, number), comments)

    def schema(self, name: str) -> Schema:
        """Returns the schema of a message or an enum."""
        if name in self.enums:
            enum, place, comments = self.enums[name]
            return described({"type": "string", "enum": [value.name for value in enum.value]}, comments[place])
        message, place, comments = self.messages[name]
        properties = {
            field.json_name: described(self.of_field(field), comments[(*place, FIELDS, number)])
            for number, field in enumerate(message.field)
        }
        return described({"type": "object", "properties": properties}, comments[place])

    def of_field(self, field: FieldDescriptorProto) -> Schema:
        """Returns the schema of a field."""
        entry = self.messages.get(field.type_name.lstrip("."))
        if entry is not None and entry[0].options.map_entry:
            return {"type": "object", "additionalProperties": self.of_one(entry[0].field[1])}
        one = self.of_one(field)
        return {"type": "array", "items": one} if field.label == _F.LABEL_REPEATED else one

    def of_one(self, field: FieldDescriptorProto) -> Schema:
        """Returns the schema of a value of a field."""
        name = field.type_name.lstrip(".")
        if not name:
            return dict(NUMBERS[field.type])
        return dict(WELL_KNOWN[name]) if name in WELL_KNOWN else {"$ref": f"#/components/schemas/{name}"}


def flat(comment: str) -> str:
    """Returns a comment in one line."""
    return re.sub(r"\s+", " ", comment).strip()


def described(schema: Schema, comment: str) -> Schema:
    """Adds a comment to a schema."""
    return schema | {"description": flat(comment)} if comment.strip() else schema


def references(value: object) -> Iterator[str]:
    """Yields the names of the schemas that a value refers to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner.rpartition("/")[2]
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def operation(method: MethodDescriptorProto, comment: str, service: str) -> Schema:
    """Returns the operation of an rpc."""
    kind = "application/connect+json" if method.server_streaming else "application/json"

    def content(name: str) -> Schema:
        return {kind: {"schema": {"$ref": f"#/components/schemas/{name.lstrip('.')}"}}}

    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "operationId": f"{service.rpartition('.')[2]}_{method.name}",
        "tags": [service],
        "description": comment,
        "requestBody": {"required": True, "content": content(method.input_type)},
        "responses": {
            "200": {
                "description": "Each message of the stream." if method.server_streaming else "The answer.",
                "content": content(method.output_type),
            },
            "default": {"description": "An error.", "content": error},
        },
    }


def document(contracts: Contracts) -> Schema:
    """Returns the whole description."""
    paths: Schema = {}
    for target in Target:
        for method in forwarded_methods(target):
            service = method.containing_service.full_name
            found, comment = contracts.methods[method.full_name]
            paths[f"/{service}/{method.name}"] = {"post": operation(found, comment, service)}
    schemas: dict[str, Schema] = {"Error": ERROR}
    missing = set(references(paths)) - schemas.keys()
    while missing:
        schemas |= {name: contracts.schema(name) for name in missing}
        missing = set(references(schemas)) - schemas.keys()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fulmen", "version": "v1", "description": INTRODUCTION, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "http://127.0.0.1:7500"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def compiled() -> FileDescriptorSet:
    """Compiles the protos with their comments."""
    command = [ROOT / "node_modules/.bin/buf", "build", ROOT / "protos", "--output", "-"]
    return FileDescriptorSet.FromString(subprocess.run(command, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    text = json.dumps(document(Contracts(compiled())), indent=1, ensure_ascii=False) + "\n"
    sys.exit(write_or_check({TARGET: text}, "tools/openapi.py"))
