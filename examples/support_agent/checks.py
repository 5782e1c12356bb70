"""Checks of an answer without a model: the order's number, the facts about it, and the rule of refunds."""

import re

from shop import ORDERS, RETURN_DAYS

NUMBER = re.compile(r"\b[A-Z]\d\d\b")
WANTS_REFUND = re.compile(r"refund|money back")


def owed(message: str) -> list[dict]:
    """Returns the refunds that the shop owes for a customer's message: one or none."""
    order = ORDERS[NUMBER.findall(message)[0]]
    in_time = order["days"] is not None and order["days"] <= RETURN_DAYS[order["item"]]
    wanted = WANTS_REFUND.search(message) and in_time
    return [{"order": order["order"], "euros": order["euros"]}] if wanted else []


def check(answer: dict) -> dict[str, float]:
    """Returns 1.0 or 0.0 for each check of an answer of the desk.

    `number`: it names the customer's order and no other. `facts`: it says no wrong sum, time or place. `rule`: what is
    owed was paid back, and nothing else.
    """
    text, asked = answer["text"], NUMBER.findall(answer["message"])
    order = ORDERS[asked[0]]
    numbers = {order["euros"], order["days"], RETURN_DAYS[order["item"]]}
    facts = {int(each) for each in re.findall(r"\b\d+\b", text)} <= numbers
    place = order["days"] is None or "on its way" not in text.lower()
    return {
        "number": float(set(NUMBER.findall(text)) == set(asked)),
        "facts": float(facts and place),
        "rule": float(answer["refunds"] == owed(answer["message"])),
    }
