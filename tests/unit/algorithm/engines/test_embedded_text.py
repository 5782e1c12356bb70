import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from fulmen_algorithm.engines.embedded.text import TextStream, ToolCall, parse_tool_calls

ALPHABET = 'ab<>/_tolcmendrgus{}[]":,1x '
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'


def characters() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(sorted(set(ALPHABET)))}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZER = characters()


def pieces(text: str, *, stop: tuple[str, ...] = (), tools: bool = False) -> tuple[list[str], TextStream]:
    """Streams a text token by token until it stops; gives what was emitted."""
    stream = TextStream(TOKENIZER, stop=stop, expect_tool_calls=tools)
    emitted = []
    for token_id in TOKENIZER.encode(text).ids:
        if stream.push(token_id):
            break
        emitted.append(stream.drain())
    emitted.append(stream.drain(final=True))
    return emitted, stream


@given(st.text(ALPHABET, max_size=40), st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
def test_emitted_text_ends_before_the_first_stop_string_and_is_never_taken_back(text, stop):
    emitted, stream = pieces(text, stop=tuple(stop))
    whole = "".join(emitted)
    assert whole == stream.text
    assert text.startswith(whole)
    assert not any(s in whole for s in stop)
    assert stream.stopped == any(s in text for s in stop)
    if not stream.stopped:
        assert whole == text


@given(st.text(ALPHABET, max_size=40))
def test_text_without_stop_strings_is_emitted_at_once(text):
    emitted, _ = pieces(text)
    assert emitted == [*text, ""]


@given(st.text("ab<_", max_size=10))
def test_a_tool_call_is_held_back_and_the_text_before_it_is_not(text):
    emitted, stream = pieces(text + CALL, tools=True)
    assert "".join(emitted) == text
    assert parse_tool_calls(stream.text) == (text, [ToolCall(name="add", arguments='{"a":1}')])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name":"add","arguments":[1]}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":}}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}}',
        CALL + "and so on",
    ],
)
def test_a_malformed_call_stays_text(text):
    assert parse_tool_calls(text) == (text, [])


def test_several_calls_keep_their_arguments_to_the_letter():
    arguments = '{ "a" : "</tool_call>" , "b": {"c": [1]}}'
    text = f'x<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>{CALL}'
    content, calls = parse_tool_calls(text)
    assert content == "x"
    assert [c.arguments for c in calls] == [arguments, '{"a":1}']
    assert json.loads(calls[0].arguments)["a"] == "</tool_call>"
