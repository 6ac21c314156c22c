"""Numbers and lists in the sentences of alternative texts."""


def number(value):
    """A number with three digits or so: 0.25, 14,000, 1.1 million."""
    for name, unit in (("billion", 1e9), ("million", 1e6)):
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def listing(items):
    """Items as a sentence has them: one, two and three."""
    items = [str(item) for item in items]
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def count(things, name):
    """How many: 1 rank, 2 ranks. Names in -ch get -es."""
    ending = "es" if name.endswith("ch") else "s"
    return f"{things:,} {name}{ending if things != 1 else ''}"


def first_to_last(values):
    """From which number to which a line goes, and how far up or down in between."""
    values = list(values)
    if not values:
        return "nowhere yet"
    ends = values[0], values[-1]
    told = f"from {number(ends[0])} to {number(ends[1])}"
    beyond = 0.02 * (max(values) - min(values))
    if max(values) > max(ends) + beyond:
        told += f" (at most {number(max(values))})"
    if min(values) < min(ends) - beyond:
        told += f" (at least {number(min(values))})"
    return told


def plain(text):
    """A label that may have several lines, as one line."""
    return " ".join(text.split())
