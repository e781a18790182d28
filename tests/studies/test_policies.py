"""What methods keep, against dense passes of transformers in which masks hide what the methods evicted, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvbench.engine.compressed_cache import prefill
from kvbench.engine.generation import GenerationContext
from kvbench.studies import kept_planes, kept_volume, passes, policy_reads, residual_error
from kvbench.studies.kept_planes import KeptPlanes, find_place
from kvbench.studies.kept_volume import KeptVolume, measure_volumes
from kvbench.studies.policy_study import Policy
from kvbench.studies.residual_error import ResidualError
from tests.support.studies import find_values, show_layers, values
from tests.support.tiny_models import ids, make_double

TOKENS, HALF, BLOCK = 150, 75, 128
LAYOUT = SimpleNamespace(layers=3, heads=2, held=(0, 1, 2))
PLACES = tuple((figure, *find_place(*own, LAYOUT)) for figure, own in kept_planes.PLACES.items())


def read(*studies, first=True):
    """The lines of one prompt, by study."""
    found = policy_reads.read_policies(make_double("llama"), ids(TOKENS), 0, studies, 0, first)
    return {study.name: lines for study, lines in found}


def compress(policy, budget, tokens=TOKENS, block_size=BLOCK):
    """The cache that the policy's method leaves without a study."""
    given = [{"preset": own} if own else None for own in (policy.preset, policy.allocator_preset)]
    names = {
        "method": policy.method,
        "method_args": given[0],
        "allocator": policy.allocator,
        "allocator_args": given[1],
    }
    return prefill(make_double("llama"), ids(TOKENS)[:, :tokens], **names, budget=budget, block_size=block_size)


@contextmanager
def hide(model, masks) -> Iterator[list]:
    """Let each layer attend by its own mask, (query heads, n, n); gives what leaves the layers."""
    states, handles = [], []
    for layer, mask in zip(model.model.layers, masks, strict=True):

        def take(module, args, kwargs, mask=mask):
            return args, kwargs | {"attention_mask": mask[None]}

        handles.append(layer.self_attn.register_forward_pre_hook(take, with_kwargs=True))
        handles.append(layer.register_forward_hook(lambda module, args, output: states.append(output[0])))
    yield states
    for handle in handles:
        handle.remove()


def attend_dense(seen):
    """Read the prompt with transformers; `seen` has what each layer's query heads see, (query heads, n, n)."""
    model = make_double("llama")
    with torch.no_grad(), hide(model, seen) as states:
        cache = model(ids(TOKENS), use_cache=True).past_key_values
    return states, [layer.keys[0] for layer in cache.layers]


def find_points(runs, shown):
    """Points of some tokens of each run's keys in the plane of all of them, by SVD."""
    every = np.concatenate(runs)
    axes = np.linalg.svd(every - every.mean(0), full_matrices=False)[2][:2]
    axes *= np.sign(axes[[0, 1], np.abs(axes).argmax(1)])[:, None]
    return [(own[shown] - every.mean(0)) @ axes.T for own in runs]


def list_points(lines, quantity, series):
    return sorted(
        (own.x, own.value) for own in lines["kept_planes"] if (own.quantity, own.series) == (quantity, series)
    )


def test_planes_show_what_each_method_keeps_and_evicts(monkeypatch):
    """In layer 0, where all runs write the same keys."""
    monkeypatch.setattr(kept_planes, "POINTS", TOKENS)
    lines = read(KeptPlanes(places=PLACES))
    assert PLACES[0] == (5, 0, 0)
    points = find_points([np.asarray(show_layers()[0]["keys"][0])] * 3, np.arange(TOKENS))[0]
    for policy in kept_planes.COMPARED:
        kept = np.isin(np.arange(TOKENS), compress(policy, HALF).places(0, 0))
        assert kept.sum() == HALF
        for quantity, series, own in (
            (f"plane_5_{policy.method}", "kept", kept),
            (f"plane_5_{policy.method}", "evicted", ~kept),
            ("plane_5_kept", policy.method, kept),
        ):
            found = list_points(lines, quantity, series)
            np.testing.assert_allclose(found, sorted(map(tuple, points[own])), atol=1e-9)
    assert read(KeptPlanes(places=PLACES), first=False) == {"kept_planes": []}


def test_planes_show_keys_as_the_methods_own_run_wrote_them(monkeypatch):
    """Sink has the same rows in all heads: the second block sees 4 first and the newest tokens of the first one."""
    monkeypatch.setattr(kept_planes, "COMPARED", kept_planes.COMPARED[:1])
    lines = read(KeptPlanes(places=PLACES))
    place = torch.arange(TOKENS)
    gone = (place >= 4) & (place < BLOCK - (HALF - 4))
    seen = torch.ones(TOKENS, TOKENS).tril().bool() & ~((place >= BLOCK)[:, None] & gone)
    _, keys = attend_dense([seen.expand(6, -1, -1)] * 3)
    shown = kept_planes.draw_positions(kept_planes.POINTS, TOKENS, 0)
    [points] = find_points([np.asarray(keys[2][1])], shown)
    found = list_points(lines, "plane_8_sink", "kept") + list_points(lines, "plane_8_sink", "evicted")
    assert PLACES[1] == (8, 2, 1)
    np.testing.assert_allclose(sorted(found), sorted(map(tuple, points)), atol=1e-9)


def test_the_papers_heads_have_places_in_other_models():
    paper, windowed = (
        SimpleNamespace(layers=28, heads=8, held=tuple(range(28))),
        SimpleNamespace(layers=6, heads=1, held=(2, 3, 4, 5)),
    )
    assert [find_place(*own, paper) for own in kept_planes.PLACES.values()] == list(kept_planes.PLACES.values())
    assert [find_place(*own, windowed) for own in kept_planes.PLACES.values()] == [(2, 0), (5, 0), (4, 0), (2, 0)]


@pytest.mark.parametrize("rows", [40, 5])
def test_volumes_are_log_determinants(rows):
    keys = np.random.default_rng(0).normal(size=(2, rows, 16)) + 1
    for unit in (False, True):
        own = keys / np.linalg.norm(keys, axis=-1, keepdims=True) if unit else keys
        gram = own.swapaxes(1, 2) @ own if rows > 16 else own @ own.swapaxes(1, 2)
        expected = np.linalg.slogdet(gram).logabsdet / gram.shape[1]
        np.testing.assert_allclose(measure_volumes(torch.tensor(keys), unit), expected, rtol=1e-10)
    assert measure_volumes(torch.ones(1, rows, 16), False).isfinite().all()  # all singular values but one are 0


def test_histograms_and_claims_of_volumes():
    lines = read(KeptVolume())["kept_volume"]
    volumes = {}
    for policy in kept_planes.COMPARED:
        rows = [layer.rows.view().keys[0] for layer in compress(policy, HALF).contexts[0].own_layers]
        own = volumes[policy.method] = torch.cat([measure_volumes(keys, False) for keys in rows])
        shares = np.histogram(own, kept_volume.BINS, (kept_volume.LOW, kept_volume.HIGH))[0] / 6
        assert find_values(lines, quantity="volume", series=policy.method) == pytest.approx(list(shares))
    for other in ("tova", "sink"):
        wider = float((volumes["keydiff"] > volumes[other]).double().mean())
        assert find_values(lines, quantity=f"wider_{other}") == [pytest.approx(wider)]


def test_errors_are_those_of_a_pass_that_does_not_see_evicted_rows(monkeypatch):
    """Nothing is removed at 0, and the error is exactly 0."""
    monkeypatch.setattr(residual_error, "REMOVED", (0.0, 0.75))
    lines = read(ResidualError())["residual_error"]
    causal = torch.ones(TOKENS, TOKENS).tril().bool()
    full, _ = attend_dense([causal.expand(6, -1, -1)] * 3)
    means = {}
    for policy in ResidualError.policies:
        name = policy.method
        assert {own.value for own in lines if own.series == name and 0 in (own.x, own.y)} == {0.0}
        cache, masks = compress(policy, 0.25, 120, None), causal.repeat(3, 6, 1, 1)
        for layer, mask in enumerate(masks):
            for head, own in enumerate(mask):
                kept = cache.places(layer, head // 3)
                own[120:, :120] = torch.isin(torch.arange(120), kept)
        cut, _ = attend_dense(masks)
        errors = [float((one - two)[-30:].norm(dim=-1).mean()) for one, two in zip(full, cut, strict=True)]
        found = {place: own for place, own in values(lines, "error_by_layer", name).items() if place[1] == 0.75}
        assert list(found.values()) == pytest.approx(errors, rel=1e-9) and min(errors) > 0.01
        means[name] = np.mean(errors)
        assert find_values(lines, quantity="error", series=name, x=0.75) == [pytest.approx(means[name])]
    smallest = min(means, key=means.get) == "expected_attention"
    assert find_values(lines, quantity="least") == [(1 + smallest) / 2]  # at 0 all errors are equal


def test_layers_with_a_sliding_window_count_in_the_residual_stream(monkeypatch):
    """They keep their window, and the others are cut; such a model reads the prompt for each method."""
    monkeypatch.setattr(residual_error, "REMOVED", (0.5,))
    found = policy_reads.read_policies(make_double("gemma3"), ids(TOKENS), 0, [ResidualError()], 0, True)
    [(_, lines)] = found
    for policy in ResidualError.policies:
        errors = values(lines, "error_by_layer", policy.method)
        assert [layer for layer, _ in errors] == list(range(6))
        assert [own == 0 for own in errors.values()] == [True, True, False, False, False, False]  # the third is cut


def test_studies_share_what_is_read_alike(monkeypatch):
    read_alone, names = GenerationContext.prefill, []
    monkeypatch.setattr(
        GenerationContext, "prefill", lambda own, part: names.append(own.choice.method.name) or read_alone(own, part)
    )
    lines = read(KeptPlanes(places=PLACES), KeptVolume())
    assert names == ["sink", "tova", "keydiff"] and all(lines.values())
    assert lines["kept_volume"] == read(KeptVolume())["kept_volume"]  # watching changes nothing


def test_a_study_has_other_files_if_a_method_has_other_settings(monkeypatch):
    for module in (passes, policy_reads):
        monkeypatch.setattr(module, "source_hash", "-".join)
    before = passes.identify_study(KeptVolume())
    monkeypatch.setattr(KeptVolume, "policies", (Policy("sink"), *kept_planes.COMPARED[1:]))
    assert passes.identify_study(KeptVolume()) != before
