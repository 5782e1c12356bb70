"""The id of an engine among those of its run, where none is given."""

from __future__ import annotations

import pytest

from fulmen_algorithm.weight_agent.settings import MAX_ID, WeightAgentSettings

PODS = [f"a-release-of-a-long-name-fulmen-engine-7d9f6c5b8-{end}" for end in ("abcde", "fghij")]


def id_on(host: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> str:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    return WeightAgentSettings(dev_mode=True, **settings).own_engine_id  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("gpu-7", "gpu-7"), ("GPU_7.example.com", "gpu-7-example-com"), ("g" * MAX_ID, "g" * MAX_ID), ("...", "engine")],
)
def test_the_id_of_an_engine_is_the_name_of_its_machine(
    host: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert id_on(host, monkeypatch) == expected
    assert id_on(host, monkeypatch, engine_id="mine") == "mine"


def test_pods_with_long_names_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [id_on(host, monkeypatch) for host in PODS]
    assert len(set(ids)) == len(PODS)
    assert all(len(each) == MAX_ID for each in ids)
