"""The English of the questions, the facts that answer them, and the words of the model."""

import random
from dataclasses import dataclass

from library import CITIES, COUNTRIES, FACTS, NOTHING, PEOPLE, facts

KEY_WORDS = {
    "lives": "lives", "born": "born", "works": "works", "keeps": "keeps", "country": "lies in", "river": "river",
    "known": "known", "exports": "exports", "pays": "pays", "speaks": "speaks",
}  # fmt: skip
"""What to search for beside the subject, by kind of fact."""

ASKED = {
    ("lives",): "where does {} live",
    ("born",): "where was {} born",
    ("works",): "what is the job of {}",
    ("keeps",): "which animal has {}",
    ("country",): "in which country is {}",
    ("river",): "by which river is {}",
    ("known",): "for what is {} known",
    ("exports",): "what does {} export",
    ("pays",): "how does one pay in {}",
    ("speaks",): "what does one speak in {}",
    ("lives", "country"): "in which country does {} live",
    ("born", "country"): "in which country was {} born",
    ("lives", "river"): "by which river does {} live",
    ("born", "known"): "for what is the city known where {} was born",
    ("country", "exports"): "what does the country export in which {} is",
    ("country", "speaks"): "what does one speak in the country in which {} is",
    ("lives", "country", "exports"): "what does the country export in which {} lives",
    ("born", "country", "exports"): "what does the country export in which {} was born",
    ("lives", "country", "pays"): "how does one pay in the country in which {} lives",
    ("born", "country", "speaks"): "what does one speak in the country in which {} was born",
}
"""Wordings, by the kinds of the facts that follow from each other."""


@dataclass(frozen=True)
class Question:
    """A question about a library.

    Attributes:
        library: number of the library.
        subject: what the first fact is about.
        kinds: kinds of the facts that lead to the answer; the object of each is the subject of the next.
    """

    library: int
    subject: str
    kinds: tuple[str, ...]

    @property
    def text(self) -> str:
        """The question in English."""
        return ASKED[self.kinds].format(self.subject)

    @property
    def answer(self) -> str:
        """The object of the last fact."""
        found = self.subject
        for kind in self.kinds:
            found = facts(self.library)[kind, found]
        return found


def draw(chance: random.Random, library: int) -> Question:
    """Draws a question: as often one of one fact, of two and of three."""
    length = chance.randint(1, 3)
    kinds = chance.choice([each for each in ASKED if len(each) == length])
    return Question(library=library, subject=chance.choice(FACTS[kinds[0]][0]), kinds=kinds)


WORDS = sorted(
    {
        word
        for text in (
            *ASKED.values(), *KEY_WORDS.values(), NOTHING, ".", *PEOPLE, *CITIES, *COUNTRIES,
            *(sentence for _, sentence, _ in FACTS.values()), *(each for _, _, objects in FACTS.values() for each in objects),
        )
        for word in text.replace("{}", "").split()
    }
)  # fmt: skip
"""Each is one token."""
