"""The spool keeps what it was given, in order, through torn ends, flipped bits, full disks and restarts."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_llm_proxy.capture.packed import PackedCalls, SpoolFull
from fulmen_llm_proxy.capture.segment import Record, Scan, encode_record
from fulmen_llm_proxy.capture.spool import DAMAGED, FULL, TORN, UNREADABLE, DiskSpool
from fulmen_llm_proxy.capture.spool_folder import SpoolFolder, open_folder

ROOMY_BYTES = 64 * 1024 * 1024


def packed(number: int, *, trainable: bool = True, attempt: str = "a", size_bytes: int = 10) -> PackedCalls:
    return PackedCalls(
        attempt=attempt,
        chunk_id=str(number),
        chunk=(b"%d " % number) + bytes(size_bytes),
        calls=1,
        unusable=0 if trainable else 1,
        captured=1,
        prompt_tokens=1,
        completion_tokens=2,
        trainable=trainable,
    )


def numbers(found: list[PackedCalls]) -> list[int]:
    return [int(one.chunk_id) for one in found]


def drained(spool: DiskSpool) -> list[int]:
    found: list[int] = []
    while not spool.is_empty:
        found += numbers(spool.read())
        spool.acknowledge()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow past the limit: the kernel fails the write, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_read_comes_again_until_it_is_acknowledged_and_then_its_file_is_gone(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    given_list = [packed(n, trainable=n % 3 > 0, attempt=f"a{n % 2}") for n in range(9)]
    spool.append(given_list)
    assert given_list == []
    assert (spool.records, spool.waiting()) == (9, {"a0": 5, "a1": 4})
    assert numbers(spool.read()) == numbers(spool.read()) == list(range(9))
    spool.append([packed(9)])
    spool.acknowledge()
    assert drained(spool) == [9]
    assert (spool.is_empty, spool.size_bytes, spool.records, spool.waiting()) == (True, 0, 0, {})
    assert files(tmp_path) == []
    assert spool.drain_losses() == []


@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), min_size=1, max_size=6),
            st.sampled_from(["read", "acknowledge", "restart"]),
        ),
        max_size=25,
    )
)
@settings(deadline=None)
def test_in_whatever_order_it_is_used_everything_comes_out_once_acknowledged_and_in_order(steps: list) -> None:
    with TemporaryDirectory() as folder:
        spool = DiskSpool(Path(folder), max_bytes=ROOMY_BYTES)
        waiting: list[int] = []
        count = 0
        for step in steps:
            match step:
                case "read":
                    found = numbers(spool.read())
                    assert found == waiting[: len(found)]
                case "acknowledge":
                    waiting = waiting[len(spool.read()) :]
                    spool.acknowledge()
                case "restart":
                    # As after a kill: nothing was closed. What was acknowledged out of a file may come again.
                    spool = DiskSpool(Path(folder), max_bytes=ROOMY_BYTES)
                    again = [n for n in _all_on_disk(Path(folder)) if n not in waiting]
                    assert all(n < min(waiting, default=count) for n in again) or not again
                    waiting = sorted([*again, *waiting])
                case _:
                    spool.append(
                        [packed(count + i, trainable=kind, size_bytes=size) for i, (kind, size) in enumerate(step)]
                    )
                    waiting += range(count, count + len(step))
                    count += len(step)
        assert sum(spool.waiting().values()) == spool.records == len(waiting)
        assert spool.size_bytes == sum(path.stat().st_size for path in files(Path(folder)))
        assert drained(spool) == waiting
        assert spool.drain_losses() == []


def _all_on_disk(folder: Path) -> list[int]:
    found = [record for path in files(folder) for record, _ in Scan(path.read_bytes()).records()]
    return [int(record.packed.chunk_id) for record in sorted(found, key=lambda record: record.sequence)]


@given(cut=st.integers(0, 1000))
@settings(deadline=None)
def test_a_torn_end_is_cut_and_counted_and_the_rest_is_whole(cut: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        DiskSpool(folder, max_bytes=ROOMY_BYTES).append([packed(n) for n in range(8)])
        [file] = files(folder)
        ends = [end for _, end in Scan(file.read_bytes()).records()]
        kept_bytes = ends[-1] - cut % ends[-1]
        os.truncate(file, kept_bytes)
        whole = sum(end <= kept_bytes for end in ends)
        spool = DiskSpool(folder, max_bytes=ROOMY_BYTES)
        torn = [loss.reason for loss in spool.drain_losses()]
        spool.append([packed(100)])
        assert drained(spool) == [*range(whole), 100]
        assert torn == ([] if kept_bytes in ends else [TORN])


@given(place=st.integers(0), bit=st.integers(0, 7), restart=st.booleans())
@settings(deadline=None)
def test_a_flipped_bit_costs_one_record_and_never_yields_a_false_one(place: int, bit: int, restart: bool) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        spool = DiskSpool(folder, max_bytes=ROOMY_BYTES)
        spool.append([packed(n) for n in range(8)])
        [file] = files(folder)
        data = bytearray(file.read_bytes())
        ends = [end for _, end in Scan(bytes(data)).records()]
        place %= len(data)
        data[place] ^= 1 << bit
        file.write_bytes(data)
        hit = sum(end <= place for end in ends)
        if restart:
            spool = DiskSpool(folder, max_bytes=ROOMY_BYTES)
        assert drained(spool) == [n for n in range(8) if n != hit]
        losses = spool.drain_losses()
        assert sum(loss.calls for loss in losses) == 1
        assert {loss.reason for loss in losses} <= {DAMAGED, TORN}
        assert restart or losses[0].attempt == "a"


def test_a_record_inside_another_ones_payload_is_not_found_when_that_one_is_whole() -> None:
    inner = encode_record(Record(sequence=7, packed=packed(7)))
    outer = packed(1)
    data = encode_record(
        Record(
            sequence=1, packed=PackedCalls(**{f: getattr(outer, f) for f in outer.__struct_fields__} | {"chunk": inner})
        )
    )
    assert [record.sequence for record, _ in Scan(data * 2).records()] == [1, 1]


def test_a_full_spool_drops_the_oldest_that_training_does_not_need_and_then_refuses(tmp_path: Path) -> None:
    max_bytes = 1024 * 1024
    spool = DiskSpool(tmp_path, max_bytes=max_bytes)
    size = 30_000
    for n in range(17):
        spool.append([packed(2 * n, trainable=False, attempt="judge", size_bytes=size)])
        spool.append([packed(2 * n + 1, size_bytes=size)])
    assert spool.drain_losses() == []
    spool.append([packed(100, size_bytes=size)])
    losses = spool.drain_losses()
    assert {(loss.attempt, loss.reason) for loss in losses} == {("judge", FULL)}
    lost = sum(loss.calls for loss in losses)
    assert 1 <= lost <= 3
    more = [packed(200 + n, size_bytes=size) for n in range(40)]
    with pytest.raises(SpoolFull):
        spool.append(more)
    kept = 40 - len(more)
    # What is left of the trainable goes nowhere; something untrainable that comes now is dropped itself.
    spool.append([packed(300, trainable=False, attempt="judge", size_bytes=size)])
    lost += sum(loss.calls for loss in spool.drain_losses())
    assert lost == 18
    assert spool.size_bytes <= max_bytes
    assert drained(spool) == [*range(1, 34, 2), 100, *range(200, 200 + kept)]


def test_what_is_being_sent_is_not_dropped(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path, max_bytes=1024 * 1024)
    spool.append([packed(0, trainable=False)])
    assert numbers(spool.read()) == [0]
    spool.append([packed(1, trainable=False, attempt="b")])
    with pytest.raises(SpoolFull):
        spool.append([packed(2 + n, size_bytes=100_000) for n in range(20)])
    assert [(loss.attempt, loss.calls) for loss in spool.drain_losses()] == [("b", 1)]
    spool.acknowledge()
    assert 0 not in drained(spool)
    assert spool.drain_losses() == []


def test_a_full_disk_loses_nothing_that_was_written_and_leaves_the_rest_with_the_caller(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    spool.append([packed(n, size_bytes=1000) for n in range(3)])
    rest = [packed(3 + n, size_bytes=1000) for n in range(3)]
    with file_size_limit(4000), pytest.raises(OSError, match="File too large"):
        spool.append(rest)
    assert numbers(rest) == [3, 4, 5]
    assert files(tmp_path)[0].stat().st_size == spool.size_bytes
    spool.append(rest)
    assert drained(DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)) == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a file system of 256 KiB; mounting one needs the rights for it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_without_space_keeps_what_is_there_and_takes_more_when_it_has_space_again(small_disk: Path) -> None:
    folder = open_folder(small_disk, "own")
    spool = DiskSpool(folder.path, max_bytes=ROOMY_BYTES)
    waiting = [packed(n, size_bytes=50_000) for n in range(10)]
    spool.append(waiting[:4])
    del waiting[:4]
    with pytest.raises(OSError, match="No space left"):
        spool.append(waiting)
    assert [path.stat().st_size for path in files(folder.path)] == [spool.size_bytes]
    assert drained(spool) == [0, 1, 2, 3]
    spool.append(waiting[:4])
    assert drained(spool) == [4, 5, 6, 7]
    spool.close()
    folder.close()


def test_a_file_that_cannot_be_read_at_start_is_left_aside_and_told(tmp_path: Path) -> None:
    DiskSpool(tmp_path, max_bytes=ROOMY_BYTES).append([packed(0)])
    [file] = files(tmp_path)
    file.unlink()
    file.mkdir()
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    assert [loss.reason for loss in spool.drain_losses()] == [UNREADABLE]
    assert spool.is_empty


def test_a_file_that_cannot_be_read_is_left_aside_and_told(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    spool.append([packed(0), packed(1)])
    [file] = files(tmp_path)
    file.unlink()
    file.mkdir()  # reading it fails, whoever one is
    with pytest.raises(OSError, match="directory"):
        spool.read()
    spool.give_up_head()
    assert [(loss.attempt, loss.calls, loss.reason) for loss in spool.drain_losses()] == [("a", 2, UNREADABLE)]
    spool.append([packed(2)])
    assert drained(spool) == [2]
    assert [path.suffix for path in tmp_path.iterdir()] == [".unreadable"]


def killed(folder: SpoolFolder) -> None:
    """What the kernel does when a process dies: the lock is gone, the files stay."""
    os.close(folder._lock_fd)


def test_the_folder_of_a_process_that_is_gone_is_taken_over_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    dead, living = open_folder(tmp_path, "dead"), open_folder(tmp_path, "living")
    DiskSpool(dead.path, max_bytes=ROOMY_BYTES).append([packed(1), packed(2)])
    DiskSpool(living.path, max_bytes=ROOMY_BYTES).append([packed(3)])
    killed(dead)
    heir = open_folder(tmp_path, "heir")
    spool = DiskSpool(heir.path, max_bytes=ROOMY_BYTES)
    spool.append([packed(4)])
    assert heir.adopted == 1
    assert drained(spool) == [1, 2, 4]
    spool.close()
    heir.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["living", "living.lock"]
    with pytest.raises(FileExistsError):
        open_folder(tmp_path, "living")


def test_a_clock_that_was_set_back_does_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskSpool(tmp_path, max_bytes=ROOMY_BYTES).append([packed(1)])
    monkeypatch.setattr("time.time_ns", lambda: 5)
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    spool.append([packed(2)])
    assert drained(spool) == [1, 2]


def test_files_of_others_are_left_alone_and_captures_are_for_their_owner_only(tmp_path: Path) -> None:
    (tmp_path / "notes.seg").write_text("not ours")
    spool = DiskSpool(tmp_path, max_bytes=ROOMY_BYTES)
    spool.append([packed(1)])
    [ours] = [path for path in files(tmp_path) if path.name != "notes.seg"]
    assert ours.stat().st_mode & 0o077 == 0
    assert drained(spool) == [1]
    assert (tmp_path / "notes.seg").exists()
