"""A trained GPT as a folder that transformers loads: what comes out of a run.

It holds the weights and nothing else of a checkpoint, so no averages of Adam.
"""

import json

from ddp_course.files import write_atomically

# our names, and those of transformers' GPT2LMHeadModel
NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention": "attn",
    "query_key_value": "c_attn",
    "output": "c_proj",
    "expand": "c_fc",
    "contract": "c_proj",
}


def weights_for_transformers(network):
    """A GPT's weights under the names of GPT-2: a dict of tensors.

    GPT-2's code multiplies by matrices of (in, out), so those of the blocks are turned
    around. The head is the token embedding, and is not written a second time.
    """
    found = {}
    for name, value in network.state_dict().items():
        if name == "head.weight":
            continue
        turned = name.startswith("blocks.") and value.dim() == 2
        renamed = ".".join(NAMES.get(part, part) for part in name.split("."))
        value = value.detach().cpu()
        found[renamed] = (value.T if turned else value).contiguous()
    return found


def configuration(network, tokenizer):
    """What transformers needs to know of a GPT: the content of config.json, a dict."""
    vocabulary, width = network.token_embedding.weight.shape
    attention = network.blocks[0].attention
    dropouts = dict.fromkeys(["embd_pdrop", "attn_pdrop", "resid_pdrop"])
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocabulary,
        "n_positions": network.context,
        "n_embd": width,
        "n_layer": len(network.blocks),
        "n_head": width // attention.head_width,
        "activation_function": "gelu",  # the exact one; GPT-2's own is "gelu_new"
        "layer_norm_epsilon": network.norm.eps,
        **{name: attention.dropout for name in dropouts},
        "bos_token_id": None,
        "eos_token_id": getattr(tokenizer, "end_of_text", None),
        "dtype": str(network.head.weight.dtype).removeprefix("torch."),
    }


def bytes_as_tokenizer():
    """The tokenizer whose tokens are bytes, for the library `tokenizers`.

    It knows each byte by a letter: those that can be printed are their own, the others
    follow from number 256 on, as in GPT-2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printed))
    letters = {chr(byte): byte for byte in printed}
    letters |= {chr(256 + place): byte for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def export(network, tokenizer, folder):
    """Write a GPT and its tokenizer into a folder: AutoModelForCausalLM and
    AutoTokenizer load it with `from_pretrained(folder)`.

    network: not wrapped. tokenizer: Bytes or BPE. Raises UsageError where the folder
    cannot be written.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    theirs = getattr(tokenizer, "tokenizer", None) or bytes_as_tokenizer()
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    about["model_max_length"] = network.context
    weights = save(weights_for_transformers(network), {"format": "pt"})
    write_atomically(folder / "tokenizer.json", theirs.to_str())
    write_atomically(folder / "tokenizer_config.json", as_json(about))
    write_atomically(folder / "config.json", as_json(configuration(network, tokenizer)))
    write_atomically(folder / "model.safetensors", weights)


def as_json(values):
    return json.dumps(values, indent=2) + "\n"
