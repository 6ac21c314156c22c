"""Tokenizers: text into numbers, and back."""

import numpy as np

from ddp_course import UsageError
from ddp_course.files import open_file


def small_type(vocabulary):
    """The smallest integer type for token ids: 16 bits up to 65,536 of them, or 32."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


class Bytes:
    """A tokenizer that needs no training: a token is a byte of UTF-8."""

    vocabulary = 256

    def encode(self, content):
        """bytes -> uint16 (tokens,)"""
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens):
        """numbers -> str"""
        return bytes(tokens).decode("utf-8", errors="replace")


class BPE:
    """Byte-pair encoding: a token is a byte, or two tokens that often come together.

    P. Gage, 1994; R. Sennrich, B. Haddow, A. Birch, "Neural Machine Translation of Rare
    Words with Subword Units", 2016; on bytes: GPT-2. Trained by Hugging Face's
    `tokenizers`.
    path: any tokenizer.json, for example that of a model on the Hugging Face Hub.
    Raises UsageError for another file.
    """

    def __init__(self, path):
        from tokenizers import Tokenizer

        try:
            open_file(path).close()  # a pipe would be waited for
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # it raises no narrower class
            raise UsageError(f"{path} is not a tokenizer.json") from None
        self.vocabulary = self.tokenizer.get_vocab_size()

    @staticmethod
    def train(texts, vocabulary, path, special=()):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=alphabet,
            special_tokens=list(special),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))

    def encode(self, content):
        """bytes -> uint16 or uint32 (tokens,), without tokens for begin and end"""
        text = content.decode("utf-8", errors="replace")
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=small_type(self.vocabulary))

    def decode(self, tokens):
        return self.tokenizer.decode(list(map(int, tokens)))
