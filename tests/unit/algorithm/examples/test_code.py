"""The code example: whatever a model writes ends soon, reaches nothing, and passes only if it computes what is wanted."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.support.algorithm.models import EXAMPLES, load_script

FOLDER = EXAMPLES / "code"
TESTS = [[[], 0], [[1, 2], 3], [[-1, 5], 4]]
SUBCLASSES = "( ) . __class__ . __base__ . __subclasses__ ( )"
LOOP = "sum ( 1 for a in xs * 10000 for b in xs * 10000 )"


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = load_script(FOLDER / "trial.py")
    yield module
    module.helper.close()


@pytest.fixture
def grader(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(FOLDER / "grader.py")


@pytest.fixture
def confined():
    return load_script(FOLDER / "confined.py")


REFUSED = [
    "",
    "   ",
    "x" * 401,
    "sum ( xs",
    "(" * 200 + "1" + ")" * 200,
    "xs . __class__ . __base__",
    f"[ c for c in {SUBCLASSES} if c . __name__ == 'Quitter' ] [ 0 ] ( 'a' , 'b' ) ( 0 )",
    f"[ c . __init__ . __globals__ for c in {SUBCLASSES} ]",
    "( x for x in xs ) . gi_frame . f_back . f_globals",
    "sum . __self__ . open ( '/etc/passwd' )",
    "'{0.__class__}' . format ( xs )",
    "f'{xs}'",
    "__builtins__",
    "__builtins__ [ 'open' ]",
    "__import__ ( 'os' )",
    "open ( '/etc/passwd' )",
    "eval ( 'xs' )",
    "getattr ( xs , 'append' )",
    "( lambda : xs ) ( )",
    "( y := xs )",
    "[ * xs ]",
    "{ x for x in xs }",
    "{ 1 : 2 }",
    "( yield )",
    "import os",
    "9 ** 9 ** 9",
    "1 << 10 ** 9",
    "'x' * 10 ** 6",
    "b'x'",
    "1.5",
    "True",
    "None",
    "xs ; xs",
    "[ x async for x in xs ]",
]
"""Attacks, and other things that are no expression of lists and whole numbers."""

WRONG = {
    "max ( xs )": "error ValueError",
    "sum ( x )": "error NameError",
    "sum ( sum )": "error TypeError",
    "xs [ 9 ]": "error RuntimeError",
    "1 // 0": "error RuntimeError",
    "sum": "error TypeError",
    "set ( xs )": "error TypeError",
    "[ 0 ] * 1000000000": "error MemoryError",
    "[ 0 ] * 100000": "error MemoryError",
    LOOP: "error TimeoutError",
    "len ( xs )": "wrong on 2 of 3",
    "[ ]": "wrong on 3 of 3",
    "sum ( xs ) == sum ( xs )": "wrong on 3 of 3",
    "-" * 390 + "1": "",
    "\ud800": "error",
    "\0": "error",
}


@pytest.mark.parametrize("code", REFUSED, ids=range(len(REFUSED)))
def test_an_attack_is_refused_before_it_runs(trial, grader, code):
    assert trial.run(code, TESTS) == "error SyntaxError"
    assert grader.grade({"tests": TESTS}, code) == 0.0


@pytest.mark.parametrize("code", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_told_to_the_model_and_scores_nothing(trial, grader, code):
    assert trial.run(code, TESTS).startswith(WRONG[code])
    assert grader.grade({"tests": TESTS}, code) == 0.0
    assert trial.run("sum ( xs )", TESTS) == trial.PASSED, "what ran before leaves nothing behind"


@pytest.mark.parametrize("outcome", [None, 7, ["sum ( xs )"], {"code": "sum ( xs )"}])
def test_an_outcome_that_is_no_text_scores_nothing(grader, outcome):
    assert grader.grade({"tests": TESTS}, outcome) == 0.0


def test_other_code_with_the_same_results_passes(trial):
    assert trial.run("sum ( xs )", TESTS) == trial.run("sum ( [ x for x in sorted ( xs ) ] )", TESTS) == trial.PASSED


def test_one_is_not_taken_for_true(trial):
    assert trial.run("len ( xs ) > 0", [[[1], 1]]) == "wrong on 1 of 1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's limits are those of Linux")
@pytest.mark.parametrize("attack", ["file", "socket", "program", "memory", "time", "exit", "flood"])
def test_code_that_got_past_the_compiler_would_still_reach_nothing(confined, monkeypatch, attack):
    def flood() -> bytes:
        return b"x" * (10 * confined.OUTPUT_BYTES)

    def connect() -> bytes:
        socket.create_connection(address)
        return b"reached"

    def spin() -> bytes:
        while True:
            pass

    attacks = {
        "file": lambda: Path(__file__).read_bytes(),
        "socket": connect,
        "program": lambda: os.execv("/bin/sh", ["sh", "-c", "echo reached >&3"]),
        "memory": lambda: bytes(2 * confined.MEMORY_BYTES),
        "time": spin,
        "exit": lambda: sys.exit("out"),
        "flood": flood,
    }
    monkeypatch.setattr(confined, "answered", lambda _line: attacks[attack]())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        found = confined.in_a_child("{}")

    if attack == "flood":
        assert len(found) <= 2 * confined.OUTPUT_BYTES
    else:
        wanted = "TimeoutError" if attack == "time" else "RuntimeError"
        assert json.loads(found) == {"error": wanted}


def test_the_process_of_a_function_has_no_environment(trial, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    trial.run("xs", TESTS)
    environment = Path(f"/proc/{trial.helper._process.pid}/environ")
    assert not environment.exists() or environment.read_bytes() == b""


def test_the_next_function_runs_though_the_helper_was_killed(trial):
    trial.run("xs", TESTS)
    trial.helper._process.kill()
    trial.helper._process.wait()
    assert trial.run("sum ( xs )", TESTS) == trial.PASSED


def tasks(use: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()]


def test_no_function_of_a_test_or_validation_task_is_that_of_another_task():
    train, validation, test = (
        [each["input"]["function"] for each in tasks(use)] for use in ("train", "validation", "test")
    )
    held_out = [*validation, *test]
    assert len(set(held_out)) == len(held_out)
    assert set(train).isdisjoint(held_out)
    assert len(test) >= 200


def test_an_answer_that_heard_all_passes_and_one_that_did_not_fails(grader, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    functions = load_script(FOLDER / "functions.py")
    by_text = {
        function.text: function
        for whole in functions.WHOLES
        for part in functions.PARTS
        for sign in functions.SIGNS
        for kind in functions.KINDS
        if (function := functions.Function(whole, part, sign, kind))
    }
    for each in tasks("test"):
        function = by_text[each["input"]["function"]]
        deaf = functions.Function(function.whole, function.part, "", function.kind)
        public = {"tests": [*each["input"]["tests"], *each["tests"]]}
        assert grader.grade(each, function.code()) == 1.0
        assert grader.grade(public, deaf.code()) == float(deaf == function)
