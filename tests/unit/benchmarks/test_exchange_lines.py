"""The benchmark of the exchange: lines are shaped and leave nothing behind, frames are delayed in order, and what was
measured becomes points, claims and tables."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exchange import __main__ as benchmark
from benchmarks.exchange import delay, findings, lines, measure, nodes128
from benchmarks.exchange.contenders import CONTENDERS, DDP, DDP_BF16, DDP_POWERSGD, DGC, GRPC_NONE, By
from benchmarks.exchange.lines import LINES, Line

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0
PARAMETERS = 1_000_000
INSIDE = """
import sys
from benchmarks.exchange import lines
lines.enter("tests.none", [])
line = lines.LINES[sys.argv[1]]
made = lines.Lines(line, 2)
with made:
    made.shape()
    shown = lines.shown(*made.within(1), "tc", "qdisc", "show", "dev", made.interface)
    addresses = lines.shown(*made.within(0), "ip", "-o", "-4", "addr", "show", "dev", made.interface)
    print(shown.replace(chr(10), " "), flush=True)
    print(addresses.replace(chr(10), " "), flush=True)
    sys.stdin.read()
print("left: " + lines.shown("ip", "-o", "link").count(chr(10)).__str__(), flush=True)
"""


def inside(line: str) -> subprocess.Popen[str]:
    """Makes lines in private namespaces; they stay until the input ends."""
    words = [*lines.private(), sys.executable, "-c", INSIDE, line]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, lines.INSIDE: "1"}
    )


@pytest.fixture(scope="module")
def shapes() -> None:
    """Skips what needs shaped lines where there can be none."""
    try:
        lines.check()
    except lines.LinesUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("line", ["100mbit", "100mbit-20ms"])
def test_a_rank_has_a_line_of_its_rate_and_all_goes_in_the_end(shapes: None, line: str) -> None:
    with inside(line) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert "tbf" in (shown := process.stdout.readline())
        assert "rate 100Mbit" in shown
        assert "10.77.0.1/24" in process.stdout.readline()
        process.stdin.close()
        # The loopback interface of the private namespace alone.
        assert process.stdout.readline().strip() == "left: 1"
        assert process.wait(LIMIT_S) == 0


def test_lines_are_gone_when_their_process_is_killed(shapes: None) -> None:
    with inside("1gbit") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    names = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    assert lines.BRIDGE not in names.split(": ")
    assert "rank0" not in subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


def test_without_shaped_lines_only_loopback_is_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(module: str, arguments: object) -> None:
        raise lines.LinesUnavailable("needs root")

    ran: list[str] = []
    monkeypatch.setattr(benchmark, "enter", refused)
    monkeypatch.setattr(benchmark.measure, "run", lambda line, form: ran.append(line.name) or {"2": stand(line, 2)})
    assert benchmark.main(["--quick", "--output", str(tmp_path)]) == 1
    assert ran == ["loopback"]
    told = capsys.readouterr().out
    assert "left out: 1gbit, 100mbit, 100mbit-20ms. A shaped line needs root" in told
    written = json.loads((tmp_path / "exchange.json").read_text())
    assert {point["line"] for point in written["raw"]["points"]} == {"loopback"}
    assert benchmark.main(["--quick", "--only", "loopback", "--output", str(tmp_path)]) == 0


def test_frames_come_later_and_in_order_and_those_of_the_other_way_at_once() -> None:
    near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    target, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (source, target):
        one.setblocking(False)
    out, back = delay.Direction(source, target, 3600.0), delay.Direction(target, source, 0.0)
    for number in range(3):
        near.send(bytes([number]))
    out.take()
    left_s = out.send_due()
    assert left_s is not None
    assert 3500 < left_s <= 3600
    assert [frame for _, frame in out.waiting] == [b"\0", b"\1", b"\2"]
    far.send(b"back")
    back.take()
    assert near.recv(16) == b"back"
    out.waiting = type(out.waiting)((0.0, frame) for _, frame in out.waiting)
    assert out.send_due() is None
    assert [far.recv(16) for _ in range(3)] == [b"\0", b"\1", b"\2"]
    for one in (near, source, target, far):
        one.close()


def stand(line: Line, world_size: int, *, scale: float = 1.0) -> dict[str, Any]:
    """Makes what would have been measured, if all went by bytes alone."""
    found: dict[str, Any] = {}
    for contender in measure.LONG.contenders(line):
        ratio = {"none": 1.0, "fp32": 1.0, "bf16": 2.0}.get(contender.codec, 100.0)
        dense = findings.through_line(4.0 * PARAMETERS, contender, line, world_size)
        sent = 0.0 if contender.by is By.NOBODY else dense / ratio
        spread = measure.spread([0.1 * world_size + scale * sent / 1e6])
        found[contender.name] = {
            "step_s": spread, "exchange_share": 0.5, "cpu_s": spread, "sent_bytes": round(sent),
            "weights_equal": None if contender.by is By.NOBODY else True,
            "exchange_s": measure.spread([0.6]),
            "figures": {"exchange_transfer_seconds": 0.3, "exchange_wait_seconds": 0.1},
        }  # fmt: skip
    return {
        "line_measured_mbit": 99.0, "contenders": found, "choice": None, "transfers_s": {GRPC_NONE.name: [3.0, 1.0, 2.0]},
    }  # fmt: skip


@pytest.fixture
def raw() -> dict[str, Any]:
    """What would have been measured on all lines."""
    found: dict[str, Any] = {"parameters": PARAMETERS}
    for line in LINES.values():
        found[line.name] = {str(ranks): stand(line, ranks) for ranks in (2, 4)} | {"measured": {"seconds": 1.0}}
    return found


def test_points_have_the_ratio_of_what_was_sent_and_none_is_of_a_peer(raw: dict[str, Any]) -> None:
    found = findings.points(raw)
    assert {point["name"] for point in found} == {
        each.name for each in CONTENDERS.values() if each.by is By.FULMEN and not each.chooses
    }
    for point in found:
        assert point["ratio"] == pytest.approx({"none": 1.0, "bf16": 2.0}.get(point["codec"], 100.0), rel=1e-3)
        assert point["compute_s"] == pytest.approx(0.1 * point["world_size"])
        assert point["codec_s"] == pytest.approx(0.2)
    by_name = {(point["name"], point["line"], point["world_size"]): point for point in found}
    assert by_name["none", "1gbit", 2]["topology"] == "ring"
    assert by_name["none, gRPC", "1gbit", 2]["topology"] == "sharded"
    assert by_name[DGC.name, "100mbit-20ms", 4]["latency_ms"] == 20.0
    # What the model cannot know of is not given to it.
    fitted = nodes128.steps_of(found)
    assert {step.step.line_bytes_per_s for step in fitted} == {1e9 / 8, 1e8 / 8}
    assert len(fitted) == sum(point["line"] in ("1gbit", "100mbit") for point in found)


def test_claims_compare_medians_with_their_goals(raw: dict[str, Any]) -> None:
    found = {claim["name"]: claim for claim in findings.claims(raw)}
    slow = raw["100mbit"]["4"]["contenders"]
    over = slow[DGC.name]["step_s"]["median"] / slow[DDP_POWERSGD.name]["step_s"]["median"]
    claim = found[f"100 Mbit/s, 4 ranks: step of {DGC.name} over that of {DDP_POWERSGD.name}"]
    assert (claim["value"], claim["goal"], claim["part"]) == (pytest.approx(over), 1.0, "100mbit")
    quick = raw["1gbit"]["2"]["contenders"]
    saved = 100 * (1 - quick[DGC.name]["step_s"]["median"] / quick[DDP_BF16.name]["step_s"]["median"])
    name = f"1 Gbit/s, 2 ranks: by how much a step of {DGC.name} is under one of {DDP_BF16.name}"
    assert found[name]["value"] == pytest.approx(saved, abs=1e-3)
    # 4 MB each way in 2 s, the median of three, are 16 Mbit/s.
    name = "100 Mbit/s, 2 ranks: share of the line that none, gRPC, fills without computing"
    assert (found[name]["value"], found[name]["met"]) == (16.0, False)
    above = [claim for name, claim in found.items() if name.startswith("loopback") and DDP.name in name]
    assert len(above) == 2


def test_the_table_has_bytes_up_down_and_both(raw: dict[str, Any]) -> None:
    figures = raw["1gbit"]["4"]["contenders"][DGC.name]["figures"]
    figures |= {"exchange_up_bytes": 1.5e6, "exchange_down_bytes": 4e6}
    table = findings.markdown(raw)
    assert "1.5 + 4 = 5.5" in table
    peer = raw["1gbit"]["4"]["contenders"][DDP_BF16.name]["sent_bytes"] / 2e6
    assert f"{peer:.3g} + {peer:.3g} = {2 * peer:.3g}" in table


def test_ranks_that_differ_are_seen(raw: dict[str, Any]) -> None:
    raw["1gbit"]["4"]["contenders"][DGC.name]["weights_equal"] = False
    [claim] = [c for c in findings.claims(raw) if c["name"].startswith("1 Gbit/s, 4") and "bits" in str(c["name"])]
    assert not claim["met"]
    taken = measure.Taken(steps=[{"step_s": 1.0, "exchange_s": 0.5}], digests=[("a", "a"), ("a", "b")])
    taken.turns = [{"cpu_s": 1.0, "sent_bytes": 2.0, "figures": {}}]
    assert measure.summary(DGC, taken, compute_s=0.5)["weights_equal"] is False
