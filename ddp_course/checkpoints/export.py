"""A trained GPT as a folder that transformers loads: what comes out of a run.

It holds the weights and nothing else of a checkpoint, so no averages of Adam.
"""

import json

from ddp_course.files import write_atomically

# our names, and those of transformers' GPT2LMHeadModel, and of its LlamaForCausalLM
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
LLAMA = {
    "token_embedding": "model.embed_tokens",
    "norm": "model.norm",
    "blocks": "model.layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "expand": "up_proj",
    "contract": "down_proj",
}


def is_modern(network):
    """Whether it is a ModernGPT, which has Llama's parts."""
    return hasattr(network.blocks[0].mlp, "gate")


def weights_for_transformers(network):
    """A GPT's weights under the names of GPT-2, or of Llama: a dict of tensors.

    GPT-2's code multiplies by matrices of (in, out), so those of the blocks are turned
    around. The head is the token embedding, and is not written a second time.
    """
    found, modern = {}, is_modern(network)
    names = LLAMA if modern else NAMES
    for name, value in network.state_dict().items():
        if name == "head.weight":
            continue
        turned = name.startswith("blocks.") and value.dim() == 2 and not modern
        renamed = ".".join(names.get(part, part) for part in name.split("."))
        value = value.detach().cpu()
        found[renamed] = (value.T if turned else value).contiguous()
    return found


def configuration(network, tokenizer):
    """What transformers needs to know of a GPT: the content of config.json, a dict."""
    vocabulary, width = network.token_embedding.weight.shape
    attention, mlp = network.blocks[0].attention, network.blocks[0].mlp
    common = {
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": getattr(tokenizer, "end_of_text", None),
        "tie_word_embeddings": True,
        "dtype": str(network.head.weight.dtype).removeprefix("torch."),
    }
    if is_modern(network):
        return common | {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": network.context,
            "hidden_size": width,
            "intermediate_size": mlp.gate.out_features,
            "num_hidden_layers": len(network.blocks),
            "num_attention_heads": width // attention.head_width,
            "num_key_value_heads": attention.key.out_features // attention.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": network.norm.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_dropout": attention.dropout,
        }
    dropouts = ["embd_pdrop", "attn_pdrop", "resid_pdrop"]
    return common | {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": network.context,
        "n_embd": width,
        "n_layer": len(network.blocks),
        "n_head": width // attention.head_width,
        "activation_function": "gelu",  # the exact one; GPT-2's own is "gelu_new"
        "layer_norm_epsilon": network.norm.eps,
        **dict.fromkeys(dropouts, attention.dropout),
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
