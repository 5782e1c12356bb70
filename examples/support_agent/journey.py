"""Runs all steps of README.md on the stack of `fulmen up`, and prints every command with its result.

python journey.py                                                                  # scripted models
python journey.py --vendor https://api.openai.com/v1 --key-name openai \\
    --desk gpt-4.1-mini --critic gpt-4.1 --judge gpt-4.1-mini --imitate imitate_real.toml
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import vendor
from checks import check
from customers import messages

import fulmen
from fulmen.client.calls import RecordedCall

HERE = Path(__file__).parent
DATA = HERE / "data"
MODEL, SMALL = "support-desk", "desk-small"
CUSTOMERS = messages()
FIRST_DAY, SECOND_DAY, THIRD_DAY, EXAM = CUSTOMERS[:80], CUSTOMERS[80:480], CUSTOMERS[480:560], CUSTOMERS[560:660]
APP_LIMIT_S, RECORDED_LIMIT_S = 600, 60


def run(*words: str | Path, quiet: bool = False) -> str:
    """Runs a command of Fulmen, and returns what it prints.

    Args:
        words: its words.
        quiet: whether what it prints is not shown, but only returned.
    """
    shown = [str(word.relative_to(HERE)) if isinstance(word, Path) else word for word in words]
    print("\n$ fulmen", *(f"'{word}'" if " " in word else word for word in shown), flush=True)
    command = [sys.executable, "-m", "fulmen_cli", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            print("" if quiet else line, end="", flush=True)
    if process.returncode:
        sys.exit(f"The command failed with status {process.returncode}.")
    return "".join(lines)


def asked_in(call: RecordedCall) -> str:
    """Returns the customer's message at the beginning of a recorded call."""
    return next(each["content"] for each in call.messages if each["role"] == "user")


def last_calls(client: fulmen.Client, scores: dict[str, float]) -> dict[str, RecordedCall]:
    """Returns the last call of each of today's unrated conversations, once all are recorded.

    Args:
        client: the client.
        scores: scores of the answers, by customer's message. Where it is 0, the app may have given up at a tool.
    """
    deadline = time.monotonic() + RECORDED_LIMIT_S
    while True:
        last: dict[str, RecordedCall] = {}
        for call in client.calls.list(filter=f"model = {MODEL} AND NOT score >= 0"):
            held = last.get(asked_in(call))
            if held is None or len(call.messages) > len(held.messages):
                last[asked_in(call)] = call
        missing = [asked for asked in scores if not _ended(last.get(asked), scores[asked])]
        if not missing:
            return last
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(missing)} conversations were not recorded in {RECORDED_LIMIT_S} s")
        time.sleep(1)


def _ended(call: RecordedCall | None, score: float) -> bool:
    answer = call.answer if call else None
    return answer is not None and not (answer.get("tool_calls") and score)


def day(client: fulmen.Client, label: str, customers: list[str], prompt: Path) -> None:
    """Lets the app answer customers, and rates the conversations: the checks replace a person who reads them."""
    print(f"\n$ python desk.py {prompt.relative_to(HERE)}    # {len(customers)} customers write: {label}", flush=True)
    said = subprocess.run(
        [HERE / ".venv/bin/python", HERE / "desk.py", prompt],
        input="\n".join(customers),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=APP_LIMIT_S,
    )
    scores = {each["message"]: min(check(each).values()) for each in map(json.loads, said.stdout.splitlines())}
    rated: Counter[tuple[str, float]] = Counter()
    for asked, call in last_calls(client, scores).items():
        client.calls.rate(call.conversation, scores[asked], label=label)
        rated[call.policy or "vendor", scores[asked]] += 1
    made = Counter(call.policy or "vendor" for call in client.calls.list(filter=f"model = {MODEL} AND label = {label}"))
    for who, count in sorted(made.items()):
        answers_of = rated[who, 0.0] + rated[who, 1.0]
        print(f"{who}: {count} of {made.total()} calls, {answers_of} last answers, {rated[who, 1.0]} of them good")


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vendor", help="base URL of a vendor; by default, vendor.py acts as one")
    parser.add_argument("--key-name", help="name of the vendor's key, as in `fulmen secret set`")
    for name, work in (("desk", "answers customers"), ("critic", "improves prompts"), ("judge", "judges answers")):
        parser.add_argument(f"--{name}", default=name, help=f"the vendor's model that {work}")
    parser.add_argument("--imitate", default="imitate.toml", help="how the small model is trained")
    return parser.parse_args()


def main() -> None:
    """Runs all steps."""
    given = parsed()
    DATA.mkdir(exist_ok=True)
    scripted = nullcontext(given.vendor) if given.vendor else vendor.serving()
    with scripted as url, fulmen.Client() as client:
        if next(iter(client.calls.list(filter=f"model = {MODEL}", limit=1)), None):
            sys.exit("This stack has been this way before: start one in another folder, with fulmen up --state-dir.")

        # 1. The app calls a route of the vendor's model, which records the calls.
        run("proxy", "backend", "add", "vendor", url, *(["--key-name", given.key_name] if given.key_name else []))
        for route, model in ((MODEL, given.desk), ("critic", given.critic), ("judge", given.judge)):
            run("proxy", "route", "put", route, "--target", f"vendor:{model}", quiet=True)
        run("proxy", "route", "record", MODEL)
        stack = json.loads(run("status", "-o", "json", quiet=True))["record"]
        os.environ["OPENAI_BASE_URL"] = f"{stack['targets']['llm_proxy_http']}/v1"
        token = run("token", "issue", "--role", "client", "--subject", MODEL, quiet=True)
        os.environ["OPENAI_API_KEY"] = token.strip()
        day(client, "first", FIRST_DAY, HERE / "prompt.md")

        # 2. Its conversations become tasks. New customers are the test.
        tasks = ("--as", "tasks", "--validation", "0.3", "--filter", f"model = {MODEL}")
        run("dataset", "create", "questions", *tasks, "--folder", DATA)
        exam = ({"input": {"messages": [{"role": "user", "content": each}]}} for each in EXAM)
        (DATA / "exam.jsonl").write_text("".join(json.dumps(each) + "\n" for each in exam))

        # 3. and 4. Checks and a judge grade the app, and a search improves its prompt.
        run("train", HERE / "search.toml")
        after, _, before = client.runs.list(limit=3)
        (DATA / "found.md").write_text(run("resources", "show", "prompt.desk-prompt/aliases/best", "--raw"))

        # 5. With the found prompt, the vendor's model shows a small one what to do; bad conversations are left out.
        day(client, "second", SECOND_DAY, DATA / "found.md")
        good = f"model = {MODEL} AND label = second AND score > 0.5"
        run("dataset", "create", "desk", "--filter", good, "--folder", DATA)
        run("train", HERE / given.imitate)
        small = next(iter(client.runs.list(limit=1)))

        # 6. The small model gets a share of the calls, and then none.
        run("proxy", "route", "canary", MODEL, "--policy", SMALL, "--percent", "30")
        day(client, "third", THIRD_DAY, DATA / "found.md")
        run("proxy", "route", "rollback", MODEL)

    # 7. What it costs.
    rows = {"vendor, first prompt": before, "vendor, found prompt": after, "small model": small}
    words = [*(f"{label}={each.name.rpartition('/')[2]}" for label, each in rows.items()), "--models", MODEL, SMALL]
    print("\n$ python table.py", *(f"'{word}'" if " " in word else word for word in words), flush=True)
    subprocess.run([sys.executable, HERE / "table.py", *words], check=True)


if __name__ == "__main__":
    main()
