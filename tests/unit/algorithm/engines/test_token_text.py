"""The bytes of tokens, put together, are the text that they were made of, however it was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.engines.embedded.token_text import token_bytes


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


BYTES = byte_level()


@given(st.text(max_size=30))
def test_a_byte_level_vocabulary_gives_every_byte_back(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    assert b"".join(token_bytes(BYTES, ids)) == text.encode()


def test_a_special_token_is_its_name_and_one_that_does_not_exist_is_nothing() -> None:
    assert token_bytes(BYTES, [BYTES.eos_token_id, 10**6]) == [b"<|end|>", b""]


@pytest.mark.parametrize(
    ("name", "text"), [("\u2581a", b" a"), ("<0x0A>", b"\n"), ("<0xZZ>", b"<0xZZ>"), ("ä", "ä".encode())]
)
def test_a_vocabulary_of_pieces_has_spaces_and_bytes_of_its_own(name: str, text: bytes) -> None:
    tokenizer = Tokenizer(models.WordLevel({name: 0, "?": 1}, unk_token="?"))
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [0]) == [text]
