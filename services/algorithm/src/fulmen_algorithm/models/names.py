"""Names of models and of their uploads, and of a model as the base of a run, `model:{digest or alias}`."""

import re
from dataclasses import dataclass
from typing import Final, Self

from fulmen.errors import ModelNotFound
from fulmen.ids import NOT_DOTS

PROJECT: Final = re.compile(r"projects/[a-z0-9-]{1,63}")
_ID: Final = rf"{NOT_DOTS}[a-z0-9._-]{{1,64}}"
_NAME: Final = re.compile(rf"(projects/[a-z0-9-]{{1,63}})/(models|uploads)/({_ID})")
_SHOWN: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A model or an upload.

    Attributes:
        project: `projects/{project}`.
        id: Digest or alias.
        is_upload: Whether it is an upload, which is not committed.
    """

    project: str
    id: str
    is_upload: bool = False

    @classmethod
    def parse(cls, name: str) -> Self:
        """Reads `projects/{project}/models/{id}` or `projects/{project}/uploads/{digest}`.

        Raises:
            ModelNotFound: if it is neither.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise unknown(name)
        return cls(project=match[1], id=match[3], is_upload=match[2] == "uploads")

    def __str__(self) -> str:
        """The name."""
        return f"{self.project}/{'uploads' if self.is_upload else 'models'}/{self.id}"


def unknown(name: object) -> ModelNotFound:
    """Returns the error for a name of no model; also for a model of another project, which must look the same."""
    return ModelNotFound("The model or upload does not exist.", model=str(name)[:_SHOWN])
