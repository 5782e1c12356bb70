"""Settings of codecs are read strictly, and without torch."""

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from fulmen_exchange.codecs.codec import Bucket, LinearCodec, SegmentCodec
from fulmen_exchange.registry import load_codecs, make_codec
from fulmen_exchange.settings import CodecSettings

NAMES = (
    *("bf16", "dgc", "double_quantization", "fp16", "lowrank_quantised", "masked", "none", "powersgd"),
    *("qsgd", "topk", "topk_quantised"),
)


def test_every_codec_is_found_by_its_name_and_can_be_made_of_its_defaults():
    assert set(NAMES) <= set(load_codecs())
    for name, entry in load_codecs().items():
        settings = entry.settings()
        assert isinstance(settings, CodecSettings)
        codec = make_codec(settings)
        assert isinstance(codec, SegmentCodec | LinearCodec)
        assert codec.name == name
        assert codec.version == 1


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_codec_say_the_same_of_what_is_kept_back(name):
    entry = load_codecs()[name]
    codec, like = make_codec(entry.settings()), torch.zeros(8192)
    if isinstance(codec, LinearCodec):
        states = [codec.new_state(Bucket(index=0, flat=like, matrices=[(0, 128, 64)], offsets=[0, 8192]))]
        assert set(codec.shared) <= set(states[0])
    else:
        states = [each.new_state(like) for each in (codec, codec.reply())]
        assert codec.reply().residual_name is None or codec.reply().residual_name in states[1]
    assert codec.residual_name is None or codec.residual_name in states[0]
    assert any(states) == entry.settings.has_residual


@pytest.mark.parametrize("name", NAMES)
def test_what_codecs_do_not_know_is_an_error(name):
    with pytest.raises(ValidationError, match="colour"):
        load_codecs()[name].settings(colour="red")


def test_the_settings_of_all_codecs_are_read_without_torch():
    read = (
        "import sys; from fulmen_exchange.registry import load_codecs, make_codec;"
        "[make_codec(entry.settings()) for entry in load_codecs().values()];"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", read], check=True, timeout=60)
