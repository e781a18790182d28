"""Train the compressors of DeltaKV.

Examples:
  kvbench calibrate deltakv --model reference --out FILE --steps 400 --length 512
  kvbench calibrate deltakv --model reference --out FILE --samples
  kvbench calibrate deltakv --model FOLDER --out FILE --text FOLDER
  kvbench calibrate deltakv --model smollm2 --out FILE --packages torch,transformers,pandas,numpy
  kvbench calibrate deltakv --model FOLDER --out FILE --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT
  kvbench calibrate deltakv --model FOLDER --out FILE --text FOLDER --remove reference

A step reads a batch twice: once with the untouched model, and once with keys and values of every layer replaced by what
the compressors leave of them. The loss is the cross-entropy of the next token, plus the mean squared error of each
layer's keys and values. Only the compressors are trained (kvbench/training/delta_losses.py).

The recipe is the authors': a SwiGLU network of inner width 3072, a linear one back, codes of a quarter of 2 d_k (d_k
being the width of the keys of all KV heads of a layer), AdamW with a rate of 2e-4, 20,000 steps of 8192 tokens. For
models with 2 d_k below 1024 kvbench scales it: with w = 2 d_k / 1024, the inner width is 3072 w, the rate 2e-4 / w^2
but at most 3e-3, and there are 20,000 w^2 steps of 8192 w tokens.

Some options are for the paper's ablations. --kind full has its larger pair of networks, both with GELU, an inner width
of 4096 (4096 w) and biases. --remove reference trains codes of whole rows, with 3/8 of 2 d_k numbers (768 of 2048), for
codec.remove=reference. --stride and --nearest choose the references; the codec's settings of these names should be
equal. --loss trains with one of the two losses alone, and the log still has both.

By default the command trains on essays that it writes (tasks/common/synthetic_prose.py). They are enough to try it; for
a real model give real text. Without any at hand, --packages takes the docstrings of installed packages. The embedded
model has read nothing but samples of its benchmarks, so --samples makes such samples for it, from seeds that no
evaluation uses. If the text has fewer tokens than the training, it is read several times.

--untrained writes the weights with which the training would begin. They are for measurements of time and memory, so
--model may also be a file of conf/model/shapes/. The file names no model, and its metadata say what it is.

The compressors are trained in float32 and written in bfloat16, as the authors' are; the losses on the sequences that
are held out are those of the written ones. The training writes its state to OUT.training every minute and its losses
to OUT.log.jsonl at every step. After an interruption the same command goes on.
"""

from argparse import Namespace

from kvbench.cli.calibration_options import SOURCES, add_text_options, check_text_options, require_dtype
from kvbench.cli.command import CommandParser, refuse_given

RECIPE = {
    "kind": "kind", "remove": "remove", "stride": "stride", "nearest": "neighbours", "loss": "loss",
    "steps": "steps", "length": "length", "batch": "batch", "lr": "rate", "code": "code", "inner": "inner",
}  # fmt: skip
REFERENCES = ("stride", "nearest")  # options without a meaning for --remove reference
# options without a meaning for --untrained
TRAINING = ("steps", "length", "batch", "lr", "dtype", "remove", *REFERENCES, "loss", *SOURCES)


def add_options(parser: CommandParser) -> None:
    """Add the options of this method."""
    add_text_options(parser)
    parser.add_argument("--steps", type=int, help="steps of the optimizer (default: see below)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: see below, at most the model's)")
    parser.add_argument("--batch", type=int, help="sequences of a step (default: 1)")
    parser.add_argument("--lr", type=float, help="peak of the learning rate (default: see below)")
    parser.add_argument("--code", type=int, help="width of a code (default: see below)")
    parser.add_argument("--inner", type=int, help="inner width of the networks (default: see below)")
    parser.add_argument("--kind", help="light or full, of the networks (default: light)")
    parser.add_argument("--remove", help="nothing, or reference: codes of whole rows (default: nothing)")
    parser.add_argument("--stride", type=int, help="distance between references (default: 10)")
    parser.add_argument("--nearest", type=int, help="references of a token (default: 4)")
    parser.add_argument("--loss", help="both, mse (keys and values) or ntp (next token) (default: both)")
    parser.add_argument("--untrained", action="store_true", help="write the first weights and do not train")
    parser.add_argument("--dtype", help="float32 or bfloat16, of the model (default: by the device)")


def calibrate(options: Namespace, device: str) -> None:
    """Train compressors, write their file, and print its path and the losses on the sequences held out.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model, the text or the state of the training cannot be read.
    """
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    require_dtype(dtype)
    check_text_options(options)
    if options.untrained:
        refuse_given(options, TRAINING, "--untrained: trains nothing")
    if options.remove == "reference":
        refuse_given(options, REFERENCES, "--remove=reference: there are no references")

    import torch

    from kvbench.cli.calibration_steps import UNTRAINED, load_untrained_layout, open_checkpoint, read_sequences
    from kvbench.training import delta_training, interrupted_training
    from kvbench.training.delta_losses import check_layout, choose_recipe, draw_compressors

    if options.untrained:
        layout = load_untrained_layout(options)
        check_layout(layout)
        width = 2 * layout.heads * layout.dim
        given = {name: getattr(options, name) for name in ("code", "inner", "kind", "seed")}
        recipe = choose_recipe(width, layout.longest, given)
        drawn = draw_compressors(layout.layers, width, recipe)
        delta_training.write_compressors(options.out, drawn, UNTRAINED)
        print(f"{options.out}: untrained compressors of {layout.layers} layers, {width} to {recipe.code} numbers")
        return
    checkpoint = open_checkpoint(options)
    layout = checkpoint.layout()
    check_layout(layout)
    width = 2 * layout.heads * layout.dim
    given = {name: getattr(options, option) for option, name in RECIPE.items()}
    recipe = choose_recipe(width, layout.longest, given | {"seed": options.seed})
    checkpoint.check()
    settings = {option: getattr(recipe, name) for option, name in RECIPE.items()}
    settings |= {"model": checkpoint.identity(), "seed": recipe.seed, "dtype": dtype, "device": device}
    state = interrupted_training.load_state(options.out, settings)
    weights = layout.layers * recipe.count_weights(width)
    interrupted_training.check_room(options.out, layout.layers, weights, recipe.steps)

    wanted, least = (delta_training.count_needed(count) for count in (recipe.steps * recipe.batch, recipe.batch))
    read = read_sequences(options, checkpoint, recipe.length, wanted, least)
    text = read.text
    if state is not None:
        interrupted_training.compare_settings(options.out, state["settings"], {"text": text.digest})
    settings["text"] = text.digest

    model = checkpoint.weights(getattr(torch, dtype), device)
    training = delta_training.DeltaTraining(model, width, recipe, text, options.out, settings, state)
    passes = recipe.steps * recipe.batch / len(training.sequences)
    print(
        f"{read.source}: {text.texts} texts, {len(training.sequences)} sequences of {recipe.length} tokens, each is "
        f"read {passes:.1f} times; {len(training.held_out)} more are held out"
    )
    try:
        training.run()
    except KeyboardInterrupt as stop:
        where = f"step {training.step} of {recipe.steps}"
        stop.args = (f" at {where}; the same command goes on from step {training.saved}",)
        raise
    losses = training.evaluate()
    training.write(delta_training.describe_training(checkpoint.identity(), recipe, text, read.source, losses))
    mean = sum(losses.errors) / len(losses.errors)
    print(f"{options.out}: compressors of {layout.layers} layers, {width} to {recipe.code} numbers")
    print(
        f"held out: cross-entropy {losses.untouched:.4f} untouched, {losses.compressed:.4f} with compressors, "
        f"mean squared error {mean:.4f} per layer"
    )
