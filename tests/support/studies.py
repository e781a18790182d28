"""Studies of tiny models in float64, and what their layers hold, for computations by definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import nnls

from kvbench.store.study_lines import Line
from kvbench.studies.passes import StudyPrompt, read_prompt
from kvbench.studies.study import LayerStudy
from tests.support.tiny_models import ids, make_double


@dataclass(frozen=True)
class Everything(LayerStudy):
    """Keeps all that a layer shows."""

    name: ClassVar[str] = "everything"
    wants: ClassVar[tuple[str, ...]] = ("lse", "unrotated_keys", "hidden", "normed_hidden")

    def update(self, memory, observation, rows):
        for name in ("queries", "lse", "unrotated_keys", "hidden", "normed_hidden"):
            memory.setdefault(name, []).append(getattr(observation, name)[0].clone())
        memory |= {"keys": rows.keys[0].clone(), "values": rows.values[0].clone(), "scaling": observation.scaling}


def study(own: LayerStudy, model: str = "llama", tokens: int = 150, block_size: int | None = None) -> list[Line]:
    """The lines of one prompt."""
    found = read_prompt(make_double(model), StudyPrompt("0", tuple(ids(tokens)[0].tolist())), [own], block_size)
    return list(own.finish(found[own.name], True))


def show_layers(model: str = "llama", tokens: int = 150) -> list[dict[str, np.ndarray]]:
    """What each layer holds and computes for the same prompt: keys, values, queries and more, as arrays of float64."""
    prompt = StudyPrompt("0", tuple(ids(tokens)[0].tolist()))
    found = read_prompt(make_double(model), prompt, [Everything()])["everything"]
    return [
        {name: np.asarray(own[0] if isinstance(own, list) else own) for name, own in layer.items()}
        for layer in found.values()
    ]


def values(lines: Sequence[Line], quantity: str, series: str | None = None) -> dict[tuple, float]:
    """(layer, head, x, y) -> value, without the coordinates that are None."""
    chosen = [own for own in lines if own.quantity == quantity and series in (None, own.series)]
    assert chosen, quantity
    return {
        tuple(part for part in (own.layer, own.head, own.x, own.y) if part is not None): own.value for own in chosen
    }


def attend(layer: dict[str, np.ndarray]) -> np.ndarray:
    """The attention probabilities of a layer by definition, (query heads, queries, rows)."""
    keys = layer["keys"].repeat(len(layer["queries"]) // len(layer["keys"]), 0)
    logits = layer["queries"] @ keys.swapaxes(1, 2) * layer["scaling"]
    logits = np.where(np.tri(logits.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cosine of vectors in the last dimension."""
    return (x * y).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))


def find_values(lines: Sequence[Line], **place: object) -> list[float]:
    """The values of the lines with these fields, in their order."""
    return [line.value for line in lines if all(getattr(line, name) == own for name, own in place.items())]


def measure_distance(points: np.ndarray) -> float:
    """The distance of 0 from a convex hull: least squares for weights whose sum is drawn towards 1."""
    weights, _ = nnls(np.vstack([points.T, np.ones(len(points))]), np.eye(points.shape[1] + 1)[-1], maxiter=9999)
    return float(np.linalg.norm(weights @ points / weights.sum()))
