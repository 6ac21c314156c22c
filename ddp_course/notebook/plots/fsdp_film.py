"""FSDP as an animation: blocks that are gathered, used and freed."""

from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import box, chunk, grid, moved, rectangle, text
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.style import CARD, INK, NOTE, PAPER, color_of
from ddp_course.notebook.plots.words import count

SLOT, HIGH, GAP, LEFT, TOP = 32, 26, 4, 140, 38  # pixels
MOVE, FREE = 0.55, 0.75  # when, in its beat, a piece has arrived, and is freed


def fsdp(ranks, blocks=3):
    """One training step with FSDP on this many ranks: an animation, and on paper its
    kinds of moments.

    Each rank keeps a shard of the weights of every block. A block is gathered before it
    computes and freed afterwards, in forward and again in backward, after which its
    gradients are reduce-scattered.
    """
    beats = list(beats_of(blocks))
    wide = card_wide(ranks)
    width = max(420, LEFT + ranks * (wide + 10) + 4)
    height = TOP + 26 + blocks * block_high() + 58
    film = Film(width, height, len(beats))
    film.show("".join(cards(ranks, blocks)))
    for beat, (caption, block, action) in enumerate(beats):
        end = beat + 1 if beat + 1 < len(beats) else None
        line = text(0, 0, caption, size=14, weight=700)
        film.show(line, (width / 2, 18), beat, end)
        action(film, ranks, block, beat)
    draw_counts(film, ranks, blocks, beats)
    legend = "W weights, G gradients; striped: the mean of all ranks"
    film.show(text(width / 2, height - 12, legend, color=NOTE, size=12))
    alt = in_words(ranks, blocks, beats)
    moments = [0, 1, 2 * blocks, 2 * blocks + 1, 2 * blocks + 2, len(beats) - 1]
    stills = [moment + MOVE / 2 for moment in moments]
    still = film.stills(stills, 2 if width <= 480 else 1, alt)
    display_film(film, still, alt)


def beats_of(blocks):
    """What happens, beat by beat: (caption, block, the function that draws it)."""
    for block in range(blocks):
        yield f"forward, block {block}: all_gather", block, gather
        yield f"forward, block {block}: compute, then free", block, compute
    for block in reversed(range(blocks)):
        yield f"backward, block {block}: all_gather again", block, gather
        yield f"backward, block {block}: gradients, then free", block, gradients
        yield f"backward, block {block}: reduce_scatter", block, scatter
    yield "optimizer: each rank updates its shards", blocks, update


# ---- places ----


def card_wide(ranks):
    return max(120, ranks * (SLOT + GAP) + 12)


def block_high():
    return 2 * (HIGH + GAP) + 12


def place_of(ranks, rank, block, shard, row):
    """The corner of a piece on a rank's card. row: 0 for weights, 1 for gradients."""
    wide = card_wide(ranks)
    inside = (wide - ranks * (SLOT + GAP) + GAP) / 2
    x = LEFT + rank * (wide + 10) + inside + shard * (SLOT + GAP)
    return x, TOP + 30 + block * block_high() + row * (HIGH + GAP)


def between(start, goal):
    """The path of a piece from one place to another."""
    return (0, 0), (goal[0] - start[0], goal[1] - start[1])


# ---- what is drawn ----


def cards(ranks, blocks):
    """The ranks with places for weights and gradients, and the shards that stay."""
    for block in range(blocks):
        _, y = place_of(ranks, 0, block, 0, 0)
        for row, name in enumerate((f"block {block}  weights", "gradients")):
            middle = y + row * (HIGH + GAP) + HIGH / 2
            yield text(LEFT - 10, middle, name, anchor="end")
    wide, tall = card_wide(ranks), 30 + blocks * block_high()
    for rank in range(ranks):
        left = LEFT + rank * (wide + 10)
        yield rectangle(left, TOP, wide, tall, CARD, color_of(rank), 2, 6)
        yield text(left + wide / 2, TOP + 15, f"rank {rank}", CARD, weight=700)
        for block in range(blocks):
            x, y = place_of(ranks, rank, block, 0, 0)
            yield grid(x, y, ranks, 2, SLOT, HIGH, GAP)
            yield moved(weight(rank), *place_of(ranks, rank, block, rank, 0))


def weight(shard):
    """A shard of weights, in the colour of the rank that keeps it."""
    return piece_of(shard, f"W{shard}")


def gradient(rank, shard):
    """The gradients of a shard, in the colour of the rank that computed them."""
    return piece_of(rank, f"G{shard}")


def piece_of(rank, label):
    edge = rectangle(0, 0, SLOT, HIGH, "none", PAPER)
    return box(0, 0, SLOT, HIGH, color_of(rank), label, weight=700) + edge


def gather(film, ranks, block, beat):
    """Each shard travels to all other ranks, and stays until the next beat's end."""
    for rank in range(ranks):
        for shard in range(ranks):
            if shard != rank:
                start = place_of(ranks, shard, block, shard, 0)
                goal = place_of(ranks, rank, block, shard, 0)
                path = between(start, goal)
                times = beat, beat + 1 + FREE
                film.travel(weight(shard), start, *times, path, beat + MOVE)


def compute(film, ranks, block, beat):
    """The whole block is used: a frame around it on each rank."""
    wide = ranks * (SLOT + GAP) - GAP + 6
    frame = rectangle(-3, -3, wide, HIGH + 6, "none", INK, 3)
    for rank in range(ranks):
        film.show(frame, place_of(ranks, rank, block, 0, 0), beat, beat + FREE)


def gradients(film, ranks, block, beat):
    """Each rank gets the gradients of the whole block, from its own samples."""
    compute(film, ranks, block, beat)
    for rank in range(ranks):
        for shard in range(ranks):
            end = beat + 1 + (MOVE if shard == rank else 0)
            place = place_of(ranks, rank, block, shard, 1)
            film.show(gradient(rank, shard), place, beat + 0.25, end)


def scatter(film, ranks, block, beat):
    """Gradients travel to the rank that has their shard, which keeps their mean."""
    for shard in range(ranks):
        goal = place_of(ranks, shard, block, shard, 1)
        for rank in range(ranks):
            if rank != shard:
                start = place_of(ranks, rank, block, shard, 1)
                path = between(start, goal)
                piece = gradient(rank, shard)
                film.travel(piece, start, beat, beat + MOVE, path)
        mean = chunk(SLOT, HIGH, range(ranks), f"G{shard}")
        film.show(mean, goal, beat + MOVE)


def update(film, ranks, blocks, beat):
    """A frame around each rank's own weights and gradients."""
    frame = rectangle(-3, -3, SLOT + 6, 2 * HIGH + GAP + 6, "none", INK, 3)
    for rank in range(ranks):
        for block in range(blocks):
            film.show(frame, place_of(ranks, rank, block, rank, 0), beat)


def draw_counts(film, ranks, blocks, beats):
    """How many shards of the weights each rank holds, of how many."""
    few, all_ = blocks, blocks * ranks
    changes = [(0, few)]
    for beat, (_, _, action) in enumerate(beats):
        if action is gather and ranks > 1:
            changes += [(beat + MOVE, few + ranks - 1), (beat + 1 + FREE, few)]
    ends = [begin for begin, _ in changes[1:]] + [None]
    for rank in range(ranks):
        x = LEFT + rank * (card_wide(ranks) + 10) + card_wide(ranks) / 2
        place = x, TOP + 30 + blocks * block_high() + 14
        for (begin, held), end in zip(changes, ends):
            film.show(text(0, 0, f"{held} of {all_} shards"), place, begin, end)


def in_words(ranks, blocks, beats):
    """What the animation shows."""
    few, all_ = blocks, blocks * ranks
    return (
        f"Animation of one FSDP training step of {count(blocks, 'block')} on "
        f"{count(ranks, 'rank')}, in {len(beats)} steps. Each rank keeps {few} of {all_} "
        f"pieces of the weights, and holds {few + ranks - 1} while a block is gathered: "
        f"{'; '.join(caption for caption, *_ in beats)}."
    )
