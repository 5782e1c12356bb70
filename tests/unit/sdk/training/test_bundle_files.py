"""What a bundle takes: git's own rules, less what may hold secrets; nothing more without an exact name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.train import ConfigError
from fulmen.training.bundle import bundle_lines, pack_bundle
from fulmen.training.bundle_files import SECRET, choose_files

FAKE_KEY = "sk-proj-" + "a1B2" * 12
NAMES = ("a", "b", "keep.txt", "x.log", "data", "Sub", "sp ace")
PATTERNS = (
    "*.log", "/a", "a/", "!a", "b/**", "**/x.log", "!keep.txt", "data/*", "!data/keep.txt", "sp\\ ace", "#a", "\\#a",
    "Sub/*.log", "/data/b", "[ab]", "?", "!*/", "*", "keep.txt ", "", "**/", "a/**/b", "!/b",
)  # fmt: skip


def write(folder: Path, *names: str, text: str = "x\n") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *arguments: str, stdin: str = "") -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, input=stdin, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".env.local", "config/.env.production", "prod.env", ".envrc", "tls/server.pem", "server.key",
        "id_rsa", "id_ed25519.pub", "deep/id_ecdsa_work", ".ssh/config", ".aws/credentials", ".netrc", ".npmrc",
        "web/.npmrc", ".pypirc", "kubeconfig", "kubeconfig.yaml", ".kube/config", ".docker/config.json",
        "service-account-prod.json", "credentials.json", "terraform.tfstate", "bundle.p12", ".git-credentials",
        ".ENV", "Server.PEM", "ID_RSA", ".AWS/config", "Credentials.JSON",
    ],
)  # fmt: skip
def test_what_may_hold_secrets_is_left_out_by_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "agent.py", name)

    chosen = choose_files(tmp_path)

    assert list(chosen.files) == ["agent.py"]
    assert {each.why for each in chosen.left_out} == {SECRET}


@pytest.mark.parametrize("name", ["node_modules/x/index.js", ".fulmen/client.token", ".git/config", ".venv/a.py"])
def test_caches_and_installed_software_are_left_out(tmp_path: Path, name: str) -> None:
    write(tmp_path, "agent.py", name)

    assert list(choose_files(tmp_path).files) == ["agent.py"]


def test_a_virtual_environment_is_recognised_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", "my-python/pyvenv.cfg", "my-python/lib/site.py")

    assert list(choose_files(tmp_path).files) == ["agent.py"]


@given(
    rules=st.dictionaries(st.sampled_from(["", "data", "data/Sub"]), st.lists(st.sampled_from(PATTERNS), max_size=5)),
    files=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), min_size=1, max_size=12),
)
@example(rules={"": ["keep.txt", "!/b"]}, files=[["b", "keep.txt", "a"]])
@settings(deadline=None)
def test_gitignore_files_are_read_as_git_reads_them(
    tmp_path_factory: pytest.TempPathFactory, rules: dict[str, list[str]], files: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    for parts in files:
        path = folder.joinpath(*parts)
        if not path.is_dir() and not any(each.is_file() for each in path.parents if each != folder):
            write(folder, "/".join(parts))
    for place, lines in rules.items():
        if (folder / place).is_dir():
            (folder / place / ".gitignore").write_text("\n".join(lines) + "\n")

    taken = set(choose_files(folder).files)

    assert taken == set(git(folder, "ls-files", "-z", "--others", "--exclude-standard").split("\0")) - {""}


def test_rules_above_the_folder_count_up_to_the_repositorys_root(tmp_path: Path) -> None:
    write(tmp_path / "repository", ".git/config", "agents/one/agent.py", "agents/one/notes.txt", "agents/one/a.bin")
    write(tmp_path, ".gitignore", text="agent.py\n")
    write(tmp_path / "repository", ".gitignore", text="*.bin\n/notes.txt\n")
    write(tmp_path / "repository", "agents/.gitignore", text="one/notes.txt\n")

    assert list(choose_files(tmp_path / "repository/agents/one").files) == ["agent.py"]


def test_a_folder_that_is_ignored_as_a_whole_is_packed_by_its_own_rules(tmp_path: Path) -> None:
    write(tmp_path, ".git/config", "scratch/agent.py", "scratch/a.log")
    write(tmp_path, ".gitignore", text="scratch/\n*.log\n")

    assert list(choose_files(tmp_path / "scratch").files) == ["a.log", "agent.py"]


def test_a_fulmenignore_adds_to_gitignores_and_takes_files_back(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", "built.js", "notes/a.txt", ".env")
    write(tmp_path, ".gitignore", text="built.js\n")
    write(tmp_path, ".fulmenignore", text="!built.js\nnotes/\n!.env\n")

    chosen = choose_files(tmp_path)

    assert list(chosen.files) == [".fulmenignore", ".gitignore", "agent.py", "built.js"]
    assert {each.name: each.why for each in chosen.left_out} == {
        "notes/": "ignored by .fulmenignore",
        ".env": SECRET,
    }


def test_include_takes_what_it_names_and_secrets_by_their_exact_path_only(tmp_path: Path) -> None:
    write(tmp_path, "a.pem", "certs/test.pem", "certs/other.pem", "node_modules/x/i.js", "node_modules/x/.npmrc")
    write(tmp_path, ".ssh/id_rsa", ".ssh/config", ".venv/a.py", ".venv/b.py")

    include = ("certs/test.pem", "*.pem", "/node_modules/", ".ssh/id_rsa", ".venv/b.py")

    assert list(choose_files(tmp_path, include=include).files) == [
        ".ssh/id_rsa", ".venv/b.py", "certs/test.pem", "node_modules/x/i.js",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"x = 1\nkey = '{FAKE_KEY}'\n", "line 2: looks like an OpenAI key"),
        ("sk-ant-api03-" + "Ab1_" * 10, "an Anthropic key"),
        ("-----BEGIN RSA PRIVATE KEY-----\n", "a private key"),
        ("-----BEGIN PRIVATE KEY-----\n", "a private key"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n", "a private key"),
        ("aws = AKIA" + "ABCDEFGH12345678" + "\n", "an AWS access key"),
        ("ghp_" + "a1" * 18, "a GitHub token"),
        ("\n" * 70_000 + "x" * 1_000_000 + " AIza" + "b" * 35, "line 70001: looks like a Google API key"),
    ],
)
def test_a_file_whose_content_looks_like_a_secret_is_refused_without_showing_it(
    tmp_path: Path, text: str, what: str
) -> None:
    write(tmp_path, "agent.py")
    write(tmp_path, "tools.py", text=text)

    with pytest.raises(ConfigError) as refused:
        pack_bundle(tmp_path)

    assert "tools.py" in str(refused.value)
    assert what in str(refused.value)
    assert FAKE_KEY not in str(refused.value)
    assert pack_bundle(tmp_path, agent=AgentConfig(python="agent.py:x", include=("tools.py",))).files


def test_texts_about_keys_are_no_keys(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", text='KEY = os.environ["OPENAI_API_KEY"]  # sk-..., AKIA, task-' + "a" * 40 + "\n")

    assert pack_bundle(tmp_path).files == ("agent.py",)


def test_an_agent_whose_own_file_is_left_out_is_refused_with_the_rule(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", ".venv/bin/tool", "grade.py")
    write(tmp_path, ".gitignore", text="grade.py\n")

    agent = AgentConfig(command=(".venv/bin/tool", "agent.py"), grader="grade.py:grade")
    with pytest.raises(ConfigError) as refused:
        pack_bundle(tmp_path, agent=agent)

    assert len(refused.value.problems) == 2
    assert "grade.py: ignored by .gitignore" in refused.value.problems[0]
    assert ".venv/bin/tool: a cache, or installed software" in refused.value.problems[1]


@pytest.mark.parametrize("place", [".venv", "python-of-mine"])
def test_an_interpreter_of_a_virtual_environment_is_refused_with_the_path_that_works(
    tmp_path: Path, place: str
) -> None:
    write(tmp_path, "agent.py", "grade.py", f"{place}/pyvenv.cfg")
    interpreter = tmp_path / place / "bin/python"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)

    agent = AgentConfig(command=(f"{place}/bin/python", "agent.py"), grader_command=("./missing/python", "grade.py"))
    with pytest.raises(ConfigError) as refused:
        pack_bundle(tmp_path, agent=agent)

    assert refused.value.problems == (
        f"{place}/bin/python: an installed program of this machine, which cannot be bundled. Name its environment for runners "
        f'on this machine, `venv = "{place}"`, or the packages for any runner, `requirements = "requirements.txt"`; or write '
        '"python" for the one on each runner\'s PATH',
        f"./missing/python: no such file in {tmp_path}",
    )
    absolute = AgentConfig(command=(str(interpreter), "agent.py"))
    assert "agent.py" in pack_bundle(tmp_path, agent=absolute).files


@pytest.mark.parametrize("name", [".env", ".ENV", ".ssh/config", ".git/config", ".fulmen/client.token"])
def test_a_link_to_what_is_left_out_is_left_out_under_its_own_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "agent.py", name)
    (tmp_path / "settings.txt").symlink_to(tmp_path / name)

    chosen = choose_files(tmp_path)

    assert list(chosen.files) == ["agent.py"]


def test_the_list_names_sizes_and_reasons(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", ".env", "node_modules/a.js")

    assert bundle_lines(pack_bundle(tmp_path)) == [
        "The bundle has 1 files, 2 bytes:",
        "     2 bytes  agent.py",
        "Left out:",
        "  .env: may contain secrets",
        "  node_modules/: a cache, or installed software",
    ]
