"""Plans which GPUs of this machine the parts of a run get: its trainer, the models beside it, and each of its engines.

Parts are on GPUs of their own where there are enough. Where there are not they share, which is said; what cannot work is
refused with every reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fulmen_algorithm.cluster.gpus.machine import Gpu
from fulmen_algorithm.cluster.port import PlacementRefused

GIB = 2**30
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a run that needs GPUs.

    Attributes:
        name: What it is, as text.
        count: Number of GPUs; two processes of one part cannot share one.
        share: Share of the memory of each GPU that it reserves; 0 if it allocates only what it needs.
        gpus: Its GPUs; empty before the plan, unless the run names them.
        had: GPUs that it used before and keeps if possible.
        processes: Processes that it is in, as text; parts in the same ones never share a GPU. Empty for those of its own.
    """

    name: str
    count: int
    share: float = 0.0
    gpus: Sequence[int] = ()
    had: Sequence[int] = ()
    processes: str = ""


def planned(parts: Sequence[Part], gpus: Mapping[int, Gpu], held: Mapping[str, Sequence[Part]]) -> list[Part]:
    """Chooses GPUs for the parts of a run.

    Args:
        parts: The parts, the trainer first.
        gpus: GPUs of the machine, by number.
        held: Parts of others, with their GPUs, by name of the holder.

    Returns:
        The parts with their GPUs.

    Raises:
        PlacementRefused: with every reason, if it does not fit.
    """
    reasons = [reason for part in parts for reason in _problems(part, gpus)]
    reasons += _problems_of_processes(parts, gpus)
    if reasons:
        raise PlacementRefused(reasons)
    users = Counter(gpu for theirs in held.values() for part in theirs for gpu in part.gpus)
    users.update(gpu for part in parts for gpu in part.gpus)
    kept = {gpu for part in parts for gpu in part.had}
    found = list(parts)
    for index, part in enumerate(parts):
        if not part.gpus:
            beside = {gpu for other in found if _are_together(part, other) for gpu in other.gpus}
            # The least used; of these, GPUs that it used before, and none that another part used.
            order = sorted(gpus.keys() - beside, key=lambda gpu: (users[gpu], gpu not in part.had, gpu in kept, gpu))
            found[index] = replace(part, gpus=sorted(order[: part.count]))
            users.update(found[index].gpus)
    if reasons := list(_overfull(found, held)):
        raise PlacementRefused(reasons)
    return found


def shared(parts: Sequence[Part], held: Mapping[str, Sequence[Part]]) -> dict[int, list[str]]:
    """Returns the GPUs that a run shares with others or between its parts, with the names of all that use each."""
    users = _users(parts, held)
    mine = {gpu for part in parts for gpu in part.gpus}
    return {gpu: [name for name, _ in users[gpu]] for gpu in sorted(mine) if len(users[gpu]) > 1}


def plan_text(parts: Sequence[Part], gpus: Mapping[int, Gpu]) -> str:
    """Returns a plan as a sentence."""
    kinds = Counter(_kind(gpu) for gpu in gpus.values())
    there = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"GPUs ({there}): " + "; ".join(f"{part.name} on {_listed(part.gpus)}" for part in parts) + "."


def sharing_text(found: Mapping[int, Sequence[str]]) -> str:
    """Returns which GPUs are shared as a sentence."""
    each = "; ".join(f"{gpu} by {', '.join(names)}" for gpu, names in found.items())
    return f"There are not enough GPUs, so some are shared: {each}."


def _problems(part: Part, gpus: Mapping[int, Gpu]) -> Iterator[str]:
    if part.count > len(gpus):
        yield f"{part.name}: {part.count} GPUs are needed, but there are {len(gpus)}"
    unknown = [gpu for gpu in part.gpus if gpu not in gpus]
    if unknown:
        yield f"{part.name}: GPU {_listed(unknown)} is named, but the GPUs are {_listed(sorted(gpus))}"
    if twice := sorted(gpu for gpu, times in Counter(part.gpus).items() if times > 1):
        yield f"{part.name}: GPU {_listed(twice)} is named twice, but two of its processes cannot share one"
    if part.gpus and len(part.gpus) != part.count:
        yield f"{part.name}: {part.count} GPUs are needed, but {len(part.gpus)} are named"


def _are_together(part: Part, other: Part) -> bool:
    return part.processes != "" and part.processes == other.processes


def _problems_of_processes(parts: Sequence[Part], gpus: Mapping[int, Gpu]) -> Iterator[str]:
    for processes in dict.fromkeys(part.processes for part in parts if part.processes):
        theirs = [part for part in parts if part.processes == processes]
        count = sum(part.count for part in theirs)
        if len(theirs) > 1 and count > len(gpus) >= max(part.count for part in theirs):
            names = " and ".join(part.name for part in theirs)
            yield f"{names}: {count} GPUs are needed, but there are {len(gpus)}"


def _overfull(parts: Sequence[Part], held: Mapping[str, Sequence[Part]]) -> Iterator[str]:
    mine = {gpu for part in parts for gpu in part.gpus}
    for gpu, users in sorted(_users(parts, held).items()):
        taken = sum(share for _, share in users)
        is_full = taken > 1 + ROUNDING or (taken > 1 - ROUNDING and any(not share for _, share in users))
        if gpu in mine and is_full:
            names = ", ".join(f"{name} ({share:g})" if share else name for name, share in users)
            yield (
                f"GPU {gpu} is for {names}, which together need more than its memory: name other GPUs, or lower"
                " gpu_memory_utilization"
            )


def _users(parts: Sequence[Part], held: Mapping[str, Sequence[Part]]) -> dict[int, list[tuple[str, float]]]:
    """Returns the parts on each GPU: their names and shares."""
    users: dict[int, list[tuple[str, float]]] = {}
    named = [(part.name, part) for part in parts]
    named += [(f"{part.name} of {holder}", part) for holder, theirs in held.items() for part in theirs]
    for name, part in named:
        for gpu in part.gpus:
            users.setdefault(gpu, []).append((name, part.share))
    return users


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" if gpu.memory_bytes else gpu.name


def _listed(gpus: Sequence[int]) -> str:
    """Returns numbers as text, such as `0-3, 6`."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
