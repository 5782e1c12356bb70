"""Base class of all settings of runs."""

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

MAX_INTEGER = 2**53 - 1
"""Beyond it JSON's numbers are not exact."""


class Strict(BaseModel):
    """Settings: unknown keys are errors, numbers are finite and not read from text, and instances are immutable.

    JSON has no infinity, so an infinite number could not be read back with the run. The store's texts have no NUL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"should be from -{MAX_INTEGER} to {MAX_INTEGER}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("should have no NUL character")
        return value


def _named_none(value: object) -> object:
    return None if value == "none" else value


def _named_auto(value: object) -> object:
    return None if value == "auto" else value


NONE_BY_NAME = BeforeValidator(_named_none)
"""Accepts the text `none` for null, which TOML lacks, in settings whose default is not null."""
AUTO_BY_NAME = BeforeValidator(_named_auto)
"""Accepts the text `auto` for null, in settings that are chosen by the run itself unless they are given."""
