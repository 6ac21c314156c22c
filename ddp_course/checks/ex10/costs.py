"""What an update of a larger kind of model costs, predicted and then measured."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.predictions import likely, numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.lesson02 import ring_all_reduce
from ddp_course.ranks.environment import process_group

# ---- the model that is measured ----


class Layer(nn.Module):
    """A layer as Llama has it. Attention is written out, so that all of it is counted."""

    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm, self.other_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.output = matrix(width, width), matrix(width, width)
        self.key = matrix(width, kv_heads * self.size)
        self.value = matrix(width, kv_heads * self.size)
        self.gate, self.up = matrix(width, hidden), matrix(width, hidden)
        self.down = matrix(hidden, width)

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        normed = self.other_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x):
        batch, tokens, width = x.shape
        query, key, value = (
            made.view(batch, tokens, -1, self.size).transpose(1, 2)
            for made in (self.query(x), self.key(x), self.value(x))
        )
        shared_by = self.heads // self.kv_heads
        key, value = (one.repeat_interleave(shared_by, 1) for one in (key, value))
        future = torch.full((tokens, tokens), -torch.inf).triu(1)
        weights = (query @ key.transpose(2, 3) / self.size**0.5 + future).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).reshape(x.shape))


def matrix(before, after):
    return nn.Linear(before, after, bias=False)


class Llama(nn.Module):
    """A small model of that kind. Its positions need no parameters, and are left out."""

    def __init__(self, vocabulary, layers, width, heads, kv_heads, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width, heads, kv_heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), matrix(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens))))


class Products(TorchDispatchMode):
    """Counts the floating-point operations of all products of matrices in a block."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if str(function) in ("aten.mm.default", "aten.bmm.default"):
            self.flops += 2 * result.numel() * args[0].shape[-1]
        return result


def predictions(predict_update, cases):
    """What the answer predicts for all cases."""
    predicted = []
    for case in cases:
        with trying(in_words(case)):
            predicted.append(numbers(predict_update(**case), 3))
    return predicted


def measured(case):
    """What DDP does here in an update."""
    with process_group(timeout=10) as (_, n):
        return measure(case, n)


def measure(case, n):
    """Parameters, operations and bytes that this rank of n really sends, in one update."""
    shape = {name: case[name] for name in SHAPE}
    model, sent = DistributedDataParallel(Llama(**shape)), []

    def by_a_ring(state, bucket):
        sent.append(ring_all_reduce(bucket.buffer().div_(n)))
        averaged = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged

    model.register_comm_hook(None, by_a_ring)
    tokens = torch.randint(case["vocabulary"], (case["windows"], case["context"]))
    with Products() as products:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    parameters = sum(value.numel() for value in model.parameters())
    return [parameters, products.flops, sum(sent)]


SHAPE = ["vocabulary", "layers", "width", "heads", "kv_heads", "hidden"]


# ---- what is claimed ----


def costs(vocabulary, layers, width, heads, kv_heads, hidden, **others):
    """All sizes, and what follows from them, as a namespace."""
    u = SimpleNamespace(layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden, **others)
    u.table, u.narrow, u.tokens = vocabulary * width, kv_heads * (width // heads), u.windows * u.context
    u.multiplied = u.table + layers * (2 * width**2 + 2 * width * u.narrow + 3 * width * hidden)
    u.norms, u.attention = (2 * layers + 1) * width, 12 * layers * width * u.context
    u.parameters = u.table + u.multiplied + u.norms
    u.flops = u.tokens * (6 * u.multiplied + u.attention)
    u.gradient = 4 * u.parameters  # its bytes
    u.sent = 2 * (u.ranks - 1) / u.ranks * u.gradient
    return u


LOOKED_UP = "the embedding is a table: a token's row is looked up, and nothing is multiplied"
RING = "a ring sends 2 * (ranks - 1) / ranks of the gradient's bytes, see lesson 2"
# of each number: its name, to how many digits it must agree, the cause if no mistake gives it, mistakes
NUMBERS = [
    ("parameters", 12, "add up the matrices and vectors of the list: one of them is missing or too large", [
        (lambda u: u.parameters - u.table, "the head is not tied: it is a matrix of its own, as large as the embedding"),
        (lambda u: u.parameters + 2 * u.layers * u.width * (u.width - u.narrow), "key and value have fewer heads: their "
         "matrices are only kv_heads * (width // heads) wide"),
        (lambda u: u.parameters - u.layers * u.width * u.hidden, "the MLP has three matrices: gate, up and down"),
        (lambda u: u.parameters - u.norms, "norms have parameters, too: a factor for each of the `width` numbers"),
        (lambda u: u.parameters - u.width, "there is one more norm, before the head"),
        (lambda u: u.parameters - u.layers * u.width, "each layer has two norms"),
        (lambda u: u.parameters - u.layers * u.width - u.width, "each layer has two norms, and there is one more before "
         "the head"),
        (lambda u: u.parameters + u.norms, "an RMSNorm has a factor for each number, and no bias"),
        (lambda u: u.parameters + u.context * u.width, "positions have no parameters here"),
        (lambda u: u.parameters + u.layers * 3 * u.width * (4 * u.width - u.hidden), "the MLP is `hidden` wide, not 4 * "
         "width"),
    ]),
    ("floating-point operations", 6,
     "6 per parameter of each matrix that is multiplied, and 12 * layers * width * context, for each token", [
        (lambda u: u.flops + u.tokens * 6 * u.table, LOOKED_UP),
        (lambda u: u.flops + u.tokens * 6 * (u.table + u.norms), LOOKED_UP),
        (lambda u: u.flops - u.tokens * 6 * u.table, "the head is a matrix that is multiplied with each token, unlike the "
         "embedding"),
        (lambda u: u.flops - u.tokens * u.attention, "attention is missing: each token is multiplied with all tokens of "
         "its window"),
        (lambda u: u.flops - u.tokens * u.attention / 2, "half of attention is missing: it is two products, query with key "
         "and weights with value, both over the whole square, although half of it is masked"),
        (lambda u: 6 * u.tokens * u.parameters, "that is 6 per parameter and token: but the embedding is only looked up, "
         "and attention, which has no parameters of its own, is missing"),
        (lambda u: u.flops - u.tokens * u.attention * (1 - u.heads / u.width), "in attention, all `width` numbers of a "
         "token are multiplied, not one for each head"),
        (lambda u: u.flops - u.tokens * u.attention * (1 - u.kv_heads / u.heads), "every head of the query attends, "
         "whatever kv_heads is: the shared keys save memory, not operations"),
        (lambda u: u.flops * 4 / 3, "nothing is recomputed here: forward takes 2 per parameter and token, and backward 4"),
        (lambda u: u.flops / 3, "backward takes twice as many operations as forward: 6 per parameter and token in all"),
        (lambda u: u.flops / 2, "a multiplication and an addition are two operations"),
        (lambda u: u.flops / u.tokens, "that is for one token: an update has windows * context of them on each rank"),
        (lambda u: u.flops / u.windows, "that is for one window: a rank has several in an update"),
        (lambda u: u.flops * u.ranks, "that is for all ranks together: each rank computes its own windows only"),
        (lambda u: u.flops / u.ranks, "`windows` are those of one rank: do not divide them by the ranks again"),
    ]),
    # a ring's pieces are not equally long: what is measured is a few bytes off
    ("bytes sent by this rank", 4, "2 * (ranks - 1) / ranks of 4 bytes for each parameter", [
        (lambda u: u.gradient, RING), (lambda u: 2 * u.gradient, RING),
        (lambda u: u.sent / 2, "that is half: an all-reduce goes around the ring twice, once to add up, once to "
         "distribute, and a gradient in float32 has 4 bytes per number"),
        (lambda u: u.sent / 4, "these are numbers, not bytes: a gradient in float32 has 4 bytes per number"),
        (lambda u: u.sent * u.ranks, "that is what all ranks send together"),
    ]),
]  # fmt: skip


def claims(cases, predicted, here, truth):
    """That the three numbers predicted for one case, cases[here], are the true ones."""
    words, got, of_cases = in_words(cases[here]), predicted[here], [costs(**case) for case in cases]
    yield Claim(
        words, isinstance(got, list), True, "return three numbers: (parameters, flops, sent)",
        told="three numbers", shown=got,
    )  # fmt: skip
    for place, (name, digits, otherwise, mistakes) in enumerate(NUMBERS):
        if truth[place] == 0:
            otherwise, mistakes = "a single rank has nobody to send to", []
        seen = [each[place] if isinstance(each, list) else None for each in predicted]
        yield Claim(
            f"{name}: {words}", got[place], float(truth[place]), otherwise, likely(mistakes, of_cases, seen, here, digits),
            digits, told=f"{truth[place]:,.0f}", shown=f"{got[place]:,.0f}",
        )  # fmt: skip


def in_words(case):
    return ", ".join(f"{name}={value}" for name, value in case.items())


LLAMA_3_8B = {"vocabulary": 128256, "context": 8192, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8,
              "hidden": 14336, "windows": 2, "ranks": 64}  # fmt: skip


@question(
    "Make a list of all matrices and vectors with their sizes. Which of the matrices is multiplied with each token, and "
    "which one is only looked up? For what a ring all-reduce sends, see lesson 2.",
    "A layer has 2 * width**2 parameters in query and output, 2 * width * (kv_heads * width // heads) in key and value, "
    "3 * width * hidden in the MLP, and two norms of `width`. The embedding and the head have vocabulary * width each. "
    "Per token, 6 operations per parameter of a matrix that is multiplied, and 12 * layers * width * context for "
    "attention, as in lesson 10.",
    "layer = 2 * width**2 + 2 * width * kv_heads * width // heads + 3 * width * hidden; table = vocabulary * width; "
    "parameters = 2 * table + layers * (layer + 2 * width) + width; per_token = 6 * (table + layers * layer) + 12 * "
    "layers * width * context; flops = windows * context * per_token; sent = 2 * (ranks - 1) / ranks * 4 * parameters.",
)
def check_predict_update(answer, draw):
    """Parameters, operations and bytes are compared with those of real ranks, and with
    the published size of a large model.
    """
    n = 3
    cases = [a_case(draw, n), LLAMA_3_8B, LLAMA_3_8B | {"ranks": 1}]
    [predicted] = answer.on_ranks(predictions, cases)
    for rank, truth in enumerate(answer.without(measured, cases[0], nproc=n, timeout=12)):
        hold(claims(cases, predicted, 0, truth), f"{rank} of {n}")
    for here in (1, 2):
        u = costs(**cases[here])
        hold(claims(cases, predicted, here, [u.parameters, u.flops, u.sent]))


def a_case(draw, ranks):
    heads, kv_heads = draw.choice([(6, 2), (4, 1), (6, 1)])
    case = {"vocabulary": draw.randrange(250, 400), "context": draw.randrange(24, 48)}
    case |= {"layers": draw.randrange(2, 4), "width": 16 * heads, "heads": heads}
    case |= {"kv_heads": kv_heads, "hidden": draw.randrange(90, 150)}
    return case | {"windows": draw.randrange(2, 5), "ranks": ranks}
