"""A small language model to fine-tune, pretrained for some seconds on Python's standard
library.
"""

import shutil

import torch

from ddp_course.data.questions import CHAT, END, PAD, functions_in
from ddp_course.data.text import BPE, files_of, fingerprint_of, made_once

SHAPE = {  # Llama's, but with 400,000 parameters and not billions
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
# the chat template of HuggingFaceTB/SmolLM2-135M-Instruct, (c) Hugging Face, Apache 2.0
SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY, CONTEXT, BATCH, UPDATES = 1024, 64, 16, 240


def small_llama():
    """The folder of a small Llama and its tokenizer, pretrained for some seconds. Made
    once on a machine.
    """
    sources = [path.read_bytes() for path in files_of("python")[1::2]]
    return str(
        made_once(
            "llama",
            fingerprint_of(__file__, sources),
            lambda folder: pretrain(sources, folder),
        )
    )


def with_chat_of_smollm2(base, folder):
    """Copy a model to a folder, with the chat template and the special tokens of SmolLM2's
    instruct models. Returns the folder, as text.

    base: of small_llama, whose two special tokens get other names.
    """
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(base, folder)
    file = folder / "tokenizer.json"
    pieces = file.read_text(encoding="utf-8")
    pieces = pieces.replace(END, "<|im_end|>").replace(PAD, "<|im_start|>")
    file.write_text(pieces, encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=SMOLLM2,
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def pretrain(sources, folder):
    """Train a tokenizer, and then a model to guess the next token: lesson 10's recipe,
    in short.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    print("pretraining a small Llama, once on this machine: half a minute", flush=True)
    BPE.train(
        (source.decode(errors="replace") for source in sources[::9]),
        VOCABULARY,
        folder / "pieces.json",
        [END, PAD],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "pieces.json"),
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT,
    )
    windows = some_windows(tokenizer, sources)
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, **SHAPE,
    )  # fmt: skip
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-3, weight_decay=0.1, betas=(0.9, 0.95)
    )
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
    """Functions and their docstrings, as they stand in a file, cut into windows: int64
    (windows, CONTEXT).
    """
    texts = [f'{line}\n    """{what}"""\n' for what, line in functions_in(sources)]
    tokens = [
        token
        for text in tokenizer(texts)["input_ids"]
        for token in (*text, tokenizer.eos_token_id)
    ]
    return torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
