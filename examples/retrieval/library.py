"""Libraries of one-sentence documents, made from a seed, and how they are searched.

Each library describes its own world: who lives where, which country a city is in, what a country exports. The facts differ
between libraries, so that an answer can't be known without reading.
"""

import random
import re
import sqlite3
from contextlib import closing
from functools import cache

PEOPLE = [
    "ada",
    "ben",
    "carl",
    "dora",
    "emil",
    "frida",
    "gus",
    "hanna",
    "ivo",
    "jana",
    "kurt",
    "lena",
    "milo",
    "nora",
    "otto",
    "pia",
    "quinn",
    "rosa",
    "sven",
    "tara",
]
CITIES = ["oslo", "lima", "rome", "cairo", "delhi", "perth", "quito", "turin", "york", "bergen", "malmo", "nantes"]
COUNTRIES = ["norland", "sudland", "ostia", "westmark", "midia", "farland"]
JOBS = ["baker", "miller", "smith", "tailor", "painter", "nurse"]
PETS = ["cat", "dog", "parrot", "horse", "goat", "snake"]
RIVERS = ["tam", "ore", "wend", "isel", "rhune", "dova"]
SIGHTS = ["bridges", "towers", "gardens", "markets", "mills", "harbours"]
GOODS = ["fish", "wool", "timber", "copper", "salt", "wine", "tea", "glass"]
COINS = ["crowns", "marks", "florins", "shells", "thalers", "pounds"]
TONGUES = ["norse", "sudic", "ostian", "westic", "midian", "faran"]

FACTS = {
    "lives": (PEOPLE, "{} lives in {}", CITIES),
    "born": (PEOPLE, "{} was born in {}", CITIES),
    "works": (PEOPLE, "{} works as {}", JOBS),
    "keeps": (PEOPLE, "{} keeps a {}", PETS),
    "country": (CITIES, "{} lies in {}", COUNTRIES),
    "river": (CITIES, "{} lies by the river {}", RIVERS),
    "known": (CITIES, "{} is known for {}", SIGHTS),
    "exports": (COUNTRIES, "{} exports {}", GOODS),
    "pays": (COUNTRIES, "{} pays in {}", COINS),
    "speaks": (COUNTRIES, "{} speaks {}", TONGUES),
}
"""Subjects, sentence and objects, by kind of fact."""

NOTHING = "nothing found"
SHOWN = 2
MAX_WORDS = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": f"Shows the {SHOWN} documents that match the words best.",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
        },
    }
]


@cache
def facts(library: int) -> dict[tuple[str, str], str]:
    """Returns what holds in a library, by kind and subject; equal numbers give equal libraries."""
    chance = random.Random(library)
    return {
        (kind, subject): chance.choice(objects)
        for kind, (subjects, _, objects) in FACTS.items()
        for subject in subjects
    }


def documents(library: int) -> list[str]:
    """Returns the documents of a library."""
    found = [FACTS[kind][1].format(subject, value) for (kind, subject), value in facts(library).items()]
    random.Random(library).shuffle(found)
    return found


@cache
def _index(library: int) -> bytes:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
        database.executemany("INSERT INTO documents VALUES (?)", [(text,) for text in documents(library)])
        database.commit()
        return database.serialize()


def search(library: int, words: str) -> str:
    """Returns the documents of a library that match any of the words, the best first by BM25 (SQLite's FTS5).

    Whatever is asked has an answer: all but the first words of letters is ignored.
    """
    asked = re.findall(r"[a-z]+", words)[:MAX_WORDS]
    if not asked:
        return NOTHING
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(_index(library))
        found = database.execute(
            "SELECT text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in asked), SHOWN),
        ).fetchall()
    return " . ".join(text for (text,) in found) or NOTHING
