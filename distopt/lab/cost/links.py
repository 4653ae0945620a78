"""Links as the models of time see them: latency, bandwidth, and the cost of adding up at their ends."""

import re
from typing import NamedTuple

from distopt.checks import check_float, check_int, check_positive, suggest

ON_HOST = 1e-10  # seconds per added byte: two reads and a write at 30 GB/s
ON_GPU = 1e-12  # the same at 3 TB/s
ETHERNET = 0.94  # share of payload: 1448 of the 1538 bytes of a TCP packet on the cable
PCIE = 0.9  # share of payload: 256 of 284 bytes
INFINIBAND = 0.97  # share of payload: the rest is headers of 4096-byte packets, and acknowledgements

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(bit|bits|b)(?:/s|ps)", re.IGNORECASE)
UNKNOWN = 50e-6  # seconds: the latency assumed where only the rate is known, as of TCP


class Link(NamedTuple):
    """A rank's link to the others, in the terms of the alpha-beta-gamma model (Hockney, 1994).

    Each rank has such a link of its own.  Where several ranks of a host send through one card at the same time, give
    the models ``link.shared(ranks)``.

    Attributes:
        name: a name to print.
        latency: alpha, the seconds from a call to the arrival of an empty message.
        bandwidth: 1 / beta, the payload bytes per second in one direction, while the other one is in use too.
        reduction: gamma, the seconds for each byte that is added to another one where it arrives.

    Example:
        >>> from distopt import cost
        >>> link = cost.Link("lab", latency=10e-6, bandwidth=1e9)
        >>> f"{cost.ring_all_gather(8e6, 4, link) * 1e3:.2f} ms"
        '6.03 ms'
    """

    name: str
    latency: float
    bandwidth: float
    reduction: float = ON_HOST

    def shared(self, ranks: int) -> "Link":
        """Return the share of the link that one of ``ranks`` ranks has, 1 or more, when all of them send at once."""
        return self._replace(bandwidth=self.bandwidth / check_int("ranks", ranks, 1))


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
    """Return a link by its name in ``LINKS``, in any case, or by its rate: '300Mbit/s', '2.5Gbit/s', '12GB/s'.

    A rate is that of payload, in one direction: units are powers of 1000, a small b is a bit, and the latency is 50 us.

    Raises:
        TypeError: ``text`` is no text.
        ValueError: it is neither a name nor a rate; the text names the closest one.

    Example:
        >>> from distopt import cost
        >>> cost.link("12GB/s").bandwidth
        12000000000.0
        >>> cost.link("100gbe").name
        '100GbE'
    """
    if not isinstance(text, str):
        raise TypeError(f"link must be a name or a rate as text, got {text!r}")
    wanted = text.strip()
    named = {name.lower(): entry for name, entry in LINKS.items()}
    if wanted.lower() in named:
        return named[wanted.lower()]
    rate = RATE.fullmatch(wanted)
    if rate is None:
        near = suggest(wanted, LINKS, least=0.4)
        raise ValueError(f"link must be one of {', '.join(LINKS)}, or a rate such as 300Mbit/s, got {text!r}{near}")
    digits, prefix, unit = rate.groups()
    bits = 1 if unit == "B" else 8
    bandwidth = check_positive(f"rate of {wanted}", float(digits) * UNITS[prefix.lower()] / bits)
    return Link(wanted, UNKNOWN, bandwidth)


def checked(candidate: Link) -> Link:
    """Return the link; raise TypeError or ValueError that names the field if one of its figures is out of range."""
    if not isinstance(candidate, Link):
        raise TypeError(f"link must be a Link, got {candidate!r:.60}")
    check_float("latency", candidate.latency)
    check_positive("bandwidth", candidate.bandwidth)
    check_float("reduction", candidate.reduction)
    return candidate
