"""Tokenizers: text into numbers, and back."""

import numpy as np

from ddp_course import UsageError
from ddp_course.files import open_file, write_atomically

# how tokenizers name the token that ends a text: GPT-2 and many others, Llama 3, Llama 2
# and Mistral, Gemma, DeepSeek
END_OF_TEXT = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]
END_OF_TEXT += ["<\uff5cend\u2581of\u2581sentence\uff5c>"]


def small_type(vocabulary):
    """The smallest integer type for token ids: 16 bits up to 65,536 of them, or 32."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


class Bytes:
    """A tokenizer that needs no training: a token is a byte of UTF-8."""

    vocabulary = 256
    end_of_text = None  # it has no token for that

    def encode(self, content):
        """bytes -> uint16 (tokens,)"""
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)

    def named(self, name):
        raise UsageError(f"a token is a byte: none has the name {name!r}")

    def decode(self, tokens):
        """numbers -> str"""
        return bytes(tokens).decode("utf-8", errors="replace")

    def size(self, tokens):
        """How many bytes of text these tokens are."""
        return len(tokens)


class BPE:
    """Byte-pair encoding: a token is a byte, or two tokens that often come together.

    P. Gage, 1994; R. Sennrich, B. Haddow, A. Birch, "Neural Machine Translation of Rare
    Words with Subword Units", 2016; on bytes: GPT-2. Trained by Hugging Face's
    `tokenizers`.
    path: any tokenizer.json, for example that of a model on the Hugging Face Hub.
    end_of_text: its token for the end of a text, or None. No text is encoded as this
    token, or as another special one, not even one that has its name in it.
    Raises UsageError for another file.
    """

    def __init__(self, path):
        from tokenizers import Tokenizer

        try:
            open_file(path).close()  # a pipe would be waited for
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # it raises no narrower class
            raise UsageError(f"{path} is not a tokenizer.json") from None
        self.path = path
        self.tokenizer.encode_special_tokens = True  # as text, like any other
        self.vocabulary = self.tokenizer.get_vocab_size()
        self.end_of_text = special_token(self.tokenizer, END_OF_TEXT)

    def __reduce__(self):
        return BPE, (self.path,)  # pickled, it would forget how special tokens are read

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
        write_atomically(path, tokenizer.to_str(pretty=True))

    def encode(self, content):
        """bytes -> uint16 or uint32 (tokens,), without tokens for begin and end"""
        text = content.decode("utf-8", errors="replace")
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=small_type(self.vocabulary))

    def named(self, name):
        """The id of the token with a name. Raises UsageError if there is none."""
        number = self.tokenizer.token_to_id(name)
        if number is None:
            raise UsageError(f"{self.path} has no token {name!r}")
        return number

    def decode(self, tokens):
        """numbers -> str, in which special tokens are their names"""
        numbers = list(map(int, tokens))
        return self.tokenizer.decode(numbers, skip_special_tokens=False)

    def size(self, tokens):
        """How many bytes of text these tokens are; one that cuts a letter counts three.

        The end of a text, and other special tokens, are no text.
        """
        return len(self.tokenizer.decode(list(map(int, tokens))).encode())


def special_token(tokenizer, names):
    """The id of the first of these names that is a special token; None if none is."""
    added = tokenizer.get_added_tokens_decoder().items()
    special = {token.content: number for number, token in added if token.special}
    return next((special[name] for name in names if name in special), None)
