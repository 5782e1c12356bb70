"""Codex as a command agent. Its settings name the proxy, whose URL and key the runner sets in OPENAI_BASE_URL and
OPENAI_API_KEY."""

from __future__ import annotations

import json
import os
import sys

from workspace import CONTEXT_TOKENS, MODEL, lay_out, run, settings_folder

SETTINGS = """\
model = {model}
model_provider = "fulmen"
model_context_window = {context_tokens}
model_auto_compact_token_limit = {compact_tokens}
web_search = "disabled"                # a tool that only OpenAI's service runs
approval_policy = "never"
sandbox_mode = "danger-full-access"    # the runner isolates the attempt
check_for_update_on_startup = false

[model_providers.fulmen]
name = "Fulmen"
base_url = {base_url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]                             # features that call the vendor, or have no use in an attempt
apps = false
goals = false
plugins = false
skill_search = false

[skills]
include_instructions = false
"""

issue, repository = lay_out()
folder = settings_folder("codex")
(folder / "config.toml").write_text(
    SETTINGS.format(
        model=json.dumps(MODEL),
        base_url=json.dumps(os.environ["OPENAI_BASE_URL"]),
        context_tokens=CONTEXT_TOKENS,
        compact_tokens=int(CONTEXT_TOKENS) * 3 // 4,
    )
)
command = ["codex", "exec", "--strict-config", "--ephemeral", "--skip-git-repo-check", "--color", "never", issue]
sys.exit(run(command, repository, {"CODEX_HOME": str(folder)}))
