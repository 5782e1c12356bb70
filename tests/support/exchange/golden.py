"""The golden files of codecs."""

from __future__ import annotations

import json
from pathlib import Path

from fulmen_exchange.codecs.codec import SegmentCodec
from fulmen_exchange.registry import load_codecs

FOLDER = Path(__file__).parents[3] / "protos" / "testdata" / "exchange"
NAMES = sorted(name for name, entry in load_codecs().items() if isinstance(entry.make(entry.settings()), SegmentCodec))


def bits_of(case):
    """Returns the bits of a case's elements; 0 where they are no matter of its settings."""
    found = case["settings"]
    return found.get("bits") or found.get("bits_up" if case["way"] == "up" else "bits_down") or 0


def golden(codec_name):
    """Reads the file of a codec."""
    return json.loads((FOLDER / f"{codec_name}.json").read_text())
