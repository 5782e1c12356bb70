"""mini-swe-agent as a command agent. Its LiteLLM reads the proxy's URL and key from OPENAI_BASE_URL and OPENAI_API_KEY, which the
runner sets."""

from __future__ import annotations

import sys

from workspace import FOLDER, MAX_TOKENS, MODEL, lay_out, run, settings_folder

issue, repository = lay_out()
settings = {
    "MSWEA_GLOBAL_CONFIG_DIR": str(settings_folder("mini")),
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",  # the proxy counts
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of a list of prices from the network
}
command = ["mini", "--yolo", "--agent-class", "default", "--model", f"openai/{MODEL}", "--task", issue]
command += ["--output", str(FOLDER.resolve() / "mini" / "trajectory.json"), "--config", "mini.yaml"]
command += ["--config", "agent.step_limit=40", "--config", "agent.cost_limit=0"]
command += ["--config", f"model.model_kwargs.max_tokens={MAX_TOKENS}"]
sys.exit(run(command, repository, settings))
