"""Weights in int4 on a GPU: torch's packing and its products, and answers in CUDA graphs."""

import pytest
import torch
from transformers import LlamaConfig

from kvbench.engine.compressed_cache import prefill
from kvbench.models import loading
from kvbench.models.decoder_weights import collect_weights
from kvbench.models.int4 import FEW, Int4Weight, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize(("rows", "width"), [(64, 128), (256, 1024), (1000, 896), (48, 576), (20, 256)])
def test_weights_are_those_of_a_cpu_and_products_are_exact(rows, width):
    drawn = (torch.randn(rows, width) * 0.03 + 0.01).bfloat16()
    weight, there = quantize(drawn.cuda()), quantize(drawn)
    dense = weight.make_dense()
    assert weight.packed.dim() == (4 if rows % 8 == 0 else 2) and torch.equal(dense.cpu(), there.make_dense())
    for count in (1, 3, FEW, FEW + 1):
        inputs = torch.randn(count, width, device="cuda").bfloat16()
        expected = inputs.double() @ dense.double().T
        assert (weight.project(inputs).double() - expected).norm() <= 4e-3 * expected.norm()  # bfloat16's rounding


def test_graphs_decode_what_dense_weights_give():
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=640, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    model, twin = (loading.make_random_model(config, torch.bfloat16, "cuda", 0, how) for how in ("int4", None))
    dense = {
        key: weight + 0 if isinstance(weight, Int4Weight) else weight for key, weight in model.state_dict().items()
    }
    twin.load_state_dict(dense)
    assert collect_weights(model) is not None
    ids = torch.randint(3, 500, (1, 300), device="cuda")
    for method, budget in (("full", 1.0), ("snapkv", 0.2)):
        held, expected = (prefill(one, ids, method=method, budget=budget) for one in (model, twin))
        compared = 0
        for _ in range(8):
            token, other = (one.generate(1, stop=frozenset()) for one in (held, expected))
            if not torch.equal(token, other):  # rounding decides between two tokens that are nearly as likely
                break
            error = (held.logits.float() - expected.logits.float()).square().mean().sqrt()
            assert error <= 0.1 * expected.logits.float().std()
            compared += 1
        assert compared
