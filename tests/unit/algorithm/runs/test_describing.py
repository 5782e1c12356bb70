"""What `fulmen algorithms` shows comes from the settings classes themselves."""

import json

import pytest
from jsonschema import Draft202012Validator

from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.runs.describing import setting_texts, summary

REGISTRY = load_registry()


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_algorithm_and_every_setting_is_described(name):
    entry = REGISTRY[name]
    texts = setting_texts(entry)

    assert summary(entry).endswith(".")
    assert [t.name for t in texts if not t.summary] == []
    assert {t.name for t in texts} == set(entry.settings.model_fields)


@pytest.mark.parametrize(
    "name", sorted(n for n, e in REGISTRY.items() if not any(f.is_required() for f in e.settings.model_fields.values()))
)
def test_the_defaults_that_are_shown_are_those_that_apply(name):
    entry = REGISTRY[name]
    shown = {t.name: json.loads(t.default_json) for t in setting_texts(entry) if t.default_json}

    # What is written into a run equals what leaving everything out gives.
    assert entry.settings.model_validate_json(json.dumps(shown)) == entry.settings()
    Draft202012Validator(entry.settings.model_json_schema()).validate(shown)


def test_a_description_spans_lines_and_ends_with_its_section():
    texts = {t.name: t.summary for t in setting_texts(REGISTRY["grpo"])}

    assert texts["refill_limit"].startswith("Maximum share of additional groups")
    assert texts["refill_limit"].endswith("trains on those with variance.")


def test_variants_of_one_loop_say_how_they_differ():
    said = {name: summary(entry) for name, entry in REGISTRY.items()}

    assert len(set(said.values())) == len(said)
    assert said["gspo"] == "The clipped ratio is the ratio of the whole sequence (arXiv:2507.18071)."
