"""Weights in int4: what they stand for, what their products are, and how checkpoints and runs get them."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear, silu

from kvbench.analysis.closing_table import draft_run_table
from kvbench.config.compose import compose_config
from kvbench.efficiency.roofline import Machine, WeightSizes, decode_ms, prefill_ms
from kvbench.engine.compressed_cache import prefill
from kvbench.kernels import fused_linear
from kvbench.kernels.fused_linear.reference import gated_product_reference
from kvbench.models import int4, loading
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.decoder_weights import collect_plain_weights, collect_weights, read_weights
from kvbench.models.int4 import GROUP, Int4Weight, quantize
from kvbench.models.miniature import draw_miniature
from kvbench.models.part_reader import UnknownPart
from kvbench.models.probe import run_step
from kvbench.models.random_weights import RandomCheckpoint
from kvbench.models.transformers_port import read_layout
from kvbench.runs.checks import check_settings
from kvbench.runs.integrity import WeightHashes
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError
from tests.support.families import configure_miniature
from tests.support.tiny_models import BUILD, ids, tiny

CHECKPOINT = {"layers": 2}
ORDER = torch.randperm(int4.TILE_ROWS * GROUP, generator=torch.Generator().manual_seed(3))


def draw(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn + torch.arange(rows)[:, None] / rows).to(dtype)  # groups whose zero points are not near 0


def round_weights(weights: Tensor) -> Tensor:
    """Return in float64 what the formula of the module says, group by group."""
    rows = []
    for row in weights.double():
        parts = []
        for group in row.split(GROUP):
            scale = ((group.max() - group.min()).float() / 15).bfloat16().double()
            zero = (group.min().float() + 8 * scale.float()).bfloat16().double()
            numbers = ((group - zero) / scale).round().clamp(-8, 7) if scale else torch.zeros_like(group)
            parts.append(numbers * scale + zero)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def pack_in_tiles(halves: Tensor) -> Tensor:
    """Pack as torch's operator on a GPU does, but with another order inside of a tile."""
    numbers = torch.stack([halves >> 4, halves & 15], -1).view(len(halves) // 8, 8, -1, GROUP).transpose(1, 2)
    pairs = numbers.reshape(len(halves) // 8, -1, ORDER.numel())[..., ORDER].unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32).unflatten(-1, (32, 4))


def multiply_tiles(inputs: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """Multiply as torch's operator on a GPU does."""
    weight = Int4Weight(packed, scales, len(scales) * group, torch.bfloat16)
    return (inputs.float() @ weight.make_dense().float().T).bfloat16()


@pytest.fixture
def tiles(monkeypatch):
    """The CPU packs weights as a GPU would."""
    monkeypatch.setattr(int4, "pack_tiles", pack_in_tiles)
    monkeypatch.setattr(int4, "can_pack_tiles", lambda weight: True)
    monkeypatch.setattr(int4, "find_order", lambda device: int4.read_order(pack_in_tiles, device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [GROUP, 3 * GROUP, 200, 7])
def test_a_weight_stands_for_what_the_formula_says(width, dtype):
    weights = draw(16, width, dtype)
    weights[3] = 0.25  # a group without a range
    made = quantize(weights).make_dense()
    expected = round_weights(weights)
    assert made.dtype == dtype and made.shape == weights.shape
    rounding = 0.0 if dtype != torch.bfloat16 else 2**-8
    torch.testing.assert_close(made.double(), expected, rtol=max(rounding, 1e-6), atol=1e-6)
    scale = torch.stack([group.amax(1) - group.amin(1) for group in weights.double().split(GROUP, 1)], 1) / 15
    bound = (scale * (0.5 + 15 * 2**-8)).repeat_interleave(GROUP, 1)[:, :width]  # half a step, and the scale's rounding
    assert ((made.double() - weights.double()).abs() <= bound + 2**-8 * weights.double().abs().amax()).all()


def test_a_weight_takes_four_bits_and_four_bytes_a_group():
    weight = quantize(draw(16, 3 * GROUP, torch.bfloat16))
    assert weight.nbytes == weight.packed.nbytes + weight.scales.nbytes == 16 * 3 * (GROUP // 2 + 4)
    assert int4.count_quantized_bytes(Linear(200, 5, device="meta")) == quantize(draw(5, 200)).nbytes


@pytest.mark.parametrize("width", [2 * GROUP, 200])
def test_tiles_hold_the_same_weights(tiles, width, monkeypatch):
    weights = draw(24, width, torch.bfloat16)
    tiled = quantize(weights)
    monkeypatch.setattr(int4, "can_pack_tiles", lambda weight: False)
    plain = quantize(weights)
    assert tiled.packed.dtype == torch.int32 and tiled.nbytes == plain.nbytes
    assert torch.equal(tiled.make_dense(), plain.make_dense())


def test_an_unknown_packing_is_an_error():
    with pytest.raises(RuntimeError, match="unknown way"):
        int4.read_order(lambda halves: torch.zeros(1, 1, 32, 4, dtype=torch.int32), torch.device("cpu"))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, int4.FEW, int4.FEW + 1])
def test_few_rows_are_multiplied_by_the_operator_and_many_by_dense_weights(tiles, monkeypatch, rows, biased):
    calls = []

    class Operators:
        @staticmethod
        def _weight_int4pack_mm(*given: Tensor) -> Tensor:
            calls.append(given[0].shape)
            return multiply_tiles(*given)

    weight = quantize(draw(24, 200, torch.bfloat16))
    bias = draw(1, 24, torch.bfloat16)[0] if biased else None
    inputs = draw(rows, 200, torch.bfloat16, seed=1)[None]
    expected = linear(inputs.double(), weight.make_dense().double(), None if bias is None else bias.double())
    monkeypatch.setattr(torch.ops, "aten", Operators)
    made = weight.project(inputs, bias)
    monkeypatch.undo()
    assert calls == ([(rows, 2 * GROUP)] if rows <= int4.FEW else [])
    torch.testing.assert_close(made.double(), expected, rtol=2**-7, atol=2**-5)


def test_gradients_reach_inputs():
    weight, inputs = Parameter(quantize(draw(24, 200)), requires_grad=False), draw(3, 200, seed=1).requires_grad_()
    linear(inputs, weight).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.make_dense().sum(0).expand(3, -1))


def save(name: str, folder) -> str:
    tiny(name).save_pretrained(folder)
    return str(folder)


def load(path: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return Checkpoint("own", path, weights_format="int4").weights(dtype, "cpu")


def make_dense_twin(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return a tiny model with the weights that a quantised one stands for."""
    twin = BUILD[name]()
    twin.load_state_dict({key: weight.to(weight.dtype) + 0 for key, weight in model.state_dict().items()})
    return twin.eval()


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3"])  # biases, fused projections, a tied head and windows
def test_a_loaded_model_is_the_one_with_rounded_weights(name, tmp_path):
    path, tokens = save(name, tmp_path), ids(60)
    model = load(path)
    twin = make_dense_twin(model, name)
    for key, weight in tiny(name).state_dict().items():
        inside = ".layers." in key and weight.dim() == 2
        expected = round_weights(weight) if inside else weight.double()
        torch.testing.assert_close(twin.state_dict()[key].double(), expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        logits = model(tokens).logits
        torch.testing.assert_close(logits, twin(tokens).logits)
        assert torch.equal(logits, load(path)(tokens).logits)
    assert loading.hash_weights(model) == loading.hash_weights(twin) != loading.hash_weights(tiny(name))
    hashes, written = WeightHashes(model), "model.layers.1.self_attn.o_proj.weight"
    model.get_parameter(written).packed[3, 1] += 1
    assert hashes.find_changed() == [f"{written} (int4)"]


def test_the_full_cache_and_methods_read_a_quantised_model(tmp_path):
    model, tokens = load(save("qwen3", tmp_path)), ids(60)
    twin = make_dense_twin(model, "qwen3")
    with torch.no_grad():
        logits = model(tokens).logits[:, -1]
    full = prefill(model, tokens)
    torch.testing.assert_close(full.logits, logits, rtol=1e-4, atol=1e-4)
    for method in ("snapkv", "criticalkv"):  # the second one reads W_o
        cut, expected = (prefill(one, tokens, method=method, budget=0.4) for one in (model, twin))
        assert all(
            torch.equal(cut.places(layer, head), expected.places(layer, head)) for layer in (0, 1) for head in range(3)
        )
        torch.testing.assert_close(cut.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_not_finite_is_refused_by_its_stored_name(tmp_path):
    model = tiny("llama")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(SettingError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*model\.safetensors"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_random_weights_are_drawn_as_without_int4(name):
    made, plain = (loading.make_random_model(tiny(name).config, torch.float32, "cpu", 5, how) for how in ("int4", None))
    buffers = dict(plain.named_buffers())
    assert buffers and all(torch.equal(buffers[key], one) for key, one in made.named_buffers())
    assert [key for key, _ in made.named_parameters()] == [key for key, _ in plain.named_parameters()]
    for (key, one), other in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(one, Int4Weight) == (".layers." in key and one.dim() == 2), key
        assert abs(one.std() - other.std()) <= 0.1 * other.std(), key
    again = loading.make_random_model(tiny(name).config, torch.float32, "cpu", 5, "int4")
    assert loading.hash_weights(again) == loading.hash_weights(made)


def test_modules_that_draw_weights_of_their_linear_layers_are_drawn():
    small = configure_miniature("nanochat")
    weights = dict(loading.make_random_model(small, torch.float32, "cpu", 0, "int4").named_parameters())
    assert isinstance(weights["model.layers.0.self_attn.o_proj.weight"], Int4Weight)


def test_what_no_module_draws_is_refused():
    skeleton = loading.make_skeleton(tiny("llama").config)
    skeleton.model.layers[1].factor = Parameter(torch.empty(3, device="meta"))  # its class does not know of it
    with pytest.raises(SettingError, match=r"cannot draw model\.layers\.1\.factor of LlamaForCausalLM"):
        int4.fill_quantized(skeleton, "cpu")


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "glm4_moe", "afmoe", "zaya", "qwen2_moe", "qwen3_next"])
def test_routers_and_their_experts_stay_as_they_are(name):
    """Routers may be modules with linear layers of their own."""
    model = draw_miniature(configure_miniature(name))
    names = {f"{key}.weight" for key, _ in int4.list_linear_layers(model)}
    assert names and not any({"gate", "router", "experts"} & set(key.split(".")) for key in names)
    held = {key: weight for key, weight in model.state_dict().items() if key not in names}
    assert any(weight.dim() == 3 for weight in held.values())
    packed = int4.move_quantized(model, "cpu").state_dict()
    assert all(torch.equal(packed[key], weight) for key, weight in held.items())


def test_tied_weights_stay_tied():
    config = copy.deepcopy(tiny("llama").config)
    config.tie_word_embeddings = True
    model = loading.make_random_model(config, torch.float32, "cpu", 0, "int4")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_one_dense_weight_at_a_time_is_made(monkeypatch):
    """No other linear layer of the model is dense while one is drawn."""
    config, dense = tiny("llama").config, []
    monkeypatch.setattr(int4, "quantize", lambda weight: dense.append(weight.shape) or quantize(weight))
    skeleton = loading.make_skeleton(config)
    filled = int4.fill_quantized(skeleton, "cpu")
    assert len(dense) == 7 * config.num_hidden_layers and all(
        weight.device.type == "cpu" for weight in filled.parameters()
    )


def test_bytes_of_weights_are_those_that_a_model_takes():
    config = tiny("gemma3").config
    for how in ("int4", None):
        model = loading.make_random_model(config, torch.bfloat16, "cpu", 0, how)
        assert loading.count_weight_bytes(config, torch.bfloat16, how) == sum(one.nbytes for one in model.parameters())


def test_a_mixture_of_experts_is_refused_before_weights_are_read():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.model.layers[0].mlp.gate = Linear(32, 4)  # some architectures have their router there
    names = [name for name, _ in int4.list_linear_layers(model)]
    assert names == [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkvo"]
    with pytest.raises(SettingError, match=r"^model\.weights=int4: \d+% of its layers' weights lie in linear layers"):
        int4.check_linear_share(model, "model.weights=int4")
    with pytest.raises(SettingError, match="use model.weights=null"):
        loading.make_random_model(config, torch.float32, "cpu", 0, "int4")


def test_the_step_without_modules_multiplies_with_int4(tmp_path):
    model, tokens = load(save("llama", tmp_path)), ids(40)
    weights = collect_weights(model)
    assert weights is not None
    attention, mlp = weights.blocks[0].attention, weights.blocks[0].mlp
    linears = (*attention.project, attention.output, mlp.gate, mlp.up, mlp.down)
    assert all(isinstance(one.weight, Int4Weight) for one in linears)
    with torch.no_grad():
        torch.testing.assert_close(run_step(weights, read_layout(model), tokens), model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi3", "in int4 that stand in one"),  # queries, keys and values
        ("glm4", "in int4 that stand in one"),  # gate and up
        ("cohere", "in another order of their dimensions"),
    ],
)
def test_weights_in_int4_are_neither_taken_apart_nor_reordered(name, reason):
    model = draw_miniature(configure_miniature(name))
    layout = read_layout(model)
    assert collect_plain_weights(model, layout) is not None
    packed = int4.move_quantized(model, "cpu")
    with pytest.raises(UnknownPart, match=reason):
        read_weights(packed, layout)
    assert collect_plain_weights(packed, layout) is None


def test_kernels_for_plain_weights_get_no_others(monkeypatch):
    kernels = pytest.importorskip("kvbench.kernels.fused_linear.triton")
    for name in ("rms_norm_linear_triton", "rms_norm_glu_triton"):
        monkeypatch.setattr(kernels, name, lambda *given: pytest.fail("a kernel was given weights in int4"))
    monkeypatch.setattr(kernels, "gated_product_triton", gated_product_reference)
    monkeypatch.setattr(kernels, "rms_norm_triton", lambda x, weight, epsilon, residual: x)
    weight, x = quantize(draw(24, 200)), draw(1, 200, seed=1)
    dense = x @ weight.make_dense().T
    (product,) = fused_linear.rms_norm_linear(x, [weight], implementation="triton")
    torch.testing.assert_close(product, dense)
    norm = torch.ones(200), 1e-6
    inner = fused_linear.rms_norm_glu(x, weight, weight, norm, implementation="triton")
    torch.testing.assert_close(inner, silu(dense) * dense)


def test_the_sizes_of_a_model_count_weights_not_bytes():
    made, plain = (
        loading.make_random_model(tiny("llama").config, torch.bfloat16, "cpu", 0, how) for how in ("int4", None)
    )
    sizes, others = WeightSizes.of(made), WeightSizes.of(plain)
    assert sizes.layers == others.layers and sizes.total < others.total
    assert others.read == 2 * (others.layers + others.output) and others.layer_bytes == 2 * others.layers
    saved = sum(2 * one.weight.numel() - one.weight.nbytes for _, one in int4.list_linear_layers(made))
    assert sizes.layer_bytes == others.layer_bytes - saved and sizes.read == others.read - saved
    by_operations, by_bytes = Machine(math.inf, 1e9), Machine(1e9, math.inf)
    assert decode_ms(by_operations, sizes, 0, 3) == pytest.approx([6e-6 * (others.layers + others.output)] * 2)
    dense, packed = (prefill_ms(by_bytes, model, 5, 1, None, None) for model in (plain, made))
    assert dense - packed == pytest.approx(1000 * saved / 1e9)
    assert others.layers == sum(
        weight.numel() for name, weight in plain.named_parameters() if "model.norm" in name
    ) + sum(weight.numel() for layer in plain.model.layers for weight in layer.parameters())


def describe(*settings: str) -> RunSpec:
    config = compose_config(["device=cpu", "task=ledger", *settings])
    return RunSpec.describe(config, check_settings(config))


def test_only_a_run_in_int4_is_named_by_it_and_its_baseline_has_the_same_weights(checkpoint, monkeypatch):
    monkeypatch.setattr("kvbench.runs.spec.source_hash", lambda modules: "")
    model = ["model=hf", f"model.path={checkpoint}"]
    plain, packed = describe(*model, "method=snapkv"), describe(*model, "method=snapkv", "model.weights=int4")
    assert plain.value["model"].keys() == {"name", "identity"}
    name = plain.value["model"]["name"]
    assert packed.value["model"] == plain.value["model"] | {"name": f"{name}_int4", "weights": "int4"}
    assert packed.baseline().value["model"] == packed.value["model"]
    assert packed.baseline().checkpoint != plain.baseline().checkpoint and packed.reading != plain.reading
    heading = draft_run_table(packed.value, {}, {}).heading
    assert heading["weights"] == "int4" and "weights" not in draft_run_table(plain.value, {}, {}).heading


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["model.weights=int8"], "model.weights=int8: did you mean int4? Choose one of null, int4"),
        (["model.weights=4"], "model.weights=4: choose one of null, int4"),
        (["model.weights=int4", "model.device_map=auto"], "model.weights=int4: is loaded onto one GPU"),
        (["model.weights=int4", "model=reference"], "model.weights=int4: model=reference has no such weights; null"),
    ],
)
def test_what_cannot_be_is_one_line(settings, line):
    with pytest.raises(SettingError) as error:
        describe(*settings)
    assert str(error.value).startswith(line)


def test_shapes_are_named_by_their_weights():
    packed = RandomCheckpoint.like("tiny", 0, None, "int4")
    assert packed.name == "tiny_int4" and packed.identity() == RandomCheckpoint.like("tiny", 0).identity()
    assert any(isinstance(weight, Int4Weight) for weight in packed.weights(torch.float32, "cpu").parameters())


def test_records_and_tables_name_the_weights(checkpoint, kvbench, tmp_path):
    settings = ("task.subtasks=[niah_single_1]", "task.length=600", "task.samples=1", "method=full")
    code, out, err = kvbench("model.weights=int4", *settings)
    assert code == 0, err
    assert "weights: int4" in out and f"model: {checkpoint.name}_int4" in out
    files = (tmp_path / "results").rglob("records*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) == 1 and all(record["weights"] == "int4" for record in records)
