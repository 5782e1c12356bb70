"""Harbor's task folders as a command agent with a grader: an episode for each folder.

A task has an instruction, files and tests that write a reward. An attempt runs the agent's command in namespaces with the paths of the task
(bubblewrap), and then its tests on the resulting files. Tasks whose environment is more than files need an image, and are refused.

Source: the format of tasks of Harbor 0.26, `harbor/models/task/config.py`; https://harborframework.com/docs.
"""

from __future__ import annotations

import atexit
import json
import posixpath
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fulmen.integrations import harbor_attempt
from fulmen.integrations.environments import Environment, EnvironmentInvalid, wrapped

if TYPE_CHECKING:
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["convert"]

PROGRAM = "harbor_attempt.py"
WORKDIR = "/app"
DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 30 * 86_400.0
_IMAGES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")


def convert(
    tasks: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    command: Sequence[str],
    model: str,
    agent_folder: str | PathLike[str] | None = None,
    agent: AgentConfig | None = None,
) -> Environment:
    """Returns task folders as an agent with a task each; its files are copied into a temporary folder of this process.

    Args:
        tasks: Task folders, or a folder that has them.
        command: The agent. The instruction is its standard input, and replaces `{instruction}` in its arguments; its files are in
            `/agent`, its working directory is the task's, and `OPENAI_BASE_URL` and related variables point to the model.
        model: Name of the model that it calls.
        agent_folder: Folder of the agent's files; None for none.
        agent: Further settings of the agent, such as its limits.

    Raises:
        EnvironmentInvalid: With every problem of every task: a missing file, an unknown version, an environment that needs an image.
    """
    from fulmen.train_toml.agent import AgentConfig

    folders, problems = _folders(tasks), [] if model else ["model: it has no name"]
    if not command:
        problems.append("command: it is empty")
    if not folders:
        problems.append("tasks: there is no folder with a task.toml")
    read = [_read(folder) for folder in folders]
    names = [each.folder.name for each in read]
    problems += [f"{name}: several tasks have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"{each.folder.name}: {problem}" for each in read for problem in each.problems]
    if problems:
        raise EnvironmentInvalid(f"The Harbor tasks of {tasks}", problems)
    made = Path(tempfile.mkdtemp(prefix="fulmen-harbor-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for each in read:
        each.write(made / "tasks" / each.folder.name)
    shutil.copyfile(str(harbor_attempt.__file__), made / PROGRAM)
    if agent_folder is not None:
        shutil.copytree(agent_folder, made / "agent")
    config = replace(
        agent or AgentConfig(),
        command=("python", PROGRAM, "run", "--", *command),
        grader_command=("python", PROGRAM, "grade"),
    )
    lines = tuple(wrapped({"name": name, "model": model}, number=number) for number, name in enumerate(names))
    return Environment(agent=config, tasks=lines, model=model, folder=made)


def _folders(tasks: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    if isinstance(tasks, str | PathLike):
        root = Path(tasks)
        found = [root] if (root / "task.toml").exists() else sorted(path.parent for path in root.glob("*/task.toml"))
    else:
        found = [Path(each) for each in tasks]
    # `.` has a name, too.
    return [each.resolve() for each in found]


@dataclass(kw_only=True)
class _Task:
    """A task folder that was read, with its problems.

    Attributes:
        folder: The folder.
        workdir: Its working directory.
        settings: What its attempts read.
        copies: Files of its environment, by their place below the working directory.
        problems: Why it cannot run here.
    """

    folder: Path
    workdir: str = WORKDIR
    settings: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def write(self, place: Path) -> None:
        """Copies the files of the task that attempts need; its solution is not copied."""
        place.mkdir(parents=True)
        (place / "files").mkdir()
        # Empty folders are not in bundles.
        (place / "files" / ".keep").touch()
        for name, source in self.copies.items():
            target = place / "files" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
            else:
                shutil.copyfile(source, target)
        shutil.copytree(self.folder / "tests", place / "tests")
        shutil.copyfile(self.folder / "instruction.md", place / "instruction.md")
        (place / "settings.json").write_text(json.dumps(self.settings), encoding="utf-8")


def _read(folder: Path) -> _Task:
    task = _Task(folder=folder)
    for name in ("instruction.md", "tests/test.sh", "task.toml"):
        if not (folder / name).is_file():
            task.problems.append(f"{name} is missing")
    if not (folder / "task.toml").is_file():
        return task
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        task.problems.append(f"task.toml is not TOML: {error}")
        return task
    task.problems += _links(folder)
    tables = {name: config.get(name, {}) for name in ("agent", "verifier", "environment")}
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    wrong += [
        f"{name}.env" for name, table in tables.items() if name not in wrong and not _is_env(table.get("env", {}))
    ]
    if wrong:
        task.problems += [f"task.toml: {name} must be a table" for name in wrong]
        return task
    task.problems += _unsupported(config, tables)
    task.workdir = posixpath.normpath(str(tables["environment"].get("workdir") or WORKDIR))
    environment = _environment(task, tables["environment"])
    if not task.workdir.startswith("/") or not task.workdir.strip("/"):
        task.problems.append(f"the working directory {task.workdir[:200]} must be an absolute path below /")
    task.settings = {
        "workdir": task.workdir,
        "environment": environment,
        "verifier_environment": {key: str(value) for key, value in tables["verifier"].get("env", {}).items()},
        "agent_timeout_s": _seconds(task, "agent", tables["agent"]),
        "verifier_timeout_s": _seconds(task, "verifier", tables["verifier"]),
    }
    return task


def _unsupported(config: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the parts of a task's configuration that need a container."""
    if config.get("steps"):
        yield "task.toml: steps: tasks of several steps are not supported"
    for name in ("docker_image", "gpus", "tpu", "mcp_servers", "healthcheck"):
        if tables["environment"].get(name):
            yield f"task.toml: environment.{name}: the environment needs a container, and only files are supported"
    for table in ("agent", "verifier", "environment"):
        if tables[table].get("network_mode", "public") != "public" or tables[table].get("allow_internet") is False:
            yield f"task.toml: {table}: a limited network is not supported"
        if tables[table].get("user"):
            yield f"task.toml: {table}.user is not supported"
    for table in ("environment", "verifier"):
        for key, value in tables[table].get("env", {}).items():
            if "${" in str(value):
                yield f"task.toml: {table}.env.{key}: variables of the machine are not substituted; write the value"


def _is_env(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str | int | float) for value in table.values())


def _links(folder: Path) -> Iterator[str]:
    """Yields links that do not point to a file of the task: their targets would be copied into the agent's bundle."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
            yield f"{path.relative_to(folder)} is a link that leads to no file of the task"


def _words(text: str) -> list[str] | None:
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _seconds(task: _Task, name: str, table: Mapping[str, Any]) -> float:
    value = table.get("timeout_sec", DEFAULT_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        problem = f"must be a positive number, not {repr(value)[:100]}"
        if isinstance(value, int | float) and value > MAX_TIMEOUT_S:
            problem = f"must be at most {MAX_TIMEOUT_S:.0f}"
        task.problems.append(f"task.toml: {name}.timeout_sec {problem}")
        return DEFAULT_TIMEOUT_S
    return float(value)


def _environment(task: _Task, table: Mapping[str, Any]) -> dict[str, str]:
    """Reads the files of a task's environment, as its Dockerfile copies them; returns its variables."""
    place = task.folder / "environment"
    variables = {str(key): str(value) for key, value in table.get("env", {}).items()}
    task.problems += [
        f"environment/{name}: the environment needs containers" for name in _IMAGES if (place / name).exists()
    ]
    if not (place / "Dockerfile").is_file():
        task.copies |= {"": place} if place.is_dir() else {}
        return variables
    text = (place / "Dockerfile").read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.strip().partition(" ")
        split = _words(rest)
        words = split or []
        match word.upper():
            case "" | "FROM" | "LABEL":
                pass
            case "WORKDIR":
                task.workdir = posixpath.normpath(PurePosixPath(task.workdir, rest.strip()))
            case "ENV" | "COPY" | "ADD" if split is None:
                task.problems.append(f"environment/Dockerfile:{number}: a quotation has no end")
            case "ENV" if "$" in rest:
                task.problems.append(f"environment/Dockerfile:{number}: variables are not substituted; write the value")
            case "ENV" if "=" in rest:
                variables |= dict(each.split("=", 1) for each in words if "=" in each)
            case "COPY" | "ADD":
                task.problems += _copied(task, place, words, number)
            case other if other.startswith("#"):
                pass
            case other:
                task.problems.append(
                    f"environment/Dockerfile:{number}: {other} needs an image, and only files are supported"
                )
    return variables


def _copied(task: _Task, place: Path, words: Sequence[str], number: int) -> Iterator[str]:
    """Records the files that a COPY copies; yields its problems."""
    where = f"environment/Dockerfile:{number}: "
    if len(words) < 2 or any(word.startswith("--") for word in words):
        yield where + "only COPY SOURCE… TARGET is supported"
        return
    *sources, target = words
    # The task may come from a stranger: `..` must not lead to another place of this machine.
    goal = PurePosixPath(posixpath.normpath(PurePosixPath(task.workdir, target)))
    if not goal.is_relative_to(task.workdir):
        yield where + f"{target} is outside of the working directory {task.workdir}"
        return
    below = goal.relative_to(task.workdir)
    for source in sources:
        path = (place / source).resolve()
        if not path.is_relative_to(place.resolve()) or not path.exists():
            yield where + f"there is no {source} in environment/"
            continue
        into_folder = not path.is_dir() and (target.endswith(("/", ".")) or len(sources) > 1)
        task.copies[str(below / path.name if into_folder else below)] = path
