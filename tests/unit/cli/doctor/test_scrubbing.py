"""What leaves in a support bundle: nothing that is or looks like a secret, and of logs only what services structured."""

from __future__ import annotations

import json
from pathlib import Path

from fulmen_cli.doctor.scrubbing import MASK, Scrubber, secrets_in

SECRET = "a-signing-key-of-a-deployment"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJyb2xlIjoiYWRtaW4ifQ.c2lnbmF0dXJl"


def test_known_secrets_and_what_looks_like_one_are_masked() -> None:
    scrubber = Scrubber([SECRET, "", "short"])
    text = f"key={SECRET} token={TOKEN} sk-abcdefgh1234 postgresql://fulmen:{'p' * 9}@host/db Authorization: Bearer abc short"

    assert scrubber.text(text) == (
        f"key={MASK} token={MASK} {MASK} postgresql://{MASK}@host/db Authorization: {MASK} short"
    )


def test_variables_are_masked_by_their_names() -> None:
    given = {
        "FULMEN_TOKEN": "t",
        "FULMEN_STORE_SIGNING_KEY": "k",
        "FULMEN_STORE_DATABASE_URL": "postgresql://a:b@c/d",
        "FULMEN_ALGORITHM_EXTERNAL_ENGINES": '{"http://a": "key"}',
        "FULMEN_ALERTS_URL": "https://chat/hooks/abc",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=abc",
        "FULMEN_STORE_PORT": "7101",
        "FULMEN_EMPTY_KEY": "",
    }

    shown = Scrubber([]).variables(given)
    assert shown.pop("FULMEN_STORE_PORT") == "7101"
    assert shown.pop("FULMEN_EMPTY_KEY") == ""
    assert shown.pop("FULMEN_STORE_DATABASE_URL") == f"postgresql://{MASK}@c/d"
    assert set(shown.values()) == {MASK}


def test_secrets_are_found_in_variables_and_in_the_files_that_they_name(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    given = {"A_KEY": "one", "B_SIGNING_KEY_FILE": str(file), "C_TOKEN_FILE": "/nowhere", "PORT": "7101"}

    assert list(secrets_in(given)) == ["one", str(file), SECRET, "/nowhere"]


def test_of_a_log_only_structured_lines_leave_and_no_free_text() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 3, in run\n    raise ValueError("a prompt")\nValueError: a prompt'
    lines = [
        json.dumps({"event": "serving", "service": "store", "port": 7101, "level": "info"}),
        "an agent's own words: a prompt",
        json.dumps(
            {
                "event": "attempt_failed",
                "service": "runner",
                "why": "a prompt",
                "exception": trace,
                "message": "a prompt",
                "rollout": "projects/default/rollouts/1",
            }
        ),
        'store_1-1  | {"event": "draining", "service": "store", "grace_s": 10.0}',
        '{"service": "runner", "no": "event"}',
        '{"service": "runner", "event": "a prompt"}',
        '{"event": "of_somebody_else", "prompt": "a prompt"}',
    ]

    told = [json.loads(line) for line in Scrubber([]).log(lines)]
    assert [each["event"] for each in told] == ["serving", "attempt_failed", "draining", "lines_left_out"]
    assert told[1] == {
        "event": "attempt_failed",
        "service": "runner",
        "why": "(left out)",
        "exception": ["a.py:3 in run"],
        "message": "(left out)",
        "rollout": "projects/default/rollouts/1",
    }
    assert told[-1]["count"] == 4
    assert "a prompt" not in json.dumps(told)
