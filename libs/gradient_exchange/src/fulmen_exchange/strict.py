"""The base of all settings of exchanges."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Settings: unknown keys are errors, numbers are finite and not read from text, and nothing changes afterwards.

    JSON has no infinity, so one that was let in could not be read back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
