"""The table `[agent]`: every way to start, bound and score an agent, and the message that runners get."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.runner.v1 import agent_spec_pb2
from fulmen.train_toml.agent import (
    AgentConfig,
    ContainerConfig,
    JudgeConfig,
    LimitsConfig,
    agent_config,
    agent_spec,
    read_agent,
)
from fulmen.train_toml.reader import TableReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "job.yaml").write_text("kind: Job\n")
    (tmp_path / "judge.txt").write_text("Judge {outcome}")
    (tmp_path / "large.yaml").write_text("x" * 70_000)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    return tmp_path


def read(folder: Path, text: str) -> tuple[AgentConfig, list[str]]:
    problems: list[str] = []
    return read_agent(TableReader(tomllib.loads(text), "agent", problems), folder), problems


def test_a_python_agent_in_a_process_of_its_own_has_limits_and_a_judge(folder: Path) -> None:
    agent, problems = read(
        folder,
        """
        python = "agent.py:solve"
        isolation = "process"
        limits = {memory = "2GiB", processes = 64}
        judge = {model = "gpt-x", prompt_file = "judge.txt", dimensions = ["a", "b"], min = 1, max = 5, samples = 3}
        """,
    )

    spec = agent_spec(agent, "resources/bundle.x/versions/1")
    assert problems == []
    assert spec.bundle == "resources/bundle.x/versions/1"
    assert spec.python.isolation == agent_spec_pb2.ISOLATION_PROCESS
    assert (spec.limits.memory_bytes, spec.limits.process_count) == (2 << 30, 64)
    assert spec.grader.judge == agent_spec_pb2.JudgeEntry(
        model="gpt-x", prompt="Judge {outcome}", dimensions=["a", "b"], min_score=1, max_score=5, sample_count=3
    )


def test_requirements_travel_as_the_name_of_their_file_and_allow_limits(folder: Path) -> None:
    (folder / "needs").mkdir()
    (folder / "needs" / "all.txt").write_text("httpx==0.28.1\n")
    agent, problems = read(
        folder, 'python = "agent.py:solve"\nlimits = {memory = "1GiB"}\nrequirements = "./needs/../needs/all.txt"'
    )
    spec = agent_spec(agent, "")
    assert (problems, spec.virtual_environment.requirements) == ([], "needs/all.txt")
    assert agent_config(spec) == agent


def test_requirements_that_runners_would_refuse_are_refused_with_every_line(folder: Path) -> None:
    (folder / "requirements.txt").write_text("httpx\n-e /etc\nfile:///etc/passwd\n")
    _, problems = read(folder, 'python = "agent.py:solve"\nrequirements = "requirements.txt"')
    assert [each.partition("'")[0] for each in problems] == [
        "agent.requirements: requirements.txt line 2: ",
        "agent.requirements: requirements.txt line 3: ",
    ]
    for name, problem in (("missing.txt", "cannot be read"), ("../up.txt", "is not in the agent's folder")):
        _, problems = read(folder, f'python = "agent.py:solve"\nrequirements = "{name}"')
        assert len(problems) == 1
        assert problem in problems[0]


@pytest.mark.parametrize("written", [".venv", "./.venv/", "absolute"])
def test_a_virtual_environment_and_its_programs_become_absolute_paths(folder: Path, written: str) -> None:
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    name = str(venv) if written == "absolute" else written
    agent, problems = read(
        folder, f'command = [".venv/bin/python", "agent.py"]\ngrader_command = ["node", "g.js"]\nvenv = "{name}"'
    )
    spec = agent_spec(agent, "")
    assert (problems, spec.virtual_environment.folder) == ([], str(venv))
    assert list(spec.command.argv) == [f"{venv}/bin/python", "agent.py"]
    assert list(spec.grader.command.argv) == ["node", "g.js"]


def test_what_is_no_usable_virtual_environment_is_said_with_the_remedy(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name in ("removed", "broken", "old"):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "pyvenv.cfg").write_text("")
    (folder / "removed" / "bin" / "python").symlink_to("/nowhere/python")
    for name, script in (("broken", "exit 3"), ("old", "echo 3 8")):
        python = folder / name / "bin" / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    expected = {
        "missing": "there is no folder",
        "agent.py": "there is no folder",
        "empty": "it has no pyvenv.cfg",
        "removed": "is missing, or links to",
        "broken": "cannot be run",
        "old": "has Python 3.8, but Python agents need 3.11 or newer",
    }
    for name, problem in expected.items():
        _, problems = read(folder, f'python = "agent.py:solve"\nvenv = "{name}"')
        assert len(problems) == 1
        assert problem in problems[0], problems
        assert "uv venv" in problems[0]
    _, problems = read(folder, 'command = ["python", "x.py"]\nvenv = "old"')
    assert problems == []


def test_a_container_has_no_virtual_environment_and_no_agent_has_two(folder: Path) -> None:
    (folder / "requirements.txt").write_text("httpx\n")
    _, problems = read(folder, 'container = {image = "x"}\nrequirements = "requirements.txt"')
    assert problems == [
        "agent.requirements: only for Python and command agents: install packages in the container's image"
    ]
    _, problems = read(folder, 'python = "agent.py:solve"\nrequirements = "requirements.txt"\nvenv = "missing"')
    assert problems[0] == "agent.venv: give requirements or venv, not both"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", agent_spec_pb2.ISOLATION_UNSPECIFIED),
        ('isolation = "trusted"', agent_spec_pb2.ISOLATION_TRUSTED),
        ('isolation = "process"', agent_spec_pb2.ISOLATION_PROCESS),
        ('isolation = "sandbox"', agent_spec_pb2.ISOLATION_SANDBOX),
    ],
)
def test_isolation_is_as_it_is_said_for_agent_and_grader_and_the_runners_if_it_is_not(
    folder: Path, line: str, value: int
) -> None:
    agent, problems = read(folder, f'python = "agent.py:solve"\ngrader = "agent.py:solve"\n{line}')
    spec = agent_spec(agent, "")
    assert (problems, spec.python.isolation, spec.grader.python.isolation) == ([], value, value)
    agent, problems = read(folder, f'command = ["a"]\ngrader = "agent.py:solve"\n{line}')
    spec = agent_spec(agent, "")
    assert (problems, spec.command.isolation, spec.grader.python.isolation) == ([], value, value)
    assert agent_config(spec) == agent


def test_a_newer_isolation_is_the_highest_known_one() -> None:
    spec = agent_spec_pb2.AgentSpec(python=agent_spec_pb2.PythonEntry(target="a:f", isolation=9))  # type: ignore[arg-type]  # A value of a later version.
    assert agent_config(spec).isolation == "sandbox"


def test_a_container_is_an_image_with_a_command_a_network_and_processors(folder: Path) -> None:
    agent, problems = read(
        folder,
        'container = {image = "node:22", command = ["node", "a.js"], network = "agents"}\nmax_output = "4KiB"\n'
        'limits = {cpus = 1.5, memory = 1000}\ngrader_command = ["grade"]',
    )

    spec = agent_spec(agent, "")
    assert problems == []
    assert spec.container == agent_spec_pb2.ContainerEntry(
        image="node:22", argv=["node", "a.js"], network="agents", max_output_bytes=4096
    )
    assert (spec.limits.cpu_count, spec.limits.memory_bytes) == (1.5, 1000)
    assert list(spec.grader.command.argv) == ["grade"]


def test_a_job_travels_as_the_text_of_its_file(folder: Path) -> None:
    agent, problems = read(folder, 'job = "job.yaml"')

    assert problems == []
    assert agent_spec(agent, "").job.template == "kind: Job\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "agent: give one of python ="),
        ('python = "agent.py:f"\njob = "job.yaml"', "agent: give one of python ="),
        ('python = "agent.py:f"\nisolation = "proces"', "did you mean 'process'?"),
        ('job = "job.yaml"\nisolation = "process"', "agent.isolation: only for Python and command agents"),
        ('python = "agent.py:f"\nisolation = "trusted"\nlimits = {processes = 2}', "agent.limits: cannot be enforced inside the runner"),
        ('python = "agent.py:f"\nlimits = {memory = "1GiB"}', 'agent.limits: cannot be enforced inside the runner: add'),
        ('command = ["a"]\nlimits = {cpus = 1}', "agent.limits.cpus: only for containers and jobs"),
        ('command = ["a"]\nlimits = {memory = "1 gig"}', 'agent.limits.memory: must be a size, such as "512MiB"'),
        ('command = ["a"]\nlimits = {memory = true}', "agent.limits.memory: must be a size"),
        ('command = ["a"]\nlimits = {processes = 0}', "agent.limits.processes: must be a whole number from 1"),
        ('command = ["a"]\nlimits = {memroy = 1}', "agent.limits.memroy: no such key; did you mean 'memory'?"),
        ('command = ["a"]\nlimits = 3', "agent.limits: must be a table [agent.limits]"),
        ('container = {command = ["a"]}', "agent.container.image: is required"),
        ('container = {image = "a", argv = ["a"]}', "agent.container.argv: no such key"),
        ('job = "none.yaml"', "agent.job: the file"),
        ('job = "large.yaml"', "has 70000 bytes: must have 1 to 65536"),
        ('job = "empty.yaml"', "has 0 bytes"),
        ('job = "binary.yaml"', "is not UTF-8"),
        ('command = ["a"]\njudge = {}', "agent.judge.model: is required"),
        ('command = ["a"]\njudge = {model = "m", min = 5, max = 5}', "agent.judge.max: must be greater than min"),
        ('command = ["a"]\njudge = {model = "m", min = 11}', "agent.judge.max: must be greater than min"),
        ('command = ["a"]\njudge = {model = "m", samples = 10}', "agent.judge.samples: must be a whole number from 1 to 9"),
        ('command = ["a"]\njudge = {model = "m", dimensions = ["A b"]}', "agent.judge.dimensions: 'A b'"),
        ('command = ["a"]\njudge = {model = "m", dimensions = ["a", "a"]}', "agent.judge.dimensions: must be unique"),
        ('command = ["a"]\njudge = {model = "m", prompt = "p", prompt_file = "judge.txt"}', "not both"),
        ('command = ["a"]\ngrader = "agent.py:f"\njudge = {model = "m"}', "give one of grader, grader_command and judge"),
        ('command = ["a"]\nmax_output = "1MiB"', "agent.max_output: at most 65536 bytes"),
        ('python = "agent.py:f"\nmax_output = 10', "agent.max_output: not for Python agents"),
        ('command = ["a"]\nenvironment = {A = 1}', "agent.environment: must be a table of texts"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_without_effect_is_named(folder: Path, text: str, problem: str) -> None:
    problems = read(folder, text)[1]

    assert len(problems) == 1
    assert problem in problems[0]


WORDS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3).map(tuple)
NUMBERS = st.floats(-100, 100)
JUDGES = st.builds(
    JudgeConfig,
    model=st.just("m"),
    prompt=st.text(max_size=5),
    dimensions=st.just(()) | st.just(("a", "b")),
    min_score=st.none() | NUMBERS,
    max_score=st.none() | NUMBERS,
    sample_count=st.integers(0, 9),
)
LIMITS = st.builds(
    LimitsConfig,
    memory_bytes=st.integers(0, 1 << 40),
    cpu_count=st.floats(0, 64),
    process_count=st.integers(0, 1000),
)
CONTAINERS = st.builds(ContainerConfig, image=st.just("i"), command=st.just(()) | WORDS, network=st.text(max_size=5))
ISOLATIONS = st.sampled_from(["", "trusted", "process", "sandbox"])
ENTRIES = st.one_of(
    st.builds(dict, python=st.just("a.py:f"), isolation=ISOLATIONS),
    st.builds(dict, command=WORDS, isolation=ISOLATIONS, max_output_bytes=st.integers(0, 65_536)),
    st.builds(dict, container=CONTAINERS, max_output_bytes=st.integers(0, 65_536)),
    st.builds(dict, job=st.text(min_size=1, max_size=9), max_output_bytes=st.integers(0, 65_536)),
)
GRADERS = st.one_of(
    st.just({}),
    st.just({"grader": "g.py:g"}),
    st.builds(dict, grader_command=WORDS),
    st.builds(dict, judge=JUDGES),
)


@settings(deadline=None)
@given(ENTRIES, GRADERS, LIMITS, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_a_published_agent_reads_back_as_it_was_written(entry, grader, limits, environment) -> None:
    agent = AgentConfig(**entry, **grader, limits=limits, environment=environment)

    assert agent_config(agent_spec(agent, "resources/bundle.x/versions/1")) == agent
