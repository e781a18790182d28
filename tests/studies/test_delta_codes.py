"""delta_codes: the codes of a file of compressors, beside plain loops."""

import numpy as np
import pytest

from kvbench.studies.delta_codes import DeltaCodes
from tests.support.delta_files import draw_compressor, write_for
from tests.support.layer_states import read_layers
from tests.support.studies import find_values, study
from tests.support.tiny_models import ids, tiny

TOKENS, CODE = 60, 12


def compress(kv: np.ndarray, layer: int) -> np.ndarray:
    """f_c of a token, as `draw_compressor` makes it."""
    [network] = draw_compressor(len(kv), CODE, layer).down
    gate, own = np.split(network.weights[0].numpy() @ kv, 2)
    return network.weights[1].numpy() @ (gate / (1 + np.exp(-gate)) * own)


def encode(kv: np.ndarray, layer: int) -> np.ndarray:
    """Codes of the tokens 8, 9, … but the last: references are the sinks and every tenth token behind them."""
    codes = []
    for token in range(8, TOKENS - 1):
        candidates = [*range(8), *range(8, token + 1, 10)]
        near = sorted(candidates, key=lambda own: ((kv[own] - kv[token]) ** 2).sum())[:4]
        codes.append(compress(kv[token], layer) - compress(kv[near].mean(0), layer))
    return np.array(codes)


@pytest.mark.parametrize("model, block", [("llama", None), ("qwen3", 7)])
def test_codes_are_those_of_plain_loops(model, block, tmp_path):
    path = write_for(tmp_path / "compressors.safetensors", tiny(model), code=CODE)
    lines = study(DeltaCodes(path=path), model, TOKENS, block)
    most, layers = [], read_layers(model, ids(TOKENS))
    for layer, states in enumerate(layers):
        z = encode(states.stored, layer)
        counts = np.histogram((z / np.sqrt((z**2).mean())).clip(-4, 4), 40, (-4, 4))[0]
        np.testing.assert_allclose(find_values(lines, quantity="codes", layer=layer), counts / z.size)
        small = (abs(z) < abs(z).max() / 10).mean()
        most.append(small > 0.5)
        assert find_values(lines, quantity="small", layer=layer) == [pytest.approx(small)]
        for axis, quantity in enumerate(("channel_ratio", "token_ratio")):
            sizes = np.sort(np.sqrt((z**2).mean(axis)))
            median = sizes[(len(sizes) - 1) // 2]  # torch's: the lower one of two
            assert find_values(lines, quantity=quantity, layer=layer) == [pytest.approx(sizes[-1] / median)]
        squares = {(line.y, line.x): line.value for line in lines if line.quantity == "size" and line.layer == layer}
        assert len(squares) == (32 * CODE if layer == len(layers) // 2 else 0)
        starts = [index * len(z) // 32 for index in range(33)]
        for start, stop in zip(starts[:-1], starts[1:], strict=True) if squares else ():
            found = [squares[start, channel] for channel in range(CODE)]
            np.testing.assert_allclose(found, abs(z[start:stop]).mean(0), rtol=1e-6)
    assert find_values(lines, quantity="near_zero", series="holds") == [np.mean(most)]
