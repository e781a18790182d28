"""Find how much haystack a sample gets.

`fit_units` finds the most that fits. `search_size` and `step_down` find what NVIDIA/RULER gives a sample.
"""

from collections.abc import Callable, Iterator

TRIES = 100  # draws of the smallest sample; NVIDIA/RULER draws it without end until one fits


def fit_units(cost: Callable[[int], int], most: int, room: int, guess: int = 8) -> int | None:
    """Find the largest count that fits: cost(count) <= room, and cost(count + 1) > room or count == most.

    The bisection interpolates its next guess. Costs are nearly linear, so it needs four or five guesses, and three if
    the first one is right.

    Args:
        cost: Tokens of a prompt with so many units; it grows with them.
        most: The largest count.
        room: Tokens that `cost` may reach.
        guess: The first guess.

    Returns:
        The count, or None if not even 0 units fit.
    """
    low, low_cost = 0, cost(0)
    if low_cost > room:
        return None
    first = low_cost
    high: int | None = None
    high_cost = 0
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
    """Search the units that NVIDIA/RULER (since 56ea4ef) gives to all samples of a subtask.

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
    """Bisect from `step` to `most` (or 2 * step, if that is more); return the last units that fitted, else `step`."""
    low, high, fitted = step, max(most, 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        if cost(middle) <= room:
            fitted, low = middle, middle + 1
        else:
            high = middle - 1
    return fitted


def step_down(units: int, step: int, floor: int) -> Iterator[int]:
    """Yield the units of NVIDIA/RULER's attempts at one sample, until the caller finds one that fits.

    A sample that is too long loses `step` units. A sample with `step` units or fewer is drawn again with as many;
    upstream does so without end, this function TRIES times. Upstream never ends if it goes below `floor`, the fewest
    units that can be drawn; here the sample gets `floor`.
    """
    yield (units := max(units, floor))
    while units > max(step, floor):
        yield (units := max(units - step, floor))
    for _ in range(TRIES):
        yield units
