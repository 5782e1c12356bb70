"""What customers write about the shop's orders. `python customers.py` draws new orders, always the same."""

import json
import random

from shop import ORDERS, ORDERS_FILE, RETURN_DAYS

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
NUMBERS = range(10, 50)
PRICES = range(10, 60, 5)
DAYS = (5, 9, 12, 20, 25, 35, 40, 60)
COUNT = 800
ON_ITS_WAY, TO_BE_REFUNDED = 0.25, 0.7
"""Shares: of all orders, and of the orders that were delivered."""
SEED = 1
QUESTIONS = (
    "hello where is my order {order}",
    "has my order {order} been sent yet",
    "good morning when does order {order} arrive",
)
WISHES = (
    "please refund my order {order}",
    "i want my money back for order {order}",
    "hello i would like a refund for order {order}",
)


def draw_orders() -> list[dict]:
    """Draws the order book."""
    chance = random.Random(SEED)
    names = chance.sample([f"{letter}{number}" for letter in LETTERS for number in NUMBERS], COUNT)
    return [
        {
            "order": name,
            "item": chance.choice(list(RETURN_DAYS)),
            "euros": chance.choice(PRICES),
            "days": None if chance.random() < ON_ITS_WAY else chance.choice(DAYS),
        }
        for name in names
    ]


def messages() -> list[str]:
    """Draws a message about every order of the book, so that no two customers write the same."""
    chance = random.Random(SEED)
    wishes = ((order, order["days"] is not None and chance.random() < TO_BE_REFUNDED) for order in ORDERS.values())
    return [chance.choice(WISHES if refund else QUESTIONS).format(order=order["order"]) for order, refund in wishes]


if __name__ == "__main__":
    ORDERS_FILE.write_text("".join(json.dumps(order) + "\n" for order in draw_orders()))
