"""The first words of the command line, each with its module and its line in the help of `fulmen`.

A command imports its own module alone, and `fulmen --help` none: together they take a second to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Final

import typer

__all__ = ["WORDS", "app_of", "new_app", "overview"]

WORDS: Final = {
    "init": ("init.commands", "Writes an agent, its grader, 20 tasks and a train.toml that explains every line."),
    "demo": (
        "init.commands",
        "Trains a tiny model through the four services on this machine, without a GPU or a checkout.",
    ),
    "up": ("stack.commands", "Starts the four services and their database on this machine."),
    "down": ("stack.commands", "Stops the local stack; its data is kept."),
    "status": ("stack.commands", "Shows the state, health and ports of the local stack, and the queue."),
    "logs": ("stack.commands", "Shows the log of one process of the local stack."),
    "open": ("stack.opening", "Opens the console in a browser, signed in with your token."),
    "train": ("train.commands", "Trains an agent as configured in a train.toml."),
    "algorithms": ("train.commands", "Lists the algorithms; with a name, the inputs and settings of that one."),
    "sweep": (
        "sweep.commands",
        "Tries settings of a train.toml for a few steps each, and the best of them for longer (successive halving).",
    ),
    "queue": ("rollout.backlog", "Shows queued and running rollouts, and the scheduling rules."),
    "runners": ("runner.commands", "Lists the connected runners."),
    "trace": (
        "rollout.traces",
        "Shows the spans of a rollout as a tree, with tokens, policy versions and contents of model calls.",
    ),
    "usage": (
        "project.usage",
        "Shows the tokens that model calls used and their cost by the proxy's price table.",
    ),
    "audit": (
        "project.audit",
        "Shows the administrative calls to the store, newest first. Requires an admin token.",
    ),
    "doctor": (
        "doctor.commands",
        "Checks this machine and its stack, or a deployment, and shows how to fix problems.",
    ),
    "support-bundle": (
        "doctor.support",
        "Collects diagnostics into one file: doctor's findings, versions, settings, metrics, logs, queue, runs.",
    ),
    "runner": ("runner.commands", "One runner: status, slots, drain."),
    "agent": ("agent.commands", "Try agents before training them; resume paused ones."),
    "run": (
        "run.commands",
        "Training runs: list, watch, compare, pause, roll back, stop. `fulmen train` creates them.",
    ),
    "model": ("model.commands", "Models: plan memory, list trained versions, serve, export, upload and download."),
    "exchange": ("exchange.commands", "Gradient exchange between the ranks of a training run."),
    "rollout": ("rollout.commands", "Rollouts: create, inspect, count, change, cancel, delete, export."),
    "annotations": (
        "annotations.commands",
        "Scores that people give to rollouts, and how far these people agree.",
    ),
    "schedule": ("schedule.commands", "Schedules: rollouts that are created at the times of a cron expression."),
    "spans": ("rollout.spans", "Spans of many rollouts."),
    "emit": ("agent.emit", "Report rewards and annotations of the current attempt, from any program."),
    "resources": ("resources.commands", "Versioned resources: agents, bundles, datasets, policies, routes."),
    "calls": ("calls.commands", "Recorded calls of an app: those without an attempt, on routes that record."),
    "dataset": ("calls.datasets", "Data sets for train.toml, made from recorded calls of an app."),
    "proxy": ("proxy.commands", "The LLM proxy: its routes and backends."),
    "project": (
        "project.commands",
        "Projects: tenants with weights, quotas, retention, queue rules and limits of model calls.",
    ),
    "token": ("project.tokens", "Tokens. `issue`, `revoke` and `list` use the store, which is the usual way."),
    "secret": ("secret.commands", "Secrets of agents, and keys of backends."),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"fulmen {metadata.version('fulmen-cli')}")
        raise typer.Exit(0)


def new_app() -> typer.Typer:
    """Returns the program without commands."""
    app = typer.Typer(
        help="Fulmen trains the AI agents that you already have.\n\n"
        "Begin with `fulmen demo`, or with `fulmen init`, `fulmen up` and `fulmen train train.toml`.\n\n"
        "Exit status: 0 done, 1 failed, 2 invalid options or input, 3 not found, 4 conflict.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
        ] = False,
    ) -> None:
        """The options of the program itself."""

    return app


def app_of(*words: str) -> typer.Typer:
    """Returns the program with the commands of some first words, and of those in the same modules."""
    app = new_app()
    for module in dict.fromkeys(WORDS[word][0] for word in words):
        import_module(f"fulmen_cli.{module}").register(app)
    return app


def overview() -> typer.Typer:
    """Returns the program with the help of its first words alone."""
    app = new_app()
    for word, (_, text) in WORDS.items():
        app.command(word, help=text)(lambda: None)
    return app
