"""A tiny model, a store, and runs over a model of the other services."""

from tests.support.algorithm.run_service import (  # noqa: F401  (fixtures)
    grpo_draft,
    open_service,
    sft_draft,
    tiny_model,
    world,
)
from tests.support.store.fixtures import store, store_settings, stubs  # noqa: F401  (fixtures)
