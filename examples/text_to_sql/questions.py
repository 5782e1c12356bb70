"""Questions in a small English, and the statements that answer them.

A question is an ask ("which city has the most orders") with up to two conditions ("in march", "of toys"). Asks and
conditions are drawn apart, each in one of several wordings.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shop import CATEGORIES, CITIES, CUSTOMERS, MONTHS, MOST_PIECES, MOST_STARS, PRICES

TABLE_OF = {"city": "customers", "name": "customers", "category": "products", "title": "products", "price": "products"}
"""Tables of the columns that orders and reviews do not have themselves."""
KEYS = {"customers": "customer", "products": "product"}
PLURALS = {
    "customer": "customers",
    "product": "products",
    "city": "cities",
    "category": "categories",
    "month": "months",
}
COUNTS = {"two": 2, "three": 3, "four": 4}
CONDITIONS = (0, 1, 1, 1, 2)
"""Numbers of conditions of a question; one that is listed twice is drawn twice as often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition, such as `month = 'march'`.

    Attributes:
        words: Its wording in the question.
    """

    column: str
    operator: str
    value: str
    words: str

    def __str__(self) -> str:
        """Writes it as SQL."""
        return f"{self.column} {self.operator} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One statement.

    Attributes:
        table: The table that the question is about.
        select: What is selected.
        columns: Columns that are used besides the conditions' columns.
        group: Column to group by; empty for none.
        order: What is ordered by; empty for no order.
        limit: Number of rows; 0 for no limit.
    """

    table: str
    select: str
    columns: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    group: str = ""
    order: str = ""
    limit: int = 0

    @property
    def form(self) -> tuple[object, ...]:
        """The statement without its values."""
        return (self.table, self.select, self.order, self.limit, *((c.column, c.operator) for c in self.conditions))

    @property
    def joined(self) -> tuple[str, ...]:
        """Other tables that it needs."""
        used = [TABLE_OF.get(column, self.table) for column in (*self.columns, *(c.column for c in self.conditions))]
        return tuple(table for table in KEYS if table in used and table != self.table)

    def sql(self, *, join: bool = True) -> str:
        """Writes the statement, a space between its words; without its joins it fails if it needs some."""
        joins = [f"JOIN {table} USING ( {KEYS[table]} )" for table in self.joined] if join else []
        return " ".join(
            part
            for part in (
                f"SELECT {self.select} FROM {self.table}",
                *joins,
                "WHERE " + " AND ".join(map(str, self.conditions)) if self.conditions else "",
                f"GROUP BY {self.group}" if self.group else "",
                f"ORDER BY {self.order}" if self.order else "",
                f"LIMIT {self.limit}" if self.limit else "",
            )
            if part
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What questions are asked about a table.

    Attributes:
        measures: Numbers that are added up and compared, by the words for them.
        groups: Columns to group by.
        conditions: Operator and wordings by column.
    """

    measures: Mapping[str, str]
    groups: Sequence[str]
    conditions: Sequence[tuple[str, str, Sequence[str]]]


VALUES: Mapping[str, Sequence[object]] = {
    "customer": range(1, CUSTOMERS + 1), "month": MONTHS, "quantity": range(1, MOST_PIECES), "city": CITIES,
    "category": CATEGORIES, "price": PRICES[:-1], "stars": range(1, MOST_STARS),
}  # fmt: skip
SUBJECTS = {
    "orders": Subject(
        measures={"quantity": "quantity", "price": "price"},
        groups=("customer", "product", "month", "city", "category"),
        conditions=(
            ("customer", "=", ("by customer {}", "of customer {}")),
            ("month", "=", ("in {}", "placed in {}")),
            ("quantity", ">", ("of more than {} pieces", "with a quantity above {}")),
            ("city", "=", ("from {}", "by customers in {}")),
            ("category", "=", ("of {}", "for products in {}")),
            ("price", ">", ("of products costing more than {}", "with a price above {}")),
        ),
    ),
    "reviews": Subject(
        measures={"number of stars": "stars"},
        groups=("customer", "product", "city", "category"),
        conditions=(
            ("customer", "=", ("by customer {}", "of customer {}")),
            ("stars", "=", ("with {} stars", "giving {} stars")),
            ("stars", ">", ("with more than {} stars", "giving more than {} stars")),
            ("city", "=", ("from {}", "by customers in {}")),
            ("category", "=", ("of {}", "for products in {}")),
        ),
    ),
    "products": Subject(
        measures={"price": "price"},
        groups=("category",),
        conditions=(
            ("category", "=", ("of {}", "in {}")),
            ("price", ">", ("costing more than {}", "with a price above {}")),
            ("price", "<", ("costing less than {}", "with a price below {}")),
        ),
    ),
}
TABLES = ("orders", "orders", "reviews", "products")
AGGREGATES = {"total": "SUM", "average": "AVG", "highest": "MAX", "lowest": "MIN"}


_NAMES = (*CITIES, *CATEGORIES, *MONTHS)
_OTHERS = (
    # of questions
    "how many are there count the what is of give different among list which per have has most fewest number stars by "
    "customer in placed more than pieces with a quantity above from customers for products costing price giving less below "
    # of statements
    "SELECT DISTINCT FROM JOIN USING WHERE AND GROUP BY ORDER LIMIT DESC COUNT(*) COUNT( SUM( AVG( MAX( MIN( ( ) , = > < "
    "month stars "
    # of results, and the last word
    "error: no such column: rows done"
)
WORDS = tuple(
    dict.fromkeys(
        (*_NAMES, *(f"'{name}'" for name in _NAMES), *map(str, range(100)), *COUNTS, *PLURALS, *PLURALS.values(),
         *SUBJECTS, *AGGREGATES, *_OTHERS.split())
    )
)  # fmt: skip
"""Every word of a question, a statement or a result."""


def draw(chance: random.Random) -> tuple[str, Query]:
    """Draws a question and the statement that answers it."""
    table = chance.choice(TABLES)
    words, query = chance.choice(ASKS)(chance, table)
    conditions = _conditions(chance, [c for c in SUBJECTS[table].conditions if c[0] not in query.columns])
    return " ".join((words, *(c.words for c in conditions))), replace(query, conditions=conditions)


def _conditions(chance: random.Random, possible: Sequence[tuple[str, str, Sequence[str]]]) -> tuple[Condition, ...]:
    """Draws conditions on different columns."""
    shuffled = chance.sample(possible, len(possible))
    by_column = {column: (operator, wordings) for column, operator, wordings in shuffled}
    found = []
    for column, (operator, wordings) in list(by_column.items())[: chance.choice(CONDITIONS)]:
        value = chance.choice(VALUES[column])
        literal = f"'{value}'" if isinstance(value, str) else str(value)
        words = chance.choice(wordings).format(value)
        found.append(Condition(column=column, operator=operator, value=literal, words=words))
    return tuple(found)


def _count(chance: random.Random, table: str) -> tuple[str, Query]:
    words = chance.choice(("how many {} are there", "count the {}"))
    return words.format(table), Query(table=table, select="COUNT(*)")


def _aggregate(chance: random.Random, table: str) -> tuple[str, Query]:
    said, column = chance.choice(list(SUBJECTS[table].measures.items()))
    which = chance.choice(list(AGGREGATES))
    words = chance.choice((f"what is the {which} {said} of {table}", f"give the {which} {said} of the {table}"))
    return words, Query(table=table, select=f"{AGGREGATES[which]}( {column} )", columns=(column,))


def _different(chance: random.Random, table: str) -> tuple[str, Query]:
    column = chance.choice(SUBJECTS[table].groups)
    words = chance.choice(("how many different {} are there among the {}", "count the different {} of the {}"))
    query = Query(table=table, select=f"COUNT( DISTINCT {column} )", columns=(column,))
    return words.format(PLURALS[column], table), query


def _which(chance: random.Random, table: str) -> tuple[str, Query]:
    column = chance.choice(SUBJECTS[table].groups)
    words = chance.choice(("which {} are there among the {}", "list the {} of the {}"))
    return words.format(PLURALS[column], table), Query(table=table, select=f"DISTINCT {column}", columns=(column,))


def _per_group(chance: random.Random, table: str) -> tuple[str, Query]:
    column = chance.choice(SUBJECTS[table].groups)
    words, query = chance.choice((_count, _aggregate))(chance, table)
    return f"per {column} {words}", replace(
        query, select=f"{column} , {query.select}", columns=(*query.columns, column), group=column
    )


def _most(chance: random.Random, table: str) -> tuple[str, Query]:
    """Asks for the groups at one end; of equal ones the first by name."""
    column = chance.choice(SUBJECTS[table].groups)
    end, direction = chance.choice((("most", " DESC"), ("fewest", "")))
    count = chance.choice(("", *COUNTS))
    words = (
        f"which {count} {PLURALS[column]} have the {end} {table}" if count else f"which {column} has the {end} {table}"
    )
    return words, Query(
        table=table, select=column, columns=(column,), group=column, order=f"COUNT(*){direction} , {column}",
        limit=COUNTS.get(count, 1),
    )  # fmt: skip


ASKS = (_count, _aggregate, _different, _which, _per_group, _most)
