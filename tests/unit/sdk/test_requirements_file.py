"""Requirements files: packages by name are read, everything else that pip would accept is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.requirements_file import (
    MAX_REQUIREMENTS,
    MAX_REQUIREMENTS_BYTES,
    RequirementsInvalid,
    has_hashes,
    read_requirements,
)

DIGEST = "a" * 64
ALLOWED = re.compile(r"[A-Za-z0-9][\x20-\x7e]*")


@pytest.mark.parametrize(
    ("line", "requirement"),
    [
        ("httpx", "httpx"),
        ("httpx==0.28.1", "httpx==0.28.1"),
        ("httpx[http2, socks] >= 0.27, < 1  # why", "httpx[http2, socks] >= 0.27, < 1"),
        ("zope.interface~=6.0", "zope.interface~=6.0"),
        ("torch==2.3.0+cpu", "torch==2.3.0+cpu"),
        ("a (>=1.0)", "a (>=1.0)"),
        ("numpy!=1.*", "numpy!=1.*"),
        ('tomli; python_version < "3.11"', 'tomli; python_version < "3.11"'),
        (
            f"a==1 \\\n  --hash=sha256:{DIGEST} \\\n  --hash sha256:{DIGEST}",
            f"a==1 --hash=sha256:{DIGEST} --hash=sha256:{DIGEST}",
        ),
        ("a==1\r", "a==1"),
    ],
)
def test_a_package_by_name_is_read_as_it_is_written(line: str, requirement: str) -> None:
    assert read_requirements(f"# comment\n\n{line}\n".encode()) == (requirement,)


HOSTILE = [
    ("-e /etc", "options"),
    ("-e .", "options"),
    ("-r /run/secrets/token", "options"),
    ("--index-url https://evil/simple", "options"),
    ("--extra-index-url=https://evil/simple", "options"),
    ("--find-links /", "options"),
    ("--no-binary :all:", "options"),
    ("--config-settings x=y", "options"),
    ("file:///etc/passwd", "URLs"),
    ("https://evil/x-1-py3-none-any.whl", "URLs"),
    ("x @ https://evil/x.whl", "URLs"),
    ("x@https://evil/x.whl", "URLs"),
    ("x @ file:///etc", "URLs"),
    ("git+ssh://host/x", "URLs"),
    ("./local", "paths"),
    (".", "paths"),
    ("..", "paths"),
    ("/etc", "paths"),
    ("x/y", "paths"),
    ("evil.whl", "paths"),
    ("evil.tar.gz", "paths"),
    ("evil.ZIP", "paths"),
    ("a==1 --index-url=https://evil", "URLs"),
    ("a==1 --global-option=x", "not a requirement"),
    ("a==1 --hash=md5:00", "not a requirement"),
    ("${HOME}", "not a requirement"),
    ("a==${TOKEN}", "not a requirement"),
    ("a\u2028--index-url", "not a requirement"),
    ("a\x0b-e.", "not a requirement"),
    ("\u0430==1", "not a requirement"),
    ("a b", "not a requirement"),
    ("a==1; x --index-url y", "not a requirement"),
]


def test_every_line_that_is_none_is_a_problem_with_its_number() -> None:
    with pytest.raises(RequirementsInvalid) as refused:
        read_requirements("\n".join(["fine==1", *(line for line, _ in HOSTILE)]).encode())
    assert len(refused.value.problems) == len(HOSTILE)
    for number, ((line, word), problem) in enumerate(zip(HOSTILE, refused.value.problems, strict=True), start=2):
        assert problem.startswith(f"line {number}: {line!r}: "), problem
        assert word in problem, (line, problem)


def test_a_comment_hides_no_line_that_pip_would_see() -> None:
    # pip splits lines at these characters, too; what the tool is given has none of them.
    assert read_requirements("a==1\n# x\u2028--index-url http://evil\x85-e .\x0c-e /\n".encode()) == ("a==1",)


def test_a_byte_order_mark_is_no_part_of_the_first_name() -> None:
    assert read_requirements("\ufeffa==1\n".encode()) == ("a==1",)


def test_hashes_are_for_all_requirements_or_for_none() -> None:
    locked = f"a==1 --hash=sha256:{DIGEST}\nb==2 ; python_version > '3' --hash=sha384:{DIGEST}\n"
    assert has_hashes(read_requirements(locked.encode()))
    assert not has_hashes(read_requirements(b"a==1"))
    with pytest.raises(RequirementsInvalid) as refused:
        read_requirements(f"{locked}c==3\nd==4\n".encode())
    assert refused.value.problems == ("some requirements have hashes, but these have none: c==3, d==4",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no requirement"),
        (b"# only a comment\n", "has no requirement"),
        (b"\xff", "is not UTF-8"),
        (
            b"a" * (MAX_REQUIREMENTS_BYTES + 1),
            f"has {MAX_REQUIREMENTS_BYTES + 1} bytes: at most {MAX_REQUIREMENTS_BYTES}",
        ),
        (b"a\n" * (MAX_REQUIREMENTS + 1), f"has {MAX_REQUIREMENTS + 1} requirements: at most {MAX_REQUIREMENTS}"),
    ],
)
def test_a_file_that_is_too_large_empty_or_no_text_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(RequirementsInvalid) as refused:
        read_requirements(content)
    assert refused.value.problems == (problem,)


@given(st.text(alphabet=st.sampled_from("ab1.-_ =<>~!\\\n#@/:;$[](),'\"*+\t\r\x0b\u2028{}"), max_size=60))
def test_whatever_a_file_says_what_is_read_are_plain_requirements(text: str) -> None:
    try:
        requirements = read_requirements(text.encode())
    except RequirementsInvalid:
        return
    for line in requirements:
        assert ALLOWED.fullmatch(line)
        assert not set("/@$\\#{}") & set(line)
        assert not line.startswith("-")
        assert " -" not in line.replace(" --hash=", "")


@pytest.mark.parametrize("line", [f"a{' ' * 500_000}!", "a" * 60_000 + "!", "a==1" + " --hash=sha256:0" * 4000 + "!"])
def test_a_long_line_is_refused_in_a_moment(line: str) -> None:
    with pytest.raises(RequirementsInvalid):
        read_requirements(line.encode())
