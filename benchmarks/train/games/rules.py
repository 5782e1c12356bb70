"""Five games of several turns, each with one tool, that a tiny model learns by imitation in a minute.

In each, the teacher has a bad habit most of the time, so that a model that imitates it wins some of the time: `Search`,
`Maze` and `Nim` are lost late (failures are longer than successes), `Inspection` is lost early, and `Booking` either way.
Perfect play always wins.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Protocol

Teacher = Generator[str, str, str]
"""Yields the tool's arguments, is sent its results, and returns the answer."""
Setup = Mapping[str, Any]
DONE = "Done"


class Game(Protocol):
    """One play of a game.

    Attributes:
        tool: Name of the tool.
        turns: Maximum number of model calls.
    """

    tool: ClassVar[str]
    turns: ClassVar[int]

    def __init__(self, setup: Setup) -> None:
        """`setup`: as drawn."""

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        """Draws the setup of a play."""

    @property
    def opening(self) -> str:
        """First message to the player."""

    def use(self, argument: str) -> str:
        """Makes a move; returns the tool's result."""

    def won(self, answer: str) -> bool:
        """True if the play was won, given the player's answer after its last move."""

    def teach(self, chance: random.Random) -> Teacher:
        """Plays as the teacher does."""


class Search(Game):
    """Find a number below 32 in five guesses. The bad habit: going on by one."""

    tool = "guess"
    turns = 12
    HABIT, LIMIT, SIZE = 0.65, 5, 32

    def __init__(self, setup: Setup) -> None:
        self._hidden = int(setup["hidden"])
        self._guesses = 0
        self._found = False

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        return {"hidden": chance.randrange(Search.SIZE)}

    @property
    def opening(self) -> str:
        return "Find"

    def use(self, argument: str) -> str:
        self._guesses += 1
        guess = number(argument)
        if guess == self._hidden:
            self._found = self._found or self._guesses <= self.LIMIT
            return "Found"
        return "Bad" if guess is None else "Higher" if guess < self._hidden else "Lower"

    def won(self, answer: str) -> bool:
        return self._found and answer == DONE

    def teach(self, chance: random.Random) -> Teacher:
        slow = chance.random() < self.HABIT
        low, high = 0, self.SIZE - 1
        guess = (low + high) // 2
        while (result := (yield f"{guess:02d}")) != "Found":
            low, high = (guess + 1, high) if result == "Higher" else (low, guess - 1)
            guess = (low if result == "Higher" else high) if slow else (low + high) // 2
        return DONE


class Inspection(Game):
    """Check every floor from one to another, then say so. The bad habit: stopping after three."""

    tool = "check"
    turns = 12
    HABIT, STOPS_AFTER, FLOORS = 0.7, 3, 32

    def __init__(self, setup: Setup) -> None:
        self._first, self._last = int(setup["first"]), int(setup["last"])
        self._checked: set[int] = set()

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        first = chance.randrange(Inspection.FLOORS - 8)
        return {"first": first, "last": first + chance.randint(3, 7)}

    @property
    def opening(self) -> str:
        return f"From{self._first:02d}To{self._last:02d}"

    def use(self, argument: str) -> str:
        floor = number(argument)
        if floor is None or not self._first <= floor <= self._last:
            return "Bad"
        self._checked.add(floor)
        return f"Left{self._last - self._first + 1 - len(self._checked):02d}"

    def won(self, answer: str) -> bool:
        return answer == DONE and len(self._checked) == self._last - self._first + 1

    def teach(self, chance: random.Random) -> Teacher:
        last = self._first + self.STOPS_AFTER - 1 if chance.random() < self.HABIT else self._last
        for floor in range(self._first, last + 1):
            yield f"{floor:02d}"
        return DONE


class Maze(Game):
    """Walk to the exit of a field of 5 x 5 within nine moves. The bad habit: going through it row by row."""

    tool = "move"
    turns = 13
    HABIT, LIMIT, SIZE = 0.65, 9, 5
    MOVES: ClassVar[Mapping[str, tuple[int, int]]] = {
        "North": (-1, 0),
        "South": (1, 0),
        "West": (0, -1),
        "East": (0, 1),
    }

    def __init__(self, setup: Setup) -> None:
        self._at, self._exit = tuple(setup["start"]), tuple(setup["exit"])
        self._moves = 0
        self._out = False

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        cells = [(row, column) for row in range(Maze.SIZE) for column in range(Maze.SIZE)]
        start, goal = chance.sample(cells, 2)
        return {"start": start, "exit": goal}

    @property
    def opening(self) -> str:
        return f"Exit{_cell(self._exit)}At{_cell(self._at)}"

    def use(self, argument: str) -> str:
        self._moves += 1
        if argument not in self.MOVES:
            return "Bad"
        self._at = tuple(
            min(max(place + step, 0), self.SIZE - 1) for place, step in zip(self._at, self.MOVES[argument], strict=True)
        )
        if self._at == self._exit:
            self._out = self._out or self._moves <= self.LIMIT
            return "Out"
        return f"At{_cell(self._at)}"

    def won(self, answer: str) -> bool:
        return self._out and answer == DONE

    def teach(self, chance: random.Random) -> Teacher:
        sweeps = chance.random() < self.HABIT
        while True:
            (row, column), (goal_row, goal_column) = self._at, self._exit
            straight = (
                "South" if goal_row > row else "North" if goal_row < row else "East" if goal_column > column else "West"
            )
            if (yield self._sweep(row, column) if sweeps else straight) == "Out":
                return DONE

    def _sweep(self, row: int, column: int) -> str:
        """Returns the next move through all rows: even ones to the east, odd ones to the west."""
        end, along = (0, "West") if row % 2 else (self.SIZE - 1, "East")
        return along if column != end else "South" if row < self.SIZE - 1 else "North"


class Booking(Game):
    """Book the first free slot from the one that is wished. The bad habits: giving up, or asking again for the same."""

    tool = "book"
    turns = 10
    GIVES_UP, REPEATS, SLOTS = 0.55, 0.15, 32

    def __init__(self, setup: Setup) -> None:
        self._wished, self._busy = int(setup["wished"]), int(setup["busy"])
        self._booked: int | None = None

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        return {"wished": chance.randrange(Booking.SLOTS - 6), "busy": chance.randrange(6)}

    @property
    def opening(self) -> str:
        return f"Wish{self._wished:02d}"

    def use(self, argument: str) -> str:
        slot = number(argument)
        if slot is None or self._booked is not None:
            return "Bad"
        if self._wished <= slot < self._wished + self._busy:
            return "Busy"
        self._booked = slot
        return "Booked"

    def won(self, answer: str) -> bool:
        return answer == DONE and self._booked == self._wished + self._busy

    def teach(self, chance: random.Random) -> Teacher:
        habit, slot = chance.random(), self._wished
        while (yield f"{slot:02d}") == "Busy":
            if habit < self.GIVES_UP:
                return "Sorry"
            slot += habit >= self.GIVES_UP + self.REPEATS
        return DONE


class Nim(Game):
    """Take one to three of a pile in turn with an opponent; who takes the last wins. The bad habit: taking one."""

    tool = "take"
    turns = 12
    HABIT, MOST, SHARP = 0.7, 3, 0.5

    def __init__(self, setup: Setup) -> None:
        self._pile, self._seed = int(setup["pile"]), int(setup["seed"])
        self._result = ""

    @staticmethod
    def draw(chance: random.Random) -> Setup:
        return {"pile": chance.choice([n for n in range(9, 24) if n % 4]), "seed": chance.randrange(1000)}

    @property
    def opening(self) -> str:
        return f"Pile{self._pile:02d}"

    def use(self, argument: str) -> str:
        taken = number(argument)
        if self._result or taken is None or not 1 <= taken <= min(self.MOST, self._pile):
            return "Bad"
        self._pile -= taken
        if self._pile == 0:
            self._result = "Won"
            return self._result
        # The same pile is answered in the same way in all plays of a setup.
        chance = random.Random(self._seed * 100 + self._pile)
        self._pile -= _take(self._pile, chance, sharp=chance.random() < self.SHARP)
        if self._pile == 0:
            self._result = "Lost"
            return self._result
        return f"Left{self._pile:02d}"

    def won(self, answer: str) -> bool:
        return self._result == "Won" and answer == DONE

    def teach(self, chance: random.Random) -> Teacher:
        sharp = chance.random() >= self.HABIT
        while True:
            taken = _take(self._pile, chance, sharp=True) if sharp else 1
            if not (yield f"{taken:02d}").startswith("Left"):
                return DONE


GAMES: Mapping[str, type[Game]] = {
    "search": Search, "inspection": Inspection, "maze": Maze, "booking": Booking, "nim": Nim
}  # fmt: skip
WORDS = (
    *("Find", "Higher", "Lower", "Found", "From", "To", "Exit", "At", "Out", "Wish", "Busy", "Booked", "Sorry"),
    *("Pile", "Left", "Won", "Lost", "Bad", DONE, *Maze.MOVES),
    *(f"{axis}{place}" for axis in "RC" for place in range(Maze.SIZE)),
    *(f"{number:02d}" for number in range(Search.SIZE)),
)
"""Everything that is said in a game."""


def number(text: str) -> int | None:
    """Reads two digits; None for anything else."""
    return int(text) if len(text) == 2 and text.isascii() and text.isdigit() else None


def _cell(place: tuple[int, ...]) -> str:
    return f"R{place[0]}C{place[1]}"


def _take(pile: int, chance: random.Random, *, sharp: bool) -> int:
    """Chooses how many to take: the winning number if there is one and the player is sharp."""
    winning = pile % (Nim.MOST + 1)
    return winning if sharp and winning else chance.randint(1, min(Nim.MOST, pile))
