"""States of custom optimizers in checkpoints: trees of torch, of optax, and any others."""

import collections
import subprocess
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint_file import PEAK, refused, said, small  # noqa: F401

import laws
from distopt import DistOpt, Parameter, checkpoint, cli, run_ranks
from distopt.checkpoint import CheckpointError, file, head
from distopt.comm import LocalCommunicator
from distopt.optim import SGD
from tiers import every

EXTRA = 64 << 20  # bytes that reading may take beyond what grows with the file


class Moments(NamedTuple):
    """As optax's ScaleByAdamState, of which ``count`` is a tuple's method too."""

    count: Any
    mu: dict
    nu: dict


class Empty(NamedTuple):
    """As optax's EmptyState."""


def written(tree, path):
    """What comes out of a file."""
    checkpoint.write(path, tree, {})
    return checkpoint.read(path)[0]


# ------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    "tree",
    [
        {0: "a", 1: {"x": np.arange(3)}, "two": [1, (2, None)]},
        {-1: {2**52: True}},
        {"state": {}, "groups": [{"betas": (0.9, 0.999), "params": [0, 1], "maximize": False, "foreach": None}]},
    ],
)
def test_dicts_with_integer_keys_are_read_back(tree, tmp_path):
    found = written(tree, tmp_path / "x")
    np.testing.assert_equal(found, tree)
    assert list(map(type, found)) == list(map(type, tree))


def test_named_tuples_are_read_back_with_their_fields(tmp_path):
    tree = (Moments(np.int32(3), {"w": np.ones(2)}, {"w": np.zeros(2)}), Empty(), (Empty(),))
    moments, empty, (inner,) = written(tree, tmp_path / "x")
    assert (type(moments).__name__, type(moments)._fields) == ("Moments", ("count", "mu", "nu"))
    assert moments.count == 3
    np.testing.assert_equal((moments.mu, moments.nu), (tree[0].mu, tree[0].nu))
    assert moments._replace(count=4)[0] == moments._make((4, 1, 2)).count == 4
    assert list(moments._asdict()) == ["count", "mu", "nu"]
    assert (type(empty)._fields, len(empty), type(inner) is type(empty)) == ((), 0, True)
    assert repr(empty) == "Empty()"
    again = written((moments, empty), tmp_path / "y")
    assert type(again[0]) is type(moments)


def test_an_ordered_dict_is_a_dict(tmp_path):
    found = written(collections.OrderedDict(b=1, a=2), tmp_path / "x")
    assert (type(found), list(found)) == (dict, ["b", "a"])


@pytest.mark.parametrize(
    "tree",
    [
        '["dict",0]',
        '["dict",0,1,"0",2]',
        '["dict",true,1]',
        '["dict",1.5,1]',
        '["dict",[],1]',
        '["named"]',
        '["named","State","x"]',
        '["named","State",1,2]',
        '["named","State","_fields",1]',
        '["named","State","__class__",1]',
        '["named","State","x y",1]',
        '["named","State","x",1,"x",2]',
        '["named","\\u0000","x",1]',
        '["named",["S"],"x",1]',
        '["tensor",1]',
        '{"w":["tensor"],"x":["dict",1,["tensor"]]}',
    ],
)
def test_forged_type_words_are_refused(tree, small):  # noqa: F811
    small.write_bytes(said(tree=tree)(small.read_bytes()))
    assert isinstance(refused(small), CheckpointError)


def test_files_of_the_first_version_are_read(small):  # noqa: F811
    small.write_bytes(said(version="1")(small.read_bytes()))
    assert refused(small) is None


# ------------------------------------------------------------------------------------------------- many tensors


@pytest.mark.thorough
def test_thousands_of_small_tensors_are_read_back(tmp_path):
    """Those of a model and of an optimizer with two moments each."""
    tree = {word: {f"p{k}": np.full(16, k, "f4") for k in range(4000)} for word in ("parameters", "mu", "nu")}
    found = written(tree, tmp_path / "x")
    assert all((found[word][name] == x).all() for word, arrays in tree.items() for name, x in arrays.items())


@pytest.mark.mpi
@pytest.mark.parametrize("value", every(2, ['{"a":0}', "{}", '["named","S","a",0]', "1e9", '["dict",0,0]'], first=0))
def test_memory_for_a_forged_file_is_bounded_by_its_size(value, small):  # noqa: F811
    """A header of the largest length, with as many values as it may have, costs some bytes for each of its letters."""
    count = 800_000 // (sum(map(value.count, ",{[")) + 1)
    tree = '["list",' + ",".join([value] * count) + "]"
    tree += " " * (head.MAX_HEAD_BYTES - 10_000 - len(tree) - tree.count('"'))
    small.write_bytes(said(tree=tree)(small.read_bytes()))
    found = subprocess.run([sys.executable, "-c", PEAK, small], capture_output=True, text=True, timeout=100, check=True)
    error, peak = found.stdout.splitlines()
    assert "must be in the tree" in error, "it was parsed"
    assert int(peak) < EXTRA + 40 * small.stat().st_size


# ------------------------------------------------------------------------------------------------- optax' kind


class OptaxLike:
    """An optimizer whose state is a tree that updates make anew, with classes of its own."""

    def __init__(self, begun=True):
        self.grads, self.params = {}, {}
        self.state = (Moments(np.zeros((), "i4"), {}, {}), Empty()) if begun else None

    def apply(self, name, value, grad):
        self.params[name], self.grads[name] = value, grad.copy()

    def step(self):
        moments, empty = self.state or (Moments(np.zeros((), "i4"), {}, {}), Empty())
        zero = {name: np.zeros_like(g) for name, g in self.grads.items()}
        mu = {n: 0.9 * moments.mu.get(n, zero[n]) + 0.1 * g for n, g in self.grads.items()}
        nu = {n: 0.99 * moments.nu.get(n, zero[n]) + 0.01 * g * g for n, g in self.grads.items()}
        for name, value in self.params.items():
            value -= 0.1 * mu[name] / (np.sqrt(nu[name]) + 1e-8) / np.float32(moments.count + 1)
        self.state = Moments(moments.count + 1, mu, nu), empty

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("begun", [False, True])
def test_named_tuples_of_an_optimizer(begun, tmp_path):
    """They come back with the optimizer's own classes where it has a state already."""

    def main(comm):
        make = lambda: OptaxLike(begun)  # noqa: E731
        expected = laws.train(comm, steps=4, make=make)[0]
        params, opt = laws.train(comm, steps=2, make=make)
        opt.save(tmp_path, params)
        params, opt = laws.parameters(rank=comm.rank), DistOpt(make(), comm, threshold=60)
        opt.load(tmp_path, params)
        moments, empty = opt.opt.state
        assert moments.count == 2
        assert (type(moments) is Moments, type(empty) is Empty) == (begun, begun)
        laws.train(comm, steps=2, start=2, params=params, opt=opt)
        assert laws.digest(params) == laws.digest(expected)

    run_ranks(2, main)


def test_another_number_of_ranks_resumes_from_the_average_of_any_tree(tmp_path):
    def save(comm):
        params, opt = laws.train(comm, steps=3, mode="partial", make=OptaxLike)
        opt.save(tmp_path, params)
        return opt.opt.state[0]

    def load(comm):
        params, opt = laws.parameters(rank=comm.rank), DistOpt(OptaxLike(), comm, threshold=60)
        opt.load(tmp_path, params)
        return opt.opt.state[0]

    states, (found,) = run_ranks(2, save), run_ranks(1, load)
    assert type(found) is Moments
    assert found.count == 3
    for name, mu in found.mu.items():
        np.testing.assert_allclose(mu, (states[0].mu[name] + states[1].mu[name]) / 2, rtol=0, atol=1e-7)
        assert mu.size == 0 or (states[0].mu[name] != states[1].mu[name]).any()


# ------------------------------------------------------------------------------------------------- torch


class Torch:
    """One of torch's optimizers as one that distopt wraps."""

    def __init__(self, make):
        import torch

        self.params, self.make, self.opt, self.torch = {}, make, None, torch

    def apply(self, name, value, grad):
        param = self.params.setdefault(name, self.torch.nn.Parameter(self.torch.from_numpy(value)))
        param.grad = self.torch.from_numpy(grad.copy())

    def step(self):
        self._made().step()

    def _made(self):
        self.opt = self.opt or self.make(list(self.params.values()))
        return self.opt

    def state_dict(self):
        return self.opt and self.opt.state_dict()

    def load_state_dict(self, state):
        self.loaded = state
        if self.params:
            self._made().load_state_dict(state)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is missing: pip install torch")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_torchs_optimizers_go_on_to_the_same_bits(name, torch, tmp_path):
    options = {"lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})

    def main(comm):
        make = lambda: Torch(lambda params: getattr(torch.optim, name)(params, **options))  # noqa: E731

        def made():
            params = [Parameter(f"p{k}", np.full((k + 1, 2), k + 1.0, "f4")) for k in range(3)]
            opt = DistOpt(make(), comm, broadcast=False)
            for p in params:
                opt.opt.apply(p.name, p.data, np.zeros_like(p.data))
            return params, opt

        def train(params, opt, steps):
            for step in steps:
                opt([(p, p.data * 0.1 + step + comm.rank) for p in params])

        expected, whole = made()
        train(expected, whole, range(5))
        params, opt = made()
        train(params, opt, range(2))
        opt.save(tmp_path, params)
        params, opt = made()
        opt.load(tmp_path, params)
        given = opt.opt.loaded["state"]
        assert all(type(key) is int for key in given)
        assert {type(x) for state in given.values() for x in state.values()} <= {torch.Tensor, type(None)}
        train(params, opt, range(2, 5))
        assert laws.digest(params) == laws.digest(expected)

    run_ranks(2, main)


@pytest.mark.torch
def test_tensors_of_every_dtype_are_read_back(torch, tmp_path, capsys):
    bits = np.arange(1 << 16, dtype="u2").view("i2")
    tree = {
        "bfloat16": torch.from_numpy(bits).view(torch.bfloat16),  # every NaN
        "half": torch.from_numpy(bits).view(torch.float16),
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(2, 0, dtype=torch.int64),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "turned bfloat16": torch.arange(6.0).to(torch.bfloat16).reshape(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "array": np.ones(2),
    }
    found = written(tree, tmp_path / "x")
    assert type(found.pop("array")) is np.ndarray
    for name, x in found.items():
        assert type(x) is torch.Tensor, name
        assert (x.dtype, x.shape, x.requires_grad) == (tree[name].dtype, tree[name].shape, False)
        assert torch.equal(x.reshape(-1).view(torch.uint8), tree[name].detach().reshape(-1).view(torch.uint8)), name
    assert cli.main(["inspect", str(tmp_path / "x")]) == 0
    assert "/bfloat16         bfloat16  (65536,)" in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.parametrize("make", ["torch.eye(2).to_sparse()", "torch.ones(2, dtype=torch.complex64)"])
def test_sparse_and_complex_tensors_are_refused(make, torch, tmp_path):
    with pytest.raises(TypeError, match="/a: neither a checkpoint nor a message holds"):
        checkpoint.write(tmp_path / "x", {"a": eval(make, {"torch": torch})}, {})


@pytest.mark.torch
def test_tensors_in_a_process_without_torch_are_arrays(torch, tmp_path):
    checkpoint.write(tmp_path / "x", {"w": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}, {})
    program = """
import sys
from distopt import checkpoint
tree, _ = checkpoint.read(sys.argv[1])
print(type(tree["w"]).__name__, tree["w"], tree["b"].dtype, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, tmp_path / "x"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "ndarray [0. 1. 2.] bfloat16 False\n"


@pytest.mark.torch
def test_tensors_of_ranks_that_differ_are_averaged(torch, tmp_path):
    class Own:
        def __init__(self):
            self.state = {0: {"m": torch.zeros(2, dtype=torch.float64)}}

        def apply(self, name, value, grad):
            value -= grad
            self.state[0]["m"] += torch.from_numpy(grad)

        def state_dict(self):
            return {"state": self.state}

        def load_state_dict(self, state):
            self.state = state["state"]

    def save(comm):
        w, opt = Parameter("w", np.zeros(2)), DistOpt(Own(), comm)
        opt.backward_and_partial_update([(w, np.full(2, comm.rank + 1.0))])
        opt.save(tmp_path, [w])

    def load(comm):
        w, opt = Parameter("w", np.zeros(2)), DistOpt(Own(), comm)
        opt.load(tmp_path, [w])
        return opt.opt.state[0]["m"]

    run_ranks(2, save)
    (found,) = run_ranks(1, load)
    assert type(found) is torch.Tensor
    assert found.tolist() == [1.5, 1.5]


def test_a_bfloat16_array_is_read_back_as_an_array(tmp_path):
    found = written({"a": np.ones(2, ml_dtypes.bfloat16)}, tmp_path / "x")
    assert (type(found["a"]), found["a"].dtype) == (np.ndarray, np.dtype(ml_dtypes.bfloat16))


def test_states_of_distopts_own_optimizers_stay_as_they_were(tmp_path):
    """They have no named tuples: nothing is asked of them twice."""
    w, opt = Parameter("w", np.zeros(3)), DistOpt(SGD(1.0, momentum=0.9), LocalCommunicator())
    opt([(w, np.ones(3))])
    place = opt.save(tmp_path, [w])
    assert file.header(place / "all").plain["optimizer"]
    opt.opt.get_states = None
    opt.load(tmp_path, [w])
