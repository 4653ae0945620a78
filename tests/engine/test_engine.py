"""The engine and its facades."""

import distopt
from distopt import DistOpt


def test_facades_do_not_inherit_from_the_engine():
    for kind in (DistOpt, distopt.Trainer, type(distopt.simulate(2))):
        assert distopt.engine.engine.Engine not in kind.__mro__
        names = [name for base in kind.__mro__[1:] for name in vars(base) if name.startswith("_") and name[1] != "_"]
        assert not set(names) & set(vars(kind)), "no private member of a base is overridden"
