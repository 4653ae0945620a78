"""The parameter lists that the benchmarks use: (name, shape), in forward order."""

import numpy as np


def resnet50():
    """ResNet-50 (He et al., 2016): 161 tensors, 25,557,032 elements."""
    found = [("conv1.weight", (64, 3, 7, 7)), *_norm("bn1", 64)]
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            found += [(f"{name}.conv1.weight", (width, inputs, 1, 1)), *_norm(f"{name}.bn1", width)]
            found += [(f"{name}.conv2.weight", (width, width, 3, 3)), *_norm(f"{name}.bn2", width)]
            found += [(f"{name}.conv3.weight", (4 * width, width, 1, 1)), *_norm(f"{name}.bn3", 4 * width)]
            if block == 0:
                found += [(f"{name}.downsample.0.weight", (4 * width, inputs, 1, 1))]
                found += _norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    return [*found, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]


def _norm(name, width):
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def tiny():
    """2000 tensors of 512 to 4096 elements."""
    sizes = np.random.default_rng(0).integers(512, 4097, 2000)
    return [(f"t{k}", (int(n),)) for k, n in enumerate(sizes)]


def bert_base():
    """BERT-base (Devlin et al., 2019) with its pooler: 199 tensors, 109,482,240 elements."""
    width = 768
    found = [(f"embeddings.{k}", (n, width)) for k, n in (("word", 30522), ("position", 512), ("type", 2))]
    found += _norm("embeddings.norm", width)
    for layer in range(12):
        name = f"layer{layer}"
        for part in ("query", "key", "value", "attention.output"):
            found += [(f"{name}.{part}.weight", (width, width)), (f"{name}.{part}.bias", (width,))]
        found += _norm(f"{name}.attention.norm", width)
        found += [(f"{name}.up.weight", (4 * width, width)), (f"{name}.up.bias", (4 * width,))]
        found += [(f"{name}.down.weight", (width, 4 * width)), (f"{name}.down.bias", (width,))]
        found += _norm(f"{name}.norm", width)
    return [*found, ("pooler.weight", (width, width)), ("pooler.bias", (width,))]


MODELS = {"resnet50": resnet50, "tiny": tiny, "bert_base": bert_base}
