"""The databases of a shop, made from a seed, and a safe way to run a statement on one: read-only and bounded."""

import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

CITIES = ("oslo", "lima", "cairo", "delhi", "paris", "tokyo", "quito", "accra")
CATEGORIES = ("toys", "books", "tools", "shoes", "lamps", "games")
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august")
CUSTOMERS, PRODUCTS, ORDERS, REVIEWS = 20, 24, 400, 300
PRICES = tuple(range(10, 100, 10))
MOST_PIECES, MOST_STARS = 9, 5

SCHEMA = """
CREATE TABLE customers (customer INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE products (product INTEGER PRIMARY KEY, title TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (customer INTEGER, product INTEGER, month TEXT, quantity INTEGER);
CREATE TABLE reviews (customer INTEGER, product INTEGER, stars INTEGER);
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "query",
            "description": "Runs one SQLite statement on the shop's database; says how many rows it has, or its error.",
            "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
        },
    }
]

Row = tuple[int | float | str | bytes | None, ...]
MAX_ROWS = 60
MAX_CHARACTERS = 1000
"""Of a statement, and of a value in it or in its result."""
STEPS, MAX_STEPS = 1000, 500_000
"""Instructions of SQLite between two looks at a statement, and those that it may take: about ten milliseconds."""
ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
ALLOWED_FUNCTIONS = frozenset({"count", "sum", "avg", "min", "max", "total", "round", "abs", "like"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a statement.

    Attributes:
        rows: The rows; none if it failed.
        error: What was wrong; empty if nothing was.
    """

    rows: tuple[Row, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        """Returns the text that the model reads."""
        return f"error: {self.error}" if self.error else f"{len(self.rows)} rows"


@lru_cache(maxsize=64)
def contents(seed: int) -> bytes:
    """Makes a database; the same seed makes the same."""
    chance = random.Random(seed)
    customers = [(n, f"name{n}", chance.choice(CITIES)) for n in range(1, CUSTOMERS + 1)]
    products = [(n, f"title{n}", chance.choice(CATEGORIES), chance.choice(PRICES)) for n in range(1, PRODUCTS + 1)]
    bought = [(*_pair(chance), chance.choice(MONTHS), chance.randint(1, MOST_PIECES)) for _ in range(ORDERS)]
    reviewed = [(*_pair(chance), chance.randint(1, MOST_STARS)) for _ in range(REVIEWS)]
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        for table, rows in (
            ("customers", customers),
            ("products", products),
            ("orders", bought),
            ("reviews", reviewed),
        ):
            database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        database.commit()
        return database.serialize()


def _pair(chance: random.Random) -> tuple[int, int]:
    return chance.randint(1, CUSTOMERS), chance.randint(1, PRODUCTS)


def run(sql: str, seed: int) -> Result:
    """Runs one statement on a copy of a database; whatever is wrong with it is in the result, never raised."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(contents(seed))
        _bound(database)
        try:
            cursor = database.execute(sql)
            if cursor.description is None:
                return Result(error="not a query")
            rows = cursor.fetchmany(MAX_ROWS + 1)
        # ValueError: a character that no statement may have, such as NUL.
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return Result(error="too many steps" if str(error) == "interrupted" else str(error))
    return Result(error=f"more than {MAX_ROWS} rows") if len(rows) > MAX_ROWS else Result(rows=tuple(rows))


def _bound(database: sqlite3.Connection) -> None:
    """Lets a connection do nothing but read, for a bounded time and into bounded memory."""
    looks = iter(range(MAX_STEPS // STEPS))
    database.set_progress_handler(lambda: next(looks, None) is None, STEPS)
    database.set_authorizer(_authorize)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_CHARACTERS)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CHARACTERS)


def _authorize(action: int, _table: str | None, name: str | None, *_: str | None) -> int:
    allowed = action in ALLOWED_ACTIONS or (action == sqlite3.SQLITE_FUNCTION and name in ALLOWED_FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
