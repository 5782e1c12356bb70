"""The examples' tiny models know every text of their example, and are the same for the same seed."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fulmen_algorithm.tiny_model import END, ROLES, UNKNOWN
from fulmen_algorithm.training.policy import PolicyModel
from tests.support.algorithm.models import EXAMPLES, load_script

NAMES = sorted(path.parents[1].name for path in EXAMPLES.glob("*/tasks/demonstrations.jsonl"))
CONVERSATIONS = 300
SPACED = {"code", "nim", "orders", "retrieval", "text_to_sql"}
"""Examples whose decoder writes spaces between words."""


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_an_example_is_known(name, tmp_path):
    load_script(EXAMPLES / name / "make_model.py").build(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    room = PolicyModel.load(tmp_path).model.config.max_position_embeddings
    with (EXAMPLES / name / "tasks" / "demonstrations.jsonl").open(encoding="utf-8") as lines:
        for line in islice(lines, CONVERSATIONS):
            given = json.loads(line)
            text = tokenizer.apply_chat_template(given["messages"], tools=given.get("tools"), tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens = tokenizer.convert_ids_to_tokens(ids)
            assert UNKNOWN not in tokens, text
            assert len(ids) <= room
            assert tokens[-1] == END
            assert ROLES[1] in tokens
            assert tokenizer.decode(ids) == text or name in SPACED


def test_the_seed_decides_about_the_weights(tmp_path):
    build = load_script(EXAMPLES / "two_roles/make_model.py").build
    found = []
    for number, seed in enumerate((1, 1, 2)):
        build(str(tmp_path / str(number)), seed)
        found.append(load_file(tmp_path / str(number) / "model.safetensors"))
    same, other = ([(found[0][key] == one[key]).all().item() for key in found[0]] for one in found[1:])
    assert all(same)
    assert not all(other)
