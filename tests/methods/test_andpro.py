"""AnDPro: weighted values against their anchor, in loops and float64; chunks built as its code builds them."""

import pytest

import kvbench
from tests.support.oracle_scores import protect_chunks, score_along_output, score_chunks
from tests.support.oracle_shares import share_safeguarded
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_newest
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, tiny


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "mistral", "gemma3", "llama3"], "llama"))
def test_andpro(model, block):
    cut = keep_by_score(score_along_output(6), 17, protect_newest(6))
    assert_engines_agree(model, cut, "andpro", 17, block, 45, window=6)


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("chunk, kernel", [(4, 7), (4, 1), (1, 3)])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "mistral"], "llama"))
def test_andpro_as_coded(model, chunk, kernel, block):
    """Top rows over all heads together and head by head."""
    args = dict(window=8, kernel=kernel, chunk=chunk, first=1)
    score, protect = score_chunks(**args), protect_chunks(8, chunk, 1)
    args |= dict(anchor="droppable")
    assert_engines_agree(model, keep_by_score(score, 19, protect), "andpro", 19, block, 45, **args)
    everywhere = ("ada", {"mode": "safeguard", "alpha": 0.0})
    assert_engines_agree(
        model,
        keep_by_score(score, 19, protect, share_safeguarded(0.0)),
        "andpro",
        19,
        block,
        45,
        allocator=everywhere,
        **args,
    )


def places(**args) -> list[list[int]]:
    held = kvbench.prefill(tiny("llama"), ids(90), "andpro", 24, method_args={"window": 8, **args})
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]


def test_code_and_paper_differ_in_each_of_their_settings():
    paper = places()
    for other in (dict(kernel=7), dict(chunk=4), dict(first=4), dict(anchor="droppable")):
        assert places(**other) != paper


def test_chunks_stay_or_go_together():
    """24 rows of 90: the first four, the last two chunks (90 is no multiple of 4: six rows), three chunks between and
    two rows of a fourth.
    """
    for kept in places(preset="official_code", window=8):
        assert kept[:4] == [0, 1, 2, 3] and kept[-6:] == list(range(84, 90))
        chunks = [row // 4 for row in kept[4:-6]]
        assert sorted(chunks.count(chunk) for chunk in set(chunks)) == [2, 4, 4, 4]
