"""Exercise 11: a LoRA layer and its merge, which parameters may train, and a loss over
answers only.
"""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.differences import near, parted
from ddp_course.checks.training import LEARNING_RATE, descend, fill
from ddp_course.ranks.environment import process_group
from ddp_course.school.judge import Wrong, question, trying

# ---- 1: a LoRA layer ----


def some(*shape, seed):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def a_layer(case):
    """The given layer, in fp32, as nn.Linear makes it."""
    layer = nn.Linear(case["inputs"], case["outputs"], bias=case["bias"])
    return fill(layer, case["seed"]).float()


def inputs_of(case):
    """What the layer gets: rows, or rows of tokens."""
    return some(*case["rows"], case["inputs"], seed=case["seed"] + 1).float()


def trained_of(module):
    return {
        name: value for name, value in module.named_parameters() if value.requires_grad
    }


def observe_layers(kind, cases):
    """For each case: which parameters train, the outputs at first, with other weights,
    and when merged, and what the constructor changed in torch.
    """
    seen = []
    for case in cases:
        with trying(
            f"{case['inputs']} inputs, {case['outputs']} outputs, r={case['r']}, alpha={case['alpha']}"
        ):
            layer, x = a_layer(case), inputs_of(case)
            torch.manual_seed(case["seed"])
            lora = kind(layer, case["r"], case["alpha"])
            of_case = {
                "trained": [
                    [name, list(value.shape)]
                    for name, value in trained_of(lora).items()
                ],
                "seeded": torch.initial_seed() != case["seed"],
            }
            of_case["begin"] = lora(x)
            if len(of_case["trained"]) == 2:
                of_case |= observe_numbers(lora, layer, x, case)
            of_case["gradients on"] = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            seen.append(of_case)
    return seen


def observe_numbers(lora, layer, x, case):
    output = lora(x)
    if output.requires_grad:
        output.pow(2).sum().backward()
    flows = any(
        value.grad is not None and value.grad.abs().sum() > 0
        for value in trained_of(lora).values()
    )
    all_zeros = not any(value.detach().any() for value in trained_of(lora).values())
    values = []
    with torch.no_grad():
        for place, value in enumerate(trained_of(lora).values()):
            value.copy_(some(*value.shape, seed=case["seed"] + 2 + place))
            values.append(value.clone())
    earlier = x.clone().requires_grad_()  # what the layers before would get
    output = lora(earlier)
    if output.requires_grad:
        output.sum().backward()
    seen = {"flows": flows, "all zeros": all_zeros, "values": values}
    seen |= {"output": output, "of x": earlier.grad}
    merged = lora.merged()
    return seen | {
        "kind": "Linear" if type(merged) is nn.Linear else type(merged).__name__,
        "new": merged is not layer and merged is not lora,
        "merged": merged(x),
        "afterwards": lora(x),
        "again": lora.merged()(x),
        "still": list(trained_of(lora)),
    }


def observe_training(kind, case, steps):
    """Train on ranks with DDP; return the initial matrices, and the merged layer's
    output at the end.
    """
    with process_group(timeout=4) as (rank, n):
        lora = kind(a_layer(case), case["r"], case["alpha"])
        model = DistributedDataParallel(lora)
        begin = [value.detach().clone() for value in trained_of(lora).values()]
        for step in range(steps):
            batch = some(2 * n, case["inputs"], seed=case["seed"] + step).float()
            model(batch.chunk(n)[rank]).pow(2).mean().backward()
            descend(lora)
        x = some(3, case["inputs"], seed=case["seed"]).float()
        return {"begin": begin, "end": lora.merged()(x)}


@question(
    "Keep the layer as a submodule and freeze its parameters. Add two nn.Parameters: A of shape (r, inputs), and B "
    "of shape (outputs, r). layer.in_features and layer.out_features are the sizes.",
    "One of A and B starts as zeros, so that the layer starts unchanged; the other must not, otherwise neither would "
    "ever get a gradient. forward: self.layer(x) + alpha / r * (x @ A.T @ B.T).",
    "merged: make an nn.Linear of the same sizes, with a bias if the layer has one; its weight is layer.weight + alpha "
    "/ r * B @ A, its bias a copy. Do this under torch.no_grad(), and leave self unchanged: copy.deepcopy(self.layer) "
    "is a start.",
)
def check_lora_layer(answer, draw):
    """It starts like the layer, trains only A and B, and computes W x + b + alpha / r B
    A x, also when merged.
    """
    cases = []
    for bias in (True, False):
        r, inputs, outputs = draw.sample(range(2, 9), 3)
        # no multiple of r, and smaller than r in the second case
        alpha = r * draw.randrange(2, 6) + 1 if bias else draw.randrange(1, r)
        cases.append(
            {
                "inputs": inputs,
                "outputs": outputs,
                "r": r,
                "alpha": alpha,
                "bias": bias,
                "rows": [5] if bias else [2, 3],
                "seed": draw.randrange(10**6),
            }
        )
    [seen] = answer.on_ranks(observe_layers, cases)
    for case, of_case in zip(cases, seen):
        judge_layer(case, of_case)
    steps, n = 2, draw.choice([2, 3])
    of_ranks = answer.on_ranks(observe_training, cases[0], steps, nproc=n)
    expected = trained_by_hand(cases[0], of_ranks[0]["begin"], steps, n)
    for rank, of_rank in enumerate(of_ranks):
        if not near(of_rank["end"], expected):
            cause = "after training with DDP, the merged layer is not that of one process on all batches"
            raise Wrong(
                f"{steps} steps with DDP",
                rank=f"{rank} of {n}",
                expected=expected,
                got=of_rank["end"],
                cause=cause,
            )


def thin(values, case):
    """(B A, in that shape) of two matrices that are found by their shapes, whichever
    way round they are stored.
    """
    r, shapes = (
        case["r"],
        {(case["r"], case["inputs"]): "A", (case["outputs"], case["r"]): "B"},
    )
    found = {}
    for value in values:
        for matrix in (value, value.T):
            found.setdefault(shapes.get(tuple(matrix.shape)), matrix)
    assert found["A"].shape[0] == r
    return found["B"] @ found["A"]


def trained_by_hand(case, begin, steps, n):
    layer = a_layer(case).double()
    values = [value.double().requires_grad_() for value in begin]
    for step in range(steps):
        batch = some(2 * n, case["inputs"], seed=case["seed"] + step).float().double()
        output = layer(batch) + case["alpha"] / case["r"] * batch @ thin(values, case).T
        gradients = torch.autograd.grad(output.pow(2).mean(), values)
        with torch.no_grad():
            for value, gradient in zip(values, gradients):
                value -= LEARNING_RATE * gradient
    x = some(3, case["inputs"], seed=case["seed"]).float().double()
    return (
        layer(x).detach()
        + case["alpha"] / case["r"] * x @ thin(values, case).T.detach()
    )


def judge_layer(case, seen):
    r, inputs, outputs, alpha = (
        case[name] for name in ("r", "inputs", "outputs", "alpha")
    )
    checked = f"LoRALinear of {inputs} inputs, {outputs} outputs, bias {case['bias']}, r={r}, alpha={alpha}"
    layer, x = a_layer(case).double(), inputs_of(case).double()
    shapes = sorted(sorted(shape) for _, shape in seen["trained"])
    if shapes != sorted([sorted([r, inputs]), sorted([outputs, r])]):
        names = (
            ", ".join(f"{name} {tuple(shape)}" for name, shape in seen["trained"])
            or "none"
        )
        cause = "only the two new matrices may train"
        if any(
            list(shape) in ([outputs, inputs], [outputs])
            for _, shape in seen["trained"]
        ):
            cause = "the layer's own weight and bias are frozen: layer.requires_grad_(False)"
        elif not seen["trained"]:
            cause = "A and B must be nn.Parameters that require a gradient, stored as attributes of the module"
        raise Wrong(
            checked,
            expected=f"parameters that train: A {(r, inputs)} and B {(outputs, r)}",
            got=names,
            cause=cause,
        )
    if not near(seen["begin"], layer(x)):
        cause = "it must start with the output of the given layer: initialise B with zeros, so that B A is zero"
        raise Wrong(checked, expected=layer(x), got=seen["begin"], cause=cause)
    if seen["all zeros"]:
        cause = (
            "if A and B both start as zeros, the gradient of each is a product with the other, so it stays zero "
            "forever"
        )
        raise Wrong(
            checked, expected="a gradient in the first step", got="zeros", cause=cause
        )
    change = thin([value.double() for value in seen["values"]], case)
    truth = layer(x) + alpha / r * x @ change.T
    if not near(seen["output"], truth):
        looks = {
            "alpha // r drops the fraction: the scale is alpha / r": [alpha // r],
            "the sum is scaled by alpha / r": [
                alpha,
                1,
                1 / r,
                alpha / r**0.5,
                r / alpha,
            ],
            "the added term has the wrong sign": [-alpha / r],
            "B A x is missing: the new matrices have no effect": [0],
        }
        cause = "the layer must compute W x + b + (alpha / r) B A x"
        for likely, scales in looks.items():
            if any(
                near(seen["output"], layer(x) + scale * x @ change.T)
                for scale in scales
            ):
                cause = likely
        if near(seen["output"], alpha / r * x @ change.T):
            cause = "W x + b is missing: add the output of A and B to the output of the layer"
        raise Wrong(checked, expected=truth, got=seen["output"], cause=cause)
    if seen["seeded"]:
        cause = (
            "the constructor sets torch's seed, so all layers start with the same A, and "
            "everything random that follows changes: leave the seed to the program"
        )
        raise Wrong(
            checked, expected="torch's seed as before", got="another", cause=cause
        )
    if not seen["flows"]:
        cause = "no gradient reaches A and B: forward detaches their output, or computes it under no_grad"
        raise Wrong(
            checked,
            expected="a gradient in the first step",
            got="none, or zeros",
            cause=cause,
        )
    judge_gradient_of_inputs(checked, seen["of x"], layer, change, alpha / r, x)
    if seen["kind"] != "Linear" or not seen["new"]:
        got = (
            seen["kind"]
            if seen["kind"] != "Linear"
            else "the layer that it was given, changed"
        )
        cause = "merged() must return a new nn.Linear that does not need this class; the LoRALinear must not change"
        raise Wrong(checked, expected="a new Linear", got=got, cause=cause)
    for what in ("merged", "afterwards", "again"):
        if not near(seen[what], truth):
            raise Wrong(
                f"{checked}: {MERGED[what]}",
                expected=truth,
                got=seen[what],
                cause=cause_of_merge(what, seen, case),
            )
    if not seen["gradients on"]:
        cause = "gradients are off for the whole program: use torch.no_grad() in a with block or as a decorator"
        raise Wrong(
            f"{checked}: after merged()",
            expected="gradients on",
            got="off",
            cause=cause,
        )
    if len(seen["still"]) != 2:
        cause = "merged() has frozen A and B: the LoRALinear must stay as it is"
        raise Wrong(
            f"{checked}: after merged()",
            expected="A and B still train",
            got=f"{len(seen['still'])} of the two",
            cause=cause,
        )


def judge_gradient_of_inputs(checked, got, layer, change, scale, x):
    """Raise Wrong unless the layers before get the whole gradient."""

    def gradient(weight):
        return weight.sum(0).expand(x.shape)

    truth = gradient(layer.weight + scale * change)
    if near(got, truth):
        return
    cause = "the gradient that reaches x must be that of W x + (alpha / r) B A x"
    if got is None:
        got, cause = "none", "no gradient reaches x, so the layers before learn nothing"
    elif near(got, gradient(scale * change)):
        cause = (
            "no gradient passes through the frozen layer to x, so the layers before learn "
            "something else: freeze with requires_grad_(False), not with no_grad() or detach()"
        )
    elif near(got, gradient(layer.weight)):
        cause = (
            "no gradient passes through A and B to x, so the layers before learn something "
            "else: do not detach x"
        )
    raise Wrong(f"{checked}: the gradient of x", expected=truth, got=got, cause=cause)


MERGED = {
    "merged": "what the merged layer computes",
    "afterwards": "its own output after merged()",
    "again": "the result of calling merged() a second time",
}


def cause_of_merge(what, seen, case):
    if what != "merged":
        return "merged() changes its own layer, so B A counts twice afterwards: work on a copy of the layer"
    layer, x = a_layer(case).double(), inputs_of(case).double()
    change = thin([value.double() for value in seen["values"]], case)
    scale = case["alpha"] / case["r"]
    if case["bias"] and near(
        seen["merged"], layer(x) - layer.bias + scale * x @ change.T
    ):
        return "the merged layer has lost the bias"
    if near(seen["merged"], layer(x) + x @ change.T):
        return "the merged layer has no alpha / r: include it in the weight, too"
    if near(seen["merged"], layer(x)):
        return "the merged layer is the old one: B A is missing"
    return "its weight must be W + (alpha / r) B A"


# ---- 2: which parameters may train ----


class Packed(nn.Module):
    """A linear layer with integer weights, as in bitsandbytes, and adapters beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(18, 1, dtype=torch.uint8), requires_grad=False
        )
        self.A, self.B = (
            nn.Parameter(torch.randn(2, 6)),
            nn.Parameter(torch.zeros(6, 2)),
        )


class Adapted(nn.Module):
    """A network with adapters, a head that is tied to the embedding, names inside other
    names, and a frozen part.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Packed(),
                    "norm": nn.LayerNorm(6),
                    "overhead": nn.Linear(6, 3),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight


CHOICES = {
    "the adapters": ["A", "B"],
    "the adapters and the norms": ["A", "B", "norm"],
    "the head": ["head"],
    "the embedding": ["embedding"],
    "all of attention": ["attention"],
    "nothing": [],
    "one block": ["0"],
}


def observe_choices(train_only):
    """For each choice: which parameters train, by name, and what was returned."""
    seen = []
    for parts in CHOICES.values():
        torch.manual_seed(0)
        network = Adapted()
        before = {id(value) for value in network.parameters()}
        state = {name: value.clone() for name, value in network.state_dict().items()}
        given = list(parts)
        with trying(f"parts {parts}"):
            counts = train_only(network, given)
        names = [
            name
            for name, value in network.named_parameters(remove_duplicate=False)
            if value.requires_grad
        ]
        same = {id(value) for value in network.parameters()} == before
        untouched = given == parts and all(
            torch.equal(value, state[name])
            for name, value in network.state_dict().items()
        )
        of_choice = {"names": names, "same": same, "counts": counts}
        seen.append(of_choice | {"untouched": untouched})
    return seen


def truth_of(parts):
    """(names of the trained parameters, (the number that trains, the number of all))."""
    network = Adapted()
    named = list(network.named_parameters(remove_duplicate=False))
    chosen = {
        id(value)
        for name, value in named
        if set(parts) & set(name.split(".")) and value.is_floating_point()
    }
    names = [name for name, value in named if id(value) in chosen]
    trained = sum(
        value.numel() for value in network.parameters() if id(value) in chosen
    )
    return names, (trained, sum(value.numel() for value in network.parameters()))


@question(
    "Go through the names. name.split('.') gives the words between the dots: a parameter trains if one of them is in "
    "parts. All others must be frozen, even if they were trainable before.",
    "A tied parameter has two names, but named_parameters() returns only one of them; "
    "named_parameters(remove_duplicate=False) returns both. Collect the id() of all chosen parameters. Integers "
    "cannot have a gradient: check value.is_floating_point().",
    "chosen = "
    "{id(value) for name, value in model.named_parameters(remove_duplicate=False) "
    "if set(name.split('.')) & set(parts) and value.is_floating_point()}; "
    "then value.requires_grad_(id(value) in chosen) for each of model.parameters(), which returns each parameter "
    "once, as you need for both sums.",
)
def check_train_only(answer, draw):
    """Only the chosen parameters may train, by whole words, also tied ones, never
    integers; each counts once.
    """
    [seen] = answer.on_ranks(observe_choices)
    for (words, parts), of_choice in zip(CHOICES.items(), seen):
        judge_choice(words, parts, of_choice)


def judge_choice(words, parts, seen):
    checked = f"{words}: train_only(network, {parts})"
    names, counts = truth_of(parts)
    got, values = (
        seen["names"],
        dict(Adapted().named_parameters(remove_duplicate=False)),
    )
    if not seen["untouched"]:
        cause = (
            "set requires_grad, and leave the numbers and the list of parts as they are"
        )
        raise Wrong(
            checked, expected="weights and parts as before", got="changed", cause=cause
        )
    if not seen["same"]:
        cause = (
            "freeze the model's own parameters instead of replacing them with new ones"
        )
        raise Wrong(checked, expected="the same parameters", got="others", cause=cause)
    for name in got:
        if name not in names:
            cause = (
                "a parameter that is not chosen must be frozen: requires_grad_(False)"
            )
            if any(part in name for part in parts):
                cause = (
                    "compare whole words: 'head' does not match 'overhead', and 'A' matches no other word; split at "
                    "dots"
                )
            raise Wrong(
                checked, expected=f"{name} frozen", got="it trains", cause=cause
            )
    for name in names:
        if name not in got:
            cause = (
                "one of the words between the dots of its name is chosen, so it must train: any of the words, and "
                "even if "
            )
            cause += "it was frozen before"
            if name in ("embedding.weight", "head.weight"):
                cause = (
                    "the head's weight is the embedding's, and one of its two names is chosen: named_parameters() "
                    "returns it under the first name only; with remove_duplicate=False it comes twice, and the "
                    "second name must not undo the first"
                )
            elif name.startswith("norm."):
                cause = "the norm at the end was frozen before, but is chosen now: requires_grad_(True)"
            raise Wrong(
                checked, expected=f"{name} trains", got="it is frozen", cause=cause
            )
    returned = seen["counts"]
    if not (
        isinstance(returned, list) and len(returned) == 2 and tuple(returned) == counts
    ):
        cause = "return two integers: how many numbers train, and how many there are in total; numel() counts them"
        if isinstance(returned, list) and len(returned) == 2:
            twice = sum(value.numel() for value in values.values())
            trained_twice = sum(values[name].numel() for name in names)
            if returned[1] == twice or returned[0] == trained_twice != counts[0]:
                cause = "the tied weight is one parameter with two names: count it once"
            elif tuple(returned) == (len(names), len(list(Adapted().parameters()))):
                cause = "you counted tensors: count their elements with numel()"
            elif tuple(returned) == counts[::-1]:
                cause = "the two are swapped: first the number that trains, then all"
        raise Wrong(checked, expected=counts, got=returned, cause=cause)


# ---- 3: a loss of answers only ----

END, WORDS, WIDTH, FAR = 0, 7, 4, 10**6


def a_batch(case, rank):
    """Texts of a question, an answer and an end token, padded with the end token:
    (tokens, questions, lengths).
    """
    draw = torch.Generator().manual_seed(case["seed"] + rank)
    questions, answers = case["questions"][rank], case["answers"][rank]
    lengths = [question + answer for question, answer in zip(questions, answers)]
    tokens = torch.full((len(lengths), max(lengths) + 2), END)
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(1, WORDS, (length,), generator=draw)
    for row, answer, length in zip(tokens, answers, lengths):
        if answer:
            row[length - 1] = END
    return tokens, torch.tensor(questions), torch.tensor(lengths)


def a_model(seed):
    return fill(
        nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)),
        seed,
    )


PATIENCE = datetime.timedelta(seconds=3)  # for ranks that are still in answer_loss


def gradient_on_ranks(answer_loss, cases):
    """For each case: the loss, the gradient, and whether the inputs are as before."""
    with process_group(timeout=5) as (rank, n):
        of_observer, seen = dist.new_group(timeout=PATIENCE), []
        for case in cases:
            model = DistributedDataParallel(a_model(case["seed"]))
            given = a_batch(case, rank)
            logits = model(given[0].clone())
            before = [logits.detach().clone(), *(value.clone() for value in given)]
            loss = answer_loss(logits, *given)
            all_have_returned(of_observer)
            after = [logits.detach(), *given]
            changed = not all(map(torch.equal, before, after))
            with trying("the backward of what answer_loss returned"):
                loss.backward()
            gradient = flat(model.module)
            seen.append({"loss": loss, "gradient": gradient, "changed": changed})
        return seen


def all_have_returned(group):
    """Raise where another rank still waits for this one: DDP's own communication would
    answer it, with other tensors.
    """
    try:
        dist.barrier(group)
    except RuntimeError:
        raise RuntimeError(LEFT_EARLY) from None


LEFT_EARLY = (
    "answer_loss has returned on this rank, and another rank still waits inside it: each "
    "rank must call the same collectives, also a rank without any answer"
)


def flat(model):
    return torch.cat([value.grad.flatten() for value in model.parameters()])


def sums(case, rank, span=lambda begin, end: (begin, end), shift=1):
    """This rank's (gradient of the sum of losses, sum, number of targets).

    span: of (where an answer begins, where it ends), the places whose tokens are
    targets.
    """
    model = a_model(case["seed"])
    tokens, questions, lengths = a_batch(case, rank)
    logits = model(tokens)
    total, number = logits.sum() * 0, 0
    for row, answer in enumerate(zip(questions.tolist(), lengths.tolist())):
        begin, end = span(*answer)
        for place in range(max(shift, begin), min(end, tokens.shape[1])):
            total = total + F.cross_entropy(
                logits[row, place - shift], tokens[row, place]
            )
            number += 1
    total.backward()
    return flat(model), total.item(), number


def mean_of_all(case, n, **how):
    of_ranks = [sums(case, rank, **how) for rank in range(n)]
    number = max(1, sum(number for *_, number in of_ranks))
    return sum(gradient for gradient, *_ in of_ranks) / number, sum(
        total for _, total, _ in of_ranks
    ) / number


@question(
    "The logits at one place predict the token at the next: compare logits[:, :-1] with tokens[:, 1:]. A target "
    "counts if its own place is after the question and before the end of the text.",
    "places = torch.arange(1, tokens.shape[1]); counted = (places >= questions[:, None]) & (places < lengths[:, None]). "
    "Set the other targets to -100, which cross_entropy leaves out. A mean over all ranks needs the number of targets "
    "on all ranks.",
    "total = F.cross_entropy(..., reduction='sum'), which is 0 if no target counts; number = counted.sum(), summed over "
    "ranks with dist.all_reduce; return total * dist.get_world_size() / number, because DDP takes the mean over the "
    "ranks.",
)
def check_answer_loss(answer, draw):
    """The gradient of the mean loss over all answers' tokens, on 1 to 3 ranks, one of
    them without any.
    """
    for n, empty in [(1, False), (2, False), (3, True)]:
        cases = [a_case(draw, n, False), a_case(draw, n, empty)]
        of_ranks = answer.on_ranks(gradient_on_ranks, cases, nproc=n)
        for number, case in enumerate(cases):
            judge_losses(case, n, [of_rank[number] for of_rank in of_ranks])


def a_case(draw, n, empty):
    """Texts for n ranks: each has another number of them. empty: one rank has no answer
    in its texts.
    """
    texts = [draw.randrange(1, 5) for _ in range(n)]
    case = {"seed": draw.randrange(10**6)}
    case["questions"] = [[draw.randrange(2, 6) for _ in range(size)] for size in texts]
    case["answers"] = [
        [draw.randrange(2, 5) + 3 * rank for _ in range(size)]
        for rank, size in enumerate(texts)
    ]
    if empty:  # cut off: the questions were too long
        rank = draw.randrange(n)
        case["answers"][rank] = [0] * texts[rank]
    return case


def judge_losses(case, n, of_ranks):
    gradient, loss = mean_of_all(case, n)
    answers = [sum(of_rank) for of_rank in case["answers"]]
    checked = f"a batch on {n} rank{'s' * (n > 1)}, with {answers} tokens of answers"
    for rank, seen in enumerate(of_ranks):
        if seen["changed"]:
            cause = "logits, tokens, questions and lengths belong to the caller: work on copies"
            raise Wrong(checked, rank=f"{rank} of {n}", expected="the inputs as before",
                        got="changed", cause=cause)  # fmt: skip
        if not near(seen["gradient"], gradient):
            expected, got = parted(gradient, seen["gradient"], 1e-5, 1e-5)
            raise Wrong(checked, rank=f"{rank} of {n}", expected=expected, got=got,
                        cause=cause_of_gradient(case, n, seen["gradient"]))  # fmt: skip
    mean = sum(float(seen["loss"]) for seen in of_ranks) / n
    if not abs(mean - loss) <= 1e-5 * abs(loss):
        cause = (
            "the gradients are right, but the loss is not: the mean of the ranks' losses must be the mean over all "
            "tokens"
        )
        raise Wrong(
            checked,
            expected=f"{loss:.6f}, the mean of all ranks' losses",
            got=f"{mean:.6f}",
            cause=cause,
        )


def cause_of_gradient(case, n, got):
    if got.isnan().any():
        return "a rank without any answer has a mean of 0/0, which is nan: divide the sum by the number on all ranks"
    of_ranks = [sums(case, rank) for rank in range(n)]
    total = sum(gradient for gradient, *_ in of_ranks)
    number = sum(number for *_, number in of_ranks)
    means = sum(gradient / max(1, count) for gradient, _, count in of_ranks) / n
    alike = [
        ("each rank computes its own mean, so a rank with few tokens counts as much as the others: divide by the "
         "number on all ranks, from an all_reduce", means),
        ("DDP takes the mean of the ranks' losses: multiply by the number of ranks", total / number / n),
        ("it is n times too large: DDP divides only by the number of ranks", total / number * n),
        ("this is a sum: divide it by the number of tokens that count, on all ranks", total / n),
        ("this is a sum: divide it by the number of tokens that count, on all ranks", total),
    ]  # fmt: skip
    looks = {
        "the question's tokens count, too: only the answer's tokens are targets":
            {"span": lambda begin, end: (0, end)},
        "everything counts, question and padding, too: only the answer's tokens are targets":
            {"span": lambda begin, end: (0, FAR)},
        "the padding counts, too: a text ends at its length": {"span": lambda begin, end: (begin, FAR)},
        "the end token of the answer does not count, so the model would not learn to stop: padding and end token are "
        "the same, so use lengths, not token numbers": {"span": lambda begin, end: (begin, end - 1)},
        "the first token of the answer does not count: the last place of the question must predict it":
            {"span": lambda begin, end: (begin + 1, end)},
        "the last token of the question counts, too": {"span": lambda begin, end: (begin - 1, end)},
        "logits and tokens of the same place are compared: the logits at one place predict the next token": {"shift": 0},
    }  # fmt: skip
    for cause, how in looks.items():
        alike.append((cause, mean_of_all(case, n, **how)[0]))
        wrong_parts = [sums(case, rank, **how) for rank in range(n)]
        alike.append(
            (
                cause,
                sum(gradient / max(1, count) for gradient, _, count in wrong_parts) / n,
            )
        )
    for cause, gradient in alike:
        if near(got, gradient):
            return cause
    return "the sum of the losses of all answers' tokens on all ranks, divided by the number of these tokens"
