"""What holds for every test: a clean environment, one thread per numeric library, short paths for sockets."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import forked
from tests.support.folders import short_folder
from tests.support.soak import SOAK

# Before anything imports torch or numpy: with more threads than idle cores they run several times slower.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Container images like to set it; every process that a test starts would then compile its modules, torch included, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What the person who runs the tests has set for real deployments must not reach a test.
for variable in [name for name in os.environ if name.startswith("FULMEN_") and not name.startswith("FULMEN_TEST_")]:
    del os.environ[variable]

forked.install()

# A shell without job control starts background jobs with SIGINT ignored, and processes inherit that: those that tests
# interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code. `make test SOAK=10` tries ten times as many.
hypothesis.settings.register_profile("fulmen", deadline=None, max_examples=20 * SOAK)
hypothesis.settings.load_profile("fulmen")

SERIAL_KINDS = frozenset({"e2e", "chaos"})
LONG_KINDS = {"chaos": "kills", "integration": "kills"}
BEGIN_FIRST = ("vllm", "serial-stacks", "serial-kills", "trainers", "test_support_desk")
"""Groups that take minutes, one test after another: were one begun among the last, the others would wait for it."""


LONG = re.compile(r"\bmark\.long\b|\blong_(?:but|after)\b")
"""How a file says that it has long tests."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares a run of long tests the files without any, six of seven: collecting them costs every worker half a minute."""
    if config.option.markexpr.startswith("long") and collection_path.match("test_*.py"):
        return not may_have_long_tests(collection_path) or None
    return None


@functools.cache
def may_have_long_tests(path: Path) -> bool:
    """Returns whether the file, or a conftest.py of its folders, marks tests as long."""
    folders = path.relative_to(Path(__file__).parent).parents[:-1]
    files = [path, *(Path(__file__).parent / folder / "conftest.py" for folder in folders)]
    return any(LONG.search(file.read_text(encoding="utf-8")) for file in files if file.exists())


@pytest.hookimpl(tryfirst=True)  # pytest-xdist notes the groups in a hook of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups tests by the process that runs them: what starts whole stacks, and the tests of a module.

    Whole stacks run one after another, and those of a kind share one. Tests of a module share its fixtures and imports.
    Kinds run side by side; of long tests, which nearly fill the machine by themselves, two: those that kill, and the others.
    """
    tests_root = Path(__file__).parent
    unseen = {item.path for item in items if item.get_closest_marker("long") and not may_have_long_tests(item.path)}
    if unseen:
        raise pytest.UsageError(f"long by a mark that `make test-long` does not see: {', '.join(map(str, unseen))}")
    if "short=True" in config.option.markexpr:
        left = [item for item in items if is_left_to_the_long_form(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    for item in items:
        kind = item.path.relative_to(tests_root).parts[0]
        if kind in SERIAL_KINDS:
            item.add_marker(pytest.mark.serial)
        if item.get_closest_marker("serial"):
            group = LONG_KINDS.get(kind, "stacks") if item.get_closest_marker("long") else kind
            item.add_marker(pytest.mark.xdist_group(f"serial-{group}"))
        elif not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    places = {group: place for place, group in enumerate(BEGIN_FIRST)}
    items.sort(key=lambda item: places.get(item.get_closest_marker("xdist_group").args[0], len(places)))


def is_left_to_the_long_form(item: pytest.Item) -> bool:
    """Returns whether the closest marks say so: the one of a parameter or a function outweighs that of its module.

    pytest's own choice (-m) takes any mark, so a parameter that is only long would be in the short form with its function.
    """
    for node in item.iter_parents():
        if marks := [mark for mark in node.own_markers if mark.name == "long"]:
            return not all(mark.kwargs.get("short") for mark in marks)
    return False


def pytest_collection() -> None:
    """Spares the garbage collector's rounds while a million objects come that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Takes them out of its rounds for good; a round over all of them would take a second in every worker."""
    gc.enable()
    gc.freeze()


def pytest_report_header() -> str:
    """Names the PostgreSQL that the tests use."""
    from tests.support.postgres import VARIABLE, postgres_kind

    return f"PostgreSQL of the tests: {postgres_kind()} ({VARIABLE})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one line per reason for which tests were skipped, with their number."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[" ".join(reason.removeprefix("Skipped: ").split())] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}", yellow=True)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """Returns the root of the checkout."""
    return Path(__file__).parent.parent


@pytest.fixture
def database_url() -> Iterator[str]:
    """Yields the URL of a database with the store's schema."""
    from tests.support.postgres import shared_server

    server = shared_server()
    url = server.fresh_database()
    yield url
    server.drop(url)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """Yields an empty folder whose path leaves room for the name of a Unix socket; removes it afterwards."""
    with short_folder() as folder:
        yield folder
