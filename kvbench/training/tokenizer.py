"""Train the embedded model's tokenizer: byte-level BPE with 4096 pieces, learned from texts of the generators.

Every digit, and every letter of a word in capitals, is a separate piece. The model therefore copies numbers and
variable names character by character, wherever they occur. A leading space belongs to the piece after it. An encoded
text begins with `<bos>`.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<bos>", "<eos>", "<pad>"]
PIECES = r" ?\p{Lu}?\p{Ll}+| ?\p{L}| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], size: int, folder: Path) -> None:
    """Learn a tokenizer of `size` pieces from texts, and write it to a folder from which AutoTokenizer can load it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
    ).save_pretrained(folder)
