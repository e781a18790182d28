"""Compare two numbers of which only the values and their 95 % intervals are known, as of two lines of a file.

The interval of a difference a - b follows from those of a and b, which may be asymmetric (Zou and Donner 2008,
"Construction of confidence limits about effect measures: a general approach", Statistics in Medicine 27, "MOVER"):

    low  = a - b - sqrt((a - a_low)² + (b_high - b)²)
    high = a - b + sqrt((a_high - a)² + (b - b_low)²)

It takes a and b as independent. Scores on the same samples usually rise and fall together; then the interval is wider
than a paired one, and its coverage is above 95 %. Where records are at hand, use kvbench.analysis.paired instead.
"""

from math import hypot


def subtract_intervals(
    one: tuple[float, float, float], other: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Return the difference one - other with its 95 % interval.

    Args:
        one: Value, lower and upper end of its 95 % interval.
        other: The same of the number that is subtracted.

    Returns:
        The difference, and the lower and the upper end.
    """
    (value, low, high), (taken, taken_low, taken_high) = one, other
    difference = value - taken
    below, above = hypot(value - low, taken_high - taken), hypot(high - value, taken - taken_low)
    return difference, difference - below, difference + above
