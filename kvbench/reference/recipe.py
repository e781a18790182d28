"""What decides a training of the reference model: shape, schedule, losses and data, as one value with a file."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvbench.reference.tokenizer import BOS, EOS, PAD
from kvbench.settings import SettingError

VOCABULARY, DIM, EPSILON = 4096, 64, 1e-5


@dataclass(frozen=True)
class Recipe:
    """Shares and schedule are of the training's time, from 0 to 1."""

    hidden: int = 320
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    inner: int = 960
    theta: float = 5e5
    context: int = 16384
    stages: tuple[tuple[float, int], ...] = (
        (0.0, 256), (0.03, 512), (0.07, 1024), (0.2, 2048), (0.42, 4096), (0.68, 8192), (0.86, 16384),
    )  # fmt: skip
    shorter: float = 0.35  # share of steps of an earlier length, from 1024 on
    copies: float = 0.2  # share of rows that are pure copying ...
    copying: float = 0.05  # ... up to here
    tokens: int = 65536  # a step
    rate: float = 1.5e-3  # peak of the learning rate ...
    warmup: float = 0.01  # ... reached here ...
    steady: float = 0.5  # ... and kept up to here; from there on a line to zero
    decay: float = 0.05
    clip: float = 1.0
    look_ahead: int = 40  # answer tokens 2 to so far ahead are predicted too, 0: only the next token
    look_weight: float = 0.5  # weight of that loss ...
    look_ramp: float = 0.1  # ... reached here
    confusable: float = 0.0  # share of needle samples with several facts whose values resemble one another
    turns: float = 0.08  # shares of samples that are conversations on one context ...
    ledgers: float = 0.1  # ... ledgers
    needles: float = 0.03  # ... and needles as task=niah hides them
    mix: dict[str, float] = field(default_factory=dict)  # other relative shares of these kinds of samples

    @property
    def offsets(self) -> range:
        """How far ahead is looked."""
        return range(2, self.look_ahead + 1)

    def lengths(self, done: float) -> list[int]:
        """The lengths of all stages begun at this share of the time."""
        return [length for start, length in self.stages if start <= done]

    def config(self) -> dict[str, Any]:
        """What transformers loads."""
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

    def changed(self, settings: list[str]) -> "Recipe":
        """With `name=value` of each setting, the value as JSON; SettingError for an unknown name or another type."""
        known, own = {one.name for one in fields(self)}, {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in known:
                raise SettingError(f"{setting}: one of {', '.join(sorted(known))}")
            before = getattr(self, name)
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = None
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            kinds = {"stages": list, "mix": dict}
            if not (isinstance(value, kinds[name]) if name in kinds else numeric):
                raise SettingError(f"{setting}: a value like {json.dumps(before)}")
            own[name] = tuple(map(tuple, value)) if name == "stages" else type(before)(value)
        return replace(self, **own)

    def save(self, folder: Path) -> None:
        (folder / "recipe.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(folder: Path) -> Recipe:
    own = json.loads((folder / "recipe.json").read_text())
    return Recipe(**own | {"stages": tuple(map(tuple, own["stages"]))})
