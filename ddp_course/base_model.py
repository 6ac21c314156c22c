"""A small language model to fine-tune, and questions to fine-tune it on: both made from Python's standard library.

Every second file teaches the model what Python looks like; the others give the questions.
"""

import ast
import csv
import hashlib
import warnings
from pathlib import Path

import torch

from ddp_course import corpus

SHAPE = {  # Llama's, but with 400,000 parameters and not billions
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
VOCABULARY, CONTEXT, BATCH, UPDATES = 1024, 64, 16, 240
LONGEST = 72  # characters of a question, or of an answer
END, PAD = "<|end|>", "<|pad|>"
CHAT = (  # as Jinja: "user: ...", a new line, "assistant: ..." and the token that ends a text
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def questions():
    """A CSV file with the columns `user`, what a function does, and `prompt`, its first line, as a string.

    Both are from the standard library: the docstring's first line, and what follows `def`. Made once on a machine.
    """
    sources = [path.read_bytes() for path in corpus.files_of("python")[::2]]

    def make(folder):
        with (folder / "questions.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["user", "prompt"])
            rows.writerows(dict(functions_in(sources)).items())  # no question twice

    return str(corpus.made_once("questions", _fingerprint(sources), make) / "questions.csv")


def functions_in(sources):
    """What functions do, by their docstrings, and their first lines: pairs of strings. sources: bytes."""
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the sources of old have in their strings
            tree = ast.parse(source)
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if docstring:
                what = docstring.splitlines()[0].strip()
                line = f"def {node.name}({ast.unparse(node.args)}):"
                if what.isascii() and " " in what and max(len(what), len(line)) <= LONGEST:
                    yield what, line


def small_llama():
    """The folder of a small Llama and its tokenizer, pretrained for some seconds. Made once on a machine."""
    sources = [path.read_bytes() for path in corpus.files_of("python")[1::2]]
    return str(corpus.made_once("llama", _fingerprint(sources), lambda folder: pretrain(sources, folder)))


def pretrain(sources, folder):
    """Train a tokenizer, and then a model to guess the next token: lesson 10's recipe, in short."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    print("pretraining a small Llama, once on this machine: half a minute", flush=True)
    corpus.BPE.train(
        (source.decode(errors="replace") for source in sources[::9]),
        VOCABULARY,
        folder / "pieces.json",
        [END, PAD],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "pieces.json"), eos_token=END, pad_token=PAD, chat_template=CHAT
    )
    windows = some_windows(tokenizer, sources)
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, **SHAPE,
    )  # fmt: skip
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 6e-3, UPDATES, pct_start=0.1, cycle_momentum=False
    )
    for window in windows[torch.randint(len(windows), (UPDATES, BATCH))]:
        optimizer.zero_grad()
        model(input_ids=window, labels=window).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.set_rng_state(random_state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def some_windows(tokenizer, sources):
    """Functions and their docstrings, as they stand in a file, cut into windows: int64 (windows, CONTEXT)."""
    texts = [f'{line}\n    """{what}"""\n' for what, line in functions_in(sources)]
    tokens = [token for text in tokenizer(texts)["input_ids"] for token in (*text, tokenizer.eos_token_id)]
    return torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def _fingerprint(sources):
    """Of the text, and of this file: who changes how it is made gets it made anew."""
    return hashlib.sha256(Path(__file__).read_bytes() + corpus.END.join(sources)).hexdigest()[:16]
