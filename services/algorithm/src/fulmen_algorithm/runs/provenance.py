"""Provenance of a run: the facts needed to repeat it and to explain differences."""

import asyncio
import hashlib
import math
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fulmen.errors import ResourceNotFound
from fulmen.models.base_names import pinned
from fulmen_algorithm.runs.ports import ResourceStore
from fulmen_algorithm.runs.run import PolicyOrigin, TrainingRun
from fulmen_algorithm.training.files import file_sha256

PACKAGES = (
    "fulmen",
    "fulmen-algorithm",
    "numpy",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
)
"""Packages whose versions affect the metrics of a run."""
BASE = "policy.base"
"""Name of the model, by its commit on the hub or the digest of an upload, that a run begins with."""
PARAMETERS = "policy.parameters"
"""Name of the number of parameters of a run's first weights."""


async def provenance(
    run: TrainingRun, *, resources: ResourceStore, first_weights: Path | None, machine: Mapping[str, str]
) -> dict[str, str]:
    """Collects the provenance of a run at its first start.

    Args:
        run: The run.
        resources: Resources of its project.
        first_weights: Initial model folder; None if the run trains no weights.
        machine: Facts about the machine, such as `device`.

    Raises:
        ResourceNotFound: if an input does not exist.
        FileNotFoundError: if the initial folder holds no weights.
    """
    found = {f"package.{name}": number for name in PACKAGES if (number := _version(name))}
    found |= {"python": platform.python_version(), "platform": platform.platform(), **machine}
    for use, name in run.inputs.items():
        if name.startswith("resources/"):
            found[f"input.{use}.sha256"] = hashlib.sha256((await resources.get(name)).data).hexdigest()
    if first_weights is None:
        return found
    found["policy.first_weights.sha256"] = await asyncio.to_thread(_files_digest, first_weights)
    found[PARAMETERS] = str(await asyncio.to_thread(parameters_of, first_weights))
    match run.policy.origin:
        case PolicyOrigin.VERSION:
            found["policy.first_version"] = run.policy.source
        case PolicyOrigin.NEWEST:
            with suppress(ResourceNotFound):  # removed since; the weights' digest remains
                found["policy.first_version"] = (await resources.get(f"resources/policy.{run.policy.name}")).name
        case PolicyOrigin.BASE:
            # The folder is named after the commit, or after the digest of an upload.
            found[BASE] = pinned(run.policy.source, first_weights.name)
        case PolicyOrigin.PATH | PolicyOrigin.BUILD:
            pass
    return found


def _files_digest(model_dir: Path) -> str:
    """Computes the SHA-256 over the safetensors files of a model folder, in name order.

    Raises:
        FileNotFoundError: if there are none.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"No safetensors file in {model_dir}.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()


def parameters_of(model_dir: Path) -> int:
    """Counts the parameters in the safetensors files of a model folder; reads their headers only.

    Returns:
        0 if a file cannot be read; the trainer says why when it loads the model.
    """
    # Imported late: the service itself reads no tensors.
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        for file in model_dir.glob("*.safetensors"):
            with safe_open(file, framework="numpy") as weights:
                total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except SafetensorError:
        return 0
    return total


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
