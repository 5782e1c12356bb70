"""Base class of all settings of runs."""

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Strict(BaseModel):
    """Settings: unknown keys are errors, numbers are finite and not read from text, and instances are immutable.

    JSON has no infinity, so an infinite number could not be read back with the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _named_none(value: object) -> object:
    return None if value == "none" else value


def _named_auto(value: object) -> object:
    return None if value == "auto" else value


NONE_BY_NAME = BeforeValidator(_named_none)
"""Accepts the text `none` for null, which TOML lacks, in settings whose default is not null."""
AUTO_BY_NAME = BeforeValidator(_named_auto)
"""Accepts the text `auto` for null, in settings that are chosen by the run itself unless they are given."""
