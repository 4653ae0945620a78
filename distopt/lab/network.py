"""The network of a job: one link per rank, or nodes of several ranks that share a link."""

from typing import NamedTuple

from distopt.checks import check_int
from distopt.lab import cost
from distopt.lab.cost import LINKS, Link
from distopt.lab.cost.links import checked
from distopt.lab.fit import Fit

INSIDE = LINKS["NVLink"]


class Network(NamedTuple):
    """A network of nodes.

    Attributes:
        link: the link of a node to the other nodes.
        per_node: the number of ranks of a node, which share its ``link``.
        inside: the link that joins the ranks of a node to each other.

    Example:
        >>> from distopt.lab import network
        >>> cluster = network("100GbE", per_node=8, inside="NVLink")
        >>> f"{cluster.seconds('all_reduce', 100e6, 64):.4f} s"
        '0.0166 s'
    """

    link: Link
    per_node: int = 1
    inside: Link = INSIDE

    def seconds(self, verb: str, nbytes: float, size: int) -> float:
        """Return the seconds of a collective: within a node first, then between nodes.

        An all-reduce costs ``cost.hierarchical_all_reduce``.  An all-gather sends each part to the ranks of the same
        number on other nodes, all at the same time, and from these to their neighbours within the node.  The parts of
        an all-to-all go straight to their ranks, those of other nodes over the shared link.

        Args:
            verb: ``all_reduce``, ``all_gather`` or ``all_to_all``; on nodes of one rank any verb of ``cost.seconds``.
            nbytes: the bytes of one rank; of all ranks together for an all-gather.
            size: the number of ranks.

        Raises:
            ValueError: for another verb, and for ranks that do not fill their nodes.
        """
        local, nodes = self.filled(size)
        link = self.link.shared(local)
        if local == 1:
            return cost.seconds(verb, nbytes, size, self.link)
        if verb == "all_reduce":
            return cost.hierarchical_all_reduce(nbytes, local, nodes, self.inside, link)
        if verb == "all_to_all":
            elsewhere = cost.seconds(verb, nbytes, nodes, link) + (local - 1) * (nodes - 1) * link.latency
            return elsewhere + cost.seconds(verb, nbytes / nodes, local, self.inside)
        if verb != "all_gather":
            verbs = "all_reduce, all_gather or all_to_all"
            raise ValueError(f"verb must be {verbs} where nodes have several ranks, got {verb!r}")
        between = cost.seconds(verb, nbytes / local, nodes, link)
        return between + cost.seconds(verb, nbytes, local, self.inside)

    def filled(self, size: int) -> tuple[int, int]:
        """Return the ranks of a node, and the nodes; ValueError for ranks that do not fill their nodes."""
        local = min(self.per_node, size)
        if size % local:
            raise ValueError(f"ranks must fill nodes of {local}, got {size}")
        return local, size // local

    def at_bandwidth(self, bandwidth: float) -> "Network":
        """Return the same network with a link of another bandwidth, in bytes per second, between nodes."""
        return self._replace(link=self.link._replace(bandwidth=bandwidth))


Wire = Network | Fit  # predicts the seconds of a collective


def network(link: str | Link, per_node: int = 1, inside: str | Link = INSIDE) -> Network:
    """Make a network of links, each given as a ``Link``, by name or by rate (``cost.link``).

    Args:
        link: the link between nodes.
        per_node: the number of ranks of a node.
        inside: the link between the ranks of a node.

    Raises:
        ValueError: the name is unknown, ``per_node`` is below 1, or a figure of a link is out of range.
        TypeError: a figure of a link is no number.

    Example:
        >>> from distopt.lab import network
        >>> network("300Mbit/s").link
        Link(name='300Mbit/s', latency=5e-05, bandwidth=37500000.0, reduction=1e-10)
    """
    between, within = (checked(choice) if isinstance(choice, Link) else cost.link(choice) for choice in (link, inside))
    return Network(between, check_int("per_node", per_node, least=1), within)


def wire(choice: str | Link | Wire) -> Wire:
    """Return a network, or a measured fit of one, from a link's name or rate, a ``Link``, a ``Network`` or a ``Fit``.

    Raises as ``network``.

    Example:
        >>> from distopt.lab import wire
        >>> wire("10GbE").per_node
        1
    """
    if isinstance(choice, Fit):
        return choice
    return network(*choice) if isinstance(choice, Network) else network(choice)
