"""Errors survive every boundary; names are made and taken apart the same way."""

import pickle
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen import errors, ids
from fulmen.ids import DEFAULT_PROJECT


@pytest.mark.parametrize("cls", errors.all_error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_is_the_same_after_pickling(cls: type[errors.FulmenError]) -> None:
    error = cls(
        "text", violations=[errors.Violation(field="f", description="d")], rollout="projects/default/rollouts/1"
    )

    copy = pickle.loads(pickle.dumps(error))

    assert (type(copy), copy.message, copy.violations, copy.metadata) == (
        cls,
        "text",
        error.violations,
        {"rollout": "projects/default/rollouts/1"},
    )


def test_an_unknown_reason_has_no_class() -> None:
    assert errors.error_class("NEWER_THAN_THIS_VERSION") is None


@given(st.uuids(), st.integers(min_value=1, max_value=10**9 - 1))
def test_an_attempt_name_reads_back(rollout_id: uuid.UUID, number: int) -> None:
    name = ids.attempt_name(DEFAULT_PROJECT, rollout_id, number)

    assert str(ids.parse_attempt_name(name)) == name


@given(st.text(max_size=80))
def test_a_malformed_name_is_an_argument_error(name: str) -> None:
    with pytest.raises(errors.ArgumentInvalid):
        ids.parse_rollout_name(name)


@given(st.integers(min_value=0, max_value=2**48 - 1))
def test_a_uuid7_carries_its_time_and_sorts_by_it(unix_ms: int) -> None:
    made = ids.uuid7(unix_ms)

    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert ids.uuid7_unix_ms(made) == unix_ms


@given(session_id=st.uuids())
def test_a_runner_name_reads_back(session_id: uuid.UUID) -> None:
    assert ids.parse_runner_name(ids.runner_name(session_id)) == session_id


@pytest.mark.parametrize(
    "name", ["", "runners/", "runners/x", str(uuid.UUID(int=7)), f"projects/default/rollouts/{uuid.UUID(int=7)}"]
)
def test_a_malformed_runner_name_is_an_argument_error(name: str) -> None:
    with pytest.raises(errors.ArgumentInvalid):
        ids.parse_runner_name(name)
