"""The base of all settings of exchanges."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base of all settings: unknown keys are errors, numbers are finite and not parsed from text, and instances are immutable.

    JSON has no infinity, so an infinite value could not be read back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
