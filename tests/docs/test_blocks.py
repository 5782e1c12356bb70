"""Every code block of the documentation is run, or read by what it is written for, or says why not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.accounts import RUN_HERE, account, first_line, held
from tests.support.distributions import ROOT
from tests.support.docs.blocks import INDENTED, PAGES, RUN_ELSEWHERE, Block, blocks, code_blocks
from tests.support.docs.shell import OF_OTHERS, SERVICES, Unread, commands, read

LIMIT_S = 20
MOST_WITHOUT = 0.2
LANGUAGES = {"console", "go", "ini", "js", "json", "mermaid", "python", "sh", "sql", "text", "toml", "yaml"}
INLINE = re.compile(r"(?<!`)`((?:fulmen|make) [a-z][^`\n]*)`(?!`)")


def test_every_block_is_fenced_and_says_what_it_is_written_in() -> None:
    unnamed = [str(block) for block in blocks() if block.language not in LANGUAGES]
    indented = [
        f"{page}:{number}"
        for page in PAGES
        if page not in INDENTED
        for number in indented_lines((ROOT / page).read_text(encoding="utf-8"))
    ]

    assert (unnamed, indented) == ([], [])


def indented_lines(text: str) -> list[int]:
    """Returns the lines of a page that begin blocks of code by indentation alone."""
    lines = re.sub(r"^( *)```.*?^\1```$", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S).split(
        "\n"
    )
    return [
        n
        for n, line in enumerate(lines, 1)
        if re.match(r" {4,}(?!<!--)\S", line) and n > 1 and not lines[n - 2].strip()
    ]


def test_a_block_that_is_called_text_has_no_commands() -> None:
    program = re.compile(
        rf"^\s*\$?\s*(?:{'|'.join([*SERVICES, *OF_OTHERS, 'docker', 'helm', 'fulmen', 'make', 'python'])}) [a-z-]", re.M
    )

    hidden = [str(block) for block in blocks() if block.language == "text" and program.search(block.text)]

    assert hidden == []


@pytest.mark.parametrize("block", code_blocks("sh", "console"), ids=str)
def test_a_shell_reads_every_script_and_programs_read_their_commands(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    syntax = subprocess.run(
        ["bash", "-n"], input=block.script, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (syntax.returncode, syntax.stderr) == (0, "")

    found = list(commands(block.script))
    problems = []
    looked_at = [not found]  # settings alone
    for words in found:
        try:
            looked_at.append(read(words))
        except Unread as error:
            problems.append(str(error))

    assert problems == []
    assert any(looked_at), "nothing reads it: run it, or say above it why not: <!-- not run: ... -->"


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_sentences_exist(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lost = []
    for found in INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
        try:
            for words in commands(found.split(" ...")[0]):
                read(words)
        except Unread as error:
            # Sentences leave out what a command cannot do without.
            if re.search(r"has no|No such", str(error)):
                lost.append(f"{found}: {error}")

    assert lost == []


@pytest.mark.parametrize("block", code_blocks("python"), ids=str)
def test_python_compiles_and_what_it_imports_exists(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            names = [each.name for each in node.names]
            lost = [
                n for n in names if not hasattr(module, n) and importlib.util.find_spec(f"{node.module}.{n}") is None
            ]
            assert lost == []
        elif isinstance(node, ast.Import):
            for each in node.names:
                importlib.import_module(each.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fulmen":
            assert hasattr(importlib.import_module("fulmen"), node.attr), f"fulmen.{node.attr}"


@pytest.mark.parametrize("block", code_blocks("json"), ids=str)
def test_json_is_json_in_one_piece_or_one_object_after_the_other(block: Block) -> None:
    rest, decoder = block.text.strip(), json.JSONDecoder()
    while rest:
        _, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()


@pytest.mark.parametrize("block", code_blocks("yaml"), ids=str)
def test_yaml_is_yaml(block: Block) -> None:
    # tests/contract/test_helm_docs.py renders the chart with it.
    assert block.page == "docs/kubernetes.md"
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize(("page", "language"), RUN_ELSEWHERE)
def test_what_is_said_to_run_elsewhere_is_run_there(page: str, language: str) -> None:
    assert page in (ROOT / RUN_ELSEWHERE[page, language]).read_text(encoding="utf-8")
    assert any((block.page, block.language) == (page, language) for block in code_blocks())


def test_every_block_of_a_scene_is_on_its_page() -> None:
    assert RUN_HERE - {(block.page, first_line(block)) for block in blocks() if block.script} == set()


def test_most_blocks_are_run_or_read_and_the_others_say_why() -> None:
    told = account()

    assert [str(block) for block in blocks() if held(block) is None] == []
    assert told.marked / told.total < MOST_WITHOUT, "\n".join(told.lines())
