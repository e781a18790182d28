"""Define the recipe by which low-rank factors of a base model are tuned: shape, schedule, losses, lengths.

The defaults are the recipe of the first of the two tunings of model=smollm2_long. Each field is an option of `kvbench
dev tune`, and the recipe is part of the metadata of the file that the training writes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvbench.validation import SettingError, is_number, require_int

LEAST_LENGTH = 64


@dataclass(frozen=True)
class TuningRecipe:
    """The settings of a tuning. The schedule measures time as a share of all steps, from 0 to 1."""

    rank: int = 16
    """Rank of the factors of each projection."""
    alpha: float = 32.0
    """The factors' product is multiplied by alpha / rank."""
    theta: float = 200_000.0
    """Base of RoPE, while tuning and of the tuned model. NTK-aware scaling gives 1e5 * 2 ** (64 / 62) for SmolLM2 at
    twice its length."""
    longest: int = 16_896
    """Tokens that the tuned model reads: the longest sample and room for an answer."""
    lengths: str = "1024:1,2048:3,4096:5,8192:3,16384:2"
    """length:share, …: the lengths of samples in tokens, and their relative shares of all tokens."""
    tokens: int = 110_000_000
    """Tokens of the whole tuning, padding included."""
    step: int = 65_536
    """Tokens of a step of the optimizer."""
    batch: int = 65_536
    """Tokens that a GPU reads at once. A step consists of step / batch such batches."""
    rate: float = 1e-3
    """Peak of the learning rate."""
    warmup: float = 0.03
    """Time at which the learning rate reaches its peak. It then falls to zero as a cosine."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    text_weight: float = 0.1
    """Weight of the cross-entropy of the next token in plain text, beside that of answers."""
    kl_weight: float = 0.5
    """Weight of the divergence of the base's predictions from the tuned model's in plain text. 0 leaves it out."""
    seed: int = 0
    """Seed of the factors and of the samples."""

    @property
    def scale(self) -> float:
        """The number by which the factors' product is multiplied."""
        return self.alpha / self.rank

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.tokens // self.step

    @property
    def batches(self) -> int:
        """Number of batches of a step."""
        return self.step // self.batch

    @property
    def shares(self) -> dict[int, float]:
        """Share of tokens by length. The shares sum to 1."""
        parts = dict(part.split(":") for part in self.lengths.split(","))
        total = math.fsum(map(float, parts.values()))
        return {int(length): float(share) / total for length, share in parts.items()}

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        done = (step + 1) / self.steps
        if done < self.warmup:
            return self.rate * done / self.warmup
        return self.rate * 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))

    def describe(self) -> dict[str, int | float | str]:
        """Return the value of each setting."""
        return asdict(self)

    def check(self) -> None:
        """Check that factors can be tuned so.

        Raises:
            SettingError: They cannot. The message names the option.
        """
        for name in ("rank", "longest", "tokens", "step", "batch"):
            require_int(f"--{name}", getattr(self, name), 1)
        require_int("--seed", self.seed, 0)
        for name in ("alpha", "theta", "rate", "clip"):
            if not (is_number(value := getattr(self, name)) and value > 0):
                raise SettingError(f"--{name}={value}: a number above 0")
        for name in ("text_weight", "kl_weight"):
            if not (is_number(value := getattr(self, name)) and value >= 0):
                raise SettingError(f"--{name.replace('_', '-')}={value}: a number of at least 0")
        if not 0 < self.warmup < 1:
            raise SettingError(f"--warmup={self.warmup}: a share of all steps, above 0 and below 1")
        self._check_lengths()
        if self.step % self.batch:
            raise SettingError(f"--step={self.step}: a multiple of --batch, which is {self.batch}")
        if self.tokens < self.step:
            raise SettingError(f"--tokens={self.tokens}: at least one step, which has {self.step}")

    def _check_lengths(self) -> None:
        try:
            shares = self.shares
        except (ValueError, ZeroDivisionError):
            raise SettingError(f"--lengths={self.lengths}: length:share,length:share, such as 1024:1,4096:2") from None
        if not all(is_number(share) and share > 0 for share in shares.values()):
            raise SettingError(f"--lengths={self.lengths}: shares above 0")
        for length in shares:
            if not LEAST_LENGTH <= length <= self.longest:
                raise SettingError(f"--lengths: {length}: from {LEAST_LENGTH} to --longest, which is {self.longest}")
            if self.batch % length:
                raise SettingError(f"--lengths: {length}: a divisor of --batch, which is {self.batch}")


def choose_recipe(given: Mapping[str, Any]) -> TuningRecipe:
    """Return the recipe with the settings that are given and not None.

    Raises:
        SettingError: A setting cannot be used.
    """
    known = {one.name for one in fields(TuningRecipe)}
    recipe = replace(
        TuningRecipe(), **{name: value for name, value in given.items() if name in known and value is not None}
    )
    recipe.check()
    return recipe
