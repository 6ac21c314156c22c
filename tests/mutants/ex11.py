"""Exercise 11: LoRA."""

import copy
import math
import re

import numpy
import torch
import torch.distributed as dist
from ddp_course.models.lora import LoRALinear
from torch import nn
from torch.nn import functional as F

from mutants import right, wrong

# ---- plan ----


def bytes_of(layers, frozen, trained):
    """(bytes of frozen weights, bytes that one more in r takes)."""
    return sum(frozen * i * o for i, o in layers), trained * sum(map(sum, layers))


def planned(layers, ranks, budget, frozen=2, trained=16, sent=4):
    base, each = bytes_of(layers, frozen, trained)
    r = (budget - base) // each
    return r, 2 * (ranks - 1) / ranks * sent * r * sum(map(sum, layers))


@right("plan")
def by_formula(layers, ranks, budget):
    return planned(layers, ranks, budget)


@right("plan")
def by_counting_up(layers, ranks, budget):
    """As a list, and the bytes as a whole number."""
    r = 0
    while sum(bytes_of(layers, 2, 16 * (r + 1))) <= budget:
        r += 1
    numbers = r * sum(i + o for i, o in layers)
    return [r, 8 * numbers * (ranks - 1) // ranks]


@right("plan")
def in_a_tensor_of_meta_parameters(layers, ranks, budget):
    """Counts the parameters of modules that have no memory."""
    with torch.device("meta"):
        thin = [nn.ModuleList([nn.Linear(i, 1), nn.Linear(o, 1)]) for i, o in layers]
    ends = sum(part.weight.numel() for pair in thin for part in pair)
    r = int((budget - 2 * sum(math.prod(shape) for shape in layers)) / (16 * ends))
    return r, (ranks - 1) * r * ends * 8 / ranks


@wrong("plan", "frozen weights in bf16 take 2 bytes")
def frozen_in_fp32(layers, ranks, budget):
    return planned(layers, ranks, budget, frozen=4)


@wrong("plan", "the frozen weights take memory, too")
def forgets_the_base(layers, ranks, budget):
    return planned(layers, ranks, budget, frozen=0)


@wrong("plan", "a trained number is in fp32, and so are its gradient")
def trained_in_bf16(layers, ranks, budget):
    return planned(layers, ranks, budget, trained=8)


@wrong("plan", "no gradient and no state of Adam")
def all_trained(layers, ranks, budget):
    return planned(layers, ranks, budget, frozen=16)


@wrong("plan", "just above the budget: round down")
def rounds_up(layers, ranks, budget):
    base, each = bytes_of(layers, 2, 16)
    r = (budget - base) // each + 1
    return r, 2 * (ranks - 1) / ranks * 4 * r * sum(map(sum, layers))


@wrong("plan", "r is a whole number: round down")
def in_fractions(layers, ranks, budget):
    base, each = bytes_of(layers, 2, 16)
    r = (budget - base) / each + 0.01
    return r, 2 * (ranks - 1) / ranks * 4 * r * sum(map(sum, layers))


@wrong("plan", "in a ring, each rank sends")
def sends_all_of_it(layers, ranks, budget):
    r, sent = planned(layers, ranks, budget)
    return r, sent / (2 * (ranks - 1) / ranks)


@wrong("plan", "this is half of it")
def forgets_the_second_half(layers, ranks, budget):
    r, sent = planned(layers, ranks, budget)
    return r, sent / 2


@wrong("plan", "this counts all ranks together")
def of_all_ranks(layers, ranks, budget):
    r, sent = planned(layers, ranks, budget)
    return r, sent * ranks


@wrong("plan", "frozen weights in bf16 take 2 bytes")
def frozen_in_fp32_but_not_below_zero(layers, ranks, budget):
    base, each = bytes_of(layers, 4, 16)
    r = max(0, (budget - base) // each)
    return r, 2 * (ranks - 1) / ranks * 4 * r * sum(map(sum, layers))


@wrong("plan", "each trained number has a gradient")
def with_one_average(layers, ranks, budget):
    return planned(layers, ranks, budget, trained=12)


@wrong("plan", "only gradients are sent")
def sends_the_averages_too(layers, ranks, budget):
    return planned(layers, ranks, budget, sent=16)


@wrong("plan", "this is half of it")
def sends_in_bf16(layers, ranks, budget):
    return planned(layers, ranks, budget, sent=2)


@wrong("plan", "each gradient exists once")
def with_buckets(layers, ranks, budget):
    return planned(layers, ranks, budget, trained=20)


@wrong("plan", "trained numbers|exactly the budget|is in fp32|takes 4 bytes")
def of_inputs_only(layers, ranks, budget):
    """Forgets that B has outputs * r numbers."""
    base, _ = bytes_of(layers, 2, 16)
    r = (budget - base) // (16 * sum(i for i, _ in layers))
    return r, 8 * (ranks - 1) / ranks * r * sum(map(sum, layers))


@right("plan")
def in_an_array(layers, ranks, budget):
    shapes = numpy.array(layers)
    r = (budget - 2 * shapes.prod(axis=1).sum()) // (16 * shapes.sum())
    return numpy.array([r, 8 * r * shapes.sum() * (ranks - 1) / ranks])


@wrong("plan", "return two numbers")
def r_only(layers, ranks, budget):
    return planned(layers, ranks, budget)[0]


@wrong("plan", "just above the budget|2 bytes per frozen weight|trained number")
def budget_of_all_ranks(layers, ranks, budget):
    """Takes the budget for that of all ranks together."""
    base, each = bytes_of(layers, 2, 16)
    r = (budget * ranks - base) // each
    return r, 2 * (ranks - 1) / ranks * 4 * r * sum(map(sum, layers))


@wrong("plan", "exactly the budget: that still fits")
def below_the_budget(layers, ranks, budget):
    """Leaves at least a byte."""
    return planned(layers, ranks, budget - 1)


@wrong("plan", "just above the budget: round down")
def to_the_nearest(layers, ranks, budget):
    base, each = bytes_of(layers, 2, 16)
    r = round((budget - base) / each)
    return r, 2 * (ranks - 1) / ranks * 4 * r * sum(map(sum, layers))


@wrong("plan", "2 bytes per frozen weight|just above the budget|trained number")
def each_shape_once(layers, ranks, budget):
    """Layers that are alike get lost in a dict."""
    return planned(list(dict.fromkeys(layers)), ranks, budget)


@wrong("plan", "return two numbers")
def with_the_rest(layers, ranks, budget):
    """Says what is left of the budget, too."""
    r, sent = planned(layers, ranks, budget)
    return r, sent, budget - sum(bytes_of(layers, 2, 16 * r))


@wrong("plan", "only the gradients of the trained numbers|only gradients are sent|in a ring")
def sends_b_only(layers, ranks, budget):
    r, _ = planned(layers, ranks, budget)
    return r, 8 * (ranks - 1) / ranks * r * sum(o for _, o in layers)


@wrong("plan", "only the gradients of the trained numbers")
def sends_what_all_weights_have(layers, ranks, budget):
    r, _ = planned(layers, ranks, budget)
    return r, 8 * (ranks - 1) / ranks * sum(i * o for i, o in layers)


@wrong("plan", "your|is in fp32|trained number|just above|2 bytes per frozen", "failed")
def shards_over_the_ranks(layers, ranks, budget):
    """As if the optimizer's state were sharded."""
    base, each = bytes_of(layers, 2, 1)
    r = int((budget - base) // (each * (8 + 8 / ranks)))
    return r, 8 * (ranks - 1) / ranks * r * each


@wrong("plan", "TypeError|AttributeError", "your code raised")
def takes_modules(layers, ranks, budget):
    base = sum(2 * layer.weight.numel() for layer in layers)
    return (budget - base) // 16, 0


@right("plan")
def from_above(layers, ranks, budget):
    """Tries r from a large one on, downwards; bytes per layer."""
    frozen = sum(2 * i * o for i, o in layers)
    ends = [i + o for i, o in layers]
    r = next(r for r in range(budget, -1, -1) if frozen + sum(16 * r * end for end in ends) <= budget)
    message = sum(4 * r * end for end in ends)
    return torch.tensor([r, message - message / ranks + message * (ranks - 1) / ranks], dtype=torch.float64)


# ---- lora_layer ----


class Base(nn.Module):
    """What the answers below share; each changes one thing."""

    def __init__(self, layer, r, alpha):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, layer.in_features) / math.sqrt(r))
        self.B = nn.Parameter(torch.zeros(layer.out_features, r))
        self.scale = alpha / math.sqrt(r)

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.A.T @ self.B.T)

    @torch.no_grad()
    def merged(self):
        layer = copy.deepcopy(self.layer)
        layer.weight += self.scale * self.B @ self.A
        return layer


@right("lora_layer")
class OfTwoLayers(Base):
    """A and B as linear layers, and B stored first."""

    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        del self.A, self.B
        self.up = nn.Linear(r, layer.out_features, bias=False)
        self.down = nn.Linear(layer.in_features, r, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x)) * self.scale

    def merged(self):
        layer = nn.Linear(self.layer.in_features, self.layer.out_features, self.layer.bias is not None).double()
        layer.weight = nn.Parameter(self.layer.weight.data + self.scale * self.up.weight.data @ self.down.weight.data)
        if self.layer.bias is not None:
            layer.bias = nn.Parameter(self.layer.bias.data.clone())
        return layer


@right("lora_layer")
class TheOtherWayRound(Base):
    """A (inputs, r), which begins as zeros, and B (r, outputs), which does not."""

    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.A = nn.Parameter(torch.zeros(layer.in_features, r))
        self.B = nn.Parameter(torch.randn(r, layer.out_features))

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.A @ self.B)

    def merged(self):
        layer = copy.deepcopy(self.layer)
        layer.weight.data += self.scale * (self.A.data @ self.B.data).T
        return layer


@wrong("lora_layer", "frozen: layer.requires_grad_")
class NotFrozen(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        layer.requires_grad_(True)


@wrong("lora_layer", "frozen: layer.requires_grad_")
class BiasNotFrozen(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        if layer.bias is not None:
            layer.bias.requires_grad_(True)


@wrong("lora_layer", "stored as attributes of the module")
class NoParameters(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        A, B = self.A.data, self.B.data
        del self.A, self.B
        self.A, self.B = A, B


@wrong("lora_layer", "initialise B with zeros")
class BothRandom(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.B = nn.Parameter(torch.randn_like(self.B))


@wrong("lora_layer", "stays zero forever")
class BothZeros(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.A = nn.Parameter(torch.zeros_like(self.A))


@wrong("lora_layer", "scaled by alpha / sqrt\\(r\\)")
class NotScaled(Base):
    def forward(self, x):
        return self.layer(x) + x @ self.A.T @ self.B.T


@wrong("lora_layer", "scaled by alpha / sqrt\\(r\\)")
class ScaledByAlpha(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = alpha


@wrong("lora_layer", "B A x is missing")
class NoEffect(Base):
    def forward(self, x):
        return self.layer(x) + 0 * (x @ self.A.T @ self.B.T)


@wrong("lora_layer", "no gradient reaches A and B")
class LearnsNothing(Base):
    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.A.T @ self.B.T).detach()


@wrong("lora_layer", "it must start with the output of the given layer|W x \\+ b is missing")
class WithoutTheLayer(Base):
    def forward(self, x):
        return self.scale * (x @ self.A.T @ self.B.T)


@wrong("lora_layer", "merged\\(\\) must return a new nn.Linear")
class MergedIntoItself(Base):
    def merged(self):
        return self


@wrong("lora_layer", "merged\\(\\) must return a new nn.Linear")
class MergedInPlace(Base):
    def merged(self):
        self.layer.weight.data += self.scale * self.B.data @ self.A.data
        return self.layer


@wrong("lora_layer", "B A counts twice")
class ChangesItselfFirst(Base):
    def merged(self):
        self.layer.weight.data += self.scale * self.B.data @ self.A.data
        return copy.deepcopy(self.layer)


@wrong("lora_layer", "has lost the bias")
class LosesTheBias(Base):
    def merged(self):
        layer = nn.Linear(self.layer.in_features, self.layer.out_features, bias=False)
        layer.weight = nn.Parameter(super().merged().weight.data)
        return layer


@wrong("lora_layer", "has no alpha / sqrt")
class MergesWithoutScale(Base):
    def merged(self):
        layer = copy.deepcopy(self.layer)
        layer.weight.data += self.B.data @ self.A.data
        return layer


@wrong("lora_layer", "the merged layer is the old one")
class MergesNothing(Base):
    def merged(self):
        return copy.deepcopy(self.layer)


@wrong("lora_layer", "RuntimeError|ValueError", "your code raised")
class ShapesMixedUp(Base):
    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.B @ self.A)


@wrong("lora_layer", "no gradient passes through the frozen layer to x")
class FreezesByNoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            y = self.layer(x)
        return y + self.scale * (x @ self.A.T @ self.B.T)


@wrong("lora_layer", "no gradient passes through the frozen layer to x")
class DetachesTheLayer(Base):
    def forward(self, x):
        return self.layer(x).detach() + self.scale * (x @ self.A.T @ self.B.T)


@wrong("lora_layer", "no gradient passes through A and B to x")
class DetachesX(Base):
    def forward(self, x):
        return self.layer(x) + self.scale * (x.detach() @ self.A.T @ self.B.T)


@wrong("lora_layer", "no gradient reaches x")
class DetachesAllOfX(Base):
    def forward(self, x):
        return super().forward(x.detach())


@wrong("lora_layer", "drops the fraction")
class ScaledByWholeNumbers(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = alpha // r


@wrong("lora_layer", "drops the fraction")
class RoundedAtLeastOne(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = max(1, alpha // math.sqrt(r))


@wrong("lora_layer", "sets torch's seed")
class SetsTheSeed(Base):
    def __init__(self, layer, r, alpha):
        torch.manual_seed(0)
        super().__init__(layer, r, alpha)


@wrong("lora_layer", "gradients are off for the whole program")
class TurnsGradientsOff(Base):
    def merged(self):
        torch.set_grad_enabled(False)
        layer = copy.deepcopy(self.layer)
        layer.weight += self.scale * self.B @ self.A
        return layer


@wrong("lora_layer", "merged\\(\\) has frozen A and B")
class FreezesWhenMerged(Base):
    def merged(self):
        self.requires_grad_(False)
        return super().merged()


@wrong("lora_layer", "RuntimeError", "your code raised")
class ForOneRowAtATime(Base):
    """Takes (batch, inputs) only."""

    def forward(self, x):
        return self.layer(x) + self.scale * torch.mm(torch.mm(x, self.A.T), self.B.T)


@wrong("lora_layer", "this is plain LoRA's alpha / r")
class PlainLora(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = alpha / r


@wrong("lora_layer", "this is plain LoRA's alpha / r")
class OfTheLesson(LoRALinear):
    """The lesson's own layer, whose merge() has another name here."""

    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha, dropout=0.0)

    def merged(self):
        return self.merge()


@right("lora_layer")
class MergesIntoAFreshLayer(Base):
    @torch.no_grad()
    def merged(self):
        bias = self.layer.bias
        layer = nn.Linear(self.layer.in_features, self.layer.out_features, bias is not None)
        layer.weight.copy_(self.layer.weight + self.scale * self.B @ self.A)
        if bias is not None:
            layer.bias.copy_(bias)
        return layer


@right("lora_layer")
class ByOneWeight(Base):
    """Adds up the weight first, in each forward."""

    def forward(self, x):
        weight = self.layer.weight + self.scale * self.B @ self.A
        return F.linear(x, weight, self.layer.bias)


@right("lora_layer")
class InDouble(Base):
    """Merges in 64 bits."""

    def merged(self):
        layer = copy.deepcopy(self.layer)
        change = self.B.detach().double() @ self.A.detach().double()
        with torch.no_grad():
            layer.weight.add_(change * self.scale)
        return layer.requires_grad_(True)


@wrong("lora_layer", "merge them anew in each call")
class KeepsWhatItMerged(Base):
    result = None

    def merged(self):
        if self.result is None:
            self.result = [super().merged()]
        return self.result[0]


@wrong("lora_layer", "B A is zero at first, and yet|must compute W x")
class AddsTheBiasTwice(Base):
    def forward(self, x):
        bias = self.layer.bias
        return super().forward(x) + (0 if bias is None else bias)


@wrong("lora_layer", "scaled by alpha / sqrt\\(r\\)")
class RootOfBoth(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = math.sqrt(alpha / r)


@right("lora_layer")
class ByTheStateDict(Base):
    def merged(self):
        old = self.layer
        layer = nn.Linear(old.in_features, old.out_features, old.bias is not None)
        state = {name: value.clone() for name, value in old.state_dict().items()}
        state["weight"] += (self.scale * self.B @ self.A).detach()
        layer.load_state_dict(state)
        return layer


@wrong("lora_layer", "share a weight or the bias")
class SharesTheBias(Base):
    @torch.no_grad()
    def merged(self):
        old = self.layer
        layer = nn.Linear(old.in_features, old.out_features, old.bias is not None)
        layer.weight.copy_(old.weight + self.scale * self.B @ self.A)
        layer.bias = old.bias
        return layer


@wrong("lora_layer", "the added term has the wrong sign")
class Subtracts(Base):
    def forward(self, x):
        return self.layer(x) - self.scale * (x @ self.A.T @ self.B.T)


@wrong("lora_layer", "only the two new matrices may train")
class LearnsItsScale(Base):
    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.scale = nn.Parameter(torch.tensor(alpha / math.sqrt(r)))


@wrong("lora_layer", "RuntimeError|only the two new matrices may train", "failed|your code raised")
class OfTheSmallerSide(Base):
    """Both matrices have the shape of A."""

    def __init__(self, layer, r, alpha):
        super().__init__(layer, r, alpha)
        self.B = nn.Parameter(torch.zeros(layer.in_features, r))

    def forward(self, x):
        return self.layer(x + self.scale * (x @ self.A.T @ self.B.T))


@wrong("lora_layer", "W x \\+ alpha / sqrt\\(r\\) B A x|no gradient passes through A and B")
class DetachesTheThinOutput(Base):
    """Half of the path to x is cut."""

    def forward(self, x):
        mixed = (x + x.detach()) / 2
        return self.layer(x) + self.scale * (mixed @ self.A.T @ self.B.T)


@wrong("lora_layer", "its weight must be W \\+ alpha|RuntimeError", "failed|your code raised")
class MergesTransposed(Base):
    def merged(self):
        layer = copy.deepcopy(self.layer)
        layer.weight.data += self.scale * (self.A.data.T @ self.B.data.T)
        return layer


@wrong("lora_layer", "must compute W x|B A is zero at first")
class ScalesAllOfIt(Base):
    def forward(self, x):
        return self.scale * (self.layer(x) + x @ self.A.T @ self.B.T)


@right("lora_layer")
class ByEinsum(Base):
    """Adds in place, and merges by the columns of the identity."""

    def forward(self, x):
        thin = torch.einsum("...i,ri->...r", x, self.A)
        return torch.einsum("...r,or->...o", thin, self.B).mul(self.scale).add(self.layer(x))

    def merged(self):
        old = self.layer
        with torch.no_grad():
            columns = self(torch.eye(old.in_features)) - (0 if old.bias is None else old.bias)
        layer = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        state = {"weight": columns.T} | ({} if old.bias is None else {"bias": old.bias})
        layer.load_state_dict(state)
        return layer


# ---- train_only ----


def chosen_names(model, parts):
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, value in named if set(name.split(".")) & set(parts) and value.is_floating_point()]


def counts(model):
    values = list(model.parameters())
    return sum(value.numel() for value in values if value.requires_grad), sum(value.numel() for value in values)


@right("train_only")
def freeze_all_then_thaw(model, parts):
    model.requires_grad_(False)
    for name in chosen_names(model, parts):
        model.get_parameter(name).requires_grad_(True)
    return counts(model)


@right("train_only")
def module_by_module(model, parts):
    """Goes through modules and their own parameters."""
    model.requires_grad_(False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module.named_parameters(recurse=False):
            if value.dtype.is_floating_point and not set(parts).isdisjoint([*path.split("."), name]):
                value.requires_grad = True
    return list(counts(model))


@wrong("train_only", "compare whole words")
def parts_of_words(model, parts):
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.is_floating_point():
            value.requires_grad_(any(part in name for part in parts))
    return counts(model)


@wrong("train_only", "a parameter that is not chosen must be frozen")
def thaws_only(model, parts):
    for name in chosen_names(model, parts):
        model.get_parameter(name).requires_grad_(True)
    return counts(model)


@wrong("train_only", "was frozen before, but is chosen now")
def freezes_only(model, parts):
    kept = {id(model.get_parameter(name)) for name in chosen_names(model, parts)}
    for value in model.parameters():
        if id(value) not in kept:
            value.requires_grad_(False)
    return counts(model)


@wrong("train_only", "under the first name only")
def one_name_each(model, parts):
    for name, value in model.named_parameters():
        value.requires_grad_(bool(set(name.split(".")) & set(parts)) and value.is_floating_point())
    return counts(model)


@wrong("train_only", "any of the words")
def only_the_last_word(model, parts):
    for name, value in model.named_parameters(remove_duplicate=False):
        value.requires_grad_(name.split(".")[-1] in parts and value.is_floating_point())
    return counts(model)


@wrong("train_only", "packed into integers", "your code raised")
def integers_too(model, parts):
    for name, value in model.named_parameters(remove_duplicate=False):
        value.requires_grad_(bool(set(name.split(".")) & set(parts)))
    return counts(model)


@wrong("train_only", "one parameter with two names")
def tied_ones_counted_twice(model, parts):
    trained, total = freeze_all_then_thaw(model, parts)
    return trained, total + model.head.weight.numel()


@wrong("train_only", "count their elements")
def counts_tensors(model, parts):
    freeze_all_then_thaw(model, parts)
    return len(chosen_names(model, parts)), len(list(model.parameters()))


@wrong("train_only", "return two integers")
def returns_nothing(model, parts):
    freeze_all_then_thaw(model, parts)


@wrong("train_only", "first the number that trains")
def all_first(model, parts):
    return freeze_all_then_thaw(model, parts)[::-1]


@wrong("train_only", "instead of replacing them with new ones")
def new_parameters(model, parts):
    numbers = freeze_all_then_thaw(model, parts)
    model.norm.weight = nn.Parameter(model.norm.weight.detach(), requires_grad=model.norm.weight.requires_grad)
    return numbers


@wrong("train_only", "the second name must not undo the first")
def later_names_win(model, parts):
    for name, value in model.named_parameters(remove_duplicate=False):
        chosen = bool(set(name.split(".")) & set(parts)) and value.is_floating_point()
        value.requires_grad_(chosen)
    return counts(model)


@wrong("train_only", "leave the numbers and the list of parts as they are")
def adds_to_the_parts(model, parts):
    parts.append("lora")
    return freeze_all_then_thaw(model, parts)


@wrong("train_only", "leave the numbers and the list of parts as they are")
def zeros_what_is_frozen(model, parts):
    numbers = freeze_all_then_thaw(model, parts)
    for value in model.parameters():
        if not value.requires_grad:
            value.data.zero_()
    return numbers


@wrong("train_only", "any of the words")
def modules_by_their_last_word(model, parts):
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if name.split(".")[-1] in parts:
            for value in module.parameters():
                value.requires_grad_(value.is_floating_point())
    return counts(model)


@wrong("train_only", "first name only|any of the words")
def by_the_state_dict(model, parts):
    """What state_dict returns is detached: to thaw it changes nothing."""
    model.requires_grad_(False)
    for name, value in model.state_dict().items():
        if set(name.split(".")) & set(parts) and value.is_floating_point():
            value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "that of all parameters, and not of the frozen")
def what_trains_and_what_does_not(model, parts):
    trained, total = freeze_all_then_thaw(model, parts)
    return trained, total - trained


@right("train_only")
def by_patterns(model, parts):
    """A regular expression for whole words."""
    words = "|".join(map(re.escape, parts))
    wanted = re.compile(rf"(^|\.)({words})(\.|$)") if parts else re.compile(r"(?!)")
    trained = []
    for name, value in model.named_parameters(remove_duplicate=False):
        value.requires_grad = False
        if value.is_floating_point() and wanted.search(name):
            trained.append(value)
    for value in trained:
        value.requires_grad = True
    return counts(model)


@right("train_only")
def counted_in_tensors(model, parts):
    numbers = freeze_all_then_thaw(model, parts)
    return [int(torch.tensor(number)) for number in numbers]


@wrong("train_only", "compare whole words")
def beginnings_of_words(model, parts):
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.is_floating_point():
            words = name.split(".")
            if any(word.startswith(part) for word in words for part in parts):
                value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "any of the words")
def all_parts_at_once(model, parts):
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        if parts and set(parts) <= set(name.split(".")):
            value.requires_grad_(value.is_floating_point())
    return counts(model)


@wrong("train_only", "must train")
def as_peft_names_them(model, parts):
    """Freezes all but what is called lora_, whatever was asked for."""
    for name, value in model.named_parameters():
        value.requires_grad_("lora_" in name)
    return counts(model)


@wrong("train_only", "packed into integers never trains: do not count it")
def packed_ones_counted(model, parts):
    """Counts all that is chosen, and not all that trains."""
    total = freeze_all_then_thaw(model, parts)[1]
    named = model.named_parameters(remove_duplicate=False)
    chosen = {id(value): value.numel() for name, value in named if set(name.split(".")) & set(parts)}
    return sum(chosen.values()), total


@wrong("train_only", "but the number of all has it, too")
def packed_ones_left_out(model, parts):
    trained = freeze_all_then_thaw(model, parts)[0]
    return trained, sum(value.numel() for value in model.parameters() if value.is_floating_point())


@wrong("train_only", "in bf16 can train as well")
def single_precision_only(model, parts):
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        if set(name.split(".")) & set(parts) and value.dtype == torch.float32:
            value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "packed into integers", "your code raised")
def all_but_bytes(model, parts):
    """Knows one kind of integers."""
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        if set(name.split(".")) & set(parts) and value.dtype != torch.uint8:
            value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "packed into integers", "your code raised")
def all_but_what_was_frozen(model, parts):
    """Tells integers by their names."""
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        if set(name.split(".")) & set(parts) and "attention.weight" not in name or "attention" in parts:
            value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "any of the words")
def without_the_last_word(model, parts):
    """Words of modules only, and the adapters by their names."""
    model.requires_grad_(False)
    for name, value in model.named_parameters(remove_duplicate=False):
        words = name.split(".")
        if set(words[:-1] + [word for word in words[-1:] if word in "AB"]) & set(parts) and value.is_floating_point():
            value.requires_grad_(True)
    return counts(model)


@wrong("train_only", "one parameter with two names|return two integers")
def counts_by_the_state_dict(model, parts):
    trained = freeze_all_then_thaw(model, parts)[0]
    return trained, sum(value.numel() for value in model.state_dict().values())


@wrong("train_only", "return two integers")
def a_share(model, parts):
    trained, total = freeze_all_then_thaw(model, parts)
    return trained / total, total


@right("train_only")
def by_a_set_of_parameters(model, parts):
    """Keeps parameters, not ids; sums in NumPy."""
    wanted = set()
    for name, value in model.named_parameters(remove_duplicate=False):
        value.requires_grad_(False)
        if any(word == part for word in name.split(".") for part in parts):
            wanted.add(value)
    for value in wanted:
        if torch.is_floating_point(value):
            value.requires_grad_()
    sizes = numpy.array([[value.numel() * value.requires_grad, value.numel()] for value in model.parameters()])
    return sizes.sum(axis=0)


# ---- answer_loss ----


def labels_of(tokens, questions, lengths, begin=0, end=0):
    places = torch.arange(1, tokens.shape[1])
    counted = (places >= questions[:, None] + begin) & (places < lengths[:, None] + end)
    return tokens[:, 1:].masked_fill(~counted, -100)


def sum_of(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")


def over_all_ranks(total, number):
    number = number.clone()
    dist.all_reduce(number)
    return total * dist.get_world_size() / number


def with_labels(logits, labels):
    return over_all_ranks(sum_of(logits, labels), (labels != -100).sum())


@right("answer_loss")
def row_by_row(logits, tokens, questions, lengths):
    total, number = logits.sum() * 0, torch.zeros(())
    for row, (begin, end) in enumerate(zip(questions, lengths)):
        total = total + F.cross_entropy(logits[row, begin - 1 : end - 1], tokens[row, begin:end], reduction="sum")
        number += end - begin
    return over_all_ranks(total, number)


@right("answer_loss")
def by_weights(logits, tokens, questions, lengths):
    """Weights of 0 and 1, and the number gathered."""
    weights = (labels_of(tokens, questions, lengths) != -100).double()
    losses = -logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    numbers = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, weights.sum())
    return (losses * weights).sum() / (sum(numbers) / len(numbers))


@wrong("answer_loss", "the question's tokens count, too")
def question_too(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths, begin=-99))


@wrong("answer_loss", "everything counts|question's tokens count|a rank without any answer")
def library_default(logits, tokens, questions, lengths):
    """What a collator for language modelling gives: all but the padding, by its
    number.
    """
    return with_labels(logits, tokens[:, 1:])


@wrong("answer_loss", "the padding counts, too")
def padding_too(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths, end=99))


@wrong("answer_loss", "the model would not learn to stop")
def padding_by_number(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    return with_labels(logits, labels.masked_fill(labels == 0, -100))


@wrong("answer_loss", "the first token of the answer does not count")
def one_too_late(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths, begin=1))


@wrong("answer_loss", "the last token of the question counts|question's tokens count")
def one_too_early(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths, begin=-1))


@wrong("answer_loss", "of the same place are compared")
def not_shifted(logits, tokens, questions, lengths):
    places = torch.arange(tokens.shape[1])
    counted = (places >= questions[:, None]) & (places < lengths[:, None])
    labels = tokens.masked_fill(~counted, -100)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return over_all_ranks(total, counted.sum())


@wrong("answer_loss", "own mean, so a rank with few tokens|a mean of 0/0")
def mean_of_means(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    return sum_of(logits, labels) / (labels != -100).sum().clamp(min=1)


@wrong("answer_loss", "own mean, so a rank with few tokens|a mean of 0/0, which is nan")
def cross_entropys_own_mean(logits, tokens, questions, lengths):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels_of(tokens, questions, lengths).flatten())


@wrong("answer_loss", "own mean, so a rank with few tokens|a mean of 0/0")
def of_the_lesson(logits, tokens, questions, lengths):
    """Lesson 11's token_losses, and its mean over the tokens of this rank."""
    labels = labels_of(tokens, questions, lengths)
    pairs = logits[:, :-1].transpose(1, 2).float(), labels
    losses = F.cross_entropy(*pairs, ignore_index=-100, reduction="none")
    return losses[labels != -100].mean()


@wrong("answer_loss", "multiply by the number of ranks")
def forgets_that_ddp_divides(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths)) / dist.get_world_size()


@wrong("answer_loss", "this is a sum")
def only_a_sum(logits, tokens, questions, lengths):
    return sum_of(logits, labels_of(tokens, questions, lengths))


@wrong("answer_loss", "the gradients are right, but the loss is not")
def right_gradient_wrong_number(logits, tokens, questions, lengths):
    loss = with_labels(logits, labels_of(tokens, questions, lengths))
    return loss + (loss.detach() + 1)


@wrong("answer_loss", "each rank must call the same collectives, also a rank without any answer", "your code raised")
def leaves_early_where_nothing_counts(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    if (labels == -100).all():
        return logits.sum() * 0
    return with_labels(logits, labels)


@right("answer_loss")
def in_single_precision(logits, tokens, questions, lengths):
    """As lesson 11's token_losses."""
    return with_labels(logits.float(), labels_of(tokens, questions, lengths))


@right("answer_loss")
def by_a_mean_and_a_share(logits, tokens, questions, lengths):
    """The mean of this rank, times its share of the tokens."""
    labels = labels_of(tokens, questions, lengths)
    number = (labels != -100).sum()
    numbers = [torch.zeros_like(number) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, number)
    mean = sum_of(logits, labels) / number.clamp(min=1)
    return mean * number * len(numbers) / sum(numbers)


@right("answer_loss")
def with_a_shape(logits, tokens, questions, lengths):
    """A tensor of one number with a dimension."""
    return with_labels(logits, labels_of(tokens, questions, lengths)).reshape(1)


@wrong("answer_loss", "work on copies")
def writes_into_the_tokens(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    tokens[:, 1:] = labels
    return with_labels(logits, labels)


@wrong("answer_loss", "work on copies")
def counts_from_one(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    questions -= 1
    return with_labels(logits, labels)


@wrong("answer_loss", "divided by the number of these tokens|texts count equally")
def mean_per_text_first(logits, tokens, questions, lengths):
    """Each text counts the same, however long its answer is."""
    labels = labels_of(tokens, questions, lengths)
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none").sum(1)
    numbers = (labels != -100).sum(1)
    return over_all_ranks((losses / numbers.clamp(min=1)).sum(), (numbers > 0).sum())


@wrong("answer_loss", "divided by the number of these tokens|places counts")
def divides_by_all_places(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    return over_all_ranks(sum_of(logits, labels), torch.tensor(labels.numel()))


COUNTED = []


@wrong("answer_loss", "divided by the number of these tokens|another batch's number")
def counts_once_only(logits, tokens, questions, lengths):
    """Keeps the number of the first batch."""
    labels = labels_of(tokens, questions, lengths)
    if not COUNTED:
        number = (labels != -100).sum()
        dist.all_reduce(number)
        COUNTED.append(number)
    return sum_of(logits, labels) * dist.get_world_size() / COUNTED[0]


@wrong("answer_loss", "DDP takes the mean of the ranks' losses|divided by the number")
def reduces_the_loss_too(logits, tokens, questions, lengths):
    """all_reduce of the loss itself: autograd does not know of it."""
    total = sum_of(logits, labels_of(tokens, questions, lengths))
    number = (labels_of(tokens, questions, lengths) != -100).sum()
    dist.all_reduce(number)
    shared = total.detach().clone()
    dist.all_reduce(shared)
    return total / number + (shared - total.detach()) / number


@wrong("answer_loss", "a loss without a graph: .* DDP waits")
def a_new_zero_where_nothing_counts(logits, tokens, questions, lengths):
    """A zero that requires a gradient, and yet belongs to no graph."""
    labels = labels_of(tokens, questions, lengths)
    loss = with_labels(logits, labels)
    return loss if (labels != -100).any() else torch.zeros((), requires_grad=True)


@wrong("answer_loss", "a loss without a graph")
def a_number_where_nothing_counts(logits, tokens, questions, lengths):
    loss = with_labels(logits, labels_of(tokens, questions, lengths))
    return loss if loss.item() else 0.0


@wrong("answer_loss", "a loss without a graph")
def detached(logits, tokens, questions, lengths):
    return with_labels(logits.detach(), labels_of(tokens, questions, lengths))


@wrong("answer_loss", "a mean of 0/0")
def sum_of_means_per_text(logits, tokens, questions, lengths):
    """A mean for each text, which is nan where the answer was cut off."""
    means = [
        F.cross_entropy(logits[row, begin - 1 : end - 1], tokens[row, begin:end])
        for row, (begin, end) in enumerate(zip(questions, lengths))
    ]
    numbers = lengths - questions
    return over_all_ranks((torch.stack(means) * numbers).sum(), numbers.sum())


@wrong("answer_loss", "IndexError", "your code raised")
def token_by_token_up_to_the_length(logits, tokens, questions, lengths):
    """Takes one more place, which the longest text does not have."""
    total, number = logits.sum() * 0, torch.zeros(())
    for row, (begin, end) in enumerate(zip(questions.tolist(), lengths.tolist())):
        for place in range(begin, end + 1):
            loss = F.cross_entropy(logits[row, place - 1], tokens[row, place])
            total, number = total + loss * (place < end), number + (place < end)
    return over_all_ranks(total, number)


@wrong("answer_loss", "n times too large")
def counts_the_ranks_twice(logits, tokens, questions, lengths):
    return with_labels(logits, labels_of(tokens, questions, lengths)) * dist.get_world_size()


@wrong("answer_loss", "divided by the number of these tokens")
def the_largest_number_of_a_rank(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    number = (labels != -100).sum()
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return sum_of(logits, labels) / number


@wrong("answer_loss", "divided by the number of these tokens|a mean of 0/0|own mean|n times too large")
def broadcast_instead_of_a_sum(logits, tokens, questions, lengths):
    labels = labels_of(tokens, questions, lengths)
    number = (labels != -100).sum()
    dist.broadcast(number, src=0)
    return sum_of(logits, labels) / number.clamp(min=1)


@right("answer_loss")
def over_a_flat_mask(logits, tokens, questions, lengths):
    """Picks logits and tokens by a mask; what is picked may be nothing."""
    places = torch.arange(tokens.shape[1])
    mask = (places >= questions[:, None]) & (places < lengths[:, None])
    picked = logits[:, :-1][mask[:, 1:]]
    losses = F.nll_loss(picked.log_softmax(-1), tokens[mask], reduction="none")
    return over_all_ranks(losses.sum(), mask.sum())


@right("answer_loss")
def by_gathered_objects(logits, tokens, questions, lengths):
    """Counts from the lengths alone, and gathers Python numbers."""
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, int((lengths - questions).sum()))
    return sum_of(logits, labels_of(tokens, questions, lengths)) / (sum(numbers) / len(numbers))


# ---- fine_tune ----


def tune(network, batches, held_out, epochs, rate, faults=(), own=()):
    """Repaired, but for some of the given program's faults. own: functions in place of
    parts of it, by name.
    """
    parts = {"start": share, "mean": average, "evaluate": evaluate, "keep": cloned, "end": nothing} | dict(own)
    layers = list(network.layers)
    trained = [value for layer in layers for value in (layer.A, layer.B)]
    if "start" not in faults:
        parts["start"](trained)
    best, losses = None, []
    for _ in range(epochs):
        for inputs, targets in batches:
            F.mse_loss(network(inputs), targets).backward()
            parts["mean"](trained)
            with torch.no_grad():
                for value in trained:
                    value -= rate * value.grad
                    value.grad = None
        with torch.no_grad():
            if "drift" in faults:
                merge(layers)
            else:
                weights = [layer.weight.clone() for layer in layers]
                merge(layers)
            losses.append(own_loss(network, *held_out) if "own" in faults else parts["evaluate"](network, *held_out))
            for layer in layers:
                layer.merged = False
                if "drift" in faults:
                    layer.weight -= layer.scale * layer.B @ layer.A
            if "drift" not in faults:
                for layer, weight in zip(layers, weights):
                    layer.weight.copy_(weight)
        if losses[-1] == min(losses):
            best = parts["keep"](trained)
    parts["end"](layers, trained, best)
    return best, losses


def share(trained):
    for value in trained:
        dist.broadcast(value.detach(), src=0)


def average(trained):
    for value in trained:
        dist.all_reduce(value.grad)
        value.grad /= dist.get_world_size()


def merge(layers):
    for layer in layers:
        layer.weight += layer.scale * layer.B @ layer.A
        layer.merged = True


def own_loss(network, x, y):
    return F.mse_loss(network(x), y).item()


def evaluate(network, x, y):
    sums = torch.tensor([F.mse_loss(network(x), y, reduction="sum"), y.numel()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def cloned(trained):
    return [value.detach().clone() for value in trained]


def nothing(*_):
    pass


OWN_A, ROUNDED = "each has drawn A for itself", "In bf16, adding a number and subtracting it"
OWN_LOSS = "the loss on this rank's own held-out samples"


@right("fine_tune")
def tuning_repaired(*args):
    return tune(*args)


@wrong("fine_tune", ROUNDED)
def tuning_as_given(*args):
    return tune(*args, faults=["start", "own", "drift"])


@wrong("fine_tune", ROUNDED)
def tuning_with_own_start_and_drift(*args):
    return tune(*args, faults=["start", "drift"])


@wrong("fine_tune", ROUNDED)
def tuning_with_own_loss_and_drift(*args):
    return tune(*args, faults=["own", "drift"])


@wrong("fine_tune", OWN_A)
def tuning_with_own_start_and_loss(*args):
    return tune(*args, faults=["start", "own"])


@wrong("fine_tune", OWN_A)
def tuning_with_own_start(*args):
    return tune(*args, faults=["start"])


@wrong("fine_tune", OWN_LOSS)
def tuning_with_own_loss(*args):
    return tune(*args, faults=["own"])


@wrong("fine_tune", ROUNDED)
def tuning_with_drift(*args):
    return tune(*args, faults=["drift"])


@wrong("fine_tune", "mean of the ranks' means")
def tuning_by_a_mean_of_means(*args):
    def of_means(network, x, y):
        value = F.mse_loss(network(x), y)
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    return tune(*args, own={"evaluate": of_means})


@wrong("fine_tune", "sum of the ranks' means")
def tuning_by_a_sum_of_means(*args):
    def of_sums(network, x, y):
        value = F.mse_loss(network(x), y)
        dist.all_reduce(value)
        return value.item()

    return tune(*args, own={"evaluate": of_sums})


@wrong("fine_tune", "mean of the squared errors over the held-out samples of all ranks")
def tuning_that_takes_rank_0s_loss(*args):
    """All ranks choose the same epoch, but not the best one."""

    def of_rank_0(network, x, y):
        value = F.mse_loss(network(x), y)
        dist.broadcast(value, src=0)
        return value.item()

    return tune(*args, own={"evaluate": of_rank_0})


@right("fine_tune")
def tuning_without_merging(network, batches, held_out, epochs, rate):
    """Evaluates with the adapters beside the weights, counts gathered as objects, and joins
    what it sends.
    """
    parameters = [value for value in network.parameters() if value.requires_grad]
    for value in parameters:
        dist.broadcast(value.data, 0)
    history = []
    for _ in range(epochs):
        for x, y in batches:
            gradients = torch.autograd.grad(F.mse_loss(network(x), y), parameters)
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(whole)
            sizes = [value.numel() for value in parameters]
            for value, gradient in zip(parameters, (whole / dist.get_world_size()).split(sizes)):
                value.data -= rate * gradient.view_as(value)
        with torch.no_grad():
            pair = ((network(held_out[0]) - held_out[1]).pow(2).sum().item(), held_out[1].numel())
        pairs = [None] * dist.get_world_size()
        dist.all_gather_object(pairs, pair)
        adapters = [value.detach().clone() for layer in network.layers for value in (layer.A, layer.B)]
        history.append((sum(a for a, _ in pairs) / sum(b for _, b in pairs), adapters))
    return min(history, key=lambda pair: pair[0])[1], [loss for loss, _ in history]


@right("fine_tune")
def tuning_with_ddp(network, batches, held_out, epochs, rate):
    """Wrapped, so that the start and the means are DDP's."""
    from torch.nn.parallel import DistributedDataParallel

    model, layers = DistributedDataParallel(network), network.layers
    best, lowest, losses = None, float("inf"), []
    for _ in range(epochs):
        for x, y in batches:
            model(x).sub(y).square().mean().backward()
            with torch.no_grad():
                for layer in layers:
                    for value in (layer.A, layer.B):
                        value.sub_(value.grad, alpha=rate)
                        value.grad.zero_()
        with torch.no_grad():
            loss = evaluate(copy.deepcopy(network), *held_out)
        losses.append(loss)
        if loss < lowest:
            lowest = loss
            best = [copy.deepcopy(value.data) for layer in layers for value in (layer.A, layer.B)]
    return best, losses


@right("fine_tune")
def tuning_with_another_weight(network, batches, held_out, epochs, rate):
    """Puts merged parameters in the place of the weights, and the old ones back; as a tuple of parameters."""
    layers, old = network.layers, [layer.weight for layer in network.layers]

    def merged(network, x, y):
        for layer, weight in zip(layers, old):
            layer.weight = nn.Parameter(weight.float() + layer.scale * layer.B @ layer.A, requires_grad=False)
        value = evaluate(network, x, y)
        for layer, weight in zip(layers, old):
            layer.merged, layer.weight = False, weight
        return value

    trained = [value for layer in layers for value in (layer.A, layer.B)]
    share(trained)
    best, losses = None, []
    for _ in range(epochs):
        for x, y in batches:
            F.mse_loss(network(x), y).backward()
            average(trained)
            with torch.no_grad():
                for value in trained:
                    value.add_(value.grad, alpha=-rate)
                    value.grad = None
        with torch.no_grad():
            for layer in layers:
                layer.merged = True
            losses.append(merged(network, *held_out))
        if losses.index(min(losses)) == len(losses) - 1:
            best = tuple(nn.Parameter(value.clone()) for value in trained)
    return best, torch.tensor(losses)


@right("fine_tune")
def tuning_with_torchs_sgd(network, batches, held_out, epochs, rate):
    """With an optimizer, the state dict of rank 0, and a copy of the network for each evaluation."""
    state = {name: value for name, value in network.state_dict().items() if not name.endswith("weight")}
    for value in state.values():
        dist.broadcast(value, 0)
    names, losses, states = list(state), [], []
    optimizer = torch.optim.SGD([value for value in network.parameters() if value.requires_grad], rate)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            (F.mse_loss(network(x), y) / dist.get_world_size()).backward()
            for value in network.parameters():
                if value.requires_grad:
                    dist.all_reduce(value.grad)
            optimizer.step()
        with torch.no_grad():
            other = copy.deepcopy(network)
            merge(other.layers)
            losses.append(evaluate(other, *held_out))
        states.append(copy.deepcopy(network.state_dict()))
    best = states[losses.index(min(losses))]
    return [best[name] for name in names], losses


@wrong("fine_tune", "the adapters of the last epoch, not of the best one")
def tuning_without_a_clone(*args):
    return tune(*args, own={"keep": lambda trained: [value.detach() for value in trained]})


@wrong("fine_tune", "the network keeps the adapters of the last epoch")
def tuning_that_puts_the_best_back(*args):
    def put(layers, trained, best):
        for value, kept in zip(trained, best):
            value.data.copy_(kept)

    return tune(*args, own={"end": put})


@wrong("fine_tune", "still merged into this weight")
def tuning_that_ends_merged(*args):
    def end(layers, trained, best):
        with torch.no_grad():
            merge(layers)

    return tune(*args, own={"end": end})


@wrong("fine_tune", "stays in bf16")
def tuning_in_fp32(network, *args):
    """The base in fp32, where hardly anything is rounded away."""
    for layer in network.layers:
        layer.weight.data = layer.weight.data.float()
    return tune(network, *args, faults=["drift"])


@wrong("fine_tune", "were not restored before the next epoch")
def tuning_that_restores_at_the_end(network, *args):
    weights = [layer.weight.clone() for layer in network.layers]
    result = tune(network, *args, faults=["drift"])
    for layer, weight in zip(network.layers, weights):
        layer.weight.data.copy_(weight)
    return result


@wrong("fine_tune", "stays in bf16 in training")
def tuning_in_fp32_meanwhile(network, *args):
    """The base is in bf16 again when training is over."""
    for layer in network.layers:
        layer.weight.data = layer.weight.data.float()
    result = tune(network, *args)
    for layer in network.layers:
        layer.weight.data = layer.weight.data.bfloat16()
    return result


@wrong("fine_tune", "stays in bf16 in training")
def tuning_in_fp32_with_drift_meanwhile(network, *args):
    for layer in network.layers:
        layer.weight.data = layer.weight.data.float()
    result = tune(network, *args, faults=["drift"])
    for layer in network.layers:
        layer.weight.data = layer.weight.data.bfloat16()
    return result


@wrong("fine_tune", "better than the one before it")
def tuning_that_compares_with_the_last_epoch(network, batches, held_out, epochs, rate):
    """Keeps each epoch that is better than the one before it."""
    kept = []

    def both(network, x, y):
        kept.append((evaluate(network, x, y), cloned([v for layer in network.layers for v in (layer.A, layer.B)])))
        return kept[-1][0]

    _, losses = tune(network, batches, held_out, epochs, rate, own={"evaluate": both})
    best = kept[0][1]
    for (before, _), (loss, adapters) in zip(kept, kept[1:]):
        if loss < before:
            best = adapters
    return best, losses


@wrong("fine_tune", "without adapters")
def tuning_that_evaluates_the_base(*args):
    def of_base(network, x, y):
        kept = [layer.B.clone() for layer in network.layers]
        for layer in network.layers:
            layer.weight -= layer.scale * layer.B @ layer.A
        value = evaluate(network, x, y)
        assert all(map(torch.equal, kept, [layer.B for layer in network.layers]))
        return value

    return tune(*args, own={"evaluate": of_base})


@wrong("fine_tune", "merged into the weight and added as well")
def tuning_that_counts_adapters_twice(*args):
    def twice(network, x, y):
        for layer in network.layers:
            layer.merged = False
        return evaluate(network, x, y)

    return tune(*args, own={"evaluate": twice})


@wrong("fine_tune", "summed over the ranks(: their|, where their) mean")
def tuning_with_sums(*args):
    return tune(*args, own={"mean": lambda trained: [dist.all_reduce(value.grad) for value in trained]})


@wrong("fine_tune", "with its own gradients only")
def tuning_with_own_gradients(*args):
    return tune(*args, own={"mean": nothing})


@wrong("fine_tune", "twice")
def tuning_with_a_mean_of_means(*args):
    def twice(trained):
        average(trained)
        for value in trained:
            value.grad /= dist.get_world_size()

    return tune(*args, own={"mean": twice})


@wrong("fine_tune", "step is one of plain SGD")
def tuning_from_another_a(*args):
    """The same A on all ranks, but not rank 0's."""

    def drawn(trained):
        draw = torch.Generator().manual_seed(0)
        for value in trained[::2]:
            value.data.copy_(torch.randn(value.shape, generator=draw) / 5)

    return tune(*args, own={"start": drawn})


@wrong("fine_tune", "neither weights nor samples")
def tuning_that_averages_adapters_too(*args):
    def both(trained):
        average(trained)
        share(trained)

    return tune(*args, own={"mean": both})


@wrong("fine_tune", "neither weights nor samples")
def tuning_that_gathers_samples(*args):
    def gathered(network, x, y):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (x, y))
        x, y = (torch.cat(tensors) for tensors in zip(*parts))
        return F.mse_loss(network(x), y).item()

    return tune(*args, own={"evaluate": gathered})


@wrong("fine_tune", "return two lists")
def tuning_without_losses(*args):
    return tune(*args)[0]


@wrong("fine_tune", "on this rank's own held-out samples")
def tuning_that_chooses_by_its_own(network, batches, held_out, epochs, rate):
    """Returns the right losses, and chooses by others."""
    seen = []

    def both(network, x, y):
        seen.append((own_loss(network, x, y), cloned([v for layer in network.layers for v in (layer.A, layer.B)])))
        return evaluate(network, x, y)

    _, losses = tune(network, batches, held_out, epochs, rate, own={"evaluate": both})
    return min(seen, key=lambda pair: pair[0])[1], losses


# ---- teach ----


def taught(model, tokens, asked, most, passes, rate=1e-2, **own):
    """Trains an adapter; own: what is done otherwise."""
    every = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    layers = {name: layer for name, layer in every.items() if own.get("only", "") in name}
    r = own.get("r") or most // sum(sum(layer.weight.shape) for layer in layers.values())
    torch.manual_seed(own.get("seed", 0))
    trained, adapter, scale = [], {}, own.get("scale", 1)
    for name, layer in layers.items():
        A = torch.randn(r, layer.in_features) / layer.in_features**0.5
        adapter[name] = torch.zeros(layer.out_features, r).requires_grad_(), A.requires_grad_()
        trained += adapter[name]
    optimizer = own.get("optimizer", lambda values, rate: torch.optim.AdamW(values, rate))(trained, rate)
    weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for _ in range(int(passes * own.get("part", 1))):
        for batch in tokens[torch.randperm(len(tokens))].split(own.get("batch", 16)):
            changed = {f"{name}.weight": weights[name] + scale * B @ A for name, (B, A) in adapter.items()}
            logits = torch.func.functional_call(model, changed, (batch,))
            begin, end = own.get("targets", (asked, batch.shape[1]))
            shift = own.get("shift", 1)
            pair = logits[:, begin - shift : end - shift].flatten(0, 1), batch[:, begin:end].flatten()
            gradients = torch.autograd.grad(F.cross_entropy(*pair), trained)
            for value, gradient in zip(trained, gradients):
                value.grad = gradient.clone()
                if own.get("averages", True):
                    dist.all_reduce(value.grad)
                    value.grad /= own.get("by", 2)
            optimizer.step()
    own.get("end", nothing)(model, adapter)
    return {name: (B.detach(), A.detach()) for name, (B, A) in adapter.items()}


@right("teach")
def teach_all_layers(*args):
    return taught(*args)


@right("teach")
def teach_attention_only(*args):
    return taught(*args, only="query_key_value", rate=2e-2)


@right("teach")
def teach_with_a_small_rate(*args):
    return taught(*args, rate=2e-3)


@right("teach")
def teach_with_a_large_rate(*args):
    return taught(*args, rate=2e-2)


@right("teach")
def teach_with_a_slower_adam(*args):
    return taught(*args, rate=6e-3, optimizer=lambda values, rate: torch.optim.Adam(values, rate, betas=(0.9, 0.95)))


@right("teach")
def teach_the_whole_text(*args):
    """The question's tokens are targets, too."""
    return taught(*args, targets=(1, 7))


@right("teach")
def teach_with_larger_batches_and_a_small_r(*args):
    return taught(*args, r=2, batch=32, rate=2e-2)


@right("teach")
def teach_with_sums(*args):
    """Adam does not mind the scale of the gradients."""
    return taught(*args, by=1)


@right("teach")
def teach_with_half_of_the_passes(*args):
    return taught(*args, part=0.5)


@right("teach")
def teach_with_ddp_and_lora_layers(model, tokens, asked, most, passes):
    """On a copy, whose layers are replaced; the scale goes into B."""
    copied = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(dist.get_rank())
    adapted = {}
    for number, block in enumerate(copied.blocks):
        for part in ("attention", "mlp"):
            parent = getattr(block, part)
            for name, layer in list(parent.named_children()):
                adapted[f"blocks.{number}.{part}.{name}"] = lora = LoRALinear(layer, r=4, alpha=8, dropout=0)
                setattr(parent, name, lora)
    ddp = nn.parallel.DistributedDataParallel(copied)
    optimizer = torch.optim.AdamW([value for value in copied.parameters() if value.requires_grad], 1e-2)
    for _ in range(passes):
        for batch in tokens[torch.randperm(len(tokens))].split(16):
            optimizer.zero_grad()
            F.cross_entropy(ddp(batch)[:, asked - 1 : -1].transpose(1, 2), batch[:, asked:]).backward()
            optimizer.step()
    return {name: ((lora.scale * lora.B).detach(), lora.A.detach()) for name, lora in adapted.items()}


@wrong("teach", "the ranks have different adapters")
def teach_each_rank_alone(*args):
    return taught(*args, averages=False)


@wrong("teach", "the ranks have different adapters")
def teach_from_another_start(*args):
    return taught(*args, seed=dist.get_rank())


@wrong("teach", "not like those of rank 1: average")
def teach_on_rank_0_and_broadcast(*args):
    adapter = taught(*args, averages=False)
    for pair in adapter.values():
        for value in pair:
            dist.broadcast(value, 0)
    return adapter


@wrong("teach", "not like those of rank 1: average")
def teach_with_the_texts_of_rank_0(model, tokens, *args):
    dist.broadcast(tokens, 0)
    return taught(model, tokens, *args)


@wrong("teach", "the budget is 24 passes")
def teach_for_too_long(*args):
    return taught(*args, part=1.1)


@wrong("teach", "the budget is 24 passes")
def teach_with_the_texts_of_all_ranks(model, tokens, *args):
    every = [torch.empty_like(tokens) for _ in range(2)]
    dist.all_gather(every, tokens)
    return taught(model, torch.cat(every), *args)


@wrong("teach", "the adapter is too large")
def teach_with_a_large_r(*args):
    return taught(*args, r=5)


@wrong("teach", "the adapter changes nothing")
def teach_nothing(*args):
    return taught(*args, part=0)


@wrong("teach", "train longer, up to the budget")
def teach_too_slowly(*args):
    return taught(*args, rate=5e-5)


@wrong("teach", "train longer, up to the budget")
def teach_without_the_shift(*args):
    return taught(*args, shift=0)


@right("teach")
def teach_without_the_end(*args):
    """The base knows where an answer ends."""
    return taught(*args, targets=(4, 6))


@wrong("teach", "with B A times 8, the model answers")
def teach_with_a_forgotten_scale(*args):
    return taught(*args, scale=8, rate=3e-3)


@wrong("teach", "the adapters are merged into the weights")
def teach_and_merge(*args):
    def merge_all(model, adapter):
        for name, (B, A) in adapter.items():
            model.get_submodule(name).weight.data += B.detach() @ A.detach()

    return taught(*args, end=merge_all)


@wrong("teach", "the base was trained, too")
def teach_the_base_as_well(*args):
    def move(model, _):
        model.norm.bias.data += 0.01

    return taught(*args, end=move)


@wrong("teach", "still has other layers in it")
def teach_and_leave_layers(*args):
    def leave(model, _):
        model.blocks[0].mlp.expand = LoRALinear(model.blocks[0].mlp.expand)

    return taught(*args, end=leave)


@wrong("teach", "return a dict with the adapters")
def teach_and_return_the_model(model, *args):
    taught(model, *args)
    return model


@wrong("teach", "does not fit")
def teach_and_swap(*args):
    return {name: (A, B) for name, (B, A) in taught(*args).items()}


@wrong("teach", "no linear layer")
def teach_with_names_of_weights(*args):
    return {f"{name}.weight": pair for name, pair in taught(*args).items()}


@wrong("teach", "is not finite")
def teach_until_it_diverges(*args):
    return {name: (B * math.nan, A) for name, (B, A) in taught(*args).items()}


@wrong("teach", "take hooks and replaced functions off again")
def leaves_hooks(*given):
    def hook(model, adapter):
        for name, (B, A) in adapter.items():
            add = lambda layer, inputs, output, B=B.detach(), A=A.detach(): output + inputs[0] @ A.T @ B.T
            model.get_submodule(name).register_forward_hook(add)

    return taught(*given, end=hook)


@wrong("teach", "the ranks have different adapters")
def a_seed_from_a_name(*given):
    return taught(*given, seed=hash("adapter") % 2**31)


@wrong("train_only", "a parameter that is not chosen must be frozen|compare whole words")
def in_any_case(model, parts):
    lower = {part.lower() for part in parts}
    for name, value in model.named_parameters():
        value.requires_grad_(value.is_floating_point() and bool(lower & set(name.lower().split("."))))
    return counts(model)


@wrong("train_only", "compare whole words")
def words_between_underscores(model, parts):
    chosen = set(chosen_names(model, parts))
    for name, value in model.named_parameters():
        words = set(name.replace("_", ".").split("."))
        value.requires_grad_(name in chosen or value.is_floating_point() and bool(words & set(parts)))
    return counts(model)


@wrong("train_only", "return two integers")
def buffers_too(model, parts):
    trained, every = freeze_all_then_thaw(model, parts)
    return trained, every + sum(value.numel() for value in model.buffers())


@wrong("lora_layer", "", "failed|your code raised")
class OfRowsOnly(Base):
    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return (self.layer(rows) + self.scale * (rows @ self.A.T @ self.B.T)).reshape(-1, *x.shape[1:-1], len(self.B))
