import pytest

from fulmen_algorithm.training.rows import sft_row


def trained_text(policy, row) -> str:
    return policy.tokenizer.decode([t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m])


def test_only_what_the_assistant_says_trains_with_its_end_of_turn(policy):
    messages = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4+5="},
        {"role": "assistant", "content": "9"},
    ]
    row = sft_row(policy.tokenizer, messages, row_id="a")
    assert trained_text(policy, row) == "3<|end|>9<|end|>"
    assert policy.tokenizer.decode(row.token_ids) == (
        "<|user|>1+2=<|assistant|>3<|end|><|user|>4+5=<|assistant|>9<|end|>"
    )


def test_what_the_template_appends_after_the_end_of_turn_does_not_train(policy):
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|> ' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert trained_text(policy, sft_row(policy.tokenizer, messages, row_id="a")) == "2<|end|>"


def test_a_template_that_rewrites_the_past_is_refused(policy):
    policy.tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="token by token"):
        sft_row(policy.tokenizer, messages, row_id="a")


def test_a_demonstration_without_an_assistant_is_refused(policy):
    with pytest.raises(ValueError, match="no assistant"):
        sft_row(policy.tokenizer, [{"role": "user", "content": "1"}], row_id="a")
