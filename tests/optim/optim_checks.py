"""What every optimizer of distopt must do, as functions of one that makes it."""

import numpy as np

from distopt.kernels.layout import BucketLayout


def fused_equals_single(make):
    """A bucket in one call, or its tensors one after the other: the same bits, in parameters and states."""
    rng = np.random.default_rng(1)
    shapes, offsets = [(5000,), (3,), (), (0,), (17, 3)], [0, 5008, 5024, 5040, 5040]
    one = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    fused, names = [v.copy() for v in one], [f"p{k}" for k in range(len(shapes))]
    table = BucketLayout(names, shapes, offsets, "float32")
    opts = make(), make()
    for _ in range(5):
        flat = rng.standard_normal(table.extent).astype(np.float32)
        opts[0].prepare(1.0)
        opts[0].update_bucket(table.point_to(fused), [(0, 1, flat)])
        for row, (name, v) in enumerate(zip(names, one, strict=True)):
            opts[1].apply(name, v, table.view(flat, row))
        for opt in opts:
            opt.step()
    for a, b in zip(fused, one, strict=True):
        np.testing.assert_array_equal(a, b)
    for slot in opts[0].slots:
        states = [opt.get_states()[slot] for opt in opts]
        for name, shape in zip(names, shapes, strict=True):
            np.testing.assert_array_equal(states[0][name], states[1][name])
            assert states[0][name].shape == shape


def states_go_on(make):
    """Going on from get_states is never having stopped, to the bit; returns the optimizer that never stopped."""
    grads = np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32)
    values = np.zeros((2, 40), np.float32)
    first, second = make(), make()
    for k in range(6):
        first.apply("w", values[0], grads[k].copy())
        first.step()
        if k == 2:
            second.set_states(first.get_states())
            values[1] = values[0]
        if k > 2:
            second.apply("w", values[1], grads[k].copy())
            second.step()
    np.testing.assert_array_equal(values[0], values[1])
    assert set(first.get_states()) == {"rule", *first.counters, *first.slots}
    assert second.step_counter == first.get_states()["step_counter"] == 6
    return first
