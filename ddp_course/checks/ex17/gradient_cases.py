"""The models on which question 2 tries an answer, whole and cut."""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.ex17.gradient_causes import in_part
from ddp_course.checks.ex17.meshes import in_words
from ddp_course.checks.ex17.model import Block, Classifier
from ddp_course.checks.training import fill, gradients_of

HEAD_WIDTH, CLASSES, BATCH = 3, 4, 2


def classifier(case, n):
    """The classifier with an n-th of the heads."""
    heads, width = case["heads"], case["heads"] * HEAD_WIDTH
    blocks = [Block(width, heads // n, HEAD_WIDTH, 2 * width // n) for _ in range(case["blocks"])]
    if case["shared"]:
        for block in blocks:
            block.norm1, block.norm2 = blocks[0].norm1, blocks[0].norm2
    return Classifier(blocks, width, case["tokens"], CLASSES).double()


def drawn(case):
    """The whole model. A new one has norms as nn.LayerNorm makes them, all alike."""
    model = fill(classifier(case, 1), case["seed"])
    for module in model.modules():
        if case["new"] and isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model


def cut(name, value, place, n):
    """What a rank has of a parameter of the whole model, or of its gradient."""
    if "query_key_value" in name:
        return torch.cat([part.chunk(n)[place] for part in value.chunk(3)])
    if name.endswith(("output.weight", "contract.weight")):
        return value.chunk(n, dim=1)[place]
    return value.chunk(n)[place] if "expand" in name else value


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(tuple(names)))
    return model


def a_batch(case, number):
    generator = torch.Generator().manual_seed(case["seed"] + 1 + number)
    shape = BATCH, case["tokens"], case["heads"] * HEAD_WIDTH
    texts = torch.randn(shape, generator=generator, dtype=torch.float64)
    return texts, torch.randint(CLASSES, (BATCH,), generator=generator)


def gradients_in_one_process(case, number):
    model = freeze(drawn(case), case["frozen"])
    texts, labels = a_batch(case, number)
    F.cross_entropy(model(texts, None), labels).backward()
    return gradients_of(model)


def described(case):
    words = f"{in_words(case['groups'])}, a model of {case['blocks']} block{'s' * (case['blocks'] > 1)}"
    words += ", whose blocks share their norms" if case["shared"] else ""
    words += ", with new norms" if case["new"] else ""
    words += f", after the backward of step {case['step']}" if case["step"] > 1 else ""
    return words + (", all frozen that would need a sum" if case["frozen"] == in_part() else
                    ", some frozen" if case["frozen"] else "")  # fmt: skip
