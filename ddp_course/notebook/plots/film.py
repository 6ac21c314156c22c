"""Animations that play by themselves, from stored outputs too: SVG with CSS, without
scripts.

A film has a clock that counts beats. Its shapes, which are pieces of SVG, are shown for
some time or travel along a path. The film is repeated after a pause.
"""

import re

from ddp_course.notebook.plots.drawing import document


class Film:
    """Shapes on one clock. width, height: in pixels; beats: its length; pause: beats
    for which its end stays; seconds: of one beat.
    """

    def __init__(self, width, height, beats, pause=1.5, seconds=1.6):
        self.width, self.height = width, height
        self.length, self.seconds = beats + pause, seconds
        self.names = {}  # {shape: its name}: each is written once, and used by name
        self.cast = []  # (name, place, begin, end, path, arrival)

    def show(self, shape, place=(0, 0), begin=0, end=None):
        """A shape that is at a place from one beat to another, or to the end."""
        end = self.length if end is None else end
        self.travel(shape, place, begin, end, ((0, 0), (0, 0)))

    def travel(self, shape, place, begin, end, path, arrival=None):
        """A shape that is there between two beats, and moves along a path meanwhile.

        path: points [(x, y), ...] relative to the place; arrival: the beat from which
        it stays at the last of them, `end` unless given.
        """
        name = self.names.setdefault(shape, f"s{len(self.names)}")
        arrival = end if arrival is None else arrival
        self.cast.append((name, place, begin, end, tuple(path), arrival))

    def playing(self, alt):
        """The film as an animated SVG, bytes."""
        classes, body = {}, []
        for name, place, begin, end, path, arrival in self.cast:
            if begin == 0 and end == self.length:
                body.append(used(name, place))
                continue
            frames = self.keyframes(begin, end, path, arrival)
            at_first = begin == 0 and not moves(path)
            of = classes.setdefault((frames, at_first), f"a{len(classes)}")
            body.append(used(name, place, f' class="{of}"'))
        clock = f"{self.length * self.seconds:g}s infinite linear"
        rules = [f"[class]{{opacity:0;animation:{clock}}}"]
        for (frames, at_first), of in classes.items():
            visible = "opacity:1;" if at_first else ""
            rules.append(
                f"@keyframes {of}{{{frames}}}.{of}{{{visible}animation-name:{of}}}"
            )
        rules.append(
            "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
        )
        style = f"<style>{''.join(rules)}</style>"
        body = [style, self.definitions(), *body]
        return document(self.width, self.height, body, alt)

    def definitions(self, seen=None):
        """The shapes themselves: all, or those with these names."""
        named = [
            f'<g id="{name}">{shape}</g>'
            for shape, name in self.names.items()
            if seen is None or name in seen
        ]
        return f"<defs>{''.join(named)}</defs>"

    def keyframes(self, begin, end, path, arrival):
        """Where a shape is between two beats; nothing of it before and after."""
        before = f"0%,{self.at(begin - 0.001)}{{opacity:0}}" if begin > 0 else ""
        ends = end >= self.length
        after = "" if ends else f"{self.at(end + 0.001)},to{{opacity:0}}"
        if not moves(path):
            return f"{before}{self.at(begin)},{self.at(end)}{{opacity:1}}{after}"
        beats = [
            begin + (arrival - begin) * place / (len(path) - 1)
            for place in range(len(path))
        ]
        steps = list(zip(beats, path)) + [(end, path[-1])] * (end > arrival)
        frames = [
            f"{self.at(beat)}{{opacity:1;transform:translate({x:.4g}px,{y:.4g}px)}}"
            for beat, (x, y) in steps
        ]
        return before + "".join(frames) + after

    def at(self, beat):
        """A beat as a percentage of the film."""
        return f"{100 * beat / self.length:.5g}%"

    def stills(self, beats, columns, alt):
        """Pictures of the film at some beats, side by side, as one SVG, bytes."""
        panels = []
        for number, beat in enumerate(beats):
            row, column = divmod(number, columns)
            left, top = column * self.width, row * self.height
            body = "".join(frozen(*part, beat) for part in self.cast)
            panels.append(f'<g transform="translate({left} {top})">{body}</g>')
        seen = set(re.findall('href="#(.*?)"', "".join(panels)))
        panels.insert(0, self.definitions(seen))
        rows = -(-len(beats) // columns)
        columns = min(columns, len(beats))
        return document(columns * self.width, rows * self.height, panels, alt)


def used(name, place, more=""):
    """A shape at a place."""
    x, y = place
    return f'<use href="#{name}" x="{x:g}" y="{y:g}"{more}/>'


def moves(path):
    """Whether a path leads anywhere."""
    return len(set(path)) > 1


def frozen(name, place, begin, end, path, arrival, beat):
    """A shape as it is at a beat; empty where it is not there."""
    if not begin <= beat < end:
        return ""
    along = min(1, (beat - begin) / (arrival - begin)) * (len(path) - 1)
    leg = min(int(along), len(path) - 2)
    (x, y), (to_x, to_y) = path[leg : leg + 2]
    x, y = x + (along - leg) * (to_x - x), y + (along - leg) * (to_y - y)
    return used(name, (place[0] + x, place[1] + y))
