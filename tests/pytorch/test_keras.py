"""Keras 3 on PyTorch: ``fit`` of a synchronized model, whose optimizer stays Keras's."""

import importlib.util
import os

import numpy as np
import pytest
from gloo_launch import run_torch

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

missing = importlib.util.find_spec("keras") is None  # importing it here would choose its backend
pytestmark = [pytest.mark.torch, pytest.mark.skipif(missing, reason="keras is missing: pip install keras")]
RANKS, BATCH = 2, 8
OPTIMIZERS = "SGD", "AdamW", "Lion", "Muon"


def fit(comm):
    """The weights after three epochs, with each optimizer; and compressed ones, of a run that was resumed too."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    import distopt.torch as dt
    from distopt.compress import ErrorFeedback, TopK

    def made(optimizer):
        keras.utils.set_random_seed(0)
        layers = keras.Input((8,)), keras.layers.Dense(16, "tanh", name="hidden"), keras.layers.Dense(1, name="out")
        model = keras.Sequential(layers, name="net")  # Keras's own names count the layers of a process
        model.compile(optimizer=optimizer, loss="mse")
        return model

    x = np.random.default_rng(0).standard_normal((RANKS * BATCH * 4, 8)).astype(np.float32)
    y, mine, found = x.sum(1, keepdims=True), slice(comm.rank, None, comm.size), {}
    still = {"verbose": 0, "shuffle": False}
    for name in OPTIMIZERS:
        model, whole = (made(getattr(keras.optimizers, name)(0.01, clipnorm=1.0)) for _ in range(2))
        sync = dt.synchronize(model)
        model.fit(x[mine], y[mine], batch_size=BATCH, epochs=3, **still)
        sync.close()
        whole.fit(x, y, batch_size=RANKS * BATCH, epochs=3, **still)
        found[name], found[f"{name} of one process"] = (
            np.concatenate([w.ravel() for w in m.get_weights()]) for m in (model, whole)
        )

    for resumed in (False, True):
        model = made(keras.optimizers.AdamW(0.01))
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.1)))
        for epoch in range(3):
            if epoch == 1 and resumed:
                weights, moments = model.get_weights(), [v.numpy() for v in model.optimizer.variables]
                state = sync.state_dict()
                sync.close()
                model = made(keras.optimizers.AdamW(0.01))
                model.optimizer.build(model.trainable_variables)
                model.set_weights(weights)
                for variable, value in zip(model.optimizer.variables, moments, strict=True):
                    variable.assign(value)
                sync = dt.synchronize(model, ErrorFeedback(TopK(0.1)))
                sync.load_state_dict(state)
            model.fit(x[mine], y[mine], batch_size=BATCH, **still)
        found["resumed" if resumed else "compressed"] = np.concatenate([w.ravel() for w in model.get_weights()])
    return found


def test_fit_trains_as_one_process_with_the_whole_batch_and_goes_on_to_the_bit(tmp_path):
    found, others = run_torch(RANKS, fit, tmp_path)
    for name, weights in found.items():
        np.testing.assert_array_equal(weights, others[name], name)
    for name in OPTIMIZERS:
        np.testing.assert_allclose(found[name], found[f"{name} of one process"], rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found["resumed"], found["compressed"])
    assert np.abs(found["compressed"] - found["AdamW"]).max() > 1e-3
