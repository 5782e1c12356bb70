"""The shop's data: its orders by number, and within how many days after its delivery an item is taken back."""

import json
from pathlib import Path

ORDERS_FILE = Path(__file__).parent / "orders.jsonl"
ORDERS = {order["order"]: order for order in map(json.loads, ORDERS_FILE.read_text().splitlines())}
RETURN_DAYS = {"book": 14, "lamp": 30, "chair": 30, "clock": 14, "mirror": 30, "puzzle": 14}
