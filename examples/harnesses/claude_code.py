"""Claude Code as a command agent. It reads the proxy's URL and key from ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the
runner sets."""

from __future__ import annotations

import sys

from workspace import CONTEXT_TOKENS, MAX_TOKENS, MODEL, lay_out, run, settings_folder

QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
"""Nothing but model calls leaves it: no telemetry, no reports, no search for updates."""

issue, repository = lay_out()
settings = {
    **QUIET,
    "CLAUDE_CONFIG_DIR": str(settings_folder("claude")),
    # It has smaller models for some of its work; here all of it is the policy's.
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": MAX_TOKENS,
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": CONTEXT_TOKENS,
    "CLAUDE_CODE_AUTO_COMPACT_WINDOW": CONTEXT_TOKENS,
    # A line of its version at the beginning of each prompt, and a list of tools that grows: both change the tokens before a call.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "ENABLE_TOOL_SEARCH": "false",
}
command = ["claude", "--print", issue, "--model", MODEL, "--bare", "--no-session-persistence"]
# It may use these tools and no others, and never asks.
tools = "Bash,Edit,Read,Write"
command += ["--tools", tools, "--allowedTools", tools, "--permission-mode", "dontAsk"]
sys.exit(run(command, repository, settings))
