"""A policy as a resource of the store: after a crash the same weights get the same version."""

import json
from dataclasses import dataclass

from fulmen_algorithm.policy.services import RunServices
from fulmen_algorithm.policy.versions import Versions
from fulmen_algorithm.rollouts.groups import in_branch
from fulmen_algorithm.runs.ports import PublishedPolicy, SavedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResource:
    """The resource of a run's policy.

    Attributes:
        services: Those of the run.
        versions: The versions of this run; new ones are added.
    """

    services: RunServices
    versions: Versions

    @property
    def name(self) -> str:
        """The name of the resource, without its project."""
        return f"resources/policy.{self.services.entry.run.policy.name}"

    async def point(self, alias: str, version: int) -> None:
        """Points an alias to a version."""
        await self.services.resources.point(self.name, alias, version)

    async def publish(self, saved: SavedModel, step: int, *, equals: int = 0) -> tuple[PublishedPolicy, SavedModel]:
        """Publishes a version; returns it, and the weights in the folders that it names.

        Args:
            saved: The weights.
            step: Step of this run after which the weights were written.
            equals: Version with the same weights, if they are republished.
        """
        run, resources, versions = self.services.entry.run, self.services.resources, self.versions
        parent, branch = self._parent(), self.services.recorder.progress.branch
        # The same weights after a crash get the same version; other weights never do.
        request_id = in_branch(f"{run.run_id}/{step}/{saved.sha256[:32]}", branch)
        description = {**versions.describe(saved), "run": run.name, "step": step, "parent": parent}
        if saved.base:
            request_id += f"/from-{saved.base}"
        if equals:
            request_id += f"/again-{max(versions.records)}"
            description["equals"] = versions.records[equals].name
        elif branch and (equal := versions.equal(saved.sha256)):
            description["equals"] = equal.name
        content = await resources.publish(
            resource=self.name,
            kind="policy",
            content=json.dumps(description).encode(),
            content_type="application/json",
            parent=parent,
            request_id=request_id,
        )
        # An earlier owner may have published it, and then the version names the folders of that one.
        stored = json.loads((await resources.get(content.name)).data)
        saved = await versions.as_published(saved, stored)
        published = versions.add(version=content.version, name=content.name, step=step, saved=saved)
        await self.services.entry.files.push_journal()
        return published, saved

    def _parent(self) -> str:
        """Returns the name of the present weights' parent version; after a rollback, of the republished version."""
        progress, records = self.services.recorder.progress, self.versions.records
        version = progress.parent_version
        if not version:
            # The run was rolled back to its first checkpoint, which precedes its first version.
            version = min((v for v, record in records.items() if record.step == progress.step), default=0)
        return records[version].name if version else ""
