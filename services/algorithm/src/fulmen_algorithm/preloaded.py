"""Everything that the service, its trainer and its engines import: what the fork server loads before it forks them.

Invariant: importing it starts no thread.
"""

import peft
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

import fulmen_algorithm.app
import fulmen_algorithm.engines.embedded.__main__
import fulmen_algorithm.loops.worker
import fulmen_algorithm.trainers.in_process
import fulmen_algorithm.trainers.rank
import fulmen_service_kit.cli
import fulmen_service_kit.observability.loop_watchdog
import fulmen_service_kit.observability.telemetry

__all__ = ["fulmen_algorithm", "fulmen_service_kit", "peft", "transformers"]
