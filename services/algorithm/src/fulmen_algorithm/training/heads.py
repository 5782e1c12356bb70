"""What is known of a model's output head without its weights. Importable without torch.

Logits are the largest tensor of training: V numbers for each position. Where they are the output embedding applied to the
decoder's last state, and nothing more, they are computed in pieces (`training.scorer`).
"""

from collections.abc import Mapping
from typing import Any

LOGITS_AT_ONCE = 2**25
"""Maximum number of logits in one piece, 128 MiB in float32."""
_UNSET = (None, 0, False)
AFTER_HEAD: Mapping[str, tuple[Any, ...]] = {
    "final_logit_softcapping": _UNSET,  # Gemma 2, 3n and 4, VaultGemma, NanoChat
    "output_logit_soft_cap": _UNSET,  # xLSTM
    "logits_soft_cap": _UNSET,  # RecurrentGemma
    "logit_scale": (*_UNSET, 1.0),  # Cohere
    "logits_scaling": (*_UNSET, 1.0),  # Granite
    "lm_head_multiplier": (*_UNSET, 1.0),  # Falcon H1
}
"""Settings of configurations for operations after the head, and the values that disable them."""


def setting_after_head(config: Mapping[str, Any]) -> str:
    """Returns the setting of a model's configuration, that of its part for text, which changes logits; empty for none."""
    return next((name for name, values in AFTER_HEAD.items() if config.get(name) not in values), "")
