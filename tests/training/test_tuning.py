"""The tuning of low-rank factors: the model and its losses against transformers, batches, resumption, refusals."""

import json
import os
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn.functional import cross_entropy, kl_div

from kvbench.cli import tune as tune_command
from kvbench.models import checkpoint, local_models
from kvbench.models.low_rank import PROJECTIONS, read_factors_file
from kvbench.models.merging import load_factors, merge
from kvbench.stops import Terminated, stop_at_safe_points
from kvbench.training import tuning
from kvbench.training.interrupted_training import compare_settings, load_state, name_log, name_state
from kvbench.training.tuning import Ranks, Tally, Tuning, describe_tuning, read_tuning, write_factors
from kvbench.training.tuning_batches import TEXT, Batch, choose_length, make_batch, read_batches
from kvbench.training.tuning_call import TuningCall, check_earlier, start
from kvbench.training.tuning_model import LowRankLlama, Shape
from kvbench.training.tuning_recipe import TuningRecipe, choose_recipe
from kvbench.validation import SettingError
from tests.support.tuned_models import RandomSource, WrittenSample, make_config, make_weights, write_base
from tests.support.tuned_models import write_factors as write_random_factors

SMALL = TuningRecipe(
    rank=3, alpha=6.0, theta=5e4, longest=128, lengths="64:1,128:1", tokens=5 * 512, step=512, batch=256, rate=1e-2
)


def make_model(recipe: TuningRecipe = SMALL, filled: bool = False, scale: float = 0.2) -> LowRankLlama:
    """Return a miniature with factors, whose `b` are not zero if it is filled."""
    base, weights = make_weights(make_config())
    model = LowRankLlama(weights, Shape.of(base.config), recipe.rank, recipe.scale, recipe.theta, recipe.seed)
    if filled:
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for factor in model.factors.values():
                factor.copy_(scale * torch.randn(factor.shape, generator=draw))
    return model


def merge_into_base(model: LowRankLlama, recipe: TuningRecipe = SMALL) -> torch.nn.Module:
    """Return transformers' model with the factors in its weights, in float64."""
    config = make_config()
    factors = {f"{name}.{part}": model.factors[f"{name}_{part}"].detach() for name in PROJECTIONS for part in "ab"}
    config.rope_parameters = {"rope_type": "default", "rope_theta": recipe.theta}
    merged, _ = make_weights(config)
    _, weights = make_weights(make_config())
    merged.load_state_dict(merge(factors, weights, recipe.scale), strict=False)
    return merged.double()


def make_tuning(out: Path, recipe: TuningRecipe = SMALL, state=None) -> Tuning:
    return Tuning(make_model(recipe), recipe, out, recipe.describe(), state)


def read_factors(one: Tuning) -> dict[str, torch.Tensor]:
    return {name: factor.detach().clone() for name, factor in one.model.factors.items()}


@pytest.fixture
def miniature_base(tmp_path, monkeypatch) -> Path:
    """A miniature in the place of smollm2, and an empty folder for the output."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(local_models, "MODELS", tmp_path / "models")
    monkeypatch.setitem(checkpoint.KNOWN_MODELS, "smollm2", tmp_path / "models/smollm2")
    return write_base(tmp_path / "models")


# The model and its losses.


def test_the_model_with_factors_is_the_merged_one():
    model = make_model(filled=True)
    ids = torch.randint(0, 97, (3, 70), generator=torch.Generator().manual_seed(0))
    logits = model.predict(model(ids)).view(3, 70, -1)
    torch.testing.assert_close(logits.double(), merge_into_base(model)(ids).logits, atol=2e-4, rtol=1e-4)


def test_the_model_without_factors_is_the_base():
    base, _ = make_weights(make_config())
    ids = torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(0))
    logits = make_model(filled=True).predict(make_model(filled=True)(ids, tuned=False)).view(2, 50, -1)
    torch.testing.assert_close(logits, base(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_loss_is_that_of_answers_text_and_divergence(tmp_path):
    """Against transformers in float64, with the divergence only as far as the base reads."""
    one = make_tuning(tmp_path / "out")
    one.model = make_model(filled=True, scale=0.1)
    one.model.shape = replace(one.model.shape, positions=50)
    batch = make_batch(RandomSource(), SMALL, 0)
    loss, seen = one.compute_loss(batch)
    tuned, base = merge_into_base(one.model), make_weights(make_config())[0].double()
    ids = batch.ids.long()
    logits = tuned(ids).logits
    nats = cross_entropy(logits.flatten(0, 1)[batch.places], batch.targets, reduction="none")
    in_text = torch.tensor([kind == "text" for kind in batch.kinds])[batch.rows]
    [rows] = torch.nonzero(torch.tensor([kind == "text" for kind in batch.kinds]), as_tuple=True)
    assert 0 < len(rows) < len(ids)
    read = logits[rows, :50].log_softmax(-1), base(ids[rows]).logits[:, :50].log_softmax(-1)
    divergence = kl_div(*(part.flatten(0, 1) for part in read), reduction="batchmean", log_target=True)
    expected = nats[~in_text].mean() + SMALL.text_weight * nats[in_text].mean() + SMALL.kl_weight * divergence
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    sums = torch.zeros(len(ids), dtype=torch.double).index_add(0, batch.rows, nats)
    torch.testing.assert_close(seen[0].double(), sums, rtol=1e-4, atol=1e-3)
    assert seen[3, rows].sum().item() == pytest.approx(divergence.item() * 50 * len(rows), rel=1e-3)


def test_long_answers_outweigh_short_ones_by_the_root_of_their_length(tmp_path):
    one = make_tuning(tmp_path / "out", replace(SMALL, text_weight=0.0, kl_weight=0.0))
    ids = torch.randint(0, 97, (3, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    places = torch.cat([torch.arange(begin, end) for begin, end in ((40, 41), (64, 80), (130, 134))])
    batch = Batch(ids, places, ids.flatten()[places + 1].long(), places // 64, ("a", TEXT, "b"))
    loss, seen = one.compute_loss(batch)
    short, _, long = seen[0].tolist()
    assert loss.item() == pytest.approx((short + long / 2) / (1 + 4 / 2), rel=1e-5)
    assert one.compute_loss(replace(batch, kinds=(TEXT,) * 3))[0].item() == 0


def test_gradients_are_those_of_the_merged_weights(tmp_path):
    """Of both factors, by the chain rule from the gradients of transformers' weights."""
    recipe = replace(SMALL, kl_weight=0.0)
    one = make_tuning(tmp_path / "out", recipe)
    one.model = make_model(filled=True, scale=0.1)
    batch = make_batch(RandomSource(), recipe, 0)
    one.compute_loss(batch)[0].backward()
    merged = merge_into_base(one.model).requires_grad_()
    nats = cross_entropy(merged(batch.ids.long()).logits.flatten(0, 1)[batch.places], batch.targets, reduction="none")
    in_text = torch.tensor([kind == "text" for kind in batch.kinds])[batch.rows]
    (nats[~in_text].mean() + recipe.text_weight * nats[in_text].mean()).backward()
    weights = dict(merged.named_parameters())
    for name, module in PROJECTIONS.items():
        a, b = (one.model.factors[f"{name}_{part}"] for part in "ab")
        gradient = weights[f"model.layers.1.{module}.{name}.weight"].grad
        assert a.grad is not None and b.grad is not None and gradient is not None
        for made, expected in (
            (a.grad[1], recipe.scale * b[1].double().T @ gradient),
            (b.grad[1], recipe.scale * gradient @ a[1].double().T),
        ):
            torch.testing.assert_close(made.double(), expected, rtol=1e-3, atol=1e-4)
    assert not any(weight.requires_grad for layer in one.model.layers for weight in layer)


# Batches.


def test_a_batch_marks_the_token_before_each_one_that_counts():
    batch = make_batch(RandomSource(), SMALL, 3)
    length = choose_length(SMALL, 3)
    assert batch.ids.shape == (256 // length, length) and batch.kinds
    flat = batch.ids.flatten().tolist()
    assert [flat[place + 1] for place in batch.places.tolist()] == batch.targets.tolist()
    assert (batch.places // length == batch.rows).all() and batch.places.diff().min() > 0
    for row, kind in enumerate(batch.kinds):
        assert (batch.rows == row).sum() == (length - 1 if kind == "text" else 8)


def test_lengths_follow_their_shares_of_all_tokens():
    recipe = replace(SMALL, lengths="64:1,128:3")
    drawn = [choose_length(recipe, number) for number in range(2000)]  # every batch has as many tokens
    assert 0.71 < drawn.count(128) / 2000 < 0.79


def test_samples_have_numbers_of_their_own():
    numbers: list[int] = []

    class Noting(RandomSource):
        def draw(self, seed: int, number: int, length: int) -> WrittenSample:
            numbers.append(number)
            return super().draw(seed, number, length)

    for number in range(20):
        make_batch(Noting(), SMALL, number)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("sample", [WrittenSample("a", [1] * 200, [(1, 3)]), WrittenSample("a", [1] * 9, [])])
def test_a_sample_that_does_not_fit_is_an_error(sample):
    class Wrong(RandomSource):
        def draw(self, seed: int, number: int, length: int) -> WrittenSample:
            return sample

    with pytest.raises(ValueError, match="a: "):
        make_batch(Wrong(), SMALL, 0)


@pytest.mark.full
def test_workers_give_the_batches_of_one_process():
    alone, shared = (list(read_batches(RandomSource, SMALL, range(2, 9), workers)) for workers in (0, 2))
    assert [one.kinds for one in alone] == [one.kinds for one in shared]
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(alone, shared, strict=True))


# The training.


def test_a_tuning_lowers_the_loss(tmp_path):
    recipe = replace(SMALL, tokens=16 * 256, step=256, rate=3e-2, text_weight=0.0, kl_weight=0.0)
    one = make_tuning(tmp_path / "out", recipe)
    batch = make_batch(RandomSource(), recipe, 0)
    before = one.compute_loss(batch)[0].item()
    one.run(RandomSource, 0, float("inf"))
    assert one.compute_loss(batch)[0].item() < before - 0.3


def test_the_rate_rises_and_falls():
    rates = [SMALL.learning_rate(step) for step in range(SMALL.steps)]
    slow = replace(SMALL, warmup=0.5)
    assert rates[-1] == pytest.approx(0) and max(rates) <= SMALL.rate
    assert slow.learning_rate(0) < slow.learning_rate(1) > slow.learning_rate(3)


def run_and_die(out: Path, recipe: TuningRecipe) -> None:
    """Take two steps, write the state, take a third one, and be killed."""
    torch.set_num_threads(1)
    one = make_tuning(out, recipe)
    take = one.take_step

    def take_or_die(batches, stop=False) -> bool:
        if one.step == 2:
            one.save()
        if one.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(batches, stop)

    one.take_step = take_or_die
    one.run(RandomSource, 0, float("inf"))


def test_a_killed_tuning_ends_with_the_same_factors(tmp_path, monkeypatch):
    """To the bit, with the same learning curve."""
    monkeypatch.setattr(tuning, "LOG_EVERY", 1)
    whole = make_tuning(tmp_path / "whole")
    assert whole.run(RandomSource, 0, float("inf"))
    process = get_context("fork").Process(target=run_and_die, args=(tmp_path / "cut", SMALL))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    state = load_state(tmp_path / "cut", SMALL.describe())
    assert state is not None and state["step"] == 2
    cut = make_tuning(tmp_path / "cut", state=state)
    assert cut.run(RandomSource, 0, float("inf"))
    for name, factor in read_factors(whole).items():
        assert torch.equal(factor, read_factors(cut)[name]), name
    curves = [
        [json.loads(line) for line in name_log(tmp_path / name).read_text().splitlines()] for name in ("whole", "cut")
    ]
    for lines in curves:
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for name in ("loss", "text", "kl", "answers", "scores"):
        assert [line[name] for line in curves[0]] == [line[name] for line in curves[1]]


def test_a_pause_keeps_what_was_seen(tmp_path):
    """Lines of the log after pauses are those without them; each call takes one step at least."""
    whole, cut = make_tuning(tmp_path / "whole"), make_tuning(tmp_path / "cut")
    whole.run(RandomSource, 0, float("inf"))
    for step in range(1, 6):
        assert cut.run(RandomSource, 0, 1e-9 if step < 3 else float("inf"), 1) == (step == 5)
        assert cut.step == step
        cut = make_tuning(tmp_path / "cut", state=load_state(tmp_path / "cut", SMALL.describe()))
    lines = [json.loads(name_log(tmp_path / name).read_text()) for name in ("whole", "cut")]
    assert lines[0]["scores"] == lines[1]["scores"] and lines[0]["loss"] == lines[1]["loss"]


def test_a_signal_that_ends_the_workers_too_is_a_stop(tmp_path, monkeypatch):
    """torch raises a RuntimeError when a worker dies, wherever the program is."""
    one = make_tuning(tmp_path / "out")

    def break_off(batches, stop=False) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    monkeypatch.setattr(one, "take_step", break_off)
    with pytest.raises(Terminated), stop_at_safe_points():
        one.run(RandomSource, 0, float("inf"))


def run_rank(rank: int, folder: Path, recipe: TuningRecipe) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    one = Tuning(make_model(recipe), recipe, folder / "out", recipe.describe(), None, Ranks(rank, 2))
    one.run(RandomSource, 0, float("inf"))
    if rank:
        torch.save(read_factors(one), folder / "factors.pt")
    distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes_tune_as_one(tmp_path):
    """They share the batches of each step, and end with equal factors."""
    recipe = replace(SMALL, tokens=4 * 512)
    alone = make_tuning(tmp_path / "alone", recipe)
    alone.run(RandomSource, 0, float("inf"))
    context = get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, tmp_path, recipe)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    state, second = load_state(tmp_path / "out", recipe.describe()), torch.load(tmp_path / "factors.pt")
    assert state is not None
    for name, factor in read_factors(alone).items():
        assert torch.equal(state["weights"][name], second[name])
        torch.testing.assert_close(second[name], factor, rtol=1e-3, atol=2e-4)
    lines = [json.loads(name_log(tmp_path / name).read_text()) for name in ("alone", "out")]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], abs=2e-3) and lines[0]["scores"] == lines[1]["scores"]


def test_a_tuning_begun_with_other_settings_is_refused(tmp_path):
    out = tmp_path / "out"
    make_tuning(out).run(RandomSource, 0, float("inf"), 1)
    with pytest.raises(SettingError, match=r"--rate: 0\.5, but the training in out\.training was begun with 0\.01"):
        load_state(out, replace(SMALL, rate=0.5).describe())
    compare_settings(out, SMALL.describe(), SMALL.describe())


def test_a_loss_that_is_not_finite_changes_no_factor(tmp_path):
    one = make_tuning(tmp_path / "out")
    one.model.embedding = one.model.embedding * float("inf")
    before = read_factors(one)
    with pytest.raises(SettingError, match="gradient of step 1 is not finite"):
        one.run(RandomSource, 0, float("inf"))
    assert all(torch.equal(factor, before[name]) for name, factor in read_factors(one).items())


def test_the_file_says_what_it_is(tmp_path):
    one = make_tuning(tmp_path / "out")
    one.run(RandomSource, 0, float("inf"))
    write_factors(one.out, one.model, describe_tuning("abc", "smollm2", SMALL, one.step, 1))
    file = read_factors_file(one.out, "model.factors")
    assert (file.base, file.rank, file.alpha, file.theta, file.longest) == ("abc", 3, 6.0, 5e4, 128)
    assert not name_state(one.out).exists()


def test_a_second_tuning_begins_with_the_factors_of_the_first(tmp_path, miniature_base):
    """Its file says how both were made."""
    base = checkpoint.Checkpoint("base", str(miniature_base))
    one = make_tuning(tmp_path / "one")
    one.run(RandomSource, 0, float("inf"))
    write_factors(one.out, one.model, describe_tuning(base.identity(), "smollm2", SMALL, one.step, 1))
    recipe = replace(SMALL, seed=1, tokens=512)
    check_earlier(one.out, recipe, base)
    file = read_factors_file(one.out, "--start")
    other = make_tuning(tmp_path / "other", recipe)
    other.model.start_from(load_factors(file))
    for name, factor in read_factors(other).items():
        assert torch.equal(factor, read_factors(one)[name].bfloat16().float())
    write_factors(other.out, other.model, describe_tuning("abc", "smollm2", recipe, 1, 2, read_tuning(file)))
    stages = read_tuning(read_factors_file(other.out, "--start"))
    assert [(stage["recipe"]["seed"], stage["steps"], stage["gpus"]) for stage in stages] == [(0, 5, 1), (1, 1, 2)]
    for name, value, message in (
        ("rank", 4, "4: one has 3"),
        ("alpha", 1.0, "1.0: one"),
        ("theta", 1e4, "10000.0: one"),
    ):
        with pytest.raises(SettingError, match=f"--{name}={message}"):
            check_earlier(one.out, replace(recipe, **{name: value}), base)


def test_calls_go_on_with_the_tuning_that_they_began(tmp_path, miniature_base):
    """A call that leaves out --start, or adds it, goes on with another tuning, and is refused."""
    first, second = (
        TuningCall("smollm2", tmp_path / "out" / name, tmp_path, SMALL, "cpu", make_source=RandomSource, steps=5)
        for name in ("first", "second")
    )
    assert start(first) == 5
    second = replace(second, recipe=replace(SMALL, seed=1, tokens=1024), earlier=first.out)
    assert start(replace(second, steps=1)) == 1 and not second.out.exists()
    with pytest.raises(SettingError, match="--start: none, but the training in second.training was begun with"):
        start(replace(second, earlier=None))
    assert start(second) == 2
    stages = read_tuning(read_factors_file(second.out, "--start"))
    assert [(stage["recipe"]["seed"], stage["steps"]) for stage in stages] == [(0, 5), (1, 2)]
    still = replace(second, out=tmp_path / "out" / "still", recipe=replace(second.recipe, rate=1e-12))
    start(still)
    begun, ended = load_file(first.out), load_file(still.out)
    assert all(torch.equal(ended[name], tensor) for name, tensor in begun.items())
    other = replace(second, out=tmp_path / "out" / "other", steps=1, earlier=None)
    start(other)
    with pytest.raises(SettingError, match="--start: .*, but the training in other.training was begun with none"):
        start(replace(other, earlier=first.out))


def test_a_call_is_refused_before_texts_are_packed(tmp_path, miniature_base):
    call = TuningCall("smollm2", tmp_path / "out" / "f", tmp_path / "texts", SMALL, "cpu", steps=1)
    call.out.touch()
    with pytest.raises(SettingError, match="there is a file; delete it or give another name"):
        start(call)
    call.out.unlink()
    start(replace(call, make_source=RandomSource))
    with pytest.raises(SettingError, match="--seed: 1, but the training in f.training was begun with 0"):
        start(replace(call, recipe=replace(SMALL, seed=1)))
    assert not call.texts.exists()


def test_factors_that_no_tuning_can_begin_with_are_refused(tmp_path, miniature_base):
    """Nothing is trained before that."""
    base, path = checkpoint.Checkpoint("base", str(miniature_base)), tmp_path / "f"
    tunings = json.dumps([{"steps": 1}])
    for metadata, message in (
        ({"model": "abc"}, "the factors are of the base abc, and --model is "),
        *(({"tunings": text}, "its metadata do not say how the factors were tuned") for text in ("", "5", "[]", "[5]")),
    ):
        write_random_factors(path, **metadata)
        with pytest.raises(SettingError, match=f"--start=.*: {message}"):
            check_earlier(path, SMALL, base)
    factors = write_random_factors(path, tunings=tunings)
    check_earlier(path, SMALL, base)
    about = read_factors_file(path, "--start").metadata
    infinite = factors | {"q_proj.a": factors["q_proj.a"] * float("inf")}
    fewer = {name: factor[:1].contiguous() for name, factor in factors.items()}
    for tensors, message in ((infinite, "not finite"), (fewer, "factors for 1 layers, and the base has more")):
        save_file(tensors, path, dict(about))
        with pytest.raises(SettingError, match=f"--start=.*{message}"):
            check_earlier(path, SMALL, base)


def test_tallies_of_several_gpus_are_summed():
    first = Tally({"a": [1.0, 2.0, 1.0, 1.0]}, 0.5, 2.0, 0.1, 10)
    first.add(Tally({"a": [3.0, 2.0, 0.0, 1.0], "text": [4.0, 2.0, 0.0, 1.0]}, 0.5, 9.0, 9.0, 10))
    described = first.describe()
    assert (described["loss"], described["text"], described["kl"]) == (1.0, 2.0, 0.5)
    assert (described["scores"], described["tokens_per_s"]) == ({"a": 50.0}, 10)


# What is refused.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "--rank=0"),
        ({"theta": float("nan")}, "--theta=nan: a number above 0"),
        ({"kl_weight": -1.0}, "--kl-weight=-1.0"),
        ({"warmup": 1.0}, "--warmup=1.0"),
        ({"lengths": "1024"}, "--lengths=1024: length:share"),
        ({"lengths": "1024:0"}, "--lengths=1024:0: "),
        ({"lengths": "1000:1"}, "1000: a divisor of --batch"),
        ({"lengths": "32768:1"}, "32768: from 64 to --longest"),
        ({"step": 100_000}, "--step=100000: a multiple of --batch"),
        ({"tokens": 1}, "--tokens=1: at least one step"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused(given, message):
    with pytest.raises(SettingError, match=message):
        choose_recipe(given)
    assert choose_recipe({"rank": None}) == TuningRecipe()


REFUSED = {
    "--model llama --out {}/f": "--model",
    "--model smollm2 --out {}": "this is a folder; name a file",
    "--model smollm2 --out {}/f --gpus 3 --step 131072": "--gpus=3: a divisor of the number of batches of a step, 2",
    "--model smollm2 --out {}/f --pause 0": "--pause=0.0: a number above 0",
    "--model smollm2 --out {}/f --steps 0": "--steps",
    "--model smollm2 --out {}/f --workers -1": "--workers",
    "--model smollm2 --out {}/f --device tpu": "--device",
    "--model smollm2 --out {}/f --device cpu": "--device=cpu: is for a trial; give --steps, too",
    "--model smollm2 --out {}/f --rank x": "--rank",
    "--model smollm2 --out {}/f": "--device=cuda: there is no GPU here; this processor would take about",
    "--model smollm2 --out {}/f --start {}/none": "--start={}/none: no such file of low-rank factors",
    "--model smollm2 --out {}/f --start {}/../out/f": "--start={}/../out/f: is --out, too; give --out another name",
    "--model smollm2 --out {}/f --evaluate --start {}/g": "--out={}/f: no such file of low-rank factors",
    "--model smollm2 --out {}/f --evaluate": "no such file of low-rank factors",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_cannot_be_used_are_one_line(options, tmp_path, monkeypatch, capsys, miniature_base):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    capsys.readouterr()  # of the fixture
    out = tmp_path / "out"
    assert tune_command.main(options.replace("{}", str(out)).split()) == 2
    said = capsys.readouterr().err
    assert REFUSED[options].replace("{}", str(out)) in said and said.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_the_examples_of_the_help_can_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "kvbench dev tune "
    examples = [line.strip().split("  ")[0] for line in tune_command.__doc__.splitlines() if f"  {command}" in line]
    assert len(examples) == 7
    for example in examples:
        options = tune_command.make_parser().parse(example.removeprefix(command).split())
        tune_command.check_options(options, choose_recipe(vars(options)))
