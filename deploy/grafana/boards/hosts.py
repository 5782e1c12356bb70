"""Machines."""

from __future__ import annotations

from boards.panels import RATE, SERVICES, Board, Panel, Row, Variable, rate

DISKS = 'fstype!~"tmpfs|overlay|squashfs|ramfs"'
HOSTS = Board(
    name="hosts",
    title="hosts and GPUs",
    description="Machines, from node_exporter and dcgm-exporter.",
    variables=[Variable(name="instance", metric="node_load1", label="instance")],
    rows=[
        Row(
            title="Machines",
            panels=[
                Panel(
                    title="CPU in use",
                    unit="percentunit",
                    maximum=1,
                    queries={
                        "{{instance}}": "1 - avg by (instance) "
                        f'(rate(node_cpu_seconds_total{{mode="idle", instance=~"$instance"}}{RATE}))'
                    },
                ),
                Panel(
                    title="Load per core",
                    queries={
                        "{{instance}}": 'node_load1{instance=~"$instance"} / on (instance) '
                        'count by (instance) (node_cpu_seconds_total{mode="idle"})'
                    },
                ),
                Panel(
                    title="Memory in use",
                    unit="percentunit",
                    maximum=1,
                    alarm=0.95,
                    queries={
                        "{{instance}}": "1 - "
                        'node_memory_MemAvailable_bytes{instance=~"$instance"} / node_memory_MemTotal_bytes'
                    },
                ),
                Panel(
                    title="Free disk space",
                    unit="percentunit",
                    maximum=1,
                    alarm=0.1,
                    alarm_below=True,
                    queries={
                        "{{instance}} {{mountpoint}}": f'node_filesystem_avail_bytes{{instance=~"$instance", {DISKS}}} '
                        "/ node_filesystem_size_bytes"
                    },
                ),
                Panel(
                    title="Disk utilization",
                    unit="percentunit",
                    queries={
                        "{{instance}} {{device}}": f'rate(node_disk_io_time_seconds_total{{instance=~"$instance"}}{RATE})'
                    },
                ),
                Panel(
                    title="Network",
                    unit="Bps",
                    queries={
                        "in {{instance}}": rate(
                            "node_network_receive_bytes_total",
                            by="instance",
                            where='{device!="lo", instance=~"$instance"}',
                        ),
                        "out {{instance}}": rate(
                            "node_network_transmit_bytes_total",
                            by="instance",
                            where='{device!="lo", instance=~"$instance"}',
                        ),
                    },
                ),
            ],
        ),
        Row(
            title="GPUs",
            panels=[
                Panel(
                    title="Utilization",
                    unit="percent",
                    maximum=100,
                    queries={"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_UTIL"},
                ),
                Panel(
                    title="Memory in use",
                    unit="percentunit",
                    maximum=1,
                    queries={
                        "{{Hostname}} {{gpu}}": "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)"
                    },
                ),
                Panel(title="Temperature", unit="celsius", queries={"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_TEMP"}),
                Panel(title="Power", unit="watt", queries={"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_POWER_USAGE"}),
                Panel(
                    title="Copy engines and tensor cores",
                    unit="percentunit",
                    queries={
                        "copy {{gpu}}": "DCGM_FI_DEV_MEM_COPY_UTIL / 100",
                        "tensor {{gpu}}": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
                    },
                ),
                Panel(title="Errors (XID)", queries={"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_XID_ERRORS"}),
            ],
        ),
        Row(
            title="Services",
            panels=[
                Panel(
                    title="Cores in use",
                    queries={"{{job}} {{instance}}": f"rate(process_cpu_seconds_total{{{SERVICES}}}{RATE})"},
                ),
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={"{{job}} {{instance}}": f"process_resident_memory_bytes{{{SERVICES}}}"},
                ),
                Panel(title="Open files", queries={"{{job}} {{instance}}": f"process_open_fds{{{SERVICES}}}"}),
            ],
        ),
    ],
)
