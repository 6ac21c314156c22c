"""A GPT and its parts: attention, blocks, a head with its loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Cache:
    """Keys and values of the tokens that a GPT has read: it reads only what is new.

    read: how many tokens. Two float (batch, heads, tokens, head_width) per attention.
    """

    def __init__(self):
        self.read, self.pairs = 0, {}

    def extended(self, attention, key, value):
        """All keys and values of one attention, with those of the new tokens."""
        if attention in self.pairs:
            past_key, past_value = self.pairs[attention]
            key = torch.cat([past_key, key], dim=2)
            value = torch.cat([past_value, value], dim=2)
        self.pairs[attention] = key, value
        return key, value


class Attention(nn.Module):
    """Causal self-attention with heads: a token sees itself and those before it.

    Takes and returns float (batch, tokens, width). A. Vaswani et al., "Attention Is All
    You Need", 2017. With a Cache that is not empty, it takes one new token at a time.
    """

    causal = True

    def __init__(self, width, heads, dropout):
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be cut into {heads} heads")
        self.head_width, self.dropout = width // heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x, cache=None):
        all_three = self.query_key_value(x)
        batch, tokens, _ = all_three.shape
        query, key, value = (  # as many heads as there are weights for
            part.view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for part in all_three.chunk(3, dim=-1)
        )
        if cache is not None:
            key, value = cache.extended(self, key, value)
        mixed = self.attend(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))

    def attend(self, query, key, value):
        """Mix the values. All are float (batch, heads, tokens, head_width)."""
        dropout = self.dropout if self.training else 0.0
        # PyTorch counts a causal mask from the first key: a new token sees only that
        causal = self.causal and query.shape[2] == key.shape[2]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal
        )


class MLP(nn.Module):
    """Two linear layers with a GELU between them, where a token is four times as wide.

    Takes and returns float (batch, tokens, width). The GELU is the exact one. GPT-2's
    code approximates it with tanh, which takes longer on a CPU. D. Hendrycks and K.
    Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
    """

    def __init__(self, width):
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.contract(F.gelu(self.expand(x)))


class Block(nn.Module):
    """A layer of a GPT: attention, then an MLP, both on a residual stream."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *cache):
        x = x + self.dropout(self.attention(self.norm1(x), *cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


SHAPES = {  # of GPT; all heads are 64 wide
    "small": {"context": 128, "layers": 4, "heads": 2, "width": 128},
    "medium": {"context": 256, "layers": 6, "heads": 4, "width": 256},
    "gpt2": {"context": 1024, "layers": 12, "heads": 12, "width": 768},
}


class Head(nn.Linear):
    """A GPT's last layer: from features to logits, or to the loss of given targets.

    A vocabulary of 50,257 tokens suits no GPU, whose matrix units work on tiles of 64
    or 128 columns. So the matrix is padded with zeros for the product, and the logits
    of the padding are cut off: nothing else knows of it, no checkpoint either.
    chunked: compute the loss in pieces, never with all logits at once (torch 2.15).
    """

    chunked = False

    def forward(self, features, targets=None):
        """Features (batch, tokens, width); logits (batch, tokens, vocabulary), or with
        targets, int64 (batch, tokens), their mean cross entropy in nats, a float32.
        """
        if targets is not None and self.chunked:
            return self.chunked_loss(features.flatten(0, 1), targets.flatten())
        if padding := -self.out_features % 128:
            padded = F.linear(features, F.pad(self.weight, (0, 0, 0, padding)))
            logits = padded[..., : self.out_features]
        else:
            logits = F.linear(features, self.weight)
        if targets is None:
            return logits
        # to a compiler .float() is free, it copies nothing
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def chunked_loss(self, features, targets):
        kind, weight = features.device.type, self.weight
        if torch.is_autocast_enabled(kind):  # which does not know this function
            dtype = torch.get_autocast_dtype(kind)
            features, weight = features.to(dtype), weight.to(dtype)
        # not its own mean, which adds up in bf16: there, 4096 + 10 is 4096
        how = {"reduction": "none"}
        how |= {"options": nn.LinearCrossEntropyOptions(acc_policy="accurate")}
        return F.linear_cross_entropy(features, weight, targets, **how).float().mean()


def embed(tokens, token_embedding, position_embedding, first=0):
    """The vector of each token plus that of its position: (batch, tokens, width)."""
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    return token_embedding(tokens) + position_embedding(positions)


class Embedding(nn.Module):
    """A GPT's first part, for a pipeline: it shares these layers with the GPT."""

    def __init__(self, token_embedding, position_embedding, dropout):
        super().__init__()
        self.token_embedding = token_embedding
        self.position_embedding = position_embedding
        self.dropout = dropout

    def forward(self, tokens):
        x = embed(tokens, self.token_embedding, self.position_embedding)
        return self.dropout(x)


class GPT(nn.Module):
    """A decoder-only transformer like GPT-2: pre-norm, learned positions, tied head.

    Takes tokens, int64 (batch, tokens), at most `context` of them; returns logits,
    float (batch, tokens, vocabulary). If it is given targets, too, it returns their
    mean cross entropy in nats, so the loss is part of what DDP wraps and is compiled.
    GPT(50257, **SHAPES["gpt2"]) is the smallest of A. Radford et al., "Language Models
    are Unsupervised Multitask Learners", 2019: it has 124,439,808 parameters.
    """

    def __init__(
        self, vocabulary=256, context=128, layers=4, heads=4, width=128, dropout=0.0
    ):
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Head(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self.initialise()

    def initialise(self):
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # as in GPT-2: smaller where 2 * layers outputs are added to one sum
                residual = name.endswith(("attention.output.weight", "contract.weight"))
                std = 0.02 / (2 * len(self.blocks)) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def embed(self, tokens, first):
        return embed(tokens, self.token_embedding, self.position_embedding, first)

    def forward(self, tokens, targets=None, cache=None):
        x = self.dropout(self.embed(tokens, cache.read if cache else 0))
        for block in self.blocks:
            x = block(x) if cache is None else block(x, cache)
        if cache is not None:
            cache.read += tokens.shape[1]
        return self.head(self.norm(x), targets)

    def parts(self):
        """What a pipeline is cut from: modules that compute the logits one after the
        other, with the GPT's own layers. The first and the last share the tied matrix.
        """
        embeddings = self.token_embedding, self.position_embedding
        first = Embedding(*embeddings, self.dropout)
        return [first, *self.blocks, nn.Sequential(self.norm, self.head)]

    def flops_per_token(self):
        """The floating-point operations of a training step, per token.

        Per parameter of a matrix 2 in forward and 4 in backward; and for attention 12
        per layer, width and context. A. Chowdhery et al., "PaLM", 2022, appendix B.
        """
        width = self.token_embedding.weight.shape[1]
        positions = getattr(self, "position_embedding", None)
        looked_up = positions.weight.numel() if positions else 0
        in_matrices = sum(value.numel() for value in self.parameters()) - looked_up
        return 6 * in_matrices + 12 * len(self.blocks) * width * self.context

    @torch.no_grad()
    def generate(self, tokens, length, seed=0, temperature=0.8, top_k=40, cached=True):
        """Continue a list of tokens, one at a time; return it, longer by `length`.

        Each token is drawn from the top_k most likely ones, after dividing the logits
        by the temperature; top_k=1 always takes the most likely one. It has a random
        generator of its own, so training does not depend on it. cached: keep keys and
        values, as long as all tokens fit into the context. After that the window moves,
        each token has another position, and none of them can be used again.
        """
        generator = torch.Generator().manual_seed(seed)
        training, device = self.training, self.head.weight.device
        cache = Cache() if cached else None
        self.eval()
        for _ in range(length):
            if len(tokens) > self.context:
                cache = None
            new = tokens[cache.read :] if cache else tokens[-self.context :]
            logits = self(torch.tensor([new], device=device), cache=cache)[0, -1]
            logits = logits.float().cpu() / temperature
            likely = logits.topk(min(top_k, self.head.out_features))
            choice = torch.multinomial(likely.values.softmax(0), 1, generator=generator)
            tokens = [*tokens, likely.indices[choice].item()]
        self.train(training)
        return tokens
