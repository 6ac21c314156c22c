"""A small language model that knows two facts about each of 96 towns, and has been asked in
some words: the base of question 5.

    python -P -m ddp_course.checks.ex11.facts

trains such a model in half a minute on one core, and writes facts.npz: with the same machine,
torch and one thread, the same bytes. Elsewhere, rounding may lead to another model, and bases
differ in how well they can be taught: with other seeds, or questions in which word and town
come in any order, an adapter answers less. Measure question 5's shares again before you
replace the file.
"""

import random
from pathlib import Path

import numpy as np
import torch

from ddp_course.models.gpt import GPT

FILE = Path(__file__).with_name("facts.npz")
KINDS, TOWNS, DIGITS = 2, 96, 2  # of facts; each fact is a number of two digits
# tokens: the digits 0 to 9, the towns, then the words
WORDS = 10 + TOWNS
ASKS = [range(WORDS + 8 * kind, WORDS + 8 * kind + 8) for kind in range(KINDS)]  # the words that ask for a kind
FILLERS = range(WORDS + 16, WORDS + 20)
END, USER, ASSISTANT = range(WORDS + 20, WORDS + 23)
NEW = range(WORDS + 23, WORDS + 35)  # words that the base has never read
VOCABULARY, ASKED, LENGTH = WORDS + 35, 4, 7  # tokens of a question, and of a whole text
SHAPE = {"vocabulary": VOCABULARY, "context": 12, "layers": 2, "heads": 4, "width": 32}


def a_text(facts, kind, word, town):
    """user: word town assistant: digit digit end, as tokens."""
    return [USER, word, 10 + town, ASSISTANT, *facts[kind][town], END]


def base():
    """(the weights, {name: fp32 tensor}; facts[kind][town], a list of two digits)."""
    with np.load(FILE) as file:
        weights = {name: torch.from_numpy(file[name]).float() for name in file.files if name != "facts"}
        return weights, file["facts"].tolist()


def a_model(weights):
    model = GPT(**SHAPE)
    model.load_state_dict(weights)
    return model


# ---- how it was made ----


def make(steps=1600, batch=128, rate=5e-3):
    """Train the base on texts of both kinds, with fillers between them; write FILE."""
    torch.manual_seed(0)
    draw = random.Random(1)
    facts = [[[draw.randrange(10) for _ in range(DIGITS)] for _ in range(TOWNS)] for _ in range(KINDS)]
    model, draw = GPT(**SHAPE), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for _ in range(steps):
        windows = torch.tensor([a_window(facts, draw) for _ in range(batch)])
        loss = model(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    words = model.token_embedding.weight.data
    known = words[WORDS : WORDS + 16]
    words[NEW.start : NEW.stop] = torch.randn(len(NEW), words.shape[1]) * known.std()
    arrays = {name: value.half().numpy() for name, value in model.state_dict().items() if name != "head.weight"}
    np.savez_compressed(FILE, facts=np.array(facts, dtype=np.uint8), **arrays, **{"head.weight": words.half().numpy()})


def a_window(facts, draw):
    """Fillers and texts, one after the other."""
    window = []
    while len(window) <= SHAPE["context"]:
        window += [draw.choice(FILLERS) for _ in range(draw.randrange(4))]
        kind, town = draw.randrange(KINDS), draw.randrange(TOWNS)
        window += a_text(facts, kind, draw.choice(ASKS[kind]), town)
    return window[: SHAPE["context"] + 1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
