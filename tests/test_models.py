"""The shapes of well-known models, against what their papers and model zoos count."""

import math

import pytest

from distopt.models import MODELS

COUNTED = {  # tensors, elements
    "resnet50": (161, 25_557_032),
    "vgg16": (32, 138_357_544),
    "alexnet": (16, 61_100_840),
    "bert-base": (199, 109_482_240),
    "lstm": (11, 66_034_000),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    shapes = MODELS[name]()
    assert (len(shapes), sum(math.prod(shape) for _, shape in shapes)) == COUNTED[name]
    assert len({name for name, _ in shapes}) == len(shapes)
