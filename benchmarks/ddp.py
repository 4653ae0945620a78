"""torch's side of a comparison: a model whose backward has its gradients already, and a step of it.  Needs torch."""

import torch


class Ready(torch.autograd.Function):
    """A backward that computes nothing."""

    @staticmethod
    def forward(context, gradients, *params):
        context.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(context, _):
        return None, *context.gradients()


class Model(torch.nn.Module):
    """Parameters of these shapes; ``gradients()`` is what each backward yields for them."""

    def __init__(self, shapes, gradients):
        super().__init__()
        self.gradients = gradients
        self.weights = torch.nn.ParameterList(torch.zeros(s) for s in shapes)

    def forward(self):
        return Ready.apply(self.gradients, *self.weights)


def distributed(model, **options):
    """The model under DDP, with gradients as views of its buckets."""
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def step_of(model, **rule):
    """Backward, exchange if the model has one, and torch's fused SGD."""
    sgd = torch.optim.SGD(model.parameters(), fused=True, **rule)

    def step():
        model().backward()
        sgd.step()
        sgd.zero_grad()

    return step
