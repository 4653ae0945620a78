"""Train SINGA's convolutional network, written in PyTorch, with SINGA's options, on handwritten digits.

    distopt run -n 2 examples/torch_singa.py [--dist-option half] [--fused]
    torchrun --nproc-per-node 2 examples/torch_singa.py --dist-option sparseTopK --sparsification 0.01

Model, options and loop are those of SINGA's distributed example: every rank has its part of the images and takes
batches of --batch-size from it, ``train_one_batch`` chooses among DistOpt's methods, and losses and counts of right
answers are summed up over the ranks.  The optimizer is torch's; with --fused it is distopt's, which updates the memory
of the model.  The data are those of digits.py, of 8 x 8 pixels instead of 28 x 28.
"""

import argparse

import numpy as np
import torch
from digits import digits
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

import distopt

DIST_OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


class CNN(nn.Module):
    def __init__(self, num_classes=10, num_channels=1):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, 20, 3, padding=1)
        self.conv2 = nn.Conv2d(20, 50, 3, padding=1)
        self.linear1 = nn.Linear(2 * 2 * 50, 500)
        self.linear2 = nn.Linear(500, num_classes)

    def forward(self, x):
        y = max_pool2d(relu(self.conv1(x)), 2)
        y = max_pool2d(relu(self.conv2(y)), 2)
        return self.linear2(relu(self.linear1(y.flatten(1))))

    def train_one_batch(self, x, y, dist_option, spars):
        out = self(x)
        loss = cross_entropy(out, y)
        if dist_option == "plain":
            self.optimizer(loss)
        elif dist_option == "half":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss, threshold=0)  # a bucket per parameter
        elif dist_option == "sparseTopK":
            self.optimizer.backward_and_sparse_update(loss, topK=True, spars=spars)
        elif dist_option == "sparseThreshold":
            self.optimizer.backward_and_sparse_update(loss, topK=False, spars=spars)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def partition(opt, x, y):
    """This rank's part of the images and labels."""
    part = len(x) // opt.world_size
    start = part * opt.global_rank
    return torch.from_numpy(x[start : start + part]), torch.from_numpy(y[start : start + part])


def right_answers(out, y):
    return int((out.argmax(1) == y).sum())


def run(opt, model, given):
    """Yield training loss, training accuracy and evaluation accuracy of every epoch, those of all ranks."""
    training, evaluation = digits(np)
    (train_x, train_y), (val_x, val_y) = partition(opt, *training), partition(opt, *evaluation)
    rng = np.random.default_rng(given.seed)
    batches = len(train_x) // given.batch_size
    model.set_optimizer(opt)
    for _ in range(given.max_epoch):
        correct, total = 0, 0.0
        model.train()
        for mine in rng.permutation(len(train_x))[: batches * given.batch_size].reshape(batches, -1):
            x, y = train_x[mine], train_y[mine]
            out, loss = model.train_one_batch(x, y, given.dist_option, given.spars)
            correct += right_answers(out, y)
            total += loss.item()
        model.eval()
        with torch.no_grad():
            val_correct = right_answers(model(val_x), val_y)
        ranks = opt.world_size
        yield (
            opt.all_reduce(total) / (batches * ranks),
            opt.all_reduce(correct) / (batches * given.batch_size * ranks),
            opt.all_reduce(val_correct) / (len(val_x) * ranks),
        )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--max-epoch", type=int, default=10)
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("-l", "--learning-rate", type=float, default=0.05, dest="lr")
    parser.add_argument("-d", "--dist-option", choices=DIST_OPTIONS, default="plain")
    spars = "fraction of the gradients that sparseTopK sends; least magnitude that sparseThreshold sends"
    parser.add_argument("-s", "--sparsification", type=float, default=0.05, dest="spars", help=spars)
    parser.add_argument("--fused", action="store_true", help="let distopt's SGD update the model, instead of torch's")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def optimizer(given, model):
    if given.fused:
        sgd = distopt.optim.SGD(given.lr, momentum=0.9, weight_decay=1e-5)
        return distopt.DistOpt(sgd, params=model)
    sgd = torch.optim.SGD(model.parameters(), given.lr, momentum=0.9, weight_decay=1e-5)
    return distopt.DistOpt(sgd)


def main():
    given = arguments()
    torch.manual_seed(given.seed)
    model = CNN()
    opt = optimizer(given, model)
    for epoch, (loss, correct, val_correct) in enumerate(run(opt, model, given)):
        if opt.global_rank == 0:
            print(f"epoch {epoch}: training loss {loss:.4f}, training accuracy {correct:.4f}", end=", ")
            print(f"evaluation accuracy {val_correct:.4f}", flush=True)


if __name__ == "__main__":
    main()
