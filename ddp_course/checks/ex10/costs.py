"""What an update of a larger kind of model costs, predicted and then measured."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
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
            predicted.append(numbers(predict_update(**case)))
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


def numbers(returned):
    """Three numbers as float, or what was returned instead."""
    try:
        parameters, flops, sent = returned
        return [float(parameters), float(flops), float(sent)]
    except (TypeError, ValueError):
        return repr(returned)


def in_words(case):
    return ", ".join(f"{name}={value}" for name, value in case.items())


LLAMA_3_8B = {"vocabulary": 128256, "context": 8192, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8,
              "hidden": 14336, "windows": 2, "ranks": 64}  # fmt: skip


# ---- the question ----


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
    small, large = a_case(draw, n), [LLAMA_3_8B, LLAMA_3_8B | {"ranks": 1}]
    [[got, *others]] = answer.on_ranks(predictions, [small, *large])
    really = answer.without(measured, small, nproc=n, timeout=12)
    for rank, of_rank in enumerate(really):
        judge_prediction(small, got, of_rank, f"{rank} of {n}")
    for case, got in zip(large, others):
        judge_prediction(case, got, truth(**case))


def a_case(draw, ranks):
    heads, kv_heads = draw.choice([(6, 2), (4, 1), (6, 1)])
    case = {"vocabulary": draw.randrange(250, 400), "context": draw.randrange(24, 48)}
    case |= {"layers": draw.randrange(2, 4), "width": 16 * heads, "heads": heads}
    case |= {"kv_heads": kv_heads, "hidden": draw.randrange(90, 150)}
    return case | {"windows": draw.randrange(2, 5), "ranks": ranks}


def truth(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
    """[parameters, floating-point operations, bytes sent], by the formulas."""
    table = vocabulary * width
    layer = 2 * width**2 + 2 * width * kv_heads * width // heads + 3 * width * hidden
    parameters = 2 * table + layers * (layer + 2 * width) + width
    per_token = 6 * (table + layers * layer) + 12 * layers * width * context
    sent = 2 * (ranks - 1) / ranks * 4 * parameters
    return [parameters, windows * context * per_token, sent]


WHAT = ["parameters", "floating-point operations", "bytes sent by this rank"]


def judge_prediction(case, predicted, really, rank=...):
    """Raise Wrong unless the three numbers are right; the first one exactly."""
    if isinstance(predicted, str):
        cause = "return three numbers: (parameters, flops, sent)"
        raise Wrong(in_words(case), expected="three numbers", got=predicted, cause=cause)
    causes = [cause_of_parameters, cause_of_flops, cause_of_sent]
    for what, got, true, cause_of in zip(WHAT, predicted, really, causes):
        close = 0 if what == "parameters" else 0.002
        if not abs(got - true) <= close * true:  # NaN, too
            raise Wrong(
                f"{what}: {in_words(case)}",
                rank=rank,
                expected=f"{true:,.0f}",
                got=f"{got:,.0f}",
                cause=cause_of(got, true, **case),
            )


def first_like(got, looks, otherwise, close):
    for value, cause in looks:
        if abs(got - value) <= close * abs(value):
            return cause
    return otherwise


def cause_of_parameters(got, true, vocabulary, context, layers, width, heads, kv_heads, hidden, **_):
    table, narrow = vocabulary * width, kv_heads * width // heads
    looks = [
        (true - table, "the head is not tied: it is a matrix of its own, as large as the embedding"),
        (true + 2 * layers * width * (width - narrow), "key and value have fewer heads: their matrices are only "
         "kv_heads * (width // heads) wide"),
        (true - layers * width * hidden, "the MLP has three matrices: gate, up and down"),
        (true - layers * 2 * width - width, "norms have parameters, too: a factor for each of the `width` numbers"),
        (true - width, "there is one more norm, before the head"),
        (true - layers * width, "each layer has two norms"),
        (true - layers * width - width, "each layer has two norms, and there is one more before the head"),
        (true + layers * 2 * width + width, "an RMSNorm has a factor for each number, and no bias"),
        (true + context * width, "positions have no parameters here"),
        (true + layers * 3 * width * (4 * width - hidden), "the MLP is `hidden` wide, not 4 * width"),
    ]  # fmt: skip
    return first_like(got, looks, "add up the matrices and vectors of the list: one of them is missing or too large", 0)


def cause_of_flops(got, true, vocabulary, context, layers, width, heads, kv_heads, windows, ranks, **_):
    tokens, attention = windows * context, 12 * layers * width * context
    norms = 6 * (2 * layers + 1) * width
    table = 6 * vocabulary * width
    looks = [
        (true + tokens * table, "the embedding is a table: a token's row is looked up, and nothing is multiplied"),
        (true + tokens * (table + norms), "the embedding is a table: a token's row is looked up, and nothing is multiplied"),
        (true - tokens * table, "the head is a matrix that is multiplied with each token, unlike the embedding"),
        (true - tokens * attention, "attention is missing: each token is multiplied with all tokens of its window"),
        (true - tokens * attention / 2, "half of attention is missing: it is two products, query with key and weights with "
         "value, both over the whole square, although half of it is masked"),
        (true - tokens * (attention - table - norms), "that is 6 per parameter and token: but the embedding is only looked "
         "up, and attention, which has no parameters of its own, is missing"),
        (true - tokens * attention * (1 - heads / width), "in attention, all `width` numbers of a token are multiplied, not "
         "one for each head"),
        (true - tokens * attention * (1 - kv_heads / heads), "every head of the query attends, whatever kv_heads is: the "
         "shared keys save memory, not operations"),
        (true * 4 / 3, "nothing is recomputed here: forward takes 2 per parameter and token, and backward 4"),
        (true / 3, "backward takes twice as many operations as forward: 6 per parameter and token in all"),
        (true / 2, "a multiplication and an addition are two operations"),
        (true / tokens, "that is for one token: an update has windows * context of them on each rank"),
        (true / windows, "that is for one window: a rank has several in an update"),
        (true * ranks, "that is for all ranks together: each rank computes its own windows only"),
        (true / ranks, "`windows` are those of one rank: do not divide them by the ranks again"),
    ]  # fmt: skip
    otherwise = "6 per parameter of each matrix that is multiplied, and 12 * layers * width * context, for each token"
    return first_like(got, looks, otherwise, 0.002)


def cause_of_sent(got, true, ranks, **_):
    if ranks == 1:
        return "a single rank has nobody to send to"
    gradient = true * ranks / (2 * (ranks - 1))
    looks = [
        (gradient, "a ring sends 2 * (ranks - 1) / ranks of the gradient's bytes, see lesson 2"),
        (2 * gradient, "a ring sends 2 * (ranks - 1) / ranks of the gradient's bytes, see lesson 2"),
        (true / 2, "that is half: an all-reduce goes around the ring twice, once to add up, once to distribute, "
         "and a gradient in float32 has 4 bytes per number"),
        (true / 4, "these are numbers, not bytes: a gradient in float32 has 4 bytes per number"),
        (true * ranks, "that is what all ranks send together"),
    ]  # fmt: skip
    return first_like(got, looks, "2 * (ranks - 1) / ranks of 4 bytes for each parameter", 0.002)
