"""Makes the character tokenizer of the arithmetic recipes: `python scripts/make_arithmetic_tokenizer.py DIR`.

Sixteen ids: <pad>, <eos>, the digits and + - * =.
"""

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = ["<pad>", "<eos>", *"0123456789", *"+-*="]


def main(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    print(f"{len(CHARACTERS)} tokens written to {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
