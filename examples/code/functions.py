"""The English of the functions, the expressions that compute them, and the words of the model."""

import random
import re
from dataclasses import dataclass

from confined import ERRORS

WHOLES = {
    "the sum of": "sum ( [ {} ] )",
    "the largest of": "max ( [ {} ] , default = 0 )",
    "the smallest of": "min ( [ {} ] , default = 0 )",
    "the count of": "len ( [ {} ] )",
    "the count of different values among": "len ( set ( [ {} ] ) )",
    "a list of": "[ {} ]",
    "a sorted list of": "sorted ( [ {} ] )",
    "a backward list of": "[ {} ] [ : : -1 ]",
}
PARTS = {
    "": "x", "the squares of": "x * x", "the cubes of": "x * x * x", "the doubles of": "x * 2", "the sizes of": "abs ( x )",
    "the remainders by 3 of": "x % 3",
}  # fmt: skip
SIGNS = {"": "", "positive": "x > 0", "negative": "x < 0"}
KINDS = {
    "": "", "even": "x % 2 == 0", "odd": "x % 2 == 1", "small": "abs ( x ) < 5", "large": "abs ( x ) > 4",
}  # fmt: skip
PUBLIC, HIDDEN = 3, 6
LONGEST, LARGEST = 8, 9


@dataclass(frozen=True)
class Function:
    """A function to write: an aggregate over the numbers that meet the conditions."""

    whole: str
    part: str
    sign: str
    kind: str

    @property
    def text(self) -> str:
        """The function in English."""
        return " ".join(each for each in (self.whole, self.part, "the", self.sign, self.kind, "numbers") if each)

    def code(self, *, default: bool = True) -> str:
        """Returns an expression; on request without the default for an empty list."""
        conditions = [each for each in (SIGNS[self.sign], KINDS[self.kind]) if each]
        each = f"{PARTS[self.part]} for x in xs" + (f" if {' and '.join(conditions)}" if conditions else "")
        found = WHOLES[self.whole].format(each)
        return found if default else found.replace(" , default = 0", "")

    def tests(self, chance: random.Random, count: int) -> list:
        """Draws tests; the first has an empty list."""
        arguments = [[]] + [
            [chance.randint(-LARGEST, LARGEST) for _ in range(chance.randint(2, LONGEST))] for _ in range(count - 1)
        ]
        # The expression is ours, not a model's.
        wanted = eval(f"lambda xs: {self.code()}")
        return [[argument, wanted(argument)] for argument in arguments]


WORDS = sorted(
    {
        word
        for text in (
            *WHOLES, *WHOLES.values(), *PARTS, *PARTS.values(), *SIGNS, *SIGNS.values(), *KINDS, *KINDS.values(), *ERRORS,
            "the numbers for x in xs if and passed wrong on error done", *map(str, range(HIDDEN + 1)),
        )
        for word in re.split(r"[\s{}]+", text)
        if word
    }
)  # fmt: skip
"""Each is one token."""
