"""The embedded model's tokenizer: byte-level BPE with 4096 pieces, learned from the generators' own text.

Digits, and letters of words in capitals, are pieces of their own. So numbers and variable names are copied letter by
letter, in the same way everywhere. A leading space belongs to the piece after it. Encoding puts `<bos>` first.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<bos>", "<eos>", "<pad>"]
PIECES = r" ?\p{Lu}?\p{Ll}+| ?\p{L}| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], size: int, folder: Path) -> None:
    """Learn `size` pieces from texts and write them into a folder from which AutoTokenizer loads them."""
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
