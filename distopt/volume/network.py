"""What joins the ranks: one link, or nodes of several ranks that share a link to the others."""

from typing import NamedTuple

from distopt import cost
from distopt.cost import LINKS, Link
from distopt.cost.links import checked
from distopt.fit import Fit
from distopt.numbers import whole

INSIDE = LINKS["NVLink"]


class Network(NamedTuple):
    """``per_node`` ranks of a node share its one link to the other nodes; ``inside`` joins them to each other."""

    link: Link
    per_node: int = 1
    inside: Link = INSIDE

    def seconds(self, verb: str, nbytes: float, size: int) -> float:
        """Within a node first, then between nodes, all ranks of a node at a time, each with its slice.

        A sum is that of ``cost.hierarchical_all_reduce``.  What is gathered goes to the ranks of the same number on
        other nodes first, and from these to their neighbours.  Raises ValueError for another verb, and for ranks that
        do not fill their nodes.
        """
        local = min(self.per_node, size)
        if size % local:
            raise ValueError(f"ranks must fill nodes of {local}, got {size}")
        nodes, link = size // local, self.link.shared(local)
        if local == 1:
            return cost.seconds(verb, nbytes, size, self.link)
        if verb == "all_reduce":
            return cost.hierarchical_all_reduce(nbytes, local, nodes, self.inside, link)
        if verb != "all_gather":
            raise ValueError(f"verb must be all_reduce or all_gather where nodes have several ranks, got {verb!r}")
        between = cost.seconds(verb, nbytes / local, nodes, link)
        return between + cost.seconds(verb, nbytes, local, self.inside)

    def at_bandwidth(self, bandwidth: float) -> "Network":
        """The same, with another link: so many bytes per second."""
        return self._replace(link=self.link._replace(bandwidth=bandwidth))


Wire = Network | Fit  # what predictions are asked of


def network(link: str | Link, per_node: int = 1, inside: str | Link = INSIDE) -> Network:
    """A network of links, which may be given by name or rate (``cost.link``).

    Raises ValueError for a name that there is not, for fewer than 1 rank in a node, and, as TypeError, for a link that
    cannot be.
    """
    between, within = (checked(given) if isinstance(given, Link) else cost.link(given) for given in (link, inside))
    return Network(between, whole("per_node", per_node, least=1), within)


def wire(given: str | Link | Wire) -> Wire:
    """A network, or what measured one, from whatever says which; raises as ``network``."""
    if isinstance(given, Fit):
        return given
    return network(*given) if isinstance(given, Network) else network(given)
