"""Folders that look like models, without torch: their weights are random bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fulmen.models.files import ModelFile, read_manifest

__all__ = ["content_of", "manifest_of", "model_folder"]


def model_folder(folder: Path, *, seed: int = 0, size_bytes: int = 5000, more: dict[str, bytes] | None = None) -> Path:
    """Makes a folder with a configuration, a tokenizer and weights; equal seeds and sizes give equal folders."""
    files = {
        "config.json": json.dumps({"architectures": ["Tiny"], "seed": seed}).encode(),
        "tokenizer/tokenizer.json": b"{}",
        "tokenizer/empty.txt": b"",
        "model.safetensors": random.Random(seed).randbytes(size_bytes),
    }
    for path, content in {**files, **(more or {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def manifest_of(folder: Path) -> list[ModelFile]:
    """Returns the manifest of a folder."""
    return read_manifest(folder)


def content_of(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder, without hidden ones."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
