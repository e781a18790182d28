"""Define the recipe of a training of the embedded model: shape, schedule, losses and kinds of samples.

A recipe is stored in recipe.json. training_data.py draws the samples of each kind and weights their tokens.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.training.tokenizer import BOS, EOS, PAD
from kvbench.validation import SettingError, describe_choices, is_number, require_int

VOCABULARY, DIM, EPSILON = 4096, 64, 1e-5
KINDS = {int: int, float: int | float, tuple: list, dict: dict}  # type of a setting -> type of its JSON
SHARES = ("shorter", "copies", "copying", "warmup", "steady", "look_ramp", "confusable", "turns", "ledgers", "needles")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training. The schedule measures time as a share of the whole training, from 0 to 1."""

    hidden: int = 320
    """Width of the hidden states."""
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    inner: int = 960
    """Width of the feed-forward layers."""
    theta: float = 5e5
    """Base of RoPE."""
    context: int = 16384
    """Longest sequence in tokens."""
    stages: tuple[tuple[float, int], ...] = (
        (0.0, 256), (0.03, 512), (0.07, 1024), (0.2, 2048), (0.42, 4096), (0.68, 8192), (0.86, 16384),
    )  # fmt: skip
    """(time, sequence length) of each stage; the first stage begins at 0."""
    shorter: float = 0.35
    """Share of steps that use the length of an earlier stage, if that is at least 1024."""
    copies: float = 0.2
    """Share of rows that consist of random tokens and their copy, until the time `copying`."""
    copying: float = 0.05
    """Time until which rows are copies."""
    tokens: int = 65536
    """Tokens of a step."""
    rate: float = 1.5e-3
    """Peak of the learning rate."""
    warmup: float = 0.01
    """Time at which the learning rate reaches its peak."""
    steady: float = 0.5
    """Time until which the learning rate stays at its peak. It then falls linearly to zero."""
    decay: float = 0.05
    """Weight decay of matrices."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    look_ahead: int = 40
    """Distance of the farthest answer token that is predicted. 0 predicts the next token only."""
    places: int = 512
    """Number of positions in a step that predict a token at each distance from 2 on."""
    look_weight: float = 0.5
    """Weight of the look-ahead's loss."""
    look_ramp: float = 0.1
    """Time at which the look-ahead's loss reaches its weight."""
    confusable: float = 0.0
    """Share of the needle samples in which several facts have similar values."""
    turns: float = 0.08
    """Share of samples that are conversations about one context."""
    ledgers: float = 0.1
    """Share of samples that are ledgers."""
    needles: float = 0.03
    """Share of samples with needles as in task=niah."""
    mix: dict[str, float] = field(default_factory=dict)
    """Kind of sample -> relative share, in place of its default share."""

    @property
    def offsets(self) -> range:
        """Distances at which the look-ahead predicts a token."""
        return range(2, self.look_ahead + 1)

    def lengths(self, done: float) -> list[int]:
        """Return the sequence lengths of all stages that have begun at the time `done`, from 0 to 1."""
        return [length for start, length in self.stages if start <= done]

    def config(self) -> dict[str, Any]:
        """Return the model's configuration for transformers."""
        return dict(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=DIM,
            intermediate_size=self.inner,
            hidden_act="silu",
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=self.theta),
            max_position_embeddings=self.context,
            rms_norm_eps=EPSILON,
            initializer_range=0.02,
            attention_bias=False,
            mlp_bias=False,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            dtype="bfloat16",
        )

    def with_settings(self, settings: list[str]) -> "Recipe":
        """Return a recipe with changed settings.

        Args:
            settings: Texts such as "layers=4", with the value as JSON.

        Raises:
            SettingError: A name is unknown, a value has another type, or `check` refuses it.
        """
        known, changes = {one.name for one in fields(self)}, {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in known:
                raise SettingError(f"{setting}: {describe_choices(name, sorted(known))}")
            before = getattr(self, name)
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = None
            if isinstance(value, bool) or not isinstance(value, KINDS[type(before)]):
                raise SettingError(f"{setting}: a value like {json.dumps(before)}")
            if isinstance(value, list):  # the stages
                value = [tuple(one) if isinstance(one, list) else one for one in value]
            changes[name] = type(before)(value)
        made = replace(self, **changes)
        made.check()
        return made

    def check(self) -> None:
        """Check that the recipe can be trained.

        Raises:
            SettingError: It cannot. The message names the setting.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int):
                require_int(one.name, value, 0 if one.name == "look_ahead" else 1)
            elif isinstance(value, float) and not (is_number(value) and value >= 0):
                raise SettingError(f"{one.name}={value}: a number of at least 0")
        for name in SHARES:
            if getattr(self, name) > 1:
                raise SettingError(f"{name}={getattr(self, name)}: a share, at most 1")
        for name in ("rate", "clip", "theta", "warmup", "look_ramp"):
            if not getattr(self, name):
                raise SettingError(f"{name}=0: more than 0")
        if self.steady == 1:
            raise SettingError("steady=1: less, the learning rate falls after it")
        if self.look_ahead == 1:
            raise SettingError("look_ahead=1: 0, or at least 2, since every model predicts the next token")
        if self.heads % self.kv_heads:
            raise SettingError(f"kv_heads={self.kv_heads}: a divisor of heads={self.heads}")
        if (given := self.turns + self.ledgers + self.needles) > 1:
            raise SettingError(f"turns, ledgers and needles are {given:g} of the samples together: at most 1")
        starts = [one[0] for one in self.stages if isinstance(one, tuple) and len(one) == 2 and is_number(one[0])]
        rising = starts[:1] == [0] and starts[-1] < 1 and all(a < b for a, b in pairwise(starts))
        if len(starts) < len(self.stages) or not rising:
            raise SettingError(f"stages={json.dumps(self.stages)}: [[0, length], [share, length], ...], shares rising")
        for _, length in self.stages:
            require_int("stages: a length", length, 64)
            if length > self.context:
                raise SettingError(f"stages: a length of {length}: at most context={self.context}")

    def save(self, folder: Path) -> None:
        """Write recipe.json to a folder."""
        (folder / "recipe.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_recipe(folder: Path) -> Recipe:
    """Read recipe.json from a folder."""
    settings = json.loads((folder / "recipe.json").read_text())
    return Recipe(**settings | {"stages": tuple(map(tuple, settings["stages"]))})
