"""The drawing of the layers in docs/concepts/architecture.md: ``python tests/project/drawing.py`` makes it anew.

Rows are layers.  An arrow is an import, but those are left out that follow from others: what A imports, where A imports
B and B imports it.  Arrows through a layer to the same package share a lane.
"""

import functools
import itertools
import re
import textwrap
from html import escape
from pathlib import Path

from layers import HEAVY, LEVEL, ROWS, below

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "architecture.md"
FILE = PAGE.with_name("layers.svg")

WIDTH, LEFT = 1184, 128  # of the drawing, and of the names of rows
BAND, GAP = 104, 38  # the height of a row, and of what is between rows
BOX, LANE, APART = 196, 24, 14  # the width of an entry, and of a lane of arrows; what is between them
STYLE = """
    text { font-family: Inter, "Helvetica Neue", "Segoe UI", Roboto, Arial, sans-serif; }
    .band { fill: #f4f6fa; }
    .row { font-size: 13px; fill: #5b6b86; }
    .box { fill: #ffffff; stroke: #c6d0e0; }
    .name { font-size: 15px; font-weight: 600; fill: #1c2a45; }
    .what { font-size: 10.5px; fill: #5b6b86; }
    .heavy { font-size: 10px; font-weight: 600; fill: #8a5a12; }
    .arrow { fill: none; stroke: #8492ab; stroke-width: 1.5; }
    .head { fill: #8492ab; }
"""
# From the ground up.
RAMP = ["#46505c", "#38506b", "#3a6a86", "#2f8396", "#2b9a8f", "#4aa777", "#7a9e4a", "#b58a35", "#b8643f", "#a8484f"]


def thinned():
    """The imports of each entry but those that follow from others."""

    @functools.cache
    def reached(name):
        return set(below()[name]).union(*(reached(other) for other in below()[name]))

    return {
        name: sorted(o for o in direct if not any(o in reached(other) for other in direct))
        for name, direct in below().items()
    }


def chains():
    """The rows with their lanes, and the pieces of arrows from each to the next row.

    A place is (entry, row): a box in the entry's own row, or a lane of arrows to it in a row above.
    """
    rows = [[(name, row) for name in names.split()] for row, names in enumerate(ROWS.values())]
    pieces = []
    for name, imported in thinned().items():
        for other in imported:
            way = [(name, LEVEL[name]), *((other, row) for row in reversed(range(LEVEL[other], LEVEL[name])))]
            pieces += itertools.pairwise(way)
    for lane in dict.fromkeys(lower for _, lower in pieces if LEVEL[lower[0]] != lower[1]):
        rows[lane[1]].append(lane)
    return rows, list(dict.fromkeys(pieces))


def is_box(place):
    return LEVEL[place[0]] == place[1]


def width(place):
    return BOX if is_box(place) else LANE


def spread(row, wanted):
    """The middles of a row's places, as near to where they are wanted as their widths allow, in this order.

    Neighbours that would overlap become one block, which stands at the mean of what its places want.
    """
    blocks = []  # [where the first place stands, [(place, its distance from the first one), ...]]
    for place in row:
        at, block = wanted[place], [(place, 0)]
        while blocks:
            before, (*_, (last, end)) = blocks[-1]
            apart = end + APART + (width(last) + width(block[0][0])) / 2
            if before + apart <= at:
                break
            block = blocks.pop()[1] + [(other, distance + apart) for other, distance in block]
            at = sum(wanted[other] - distance for other, distance in block) / len(block)
        blocks.append((at, block))
    return {place: at + distance for at, block in blocks for place, distance in block}


def settled(rows, pieces):
    """The middle of every place: rows keep their order, and a place is drawn to those above and below it."""
    x = {place: (i - (len(row) - 1) / 2) * (BOX + APART) for row in rows for i, place in enumerate(row)}
    joined = {place: [] for place in x}
    for a, b in pieces:
        joined[a].append(b)
        joined[b].append(a)
    for _ in range(6):
        for row in (*rows, *reversed(rows)):
            x |= spread(row, {p: sum(x[q] for q in joined[p]) / len(joined[p]) if joined[p] else x[p] for p in row})
    return x


def stress(x, pieces):
    """How often arrows cross, and then how far they lean."""
    crossings = sum(
        a[1] == c[1] and (x[a] - x[c]) * (x[b] - x[d]) < 0 for (a, b), (c, d) in itertools.combinations(pieces, 2)
    )
    return crossings, sum((x[a] - x[b]) ** 2 for a, b in pieces)


def places():
    """Where everything stands, and the pieces: neighbours swap as long as that lessens the stress."""
    rows, pieces = chains()
    swaps = [(row, i) for row in rows for i in range(len(row) - 1)]
    least, untried = stress(settled(rows, pieces), pieces), list(swaps)
    while untried:
        row, i = untried.pop()
        row[i], row[i + 1] = row[i + 1], row[i]
        new = stress(settled(rows, pieces), pieces)
        if new < least:
            least, untried = new, list(swaps)
        else:
            row[i], row[i + 1] = row[i + 1], row[i]
    return settled(rows, pieces), pieces


def described():
    """What the tree in docs/concepts/architecture.md says of each entry."""
    tree = re.search(r"```\nnative/.*?```", PAGE.read_text(), re.S)[0]
    return dict(re.findall(r"^  (\w+)/? +(\S.*)$", tree, re.M)) | {"__init__": "the public names"}


def heavy(entry):
    """The large packages of others that some files of an entry import."""
    return " ".join(name for name, files in HEAVY.items() if any(file.split("/")[0] == entry for file in files))


def top(row):
    return (len(ROWS) - 1 - row) * (BAND + GAP) + 8


def band(row, name):
    """A layer: its number and its name."""
    y = top(row)
    yield f'<rect class="band" x="8" y="{y}" width="{WIDTH - 16}" height="{BAND}" rx="8"/>'
    yield f'<rect x="8" y="{y}" width="5" height="{BAND}" rx="2.5" fill="{RAMP[row]}"/>'
    yield f'<text class="name" x="24" y="{y + 46}" style="fill: {RAMP[row]}">{row + 1}</text>'
    for line, words in enumerate(textwrap.wrap(name, 14)):
        yield f'<text class="row" x="24" y="{y + 66 + 15 * line}">{words}</text>'


def arrow(upper, lower, x):
    """A piece of an arrow: from a box or a lane to a box, where it has its head, or through a lane."""
    a, start = x[upper], top(upper[1]) + BAND - 8 * is_box(upper)
    b, end = x[lower], top(lower[1])
    bend = (end - start) * 0.55
    through = "" if is_box(lower) else f" V {end + BAND}"
    yield f'<path class="arrow" d="M {a} {start} C {a} {start + bend:.1f} {b} {end - bend:.1f} {b} {end}{through}"/>'
    if is_box(lower):
        yield f'<path class="head" d="M {b - 4.5:.1f} {end} h 9 l -4.5 8 z"/>'


def box(entry, middle, what):
    """An entry: its name, the large packages that it needs, and what the tree says of it."""
    x, y = middle - BOX / 2, top(LEVEL[entry]) + 8
    yield f'<rect class="box" x="{x:.1f}" y="{y}" width="{BOX}" height="{BAND - 16}" rx="6"/>'
    yield f'<text class="name" x="{x + 12:.1f}" y="{y + 22}">{"distopt" if entry == "__init__" else entry}</text>'
    yield f'<text class="heavy" x="{x + BOX - 12:.1f}" y="{y + 22}" text-anchor="end">{heavy(entry)}</text>'
    for line, words in enumerate(textwrap.wrap(what, 31, max_lines=4, placeholder=" …")):
        yield f'<text class="what" x="{x + 12:.1f}" y="{y + 40 + 13 * line}">{escape(words)}</text>'


def svg():
    """The drawing."""
    x, pieces = places()
    left = min(middle - width(place) / 2 for place, middle in x.items())
    right = max(middle + width(place) / 2 for place, middle in x.items())
    shift = (LEFT + WIDTH - 16 - left - right) / 2
    x = {place: round(middle + shift, 1) for place, middle in x.items()}
    height, texts = top(0) + BAND + 8, described()
    shapes = [
        "<title>The packages of distopt in layers, and what imports what</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        *itertools.chain.from_iterable(band(row, name) for row, name in enumerate(ROWS)),
        *itertools.chain.from_iterable(arrow(*piece, x) for piece in pieces),
        *itertools.chain.from_iterable(box(name, x[name, row], texts[name]) for name, row in LEVEL.items()),
    ]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *shapes, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(svg())
