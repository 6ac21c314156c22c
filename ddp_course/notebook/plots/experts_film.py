"""A mixture of experts as an animation: tokens travel to their experts and back."""

from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import rectangle, text
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.style import CARD, GREY, INK, LINE, NOTE, PAPER, color_of
from ddp_course.notebook.plots.words import count, listing

TOKEN, PITCH, SLOTS = 22, 25, 5  # pixels: a token, from one to the next; in a row
LEFT, TOP, NAME = 74, 62, 34
CARD_WIDE = NAME + SLOTS * PITCH + 8
CHOICES, GAP = 36, 14  # pixels: the numbers below tokens; between two parts
CAPTIONS = (
    "each rank has its own tokens",
    "its router chooses experts for each token",
    "all-to-all: the tokens travel to their experts",
    "each expert computes the tokens that it got",
    "all-to-all: the results travel back",
    "each token's results are added, by their weights",
)


def experts(choices, number):
    """One layer with experts, forward: an animation, and on paper the moment in which
    the tokens are with their experts.

    choices: for each rank, the experts of each of its tokens, at most five tokens.
    number: of experts, which the ranks share.
    """
    if max(map(len, choices)) > SLOTS:
        raise ValueError(f"there is room for {SLOTS} tokens per rank")
    places = Places(choices, number)
    width = max(470, LEFT + len(choices) * (CARD_WIDE + 10))
    film = Film(width, places.bottom + 50, len(CAPTIONS))
    film.show("".join(cards(places)))
    for beat, caption in enumerate(CAPTIONS):
        end = beat + 1 if beat + 1 < len(CAPTIONS) else None
        heading = text(0, 0, caption, size=14, weight=700)
        film.show(heading, (width / 2, 14), beat, end)
    for copy in places.copies():
        animate(film, places, *copy)
    for rank, tokens in enumerate(choices):
        for token, chosen in enumerate(tokens):
            here = places.token(rank, token)
            film.show(square(rank, token), here)
            numbers = text(TOKEN / 2, TOKEN + 17, "\n".join(map(str, chosen)), CARD)
            film.show(numbers, here, 1)
            film.show(result(rank, token), places.result(rank, token), 5)
    legend = "squares: tokens, in the colour of their rank; rounded: results"
    film.show(text(width / 2, places.bottom + 34, legend, color=NOTE, size=12))
    alt = in_words(places)
    display_film(film, film.stills([3.9], 1, alt), alt)


class Places:
    """Where tokens, experts and results are. `loads`: the tokens of each expert."""

    def __init__(self, choices, number):
        self.choices, self.number = choices, number
        self.per_rank = number // len(choices)
        self.loads = [0] * number
        for tokens in choices:
            for chosen in tokens:
                for expert in chosen:
                    self.loads[expert] += 1
        lines = max(1, -(-max(self.loads) // SLOTS))
        self.row = lines * PITCH + 6  # pixels of an expert
        self.experts_top = TOP + TOKEN + CHOICES + GAP
        self.results_top = self.experts_top + self.per_rank * self.row + GAP
        self.bottom = self.results_top + TOKEN + 8

    def left(self, rank):
        return LEFT + rank * (CARD_WIDE + 10)

    def token(self, rank, token):
        return self.left(rank) + NAME + token * PITCH, TOP

    def result(self, rank, token):
        return self.left(rank) + NAME + token * PITCH, self.results_top

    def expert(self, expert):
        rank, place = divmod(expert, self.per_rank)
        return self.left(rank) + NAME, self.experts_top + place * self.row

    def slot(self, expert, place):
        x, y = self.expert(expert)
        line, column = divmod(place, SLOTS)
        return x + column * PITCH, y + line * PITCH

    def copies(self):
        """(rank, token, slot) of each choice. Experts get tokens in the order of the
        ranks, and from each rank in their order there.
        """
        filled = [0] * self.number
        for rank, tokens in enumerate(self.choices):
            for token, chosen in enumerate(tokens):
                for expert in chosen:
                    yield rank, token, self.slot(expert, filled[expert])
                    filled[expert] += 1


def cards(places):
    """The ranks with their empty experts."""
    for name, y in (
        ("tokens", TOP + TOKEN / 2),
        ("experts", places.experts_top + places.row / 2),
        ("results", places.results_top + TOKEN / 2),
    ):
        yield text(LEFT - 8, y, name, anchor="end", size=12)
    for rank in range(len(places.choices)):
        left, tall = places.left(rank), places.bottom - TOP + 32
        yield rectangle(left, TOP - 28, CARD_WIDE, tall, CARD, color_of(rank), 2, 6)
        yield text(left + CARD_WIDE / 2, TOP - 14, f"rank {rank}", CARD, weight=700)
    for expert in range(places.number):
        x, y = places.expert(expert)
        wide = SLOTS * PITCH
        yield rectangle(x - 3, y - 3, wide + 3, places.row - 2, PAPER, LINE)
        yield text(x - 9, y + TOKEN / 2, f"E{expert}", CARD, anchor="end", size=12)


def square(rank, token):
    """A token, with its number on its rank."""
    face = rectangle(0, 0, TOKEN, TOKEN, color_of(rank))
    return face + text(TOKEN / 2, TOKEN / 2, str(token), color_of(rank), size=12)


def result(rank, token):
    """What an expert has made of a token."""
    face = rectangle(0, 0, TOKEN, TOKEN, GREY, color_of(rank), 3, 9)
    return face + text(TOKEN / 2, TOKEN / 2, str(token), GREY, INK, size=12)


def animate(film, places, rank, token, slot):
    """A token on its way to a slot of an expert, there, and its result on the way back."""
    (x, y), (to_x, to_y) = places.token(rank, token), slot
    back_x, back_y = places.result(rank, token)
    there, back = (to_x - x, to_y - y), (back_x - to_x, back_y - to_y)
    film.travel(square(rank, token), (x, y), 2, 3.2, ((0, 0), there), 2.8)
    film.show(result(rank, token), slot, 3.2, 4)
    film.travel(result(rank, token), slot, 4, 5, ((0, 0), back), 4.8)


def in_words(places):
    """What the animation shows."""
    of_ranks = [
        f"those of rank {rank} get "
        + listing(places.loads[rank * places.per_rank :][: places.per_rank])
        for rank in range(len(places.choices))
    ]
    tokens = sum(map(len, places.choices))
    return (
        f"Animation of {count(tokens, 'token')} on {count(len(places.choices), 'rank')}"
        f" that travel to {count(places.number, 'expert')} and back, in "
        f"{len(CAPTIONS)} steps: {'; '.join(CAPTIONS)}. The experts get unequally many "
        f"tokens: {'; '.join(of_ranks)}."
    )
