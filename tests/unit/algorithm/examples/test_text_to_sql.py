"""The text-to-SQL example: whatever a statement does, it is stopped, told to the model, and scored; tests are new forms."""

import json
import re
import sqlite3
from contextlib import closing

import pytest

from tests.support.algorithm.models import EXAMPLES, load_script

FOLDER = EXAMPLES / "text_to_sql"
COUNTING = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
MANY = "SELECT COUNT(*) FROM orders a, orders b, orders c, orders d"
ORDERED = "SELECT customer FROM customers ORDER BY customer"
DATABASE = 1
VALUE = re.compile(r"(?<=[=<>] )('\w+'|\d+)")


@pytest.fixture
def shop(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(FOLDER / "shop.py")


@pytest.fixture
def grader(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(FOLDER / "grader.py")


def task(query: str) -> dict:
    return {"input": {"question": "", "database": DATABASE}, "query": query}


BAD = {
    COUNTING: "too many steps",
    MANY: "too many steps",
    "SELECT quantity FROM orders": "more than 60 rows",
    "DELETE FROM orders": "not authorized",
    "UPDATE orders SET quantity = 0": "not authorized",
    "INSERT INTO reviews VALUES (1, 1, 5)": "not authorized",
    "CREATE TABLE more (a)": "not authorized",
    "DROP TABLE orders": "not authorized",
    "ATTACH 'other.db' AS other": "not authorized",
    "PRAGMA writable_schema = 1": "not authorized",
    "BEGIN": "not authorized",
    "VACUUM INTO 'copy.db'": "authoriz",
    "SELECT load_extension('x')": "not authorized to use function: load_extension",
    "SELECT zeroblob(1000000000)": "not authorized to use function: zeroblob",
    "SELECT '" + "x" * 2000 + "'": "too large",
    "SELECT city FROM orders": "no such column: city",
    "SELECT COUNT(*) FROM invoices": "no such table: invoices",
    "SELECT 1; DROP TABLE orders": "one statement at a time",
    "how many": "syntax error",
    "-- a comment": "not a query",
    "SELECT 1\0": "null character",
    "SELECT '\ud800'": "surrogates",
    "SELECT CAST(x'ff' AS TEXT)": "decode",
    "SELECT " + "(" * 400 + "1" + ")" * 400: "overflow",
}


@pytest.mark.parametrize("sql", BAD, ids=range(len(BAD)))
def test_a_bad_statement_is_told_to_the_model_and_scores_nothing(shop, grader, sql):
    result = shop.run(sql, DATABASE)

    assert BAD[sql] in result.error
    assert str(result) == f"error: {result.error}"
    assert result.rows == ()
    assert grader.grade(task(ORDERED), sql) == 0.0
    assert result.error in grader.fault(task(ORDERED), sql)


@pytest.mark.parametrize("outcome", [None, "", 7, ["SELECT 1"], {"sql": ORDERED}])
def test_an_outcome_that_is_no_statement_scores_nothing(grader, outcome):
    assert grader.fault(task(ORDERED), outcome) == "no statement"
    assert grader.grade(task(ORDERED), outcome) == 0.0


def test_no_statement_changes_what_the_next_one_sees_or_touches_a_file(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = shop.contents(DATABASE)

    for sql in BAD:
        shop.run(sql, DATABASE)

    assert shop.contents(DATABASE) == before
    assert shop.run("SELECT COUNT(*) FROM orders", DATABASE).rows == ((shop.ORDERS,),)
    assert list(tmp_path.iterdir()) == []


def test_a_seed_makes_the_same_database_and_another_seed_another(shop):
    def rows(seed: int) -> list[tuple]:
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(shop.contents(seed))
            return database.execute("SELECT * FROM orders").fetchall()

    first = rows(DATABASE)
    shop.contents.cache_clear()
    assert rows(DATABASE) == first
    assert rows(DATABASE + 1) != first


def test_the_order_of_rows_counts_only_where_it_was_asked_for(grader):
    backwards = ORDERED + " DESC"
    assert grader.grade(task(ORDERED), ORDERED) == 1.0
    assert grader.grade(task(ORDERED), backwards) == 0.0
    assert grader.grade(task("SELECT customer FROM customers"), backwards) == 1.0


def test_rows_that_occur_twice_must_occur_twice(grader):
    twice, once = (
        "SELECT stars FROM reviews WHERE customer = 1",
        "SELECT DISTINCT stars FROM reviews WHERE customer = 1",
    )
    assert grader.grade(task(twice), twice) == 1.0
    assert grader.grade(task(twice), once) == 0.0


def test_a_number_that_is_right_on_one_database_by_chance_scores_nothing(shop, grader):
    query = "SELECT SUM( quantity ) FROM orders"
    [(total,)] = shop.run(query, DATABASE).rows
    assert shop.run(f"SELECT {total}", DATABASE).rows == ((total,),)
    assert grader.grade(task(query), f"SELECT {total}") == 0.0


def test_another_statement_with_the_same_rows_is_right(grader):
    query = "SELECT COUNT(*) FROM orders JOIN customers USING ( customer ) WHERE city = 'oslo'"
    other = "SELECT COUNT(*) FROM orders WHERE customer IN (SELECT customer FROM customers WHERE city = 'oslo')"
    assert grader.grade(task(query), other) == 1.0


def tasks(use: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()]


def test_no_validation_or_test_question_has_the_form_of_a_training_question():
    train, validation, test = (
        {VALUE.sub("?", each["query"]) for each in tasks(use)} for use in ("train", "validation", "test")
    )
    assert train.isdisjoint(validation | test)
    assert len(tasks("test")) >= 200


def test_every_test_statement_is_right_and_without_its_second_condition_wrong(grader):
    shortened = 0
    for each in tasks("test"):
        sql = each["query"]
        assert grader.fault(each, sql) == ""
        without = re.sub(r" AND \w+ [=<>] ('\w+'|\d+)", "", sql)
        if without != sql:
            shortened += 1
            assert "the rows differ" in grader.fault(each, without)
    assert shortened >= 50
