"""Tensors as bytes: safetensors files read and written without torch, and one checksum for the weights of a version.

Invariant: numbers are never interpreted. A tensor is its stored words, which keep a NaN's payload and the sign of a
zero; weights are equal if and only if their checksums are.

Format of the files: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]
Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Types, as safetensors writes them, and shapes, by name."""

WEIGHTS_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


class TensorFileDamaged(Exception):
    """A file is truncated, altered, or of another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """One tensor as the words that hold it.

    Attributes:
        dtype: As safetensors writes it: `BF16`, `F32`, ...
        shape: Its shape.
        words: Its elements in row-major order, as unsigned integers of the same width, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    words: Words

    def __post_init__(self) -> None:
        """Checks that words, type and shape agree.

        Raises:
            ValueError: if they do not.
        """
        if self.words.dtype != _WORDS[_ITEM_BYTES[self.dtype]] or self.words.shape != (math.prod(self.shape),):
            raise ValueError(
                f"{self.words.size} words of {self.words.dtype} do not form a {self.dtype} of {self.shape}."
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.words.nbytes

    def digest(self) -> str:
        """Computes the SHA-256 over type, shape and bytes, hexadecimal."""
        digest = hashlib.sha256(f"{self.dtype}{list(self.shape)}".encode())
        digest.update(content_of(self.words))
        return digest.hexdigest()


@dataclass(slots=True, kw_only=True)
class Weights:
    """Tensors by name; checksums are computed lazily, once.

    Attributes:
        tensors: The tensors; never changed in place.
        digests: Known checksums.
    """

    tensors: Mapping[str, RawTensor]
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def digest_of(self, name: str) -> str:
        """Returns the checksum of one tensor."""
        if name not in self.digests:
            self.digests[name] = self.tensors[name].digest()
        return self.digests[name]

    def sha256(self) -> str:
        """Returns the checksum of all tensors, in name order."""
        return combined_digest({name: self.digest_of(name) for name in self.tensors})


def combined_digest(digests: Mapping[str, str]) -> str:
    """Computes the checksum of weights from their tensors' checksums."""
    lines = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def empty_words(dtype: str, count: int) -> Words:
    """Allocates the elements of a tensor."""
    return np.empty(count, dtype=word_type(dtype))


def word_type(dtype: str) -> np.dtype[np.unsignedinteger]:
    """Returns the unsigned integer type of an element's width.

    Raises:
        TensorFileDamaged: if the type is unknown.
    """
    if dtype not in _ITEM_BYTES:
        raise TensorFileDamaged(f"{dtype!r} is an unknown tensor type.")
    return _WORDS[_ITEM_BYTES[dtype]]


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor's elements."""
    return math.prod(shape) * word_type(dtype).itemsize


def content_of(words: Words) -> memoryview:
    """Returns the bytes of elements, without a copy if contiguous."""
    return np.ascontiguousarray(words).view(np.uint8).data


def bytes_tensor(content: Bytes) -> RawTensor:
    """Wraps bytes as a tensor."""
    return RawTensor(dtype="U8", shape=(content.size,), words=content)


class TensorFileWriter:
    """Writes a safetensors file, one tensor after another."""

    def __init__(self, path: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        """Writes the header.

        Raises:
            OSError: if the disk is full; so do other methods.
        """
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name in in_file_order(layout):
            dtype, shape = layout[name]
            end = offset + size_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(head)) + head)

    def add(self, tensor: RawTensor) -> None:
        """Writes the next tensor, in the order of `in_file_order`."""
        self._file.write(content_of(tensor.words))

    def close(self) -> int:
        """Closes the file; returns its size in bytes."""
        with self._file as file:
            return file.tell()


def in_file_order(layout: Layout) -> list[str]:
    """Returns names in the order in which a file has them: wide elements first, so that each is aligned to its width."""
    return sorted(layout, key=lambda name: (-word_type(layout[name][0]).itemsize, name))


def layout(tensors: Mapping[str, RawTensor]) -> Layout:
    """Returns types and shapes by name."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> int:
    """Writes a safetensors file; returns its size in bytes.

    Raises:
        OSError: if the disk is full.
    """
    file = TensorFileWriter(path, layout(tensors), metadata)
    for name in in_file_order(layout(tensors)):
        file.add(tensors[name])
    return file.close()


def read_tensors(path: Path) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """Maps a safetensors file into memory; pages are read on use.

    Returns:
        The tensors by name, and the metadata.

    Raises:
        TensorFileDamaged: if the file is truncated or its header is invalid.
        OSError: if it cannot be read.
    """
    places, metadata, begin = _header(path)
    size = path.stat().st_size
    content = np.memmap(path, dtype=np.uint8, mode="r", offset=begin) if size > begin else np.empty(0, np.uint8)
    found = {}
    for name, (dtype, shape, first, end) in places.items():
        words = word_type(dtype)
        if end - first != size_of(dtype, shape) or first < 0:
            raise TensorFileDamaged(f"{name} in {path.name} differs in size from its shape.")
        part = np.asarray(content[first:end])
        aligned = part if first % words.itemsize == 0 and begin % words.itemsize == 0 else part.copy()
        found[name] = RawTensor(dtype=dtype, shape=shape, words=aligned.view(words))
    return found, metadata


def read_folder(folder: Path) -> Weights:
    """Maps the weights of a model folder into memory, from one file or several.

    Raises:
        TensorFileDamaged: if there is no file, or one is truncated.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TensorFileDamaged(f"No safetensors file in {folder.name}.")
    tensors: dict[str, RawTensor] = {}
    for file in files:
        tensors.update(read_tensors(file)[0])
    return Weights(tensors=tensors)


def read_layout(folder: Path) -> Layout:
    """Reads types and shapes of the tensors in a folder's safetensors files; their headers only.

    Raises:
        TensorFileDamaged: if a file is truncated or its header is invalid.
        OSError: if one cannot be read.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: (dtype, shape) for name, (dtype, shape, _, _) in _header(file)[0].items()}
    return found


def _header(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], dict[str, str], int]:
    """Reads types, shapes and places of tensors, the metadata, and where the content begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise TensorFileDamaged(f"{path.name} is truncated, or not a safetensors file.")
        try:
            header = json.loads(file.read(length))
            metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            places = {name: _place(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TensorFileDamaged(f"The header of {path.name} is invalid.") from error
    begin = 8 + length
    if begin + max((end for *_, end in places.values()), default=0) != size:
        raise TensorFileDamaged(f"{path.name} differs in size from its header.")
    return places, metadata, begin


def _place(entry: Mapping[str, object]) -> tuple[str, tuple[int, ...], int, int]:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("Shape and offsets must be lists.")
    first, end = (int(offset) for offset in offsets)
    return str(entry["dtype"]), tuple(int(side) for side in shape), first, end
