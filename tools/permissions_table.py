"""Prints the table of permissions into docs/security.md, between its two markers.

python tools/permissions_table.py            writes it
python tools/permissions_table.py --check    exits with 1 if it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from fulmen_service_kit.security.permissions import RULES, Rule, kind_action
from fulmen_service_kit.security.tokens import Role

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- permissions: begin -->\n", "<!-- permissions: end -->\n"
ROLES = (Role.SERVICE, Role.RUNNER, Role.ENGINE, Role.RANK, Role.CLIENT, Role.READER, Role.ATTEMPT)


def table() -> str:
    """Returns the table in Markdown: a row per group of actions with the same rule."""
    groups: dict[tuple[str, frozenset[Role], str], list[str]] = {}
    for action, rule in RULES.items():
        service, _, name = action.lstrip("/").rpartition("/")
        groups.setdefault((service.rpartition(".")[2], rule.roles, rule.scope), []).append(name)
    other = kind_action("any other kind")
    groups.setdefault(("", RULES[kind_action("prompt")].roles, RULES[kind_action("prompt")].scope), []).append(other)
    head = f"| service | action | {' | '.join(ROLES)} | tokens of |\n|{'---|' * (len(ROLES) + 3)}\n"
    rows = [_row(service, names, Rule(roles=roles, scope=scope)) for (service, roles, scope), names in groups.items()]  # type: ignore[arg-type]
    return head + "".join(rows)


def _row(service: str, names: list[str], rule: Rule) -> str:
    cells = ["yes" if role in rule.roles else "" for role in ROLES]
    projects = {
        "project": "the project",
        "service": "the project that the service serves",
        "deployment": "all projects",
    }
    return f"| {service} | {', '.join(names)} | {' | '.join(cells)} | {projects[rule.scope]} |\n"


def main() -> None:
    """Writes the page, or checks it."""
    old = PAGE.read_text()
    before, _, rest = old.partition(BEGIN)
    new = before + BEGIN + table() + END + rest.partition(END)[2]
    if "--check" not in sys.argv:
        PAGE.write_text(new)
    elif new != old:
        sys.exit("docs/security.md is not current: run `python tools/permissions_table.py`.")


if __name__ == "__main__":
    main()
