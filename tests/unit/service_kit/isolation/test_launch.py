"""A confined child reads, writes, signals and calls what it is given, and nothing else, by each technique by itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_service_kit.isolation import launch as launching
from fulmen_service_kit.isolation.cgroups import Cgroups
from fulmen_service_kit.isolation.confine import SCOPE_VERSION, landlock_version
from fulmen_service_kit.isolation.launch import Bounds, Files, Isolator, Launch, supervised
from fulmen_service_kit.isolation.levels import Isolation, IsolationUnavailable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
SETTING = "FULMEN_X_ISOLATION"
LEVELS = st.sampled_from(Isolation)
NAMES = "landlock", "bubblewrap"
TRIES = """
import ctypes, json, os, signal, socket, sys
secret, given, written, victim = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def tried(call):
    try:
        return call() or "done"
    except OSError as error:
        return error.errno
def called(number, *arguments):
    return ctypes.get_errno() if libc.syscall(number, *arguments) < 0 else "done"
print(json.dumps({
    "secret": tried(lambda: open(secret).read()),
    "given": tried(lambda: open(given).read()),
    "change": tried(lambda: open(given, "a").close()),
    "written": tried(lambda: open(written + "/new", "w").close()),
    "elsewhere": tried(lambda: open(os.path.dirname(secret) + "/new", "w").close()),
    "etc": tried(lambda: open("/etc/passwd").close()),
    "victim": tried(lambda: os.kill(int(victim), signal.SIGKILL)),
    "memory": tried(lambda: open(f"/proc/{victim}/environ", "rb").read()),
    "namespace": called(272, 0x10000000),
    "trace": called(101, 16, int(victim), 0, 0),
    "keys": called(250, 0, 0, 0, 0),
    "clone3": called(435, 0, 0),
    "null": tried(lambda: open("/dev/null", "w").close()),
    "size": tried(lambda: open(written + "/big", "wb").truncate(1 << 21) and None),
}))
"""
EPERM, ENOENT, ESRCH, EACCES, EFBIG, EROFS, ENOSYS = 1, 2, 3, 13, 27, 30, 38


def isolator_of(technique: str, level: Isolation = Isolation.SANDBOX, **options: object) -> Isolator:
    """Returns an isolator that uses one technique alone, as the user of the tests."""
    isolator = Isolator(level, setting=SETTING, **options)  # type: ignore[arg-type]  # Checked by the constructor.
    isolator.__dict__["_changes_users"] = False
    found = {"landlock": launching._Landlock, "bubblewrap": launching._Bubblewrap}[technique]()
    if found.missing or (problem := isolator._problem_of(found)):
        pytest.skip(f"{technique}: {found.missing or problem}")
    isolator.__dict__["_sandbox"] = found
    return isolator


def started(launch: Launch, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Runs a launch as a service would that is not root: root without its capabilities."""
    # All but what a map of the user 0 needs.
    bare = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", "--"] if os.geteuid() == 0 else []
    return subprocess.run(
        [*bare, *supervised(launch)],
        env=dict(os.environ) if environment is None else environment,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process of the same user that nothing hides."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("technique", NAMES)
def test_a_sandbox_gives_what_it_is_given_and_no_more(
    technique: str, tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    secret, given_, written = tmp_path / "secret" / "key", tmp_path / "given" / "file", tmp_path / "written"
    for folder in (secret.parent, given_.parent, written):
        folder.mkdir()
    secret.write_text("secret")
    given_.write_text("given")
    files = Files(readable=(given_.parent,), writable=(written,), folder=given_.parent)
    launch = isolator_of(technique).launch(
        [sys.executable, "-c", TRIES, str(secret), str(given_), str(written), str(victim.pid)],
        Isolation.SANDBOX,
        files,
        Bounds(file_bytes=1 << 20),
    )
    done = started(launch, {})
    assert not done.stderr, done
    seen = json.loads(done.stdout)
    assert (seen["given"], seen["written"], seen["etc"], seen["null"]) == ("given", "done", "done", "done")
    assert {seen["change"], seen["elsewhere"], seen["secret"]} <= {EACCES, EROFS, ENOENT}
    assert {seen["victim"]} <= {EPERM, ESRCH}
    assert {seen["memory"]} <= {EACCES, ENOENT}
    assert (seen["namespace"], seen["trace"], seen["keys"], seen["clone3"]) == (EPERM, EPERM, EPERM, ENOSYS)
    assert seen["size"] == EFBIG
    assert victim.poll() is None


@pytest.mark.skipif(landlock_version() < SCOPE_VERSION, reason="abstract sockets are scoped from Linux 6.12 on")
@pytest.mark.parametrize("technique", NAMES)
def test_a_sandbox_reaches_no_abstract_socket_of_others(technique: str, tmp_path: Path) -> None:
    name = f"fulmen-{tmp_path}"
    script = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0' + {name!r})"
    launch = isolator_of(technique).launch(
        [sys.executable, "-c", script], Isolation.SANDBOX, Files(folder=Path("/")), Bounds()
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        assert b"Operation not permitted" in started(launch).stderr


@pytest.mark.parametrize("technique", NAMES)
def test_what_is_hidden_stays_hidden_below_a_folder_that_is_readable(technique: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "inner").mkdir(parents=True)
    (shared / "inner" / "token").write_text("secret")
    (shared / "inner" / "plain").write_text("plain")
    (tmp_path / "link").symlink_to(shared / "inner" / "token")
    isolator = isolator_of(technique, readable=[shared], hidden=[tmp_path / "link"])
    script = f"cat {shared}/inner/plain; cat {shared}/inner/token"
    files = Files(folder=Path("/"))
    launch = isolator.launch(["sh", "-c", script], Isolation.SANDBOX, files, Bounds())
    done = started(launch)
    assert done.stdout == b"plain"


@pytest.mark.parametrize("technique", NAMES)
def test_sigterm_reaches_the_program_and_its_status_comes_back(technique: str, tmp_path: Path) -> None:
    script = "trap 'exit 7' TERM; kill -TERM $$; sleep 5"
    launch = isolator_of(technique).launch(
        ["sh", "-c", script], Isolation.SANDBOX, Files(folder=tmp_path, readable=(tmp_path,)), Bounds()
    )
    done = started(launch)
    assert done.returncode == 7


def test_a_child_has_no_variable_and_no_open_file_of_the_service(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as kept:
        os.set_inheritable(kept.fileno(), True)
        isolator = isolator_of("landlock", Isolation.PROCESS)
        launch = isolator.launch(
            [sys.executable, "-c", "import os; print(sorted(os.environ), os.listdir('/proc/self/fd'))"],
            Isolation.PROCESS,
            Files(folder=tmp_path),
            Bounds(),
        )
        done = started(launch, {"A": "1"})
    assert done.stdout.decode().strip() in ("['A'] ['0', '1', '2', '3']", "['A', 'LC_CTYPE'] ['0', '1', '2', '3']")


@given(st.none() | LEVELS, LEVELS)
def test_a_tenant_can_only_raise_the_level(wish: Isolation | None, floor: Isolation) -> None:
    level = Isolator(floor, setting=SETTING).level(wish)
    assert level.rank >= floor.rank
    assert level in (wish, floor)


@pytest.mark.parametrize("floor", [Isolation.CONTAINER, Isolation.JOB])
def test_above_a_sandbox_no_process_of_this_machine_is_enough(floor: Isolation, tmp_path: Path) -> None:
    with pytest.raises(IsolationUnavailable, match=f"at least `{floor}` \\({SETTING}\\)"):
        Isolator(floor, setting=SETTING).launch(["true"], floor, Files(folder=tmp_path), Bounds())


def test_a_machine_without_any_technique_refuses_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching._Bubblewrap, "missing", "the program bwrap is not installed")
    monkeypatch.setattr(launching._Landlock, "missing", "the kernel has not enabled it")
    isolator = Isolator(Isolation.SANDBOX, setting=SETTING)
    with pytest.raises(IsolationUnavailable) as refused:
        isolator.launch(["true"], Isolation.SANDBOX, Files(folder=tmp_path), Bounds())
    assert isolator.problem == str(refused.value)
    for word in ("bwrap is not installed", "Install bubblewrap", "Landlock (Linux 5.13", SETTING):
        assert word in isolator.problem


def test_a_step_that_fails_leaves_the_program_unstarted(tmp_path: Path) -> None:
    launch = Launch(
        argv=("touch", str(tmp_path / "started")),
        confinement={**launching._UNCONFINED, "cgroup_files": (str(tmp_path / "no" / "group"),)},
    )
    done = started(launch)
    assert (done.returncode, (tmp_path / "started").exists()) == (125, False)
    assert b"No such file or directory" in done.stderr


@pytest.fixture
def proc(tmp_path: Path) -> Callable[[str, str], Path]:
    """Returns what writes a /proc/self with a line of `cgroup` and one of `mountinfo`."""

    def write(cgroup: str, mountinfo: str) -> Path:
        folder = tmp_path / "proc"
        (folder / "self").mkdir(parents=True)
        (folder / "self" / "cgroup").write_text(cgroup)
        (folder / "self" / "mountinfo").write_text(mountinfo)
        return folder

    return write


def test_groups_of_version_2_get_limits_below_a_delegated_group(
    tmp_path: Path, proc: Callable[[str, str], Path]
) -> None:
    own = tmp_path / "cgroup" / "delegated"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("memory pids\n")
    found = Cgroups.find(proc("0::/delegated\n", f"30 1 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw\n"))
    assert found is not None
    group = found.create(memory_bytes=1000, process_count=7)
    folder = group.folders["memory"]
    assert folder.parent == own
    assert [(folder / name).read_text() for name in ("memory.max", "pids.max", "memory.oom.group")] == [
        "1000",
        "7",
        "1",
    ]
    assert group.process_files == (f"{folder}/cgroup.procs",)
    (folder / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert group.has_killed


def test_where_no_group_can_be_written_there_is_none(tmp_path: Path, proc: Callable[[str, str], Path]) -> None:
    own = tmp_path / "cgroup"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpu\n")
    assert Cgroups.find(proc("0::/\n", f"30 1 0:26 / {own} rw - cgroup2 cgroup2 rw\n")) is None


def test_groups_of_this_machine_hold_a_child_to_its_memory(tmp_path: Path) -> None:
    if Cgroups.find() is None:
        pytest.skip("no control group can be written here")
    isolator = isolator_of("landlock", Isolation.PROCESS)
    launch = isolator.launch(
        [sys.executable, "-c", "print(len(bytearray(b'x' * (512 << 20))))"],
        Isolation.PROCESS,
        Files(folder=tmp_path),
        Bounds(memory_bytes=128 << 20, process_count=10),
    )
    done = subprocess.run(supervised(launch), env={}, capture_output=True, timeout=60, check=False)
    assert launch.cgroup is not None
    assert (done.returncode, launch.cgroup.has_killed) == (137, True)
    launch.cgroup.remove()
    assert not any(folder.exists() for folder in launch.cgroup.folders.values())
