"""Which shell blocks of the documentation are run as they stand, on a stack of this machine, and what must be there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CLI", "SCENES", "Scene"]

CLI = "docs/cli.md"
AGENT = "def solve(task):\n    return 1.0\n"
GRADER = "def grade(task, outcome):\n    return float(outcome)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Blocks that are run one after the other, in a folder of their own.

    Args:
        name: What it is about.
        blocks: The blocks: page and first line, without a comment behind it.
        before: Commands that make what the blocks need.
        after: Commands that remove what other scenes would find.
        files: Texts of files, by name.
        environment: More variables.
        stdin: What is typed in.
    """

    name: str
    blocks: tuple[tuple[str, str], ...]
    before: str = ""
    after: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""


def of_cli(*commands: str) -> tuple[tuple[str, str], ...]:
    """Returns the places of examples of the command line's page."""
    return tuple((CLI, command) for command in commands)


SCENES = (
    Scene(
        name="an agent as a bundle",
        files={"agent.py": AGENT, "grader.py": GRADER},
        blocks=(
            ("docs/agents.md", "tar czf files.tar.gz agent.py grader.py"),
            *of_cli(
                "fulmen resources publish agent.mine agent.json --kind agent",
                "fulmen rollout list --state failed --state retry_wait",
                "fulmen rollout list --filter 'state = FAILED AND failure_kind != TIMEOUT AND priority >= 10'",
                "fulmen rollout dead",
                "fulmen rollout dead --filter 'failure_kind = TIMEOUT AND create_time > \"2026-03-14T00:00:00Z\"'",
                "fulmen rollout retry --filter 'failure_kind = INFRA'",
            ),
        ),
    ),
    Scene(
        name="versions of a prompt",
        files={"support.md": "Be kind.\n"},
        before="\n".join(
            [
                *(
                    f"echo {n} > other.md; fulmen resources publish prompt.support other.md --kind prompt"
                    for n in (1, 2, 3)
                ),
                "fulmen resources promote prompt.support 3",
            ]
        ),
        blocks=(
            ("docs/resources.md", "fulmen resources publish prompt.support support.md --kind prompt"),
            ("docs/resources.md", "fulmen runners"),
            *of_cli(
                "fulmen resources diff prompt.support/aliases/stable",
                "fulmen resources promote prompt.support 4",
                "fulmen resources rollback prompt.support",
                "fulmen resources list --kind policy",
            ),
        ),
    ),
    Scene(
        name="secrets",
        files={"key.txt": "rain-and-wind\n"},
        stdin="sun-and-heat\n",
        environment={"WEATHER_KEY": "hail-and-ice", "OPENAI_API_KEY": "sk-none-at-all"},
        blocks=(
            ("docs/secrets.md", "fulmen secret set WEATHER_KEY"),
            *of_cli(
                "fulmen secret set WEATHER_KEY --from-env",
                "fulmen secret set openai --from-env",
                "fulmen secret set my-vendor --from-file key.txt --host api.example.com",
                "fulmen secret list",
                "fulmen secret remove WEATHER_KEY",
            ),
        ),
    ),
    Scene(
        name="projects, tokens and budgets",
        files={
            "model_prices_and_context_window.json": '{"gpt-4o": {"input_cost_per_token": 2.5e-06, '
            '"output_cost_per_token": 1e-05, "litellm_provider": "openai"}, "claude": {"input_cost_per_token": 3e-06, '
            '"output_cost_per_token": 1.5e-05, "litellm_provider": "anthropic"}}'
        },
        blocks=(
            *of_cli(
                "fulmen project create team-a",
                "fulmen project create team-b --weight 300 --max-running 64 --retention-days 30 --rule hedging=on",
                "fulmen project get team-a",
                "fulmen project update team-a --max-queued 100000",
                "fulmen project update team-a --rule affinity=off --rule ageing_interval=30",
                "fulmen project update team-a --limit tokens_per_minute=2000000 --limit attempt_token_budget=50000",
                "fulmen project update team-a --budget project=500/month --budget run/demo=20",
                "fulmen project list",
                "fulmen token issue --role client --project team-a --subject ann",
                "fulmen token list --project team-a",
                "fulmen secret list --project team-a --output json",
            ),
            (
                "docs/limits-and-cost.md",
                "fulmen project update team-a --budget project=500/month --budget key/Zk3vT0aJ5h0m1rQ8dX2c9A=10/day",
            ),
            (
                "docs/limits-and-cost.md",
                "fulmen proxy import-prices model_prices_and_context_window.json --provider openai --provider anthropic --to prices.json",
            ),
        ),
    ),
    Scene(
        name="an app's own traffic",
        before="fulmen proxy backend add openai http://127.0.0.1:9/v1 && fulmen proxy route put assistant --target openai",
        after="fulmen proxy route delete assistant",
        blocks=(
            (
                "docs/own-traffic.md",
                "fulmen proxy route record assistant --sample 0.1 --pattern 'customer=C-\\d{6}' --retention-days 30",
            ),
            ("docs/own-traffic.md", "fulmen calls conversations --filter 'model = assistant'"),
            *of_cli(
                "fulmen proxy route record assistant --sample 0.1",
                "fulmen proxy route record assistant --off",
                "fulmen calls list --filter 'model = assistant AND http_status = 200'",
                "fulmen calls list --filter 'conversation = chat-17'",
                "fulmen calls conversations --filter 'call_count > 3 AND score < 0.5'",
                "fulmen calls delete chat-17 chat-18",
            ),
        ),
    ),
    Scene(
        name="backends and routes",
        blocks=of_cli(
            "fulmen proxy backend add vllm-0 http://10.0.0.7:8000/v1 --engine vllm --token-ids --max-in-flight 256",
            "fulmen proxy backends",
            "fulmen proxy routes",
            "fulmen proxy backend hold vllm-0 --ttl 120",
            "fulmen proxy backend release vllm-0",
            "fulmen proxy backend drain vllm-0",
            "fulmen proxy backend resume vllm-0",
            "fulmen proxy backend delete vllm-0",
        ),
    ),
    Scene(
        name="backends and routes of a file",
        files={
            "proxy.toml": '[[backend]]\nname = "a"\nbase_url = "http://127.0.0.1:9/v1"\n'
            '[[route]]\nmodel = "m"\ntargets = [{ backend = "a" }]\n'
        },
        blocks=(
            ("docs/proxy-toml.md", "fulmen proxy apply proxy.toml --check"),
            *of_cli("fulmen proxy apply proxy.toml", "fulmen proxy apply proxy.toml --check"),
            ("docs/proxy-toml.md", "fulmen proxy apply proxy.toml --delete"),
        ),
    ),
    Scene(
        name="looking at a stack",
        blocks=of_cli(
            "fulmen status",
            "fulmen status --output json",
            "fulmen algorithms",
            "fulmen algorithms grpo",
            "fulmen queue",
            "fulmen runners",
            "fulmen usage",
            "fulmen run list",
            "fulmen doctor",
            "fulmen doctor --output json",
        ),
    ),
    Scene(
        name="a project to start from",
        blocks=(
            *of_cli("fulmen init", "fulmen init support --framework langgraph"),
            ("docs/debugging.md", "fulmen agent check train.toml --fake-model"),
            *of_cli(
                "fulmen agent check train.toml --fake-model",
                "fulmen train train.toml --check",
            ),
            ("docs/debugging.md", "fulmen support-bundle"),
        ),
    ),
    Scene(name="prompts to start from", blocks=of_cli("fulmen init --algorithm apo --framework node")),
    Scene(
        name="an app to start from",
        files={"app.py": "def answer(question: str) -> str:\n    return question\n"},
        blocks=of_cli("fulmen init --from app.py:answer"),
    ),
    Scene(
        name="keys of a cluster",
        blocks=(("docs/kubernetes.md", "fulmen token --new-key > signing-key"),),
    ),
    Scene(
        name="keys of a deployment",
        blocks=of_cli(
            "fulmen token --new-key > signing.key",
            "fulmen token --attempt-key-secret --signing-key-file signing.key > attempt.key",
        ),
    ),
)
