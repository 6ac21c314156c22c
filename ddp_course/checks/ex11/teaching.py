"""Question 5: teach a small language model to answer questions in new words."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex11.facts import ASKED, KINDS, NEW, TOWNS, a_model, a_text, base
from ddp_course.checks.ex11.teaching_claims import KNOWN, OURS, claims, shares
from ddp_course.checks.salted import salted_hash
from ddp_course.checks.training import state
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

TRAINED, PASSES, MOST = 64, 24, 4096  # towns of a rank's texts; times that each may be read; numbers of an adapter, at least


def observe(teach, weights, texts, most):
    """What a rank returns, what it has read, and what has become of its model."""
    with process_group() as (rank, _), salted_hash(rank):
        model, read = a_model(weights), [0]

        def count(_, inputs):
            if torch.is_grad_enabled():
                read[0] += inputs[0].shape[0]

        model.token_embedding.register_forward_pre_hook(count)
        torch.manual_seed(rank)
        adapter = teach(model, texts[rank].clone(), ASKED, most, PASSES)
        dist.barrier()
        found = {"adapter": adapter, "read": read[0], "state": state(model)}
        with torch.no_grad():
            pair = [each(texts[rank][:4]) for each in (model.eval(), a_model(weights).eval())]
        return found | {"same logits": torch.allclose(*pair, atol=1e-5)}


@question(
    "Print the loss: it has to fall below 0.1 on both ranks. Each rank has only one of the new words, so both ranks' "
    "gradients are needed, in each step.",
    "Of each nn.Linear, A (r, inputs) starts with small random numbers, the same on all ranks, and B (outputs, r) with "
    "zeros. The sum of r * (inputs + outputs) over the layers is at most `most`. torch.func.functional_call(model, "
    "{name + '.weight': weight + B @ A}, (tokens,)) computes with adapters and leaves the model as it is.",
    "For each of `passes` epochs, shuffle the texts and split them into batches of 16. The loss is F.cross_entropy of "
    "logits[:, asked - 1 : -1] and tokens[:, asked:]. Sum the gradients over all ranks with all_reduce, divide by their "
    "number, and take a step of AdamW with a learning rate of 0.01. Return the detached (B, A) of each layer by its name.",
)
def check_teach(answer, draw):
    """Questions in new words, about towns that were not trained, are answered; the base stays
    as it is, and the ranks have the same small adapter.
    """
    weights, facts = base()
    trained, held_out = draw_texts(draw, weights, facts)
    most = MOST + draw.randrange(1, 100)
    of_ranks = answer.on_ranks(observe, weights, trained, most, nproc=KINDS, timeout=10)
    given = {"weights": weights, "trained": trained, "held out": held_out, "passes": PASSES, "most": most}
    on_every_rank(partial(claims, given), of_ranks)
    return picture(given, of_ranks[0]["adapter"])


def draw_texts(draw, weights, facts):
    """The texts of each rank, which asks for one kind of fact in one new word; and those held
    out, of other towns. Two lists of int64 (texts, LENGTH).

    Some new words look like words that the base knows. We draw words that it misunderstands.
    """
    while True:
        trained, held_out = [], []
        for kind, word in enumerate(draw.sample(NEW, KINDS)):
            texts = torch.tensor([a_text(facts, kind, word, town) for town in draw.sample(range(TOWNS), TOWNS)])
            trained.append(texts[:TRAINED])
            held_out.append(texts[TRAINED:])
        if max(shares(weights, {}, held_out)) < KNOWN:
            return trained, held_out


def picture(given, adapter):
    before, after = (shares(given["weights"], each, given["held out"]) for each in ({}, adapter))
    values = {"before": before, "yours": after, "ours": [OURS] * KINDS}
    values = {name: 100 * sum(each) / len(each) for name, each in values.items()}
    return "bars", {
        "values": values,
        "xlabel": "right answers, %",
        "title": "Questions that were not trained",
        "unit": " %",
    }
