"""The filter of system calls for code of tenants: what a program needs only to attack the kernel or other processes.

A denied call fails with EPERM. `clone3`, whose flags are behind a pointer that a filter cannot read, fails with ENOSYS, so
that C libraries fall back to `clone`; a new user namespace is denied there.
Source: seccomp(2); the list is the part of Docker's default profile that needs no privilege to be called.
"""

import platform
import struct
import sys
from typing import Final

# Numbers on x86_64 and aarch64; None where the call does not exist.
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NEW_USER_NAMESPACE = 0x10000000
_X32_CALLS = 0x40000000
_INSTRUCTION = struct.Struct("=HBBI")


def filter_program() -> bytes:
    """Returns the filter for this machine's architecture as a BPF program; empty where there is none."""
    known = _ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or known is None:
        return b""
    column, architecture = known
    program = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, architecture),
        # Another architecture's calls have other numbers.
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
        (_JUMP_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_ANY_BIT, 0, 1, _NEW_USER_NAMESPACE),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | _EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)
