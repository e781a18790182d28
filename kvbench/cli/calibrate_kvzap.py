"""Train the surrogates of KVzap.

Examples:
  kvbench calibrate kvzap --model reference --out FILE
  kvbench calibrate kvzap --model FOLDER --out FILE --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT
  kvbench calibrate kvzap --model FOLDER --out FILE --kind linear --text FOLDER

The model reads a text, the request to repeat it, and the text again. The logarithm of each row's KVzip+ score is what
the surrogate of the layer shall return for the row's hidden state (kvbench/training/kvzap_training.py).

The recipe is the authors' (NVIDIA/kvpress, kvzap/train.py): 2400 texts of about 1000 tokens, 500 sampled tokens of
each, an inner width of 512, AdamW with a rate of 5e-3 that falls as a cosine, 15 epochs of batches of 512; a ridge
regression for --kind linear. For models with hidden states narrower than 4096 kvbench scales it: with w = width / 4096
there are 2400 w texts and an inner width of 512 w. The memory of all sampled hidden states is needed at once.

By default the command trains on essays that it writes (tasks/common/synthetic_prose.py). They are enough to try it; for
a real model give real text.

The file is written when everything is done. After an interruption the command starts anew.
"""

from argparse import Namespace

from kvbench.cli.calibration_options import add_text_options, check_text_options
from kvbench.cli.command import CommandParser, refuse_given
from kvbench.validation import require_choice

KINDS = ("linear", "mlp")
RECIPE = {
    "sequences": "sequences", "length": "length", "tokens": "tokens", "inner": "inner", "epochs": "epochs",
    "batch": "batch", "lr": "rate",
}  # fmt: skip
STEPS = ("inner", "epochs", "batch", "lr")  # options without a meaning for a ridge regression


def add_options(parser: CommandParser) -> None:
    """Add the options of this method."""
    parser.add_argument("--kind", default="mlp", help="linear or mlp (default: mlp)")
    add_text_options(parser)
    parser.add_argument("--sequences", type=int, help="texts to train on (default: see below)")
    parser.add_argument("--length", type=int, help="tokens of a text (default: 1000, if the model takes twice as many)")
    parser.add_argument("--tokens", type=int, help="sampled tokens of a text (default: half of --length)")
    parser.add_argument("--inner", type=int, help="inner width of an mlp (default: see below)")
    parser.add_argument("--epochs", type=int, help="passes over the samples (default: 15)")
    parser.add_argument("--batch", type=int, help="samples of a step (default: 512)")
    parser.add_argument("--lr", type=float, help="peak of the learning rate (default: 5e-3)")


def calibrate(options: Namespace, device: str) -> None:
    """Train surrogates, write their file, and print its path and the errors on the texts held out.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    require_choice("--kind", options.kind, KINDS)
    if options.kind == "linear":
        refuse_given(options, STEPS, "--kind=linear: solves a ridge regression")
    check_text_options(options)

    from kvbench.cli.calibration_steps import choose_dtype, open_checkpoint, read_sequences
    from kvbench.training import kvzap_training

    checkpoint = open_checkpoint(options)
    layout = checkpoint.layout()
    given = {name: getattr(options, option) for option, name in RECIPE.items()}
    recipe = kvzap_training.choose_recipe(
        layout.hidden, layout.longest, given | {"kind": options.kind, "seed": options.seed}
    )
    dtype = choose_dtype(device)
    kvzap_training.check_memory(recipe, layout.layers, layout.hidden, dtype)

    least = recipe.total if options.sequences is not None else kvzap_training.LEAST
    read = read_sequences(options, checkpoint, recipe.length, recipe.total, least, between="\n\n")
    prompts = kvzap_training.divide_texts(read.text.sequences, checkpoint.tokenizer())

    model = checkpoint.weights(dtype, device)
    count = len(read.text.sequences)
    print(f"{read.source}: {count} sequences of {recipe.length} tokens, {len(prompts.held_out)} are held out")
    samples, unseen = (
        kvzap_training.collect_samples(model, prompts, part, recipe) for part in (prompts.trained, prompts.held_out)
    )
    networks = kvzap_training.train(samples, recipe, device)
    errors = kvzap_training.evaluate(networks, unseen)
    origin = read.describe_origin()
    kvzap_training.write_surrogates(options.out, networks, samples.layers, layout, origin, recipe, errors)
    print(f"{options.out}: {options.kind} surrogates of {len(networks)} layers, {samples.count} samples")
    print(
        f"held out: mean squared error {errors.mean_error:.4f}, R² {errors.mean_r2:.3f} (mean of all layers and heads)"
    )
