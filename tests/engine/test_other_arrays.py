"""Arrays of other libraries: the errors say how to convert them."""

import numpy as np
import pytest

from distopt import DistOpt, Parameter, Trainer
from distopt.device import describe, remedy
from distopt.optim import SGD


class Stranger:
    """A class of the name and module of another library's."""

    def __init__(self, module, name):
        self.kind = type(name, (), {"__module__": module, "backward": lambda self: pytest.fail("it was called")})

    def __call__(self):
        return self.kind()


TENSOR, JAX = Stranger("torch", "Tensor"), Stranger("jaxlib._jax", "ArrayImpl")


@pytest.mark.parametrize(("made", "said"), [(TENSOR, r"params=model"), (JAX, r"np\.asarray\(g\)")])
def test_every_error_about_foreign_arrays_says_what_to_write(made, said):
    value, good = np.zeros(2, np.float32), np.ones(2, np.float32)
    for loss in ([(Parameter("a", made()), good)], [(made(), good)], [(Parameter("a", value), made())], made()):
        with pytest.raises(TypeError, match=said):
            DistOpt()(loss)
    with pytest.raises(TypeError, match=said):
        DistOpt().all_reduce(made())
    with pytest.raises(TypeError, match=said):
        DistOpt().gradient_views([made()])
    trainer = Trainer([Parameter("a", value, made())], "sgd")
    with pytest.raises(TypeError, match=said):
        trainer.step(1)


def test_a_tensor_is_no_loss_and_its_backward_is_not_called():
    with pytest.raises(TypeError, match=r"loss must be an iterable .*, got Tensor: .* \(torch: DistOpt"):
        DistOpt()(TENSOR())


def test_an_array_as_loss_is_refused():
    with pytest.raises(TypeError, match=r"loss must be an iterable .*, got an array \(\) float32"):
        DistOpt()(np.array(3, np.float32))


def test_unknown_objects_get_no_advice():
    assert remedy(object()) == remedy(np.zeros(1)) == remedy(None) == remedy(Stranger("torch", "Module")()) == ""
    assert describe(3) == "int: 3"


@pytest.mark.torch
def test_the_advice_for_a_loss_that_is_a_tensor_holds():
    torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
    layer = torch.nn.Linear(3, 1)
    loss = layer(torch.ones(2, 3)).sum()
    with pytest.raises(TypeError, match=r"DistOpt\(optimizer, params=model\)"):
        DistOpt()(loss)
    assert layer.weight.grad is None
    before = layer.weight.detach().clone()
    DistOpt(SGD(0.1), params=layer)(loss)
    assert not torch.equal(layer.weight, before)


@pytest.mark.torch
def test_jax_arrays_are_recognised():
    jnp = pytest.importorskip("jax.numpy", reason="jax is missing: pip install jax")
    assert "np.asarray(g)" in remedy(jnp.ones(2))
