"""How much haystack a sample gets: the most that fits (`fit_units`), or what NVIDIA/RULER gives it (`search_size`,
`step_down`).
"""

from collections.abc import Callable, Iterator

TRIES = 100  # NVIDIA/RULER draws its smallest sample again without end until one fits


def fit_units(cost: Callable[[int], int], most: int, room: int, guess: int = 8) -> int | None:
    """The largest count with cost(count) <= room (and cost(count + 1) > room, or count == most); None if none.

    A bisection that interpolates its next guess: costs are nearly linear, so four or five guesses do, and three where
    the first `guess` is right.
    """
    low, low_cost = 0, cost(0)
    if low_cost > room:
        return None
    first, high, high_cost = low_cost, None, None
    while low < most and (high is None or high - low > 1):
        guess = min(guess, most)
        guessed = cost(guess)
        if guessed <= room:
            low, low_cost = guess, guessed
        else:
            high, high_cost = guess, guessed
        if high is None:
            guess = low + max(1, (room - low_cost) * low // max(1, low_cost - first))
        else:
            between = (room - low_cost) * (high - low) // (high_cost - low_cost)
            guess = min(max(low + between, low + 1), high - 1)
    return low


def search_size(cost: Callable[[int], int], length: int, room: int, step: int) -> int:
    """The units that NVIDIA/RULER (since 56ea4ef) gives to all samples of a subtask, found on its first draws.

    Args:
        cost: Tokens of a prompt with so many units. Every call draws a new prompt, so two calls may differ.
        length: Tokens of prompt and answer. They bound the search: three times the units that the first draw suggests.
        room: Tokens that `cost` may reach.
        step: Units of the first draw, and the fewest that the search tries.

    Returns:
        The last size of the bisection that fitted, or `step` if none did.
    """
    return bisect_units(cost, room, step, int(length / (cost(step) / step) * 3))


def bisect_units(cost: Callable[[int], int], room: int, step: int, most: int) -> int:
    """The last units between `step` and `most` (at least 2 * step) that fitted `room` in a bisection, else `step`."""
    low, high, found = step, max(most, 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        if cost(middle) <= room:
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def step_down(units: int, step: int, floor: int) -> Iterator[int]:
    """The units of NVIDIA/RULER's attempts at one sample, the first that fits being taken.

    A sample that is too long loses `step` units. One that has `step` or fewer is drawn again as it is; after TRIES of
    these this ends, where upstream would go on. Where upstream goes below `floor`, the fewest units that can be drawn,
    it never ends; here the sample gets `floor`.
    """
    yield (units := max(units, floor))
    while units > max(step, floor):
        yield (units := max(units - step, floor))
    for _ in range(TRIES):
        yield units
