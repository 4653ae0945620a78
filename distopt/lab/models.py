"""The parameters of well-known models: names and shapes in forward order, derived from the published architectures."""

from collections.abc import Callable

Shapes = list[tuple[str, tuple[int, ...]]]


def resnet50() -> Shapes:
    """Return the parameters of ResNet-50 (He et al., 2016): 161 tensors, 25,557,032 elements."""
    tensors = [*_convolution("conv1", 64, 3, 7, bias=False), *_norm("bn1", 64)]
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            kernels = ((inputs, width, 1), (width, width, 3), (width, 4 * width, 1))
            for k, (fan_in, fan_out, size) in enumerate(kernels, 1):
                tensors += _convolution(f"{name}.conv{k}", fan_out, fan_in, size, bias=False)
                tensors += _norm(f"{name}.bn{k}", fan_out)
            if block == 0:
                tensors += _convolution(f"{name}.downsample.0", 4 * width, inputs, 1, bias=False)
                tensors += _norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    return tensors + _linear("fc", 2048, 1000)


def vgg16() -> Shapes:
    """Return the parameters of VGG-16 (Simonyan and Zisserman, 2015): 32 tensors, 138,357,544 elements.

    It is their configuration D.
    """
    tensors, inputs, place = [], 3, 0
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            tensors += _convolution(f"features.{place}", width, inputs, 3)
            inputs, place = width, place + 2  # a ReLU follows each
        place += 1  # a pooling layer follows
    for k, (fan_in, fan_out) in enumerate([(512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)]):
        tensors += _linear(f"classifier.{3 * k}", fan_in, fan_out)
    return tensors


def alexnet() -> Shapes:
    """Return the parameters of AlexNet in one column (Krizhevsky, 2014): 16 tensors, 61,100,840 elements."""
    tensors: Shapes = []
    for place, width, inputs, size in (
        (0, 64, 3, 11),
        (3, 192, 64, 5),
        (6, 384, 192, 3),
        (8, 256, 384, 3),
        (10, 256, 256, 3),
    ):
        tensors += _convolution(f"features.{place}", width, inputs, size)
    for place, fan_in, fan_out in ((1, 256 * 6 * 6, 4096), (4, 4096, 4096), (6, 4096, 1000)):
        tensors += _linear(f"classifier.{place}", fan_in, fan_out)
    return tensors


def bert_base() -> Shapes:
    """Return the parameters of BERT-base (Devlin et al., 2019) with its pooler: 199 tensors, 109,482,240 elements."""
    width = 768
    tensors: Shapes = [(f"embeddings.{k}", (n, width)) for k, n in (("word", 30522), ("position", 512), ("type", 2))]
    tensors += _norm("embeddings.norm", width)
    for layer in range(12):
        name = f"layer{layer}"
        for part in ("query", "key", "value", "attention.output"):
            tensors += _linear(f"{name}.{part}", width, width)
        tensors += _norm(f"{name}.attention.norm", width)
        tensors += _linear(f"{name}.up", width, 4 * width) + _linear(f"{name}.down", 4 * width, width)
        tensors += _norm(f"{name}.norm", width)
    return tensors + _linear("pooler", width, width)


def lstm() -> Shapes:
    """Return the parameters of a language model of two LSTM layers (Zaremba et al., 2014): 66,034,000 elements.

    Layers have 1500 units, and the vocabulary 10,000 words.
    """
    words, width = 10_000, 1500
    tensors: Shapes = [("embedding.weight", (words, width))]
    for layer in range(2):
        for source in ("input", "hidden"):
            tensors += _linear(f"layer{layer}.{source}", width, 4 * width)  # the four gates, stacked
    return tensors + _linear("decoder", width, words)


def _convolution(name: str, fan_out: int, fan_in: int, size: int, bias: bool = True) -> Shapes:
    return [(f"{name}.weight", (fan_out, fan_in, size, size)), *([(f"{name}.bias", (fan_out,))] if bias else [])]


def _linear(name: str, fan_in: int, fan_out: int) -> Shapes:
    return [(f"{name}.weight", (fan_out, fan_in)), (f"{name}.bias", (fan_out,))]


def _norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "alexnet": alexnet,
    "bert-base": bert_base,
    "lstm": lstm,
}
