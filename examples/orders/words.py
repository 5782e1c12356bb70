"""The words of the orders example: the model's whole vocabulary."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("anna boris carla david elena felix greta hugo irene jonas katya leon maria nils olga pavel")
COUNTS = _words("two three four five six seven eight nine ten eleven twelve")
ITEMS = _words(
    "lamps chairs tables books pens cups plates bowls spoons towels candles clocks mirrors baskets shelves rugs"
)
CITIES = _words("oslo lima cairo delhi paris tokyo quito accra hanoi porto turin osaka lagos riga bern nice")
OTHERS = _words(
    "hello hi good morning this is here speaking my name please send me i need want to order would like we are out of "
    "so ship no sorry wait make that it mean or rather deliver them in and thanks thank you bye "
    "name: count: item: city:"
)
EVERY = tuple(dict.fromkeys((*NAMES, *COUNTS, *ITEMS, *CITIES, *OTHERS)))
