"""The shapes of well-known models, against what their papers and model zoos count."""

import math

import pytest

from distopt.lab.models import MODELS

COUNTED = {  # tensors, elements
    "resnet50": (161, 25_557_032),
    "vgg16": (32, 138_357_544),
    "alexnet": (16, 61_100_840),
    "bert-base": (199, 109_482_240),
    "lstm": (11, 66_034_000),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_published_numbers_of_tensors_and_elements(name):
    shapes = MODELS[name]()
    assert (len(shapes), sum(math.prod(shape) for _, shape in shapes)) == COUNTED[name]
    assert len({name for name, _ in shapes}) == len(shapes)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("resnet50", "conv1.weight", (64, 3, 7, 7)),
        ("resnet50", "layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        ("resnet50", "fc.weight", (1000, 2048)),
        ("vgg16", "classifier.0.weight", (4096, 25088)),
        ("alexnet", "classifier.6.weight", (1000, 4096)),
    ],
)
def test_tensors_of_models_have_the_published_shapes(name, tensor, shape):
    """Rows are outputs, as in the model zoos."""
    assert dict(MODELS[name]())[tensor] == shape
