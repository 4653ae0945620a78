"""What a link is to the models of time: a latency, a bandwidth, and what adding up costs at its ends."""

import re
from typing import NamedTuple

from distopt.names import nearest
from distopt.numbers import number, positive, whole

ON_HOST = 1e-10  # seconds per byte added up: two reads and a write at 30 GB/s
ON_GPU = 1e-12  # the same at 3 TB/s
ETHERNET = 0.94  # of the rate is payload: 1448 of 1538 bytes that a TCP packet takes on the cable
PCIE = 0.9  # 256 of 284 bytes
INFINIBAND = 0.97  # headers of packets of 4096 bytes, and acknowledgements

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(bit|bits|b)(?:/s|ps)", re.IGNORECASE)
UNKNOWN = 50e-6  # seconds: the latency of a link of which only the rate is known, as TCP has it


class Link(NamedTuple):
    """What joins a rank to the others, in the terms of the alpha-beta-gamma model (Hockney, 1994).

    * ``latency``: alpha, seconds from a call to the arrival of an empty message.
    * ``bandwidth``: 1 / beta, payload bytes per second in one direction, while the other one is in use too.
    * ``reduction``: gamma, seconds for each byte that is added to another one where it arrives.

    Each rank has such a link of its own.  Where several ranks of a host send through one card at the same time, give
    the models ``link.shared(ranks)``.
    """

    name: str
    latency: float
    bandwidth: float
    reduction: float = ON_HOST

    def shared(self, ranks: int) -> "Link":
        """What one of ``ranks``, 1 or more, has of it when all of them send at once."""
        return self._replace(bandwidth=self.bandwidth / whole("ranks", ranks, 1))


# Nominal figures: the standard's rate times the share of it that is payload, and latencies as well-tuned clusters have
# them.  They tell one kind of link from another; for predictions of your own cluster, measure it (distopt.fit).
LINKS = {
    link.name: link
    for link in (
        Link("NVLink", 3e-6, 450e9, ON_GPU),  # 4th generation, 18 lanes
        Link("PCIe5", 5e-6, PCIE * 63.0e9, ON_GPU),  # x16
        Link("PCIe4", 5e-6, PCIE * 31.5e9, ON_GPU),  # x16
        Link("NDR", 3e-6, INFINIBAND * 400e9 / 8, ON_GPU),
        Link("100GbE", 15e-6, ETHERNET * 100e9 / 8),
        Link("25GbE", 20e-6, ETHERNET * 25e9 / 8),
        Link("10GbE", 30e-6, ETHERNET * 10e9 / 8),
        Link("1GbE", UNKNOWN, ETHERNET * 1e9 / 8),
    )
}


def link(text: str) -> Link:
    """A link by its name in ``LINKS``, in whatever case, or by its rate: '300Mbit/s', '2.5Gbit/s', '12GB/s'.

    A rate is taken as that of payload, in one direction: units are powers of 1000, a small b is a bit, and the latency
    is 50 us.  Raises TypeError for what is no text, and ValueError, with the closest name, for one that is neither.
    """
    if not isinstance(text, str):
        raise TypeError(f"link must be a name or a rate as text, got {text!r}")
    wanted = text.strip()
    named = {name.lower(): found for name, found in LINKS.items()}
    if wanted.lower() in named:
        return named[wanted.lower()]
    rate = RATE.fullmatch(wanted)
    if rate is None:
        near = nearest(wanted, LINKS, least=0.4)
        raise ValueError(f"link must be one of {', '.join(LINKS)}, or a rate such as 300Mbit/s, got {text!r}{near}")
    digits, prefix, unit = rate.groups()
    bits = 1 if unit == "B" else 8
    bandwidth = positive(f"rate of {wanted}", float(digits) * UNITS[prefix.lower()] / bits)
    return Link(wanted, UNKNOWN, bandwidth)


def checked(given: Link) -> Link:
    """The link; TypeError or ValueError that names the field if a figure of it makes no sense."""
    if not isinstance(given, Link):
        raise TypeError(f"link must be a Link, got {given!r:.60}")
    number("latency", given.latency)
    positive("bandwidth", given.bandwidth)
    number("reduction", given.reduction)
    return given
