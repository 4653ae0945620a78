"""Models of PyTorch whose gradients ``distopt.torch.synchronize`` exchanges, trained as those of a ``DistOpt``."""

import contextlib

import torch

import distopt.torch as dt
from distopt.engine.facade import Checkpointed
from distopt.torch.state import as_arrays, as_tensors

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=1e-3),
    "plain SGD": lambda params: torch.optim.SGD(params, 0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-3),
}


class Weighed(torch.nn.Module):
    """The sum of all parameters, each multiplied by what is to be its gradient."""

    def __init__(self, params):
        super().__init__()
        self.weights = torch.nn.ParameterDict({p.name: torch.nn.Parameter(torch.from_numpy(p.data)) for p in params})
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, gradients):
        self.passes += 1
        return sum((self.weights[name] * torch.tensor(g)).sum() for name, g in gradients.items())


class Synced:
    """A script's loop of a model in the memory of some parameters, with an optimizer of torch.

    Args:
        params: the parameters.
        comm: the ranks.
        optimizer: its name.
        passes: backward passes of a step, all but the last without an exchange.
        scale: that of a GradScaler; None for no scaler.
        options: of ``synchronize``.
    """

    def __init__(self, params, comm, optimizer, passes=1, scale=None, **options):
        self._model = Weighed(params)
        self._optimizer, self._passes = OPTIMIZERS[optimizer](self._model.parameters()), passes
        self._scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale is not None)
        scaler = {"scaler": self._scaler} if scale is not None else {}
        self.sync = dt.synchronize(self._model, optimizer=self._optimizer, group=comm, **scaler, **options)
        self.engine, self.rejoin = self.sync.engine, lambda params: self.sync.rejoin()

    def __call__(self, pairs):
        gradients = {p.name: g / self._passes for p, g in pairs}
        self._optimizer.zero_grad(set_to_none=self._passes == 1)
        for number in range(1, self._passes + 1):
            with contextlib.nullcontext() if number == self._passes else self.sync.no_sync():
                self._scaler.scale(self._model(gradients)).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    @property
    def world_size(self):
        return self.sync.communicator.size

    def state_dict(self):
        """All but the parameters."""
        script = {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}
        return Checkpointed.state_dict(self.sync) | {"optimizer": as_arrays(script)}

    def load_state_dict(self, state):
        script = as_tensors(state["optimizer"])
        self._optimizer.load_state_dict(script["optimizer"])
        self._scaler.load_state_dict(script["scaler"])
        Checkpointed.load_state_dict(self.sync, state | {"optimizer": None})
