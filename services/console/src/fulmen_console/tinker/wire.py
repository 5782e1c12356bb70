"""The protobuf messages of the `tinker` package, version 0.38: what `forward_backward` sends, and what it and `asample` fetch.

Only the fields that are used here are described; a field that the package adds is skipped, as protobuf does. Tensors are
raw bytes, little-endian.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from fulmen.errors import ArgumentInvalid, Violation

__all__ = ["PROTOBUF_TYPE", "Datum", "Pass", "Sequence_", "encoded_pass", "encoded_samples", "read_pass"]

PROTOBUF_TYPE: Final = b"application/x-protobuf"
MAX_DATA: Final = 4096
MAX_CHUNKS: Final = 65_536
"""Of all data of a request."""
MAX_NAMES: Final = 16
"""Inputs of a datum; settings of a loss."""
MAX_DIMENSIONS: Final = 8
_FLOAT32: Final = 1
_TYPECODES: Final[Mapping[int, str]] = {1: "f", 2: "q", 3: "i"}
"""Of Python's arrays, by `DType`: float32, int64, int32."""
_PACKAGE: Final = "fulmen_console.tinker"
_SCALARS: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
}
# Per message its fields, `type name = number`; `map<V>` has string keys. Enums are the same as int32 on the wire.
_MESSAGES: Final = {
    "Text": "bytes tokens = 1",
    "Other": "",
    "Chunk": "Text encoded_text = 1; Other image = 2; Other dmel = 3",
    "Tensor": "bytes dense = 1; Other sparse_csr = 2; int32 dtype = 3; repeated int64 shape = 4",
    "ConfigValue": "double number = 1; string text = 2",
    "Datum": "repeated Chunk model_input = 1; map<Tensor> loss_fn_inputs = 2",
    "Request": "string model_id = 1; int32 seq_id = 2; repeated Datum data = 3; string loss_fn = 4; map<double> loss_fn_config = 5;"
    " bool forward_only = 6; map<ConfigValue> loss_fn_config_v2 = 7",
    "BatchedTensor": "bytes data = 1; bytes offsets = 2; int32 dtype = 3; repeated int64 trailing_shape = 4",
    "ArrayRecord": "string type_tag = 1; map<BatchedTensor> fields = 2; int64 num_datums = 3",
    "Output": "string loss_fn_output_type = 1; repeated ArrayRecord loss_fn_outputs = 2; map<double> metrics = 3",
    "SampledSequence": "int32 stop_reason = 1; bytes tokens = 2; bytes logprobs = 3",
    "SampleResponse": "repeated SampledSequence sequences = 1; bytes prompt_logprobs = 2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One example.

    Attributes:
        tokens: Token ids of the input, [N].
        inputs: Tensors of the loss by name, flat, and their shapes; a shape is empty if none was sent.
        problems: Parts of it that cannot be read.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, tuple[Sequence[float], tuple[int, ...]]]
    problems: tuple[Violation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A request of `forward_backward`."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence_:  # noqa: N801  (`Sequence` is that of typing)
    """A sampled sequence: token ids and their log-probabilities, both [T]."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def read_pass(body: bytes) -> Pass:
    """Decodes a request. Raises ArgumentInvalid if it is none."""
    request: Any = _CLASSES["Request"]()
    try:
        request.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError):
        found = Violation(field="body", description="is not a ForwardBackwardRequest of the tinker package")
        raise ArgumentInvalid("The request is malformed.", violations=[found]) from None
    _check_counts(request)
    config: dict[str, float | str] = dict(request.loss_fn_config)
    config |= {name: value.text or value.number for name, value in request.loss_fn_config_v2.items()}
    return Pass(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=[_datum(message, f"data[{index}]") for index, message in enumerate(request.data)],
        loss=request.loss_fn,
        config=config,
        forward_only=request.forward_only,
    )


def _check_counts(request: Any) -> None:
    """Checks numbers of parts before they become objects: an empty one has two bytes.

    Raises:
        ArgumentInvalid: if there are too many.
    """
    names = max((len(each.loss_fn_inputs) for each in request.data[: MAX_DATA + 1]), default=0)
    settings = max(len(request.loss_fn_config), len(request.loss_fn_config_v2))
    chunks = sum(len(each.model_input) for each in request.data[: MAX_DATA + 1])
    found = [
        Violation(field=field, description=f"has {count} elements; must have at most {most}")
        for field, count, most in (
            ("data", len(request.data), MAX_DATA),
            ("data.model_input", chunks, MAX_CHUNKS),
            ("data.loss_fn_inputs", names, MAX_NAMES),
            ("loss_fn_config", settings, MAX_NAMES),
        )
        if count > most
    ]
    if found:
        raise ArgumentInvalid("The request is malformed.", violations=found)


def encoded_pass(logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """Encodes the outcome of a pass: the log-probabilities of each datum, and metrics whose names end with their reduction."""
    offsets, flat = array("q", [0]), array("f")
    for each in logprobs:
        flat.extend(each)
        offsets.append(len(flat) * flat.itemsize)
    tensor = _CLASSES["BatchedTensor"](data=flat.tobytes(), offsets=offsets.tobytes(), dtype=_FLOAT32)
    record = _CLASSES["ArrayRecord"](type_tag="ArrayRecord", num_datums=len(logprobs), fields={"logprobs": tensor})
    output = _CLASSES["Output"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return output.SerializeToString()


def encoded_samples(sequences: Iterable[Sequence_], prompt_logprobs: Sequence[float] = ()) -> bytes:
    """Encodes samples; `prompt_logprobs` has nan where none was computed."""
    response = _CLASSES["SampleResponse"](
        sequences=[
            _CLASSES["SampledSequence"](
                stop_reason=0 if each.stopped else 1,
                tokens=array("i", each.tokens).tobytes(),
                logprobs=array("f", each.logprobs).tobytes(),
            )
            for each in sequences
        ]
    )
    if prompt_logprobs:
        response.prompt_logprobs = array("f", prompt_logprobs).tobytes()
    return response.SerializeToString()


def _datum(message: Any, at: str) -> Datum:
    found: list[Violation] = []
    tokens = array("i")
    for index, chunk in enumerate(message.model_input):
        try:
            if not chunk.HasField("encoded_text"):
                raise ValueError("is not text; only text is supported")
            tokens.frombytes(chunk.encoded_text.tokens)
        except ValueError as error:
            found.append(Violation(field=f"{at}.model_input[{index}]", description=str(error)))
    inputs: dict[str, tuple[Sequence[float], tuple[int, ...]]] = {}
    for name, tensor in message.loss_fn_inputs.items():
        try:
            inputs[name] = _values(tensor), tuple(tensor.shape)
        except ValueError as error:
            found.append(Violation(field=f"{at}.loss_fn_inputs.{name[:64]}", description=str(error)))
    return Datum(tokens=tokens, inputs=inputs, problems=tuple(found))


def _values(tensor: Any) -> Sequence[float]:
    if tensor.HasField("sparse_csr"):
        raise ValueError("is sparse, which is not supported")
    if tensor.dtype not in _TYPECODES:
        raise ValueError("has an unsupported type: use float32, int64 or int32")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise ValueError(f"has {len(tensor.shape)} dimensions")
    values = array(_TYPECODES[tensor.dtype])
    values.frombytes(tensor.dense)
    return values


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split("; ")):
            *label, kind, own, _, number = field.replace("map<", "map ").replace(">", "").split()
            described = message.field.add(name=own, number=int(number))
            described.label = FieldDescriptorProto.LABEL_REPEATED if label else FieldDescriptorProto.LABEL_OPTIONAL
            if label == ["map"]:
                # As protoc does it: a map is a list of entries.
                entry = message.nested_type.add(name=f"{own.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _of_kind(entry.field.add(name="key", number=1, label=FieldDescriptorProto.LABEL_OPTIONAL), "string")
                _of_kind(entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL), kind)
                described.type = FieldDescriptorProto.TYPE_MESSAGE
                described.type_name = f".{_PACKAGE}.{name}.{entry.name}"
            else:
                _of_kind(described, kind)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


def _of_kind(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_CLASSES: Final[Mapping[str, type[Message]]] = _classes()
