"""The devices of a process that trains: of the policy, and of the models beside it. Importable without torch."""

from dataclasses import dataclass

from fulmen_algorithm.training.compute import OneProcess, Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices by their names, such as `cuda:1`.

    Attributes:
        policy: The device of the policy, and of communication between ranks.
        reference: That of the frozen reference policy.
        critic: That of the critic.
    """

    policy: str
    reference: str
    critic: str

    @classmethod
    def all_on(cls, device: str) -> "Devices":
        """All models are on one device."""
        return cls(policy=device, reference=device, critic=device)

    @classmethod
    def of_service(cls, parallel: OneProcess | Placed, device: str) -> "Devices":
        """Those of the service's own process, on the GPUs that a plan has named; without any, on its `device`."""
        policy = f"cuda:{parallel.gpus[0]}" if parallel.gpus else device
        own = {model: f"cuda:{gpus[0]}" for model, gpus in parallel.beside.items() if isinstance(gpus, list)}
        return cls(policy=policy, reference=own.get("reference", policy), critic=own.get("critic", policy))

    @classmethod
    def of_rank(cls, parallel: OneProcess | Placed, local_rank: int, local_ranks: int) -> "Devices":
        """The devices of a rank, one of `local_ranks` that see the same GPUs: first the policies' GPUs, then each further
        model's."""
        policy = f"cuda:{local_rank}"
        own = {
            model: f"cuda:{place * local_ranks + local_rank}" for place, model in enumerate(parallel.beside, start=1)
        }
        return cls(policy=policy, reference=own.get("reference", policy), critic=own.get("critic", policy))
