"""Models in PyTorch for comparisons end to end: a small CNN and a ResNet-18."""

import itertools

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES = 10


def small_cnn():
    """A classifier of images of 1 x 8 x 8, as the digits of ``examples/``: 43 thousand parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(512, 72), nn.ReLU(), nn.Linear(72, CLASSES)),
    )


def normalized(inputs, outputs, stride=1, size=3):
    """A convolution without bias, and a batch norm."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


class Residual(nn.Module):
    """The basic block of a ResNet (He et al., 2016)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.block = nn.Sequential(*normalized(inputs, outputs, stride), nn.ReLU(), *normalized(outputs, outputs))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*normalized(inputs, outputs, stride, size=1))

    def forward(self, x):
        return torch.relu(self.block(x) + self.shortcut(x))


def resnet18():
    """ResNet-18 for images of 3 x 32 x 32: its stem is one convolution; 11.2 million parameters."""
    widths, layers = (64, 64, 128, 256, 512), [*normalized(3, 64), nn.ReLU()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [Residual(inputs, outputs, outputs // inputs), Residual(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def loss_on_random_images(shape, seed):
    """A function that returns a model's loss on images of that shape, (batch, channels, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(shape, generator=generator), torch.randint(CLASSES, shape[:1], generator=generator)
    return lambda model: cross_entropy(model(x), y)
