"""Settings of the efficiency measurements: time, memory and throughput on random tokens (kvbench.efficiency)."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.interfaces.task import Graded, Sample
from kvbench.validation import SettingError, is_number, require_choice, require_int

LEAST_SPLIT = 33  # tokens of an answer of task.measure=regions, of which the first 17 are left out


@dataclass(frozen=True)
class Efficiency:
    """The task. conf/task/efficiency.yaml describes its settings; lengths are in tokens."""

    name: str
    measure: str
    baseline: str
    length: int
    batch: int
    new_tokens: int | tuple[int, ...] | None
    repeats: int
    answers: int
    warmup: int
    rows: int | None
    fill: str
    most_batch: int | None
    implementation: str | None
    bandwidth: float | None
    flops: float | None
    seed: int

    measures = True  # this task measures and has no samples to score

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers of answer tokens that `new_tokens` gives, ascending; empty if it gives none."""
        return tuple(sorted(set(self._several)))

    @property
    def _several(self) -> list[int] | tuple[int, ...]:
        if self.new_tokens is None:
            return ()
        return self.new_tokens if isinstance(self.new_tokens, list | tuple) else (self.new_tokens,)

    def check(self) -> None:
        """Check the settings.

        Raises:
            SettingError: A setting is invalid, or two do not go together.
        """
        require_choice("task.measure", self.measure, ("latency", "decoding", "throughput", "scoring", "regions"))
        require_choice("task.baseline", self.baseline, ("none", "dynamic", "static_compiled"))
        require_choice("task.fill", self.fill, ("replicated", "prefilled"))
        require_choice("task.implementation", self.implementation, (None, "reference", "triton"))
        for name, least in {"length": 1, "batch": 1, "repeats": 1, "answers": 0, "warmup": 1}.items():
            require_int(f"task.{name}", getattr(self, name), least)
        for name in ("rows", "most_batch"):
            if getattr(self, name) is not None:
                require_int(f"task.{name}", getattr(self, name), 1)
        for end in () if self.new_tokens is None else self._several or (None,):
            require_int("task.new_tokens", end, 2)
        for name in ("bandwidth", "flops"):
            given = getattr(self, name)
            if given is not None and not (is_number(given) and given > 0):
                raise SettingError(f"task.{name}={given}: a number above 0, or null")
        if self.answers > self.repeats:
            raise SettingError(f"task.answers={self.answers}: at most task.repeats, {self.repeats}")
        if self.rows is not None and self.baseline != "static_compiled":
            raise SettingError(f"task.rows={self.rows}: of task.baseline=static_compiled; a method has budget=")
        if self.measure == "regions" and self.ends and max(self.ends) < LEAST_SPLIT:
            raise SettingError(
                f"task.new_tokens={max(self.ends)}: task.measure=regions splits the time of tokens after the first 17; "
                f"at least {LEAST_SPLIT}"
            )
        if self.baseline != "none" and self.measure == "regions":
            raise SettingError(f"task.baseline={self.baseline}: task.measure=regions splits kvbench's own tokens; none")
        if self.baseline != "none" and self.measure == "scoring":
            raise SettingError(f"task.baseline={self.baseline}: scores nothing; task.measure=latency or throughput")
        if self.baseline == "static_compiled" and self.measure in ("decoding", "throughput"):
            raise SettingError("task.baseline=static_compiled: compiled anew for every batch; task.measure=latency")
        reads = self.measure == "latency" and not self.answers
        if self.implementation is not None and not (self.measure == "scoring" or reads):
            raise SettingError(
                f"task.implementation={self.implementation}: of task.measure=scoring, or of latency with task.answers=0"
            )

    def fingerprint(self) -> str:
        """Return a constant, because there is no data."""
        return "random tokens"

    def samples(self, tokenizer: object, template_tokens: int, longest: int) -> Iterable[Sample]:
        """Return no samples."""
        return ()

    def score(self, sample: Sample, output: str) -> Graded:
        """Raise NotImplementedError: there is no output to score."""
        raise NotImplementedError("efficiency scores no text")
