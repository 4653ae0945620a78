"""What ranks of MPI do with flax and optax, as functions that all ranks call."""

import os
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import distopt
import distopt.jax as dj
from distopt.compress import ErrorFeedback, Int8, Packed, TopK

BATCH = 32


class Network(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))


NETWORK, OPTIMIZER = Network(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))


def batch(step):
    """The whole batch of a step."""
    x = np.random.default_rng(step).standard_normal((BATCH, 5)).astype(np.float32)
    return x, np.tanh(x[:, :1] + x[:, 1:2] * x[:, 2:3])


@jax.jit
def gradients_of(params, x, y):
    return jax.value_and_grad(lambda p: jnp.mean((NETWORK.apply(p, x) - y) ** 2))(params)


@jax.jit
def update(gradients, state, params):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def begin(seed):
    return NETWORK.init(jax.random.key(seed), jnp.zeros((1, 5)))


def train(steps, params, state, rank=0, size=1, sync=lambda g: g, after=lambda p: p):
    """Parameters, optax's state, and losses of this rank's part of each batch."""
    losses = []
    for step in steps:
        x, y = (part[rank::size] for part in batch(step))
        loss, gradients = gradients_of(params, x, y)
        params, state = update(sync(gradients), state, params)
        params = after(params)
        losses.append(float(loss))
    return params, state, losses


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree_util.tree_leaves(tree)])


def everything(comm, folder):
    """Arrays by name, for the tests to compare between ranks and with one process."""
    params = dj.broadcast(begin(seed=comm.rank), comm)
    state = OPTIMIZER.init(params)
    found = {"begun": flat(params), "one": flat(train(range(8), params, state)[0])}
    where = comm.rank, comm.size
    found["dense"] = flat(train(range(8), params, state, *where, dj.synchronize(params, communicator=comm))[0])
    int8 = dj.synchronize(params, ErrorFeedback(Int8()), communicator=comm)
    trained, _, losses = train(range(150), params, state, *where, int8)
    found |= {"int8": flat(trained), "losses": np.array(losses)}

    def sparse():
        return dj.synchronize(params, ErrorFeedback(Packed(TopK(0.05))), communicator=comm)

    found["whole"] = flat(train(range(20), params, state, *where, sparse())[0])
    first, again = sparse(), sparse()
    half, its_state, _ = train(range(10), params, state, *where, first)
    again.load_state_dict(first.state_dict())
    found["resumed"] = flat(train(range(10, 20), half, its_state, *where, again)[0])
    first.save(folder, extra={"params": half, "optimizer": its_state})
    first.close()
    third = sparse()
    extra = jax.tree_util.tree_map(jnp.asarray, third.load(folder))
    treedef = jax.tree_util.tree_structure((params, state))
    both = treedef.unflatten(jax.tree_util.tree_leaves((extra["params"], extra["optimizer"])))
    found["loaded"] = flat(train(range(10, 20), *both, *where, third)[0])

    def windows():
        return dj.local_steps(params, 5, outer=distopt.optim.SGD(1.0), communicator=comm, fragments=2, delay=2)

    one, other = windows(), windows()
    found["windows"] = flat(train(range(20), params, state, *where, after=one)[0])
    found["global"] = flat(one.global_parameters(params))
    half, its_state, _ = train(range(12), params, state, *where, after=other)
    last = windows()
    last.load_state_dict(other.state_dict())
    found["windows resumed"] = flat(train(range(12, 20), half, its_state, *where, after=last)[0])
    return found


def loses_one():
    """A script whose rank 1 is killed before its third exchange."""
    world = distopt.world()
    params = begin(seed=0)
    sync = dj.synchronize(params, ErrorFeedback(Int8()))

    def exchange(gradients):
        if sync.step_counter == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sync(gradients)

    train(range(5), params, OPTIMIZER.init(params), world.rank, world.size, exchange)
    print("the script has ended")


if __name__ == "__main__":
    sys.exit(loses_one())
