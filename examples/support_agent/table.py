"""Prints accuracy and cost of evaluations, from the rewards, tokens and prices that Fulmen recorded for their runs.

python table.py "first prompt=RUN" "found prompt=RUN" "small model=RUN" --models support-desk desk-small
"""

import argparse

import fulmen

ROW = "| {:<26} | {:>8} | {:>5} | {:>13} | {:>17} | {:>22} |"
HEADS = ("", "accuracy", "tasks", "prompt tokens", "completion tokens", "dollars for 1,000 tasks")


def row(client: fulmen.Client, label: str, run_name: str, models: set[str]) -> str:
    """Renders one evaluation; it counts the desk's model calls, but not the judge's."""
    results = client.runs.get(run_name).results
    tasks = int(results["test_rollouts"])
    used = [each for each in client.usage(by="model", run=run_name) if each.name in models]
    prompt, completion = (
        sum(getattr(each, name) for each in used) for name in ("prompt_token_count", "completion_token_count")
    )
    dollars = sum(each.cost_usd for each in used) / tasks * 1000
    return ROW.format(label, f"{results['test_reward_mean']:.2f}", tasks, prompt, completion, f"{dollars:.3f}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--models", nargs="+", required=True, help="public names of the models that count")
    arguments = parser.parse_args()
    print(ROW.format(*HEADS))
    print(ROW.format(*("-" * 3 for _ in HEADS)))
    with fulmen.Client() as client:
        for label, _, run_name in (each.partition("=") for each in arguments.runs):
            print(row(client, label, run_name, set(arguments.models)))


if __name__ == "__main__":
    main()
