"""Local steps of a PyTorch model, after steps of the script's own optimizer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from distopt.comm import Communicator
from distopt.engine.local_ranks import LocalRanks
from distopt.engine.local_state import InnerState, LocalState
from distopt.engine.outer_loop import Arrays, LocalOptions, outer_loop
from distopt.engine.spec import shows
from distopt.engine.training_state import Tree
from distopt.torch.exchange import communicator, not_logical
from distopt.torch.model import TorchModel
from distopt.torch.state import for_rank, of_rank
from distopt.torch.tensors import as_tensor


class OuterSteps:
    """Exchanges of how far a model has come, after every so many steps of an optimizer.  Making it is collective.

    The script trains as one process does.  A hook of the optimizer counts its steps, exchanges, and writes new
    parameters where the model has them; so an exchange is inside of ``optimizer.step()``.  Rank 0's parameters, and
    buffers, are sent to all ranks at once.  Buffers, as the means of a batch normalization, are this rank's own after
    that.

    Args:
        model: the model, or tensors, or (name, tensor) pairs; those that require a gradient take part.  Of a
            ``DTensor`` it is this rank's shard; ``group`` must have the ranks with the same shards then.
        optimizer: of ``torch.optim``; its steps are counted.
        scaler: the script's ``GradScaler``, if it has one: a step that it leaves out counts too, so that all ranks
            count alike.
        group: the ranks: a process group of ``torch.distributed``, or a communicator; by default ``world()``.
        check_every: steps between two comparisons of the global parameters.
        **options: every, outer, compressor, fragments, delay, alpha, threshold, break_even, exchange and over, as of
            ``distopt.LocalSteps``; ``every`` must be given.

    Attributes:
        communicator: the ranks.

    Raises:
        RuntimeError: this process was started in the place of a lost rank: those that are left lose ranks, and take
            none in.
        TypeError: an argument has the wrong type.
        ValueError: one is out of range, or ranks differ; or the optimizer updates none of the model's parameters.
    """

    @shows(LocalOptions)
    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        group: "dist.ProcessGroup | Communicator | None" = None,
        check_every: int = 0,
        **options: Any,
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch.optim, got a {type(optimizer).__name__}")
        self._model, self._optimizer, self._scaler = TorchModel(model), optimizer, scaler
        self.communicator = communicator(group, self._model.parameters[0].tensor)
        if self.communicator.outside:
            raise RuntimeError(
                "local steps must begin on all ranks together, got a process in the place of a lost rank; start "
                "without --restarts, or use distopt.torch.synchronize"
            )
        local = LocalOptions(**options)
        self._outer = outer_loop(self.communicator, self._places, local, check_every=check_every, line="torch")
        inner = InnerState()
        inner.optimizer = optimizer
        self._state = LocalState(self._outer, inner, ())
        with self._model.stream():
            _, values = self._places()
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            error = None
            if updated.isdisjoint(id(p.original) for p in self._model.parameters):
                kind = type(optimizer).__name__
                error = ValueError(
                    f"optimizer must update parameters of the model, got a {kind} of {len(updated)} others"
                )
            self._outer.begin(values, error)
            self._model.broadcast_others(self.communicator, self._outer.engine.agreement)
        # The logical rank whose turn it is, and whether it is in `of`, and has made its step; None outside of a turn.
        self._turn: int | None = None
        self._inside = False
        self._stepped = False
        self._ranks: LocalRanks | None = None
        if self.communicator.ranks.logical:
            self._ranks = LocalRanks(self._outer, self._own, self._load)
            self.communicator.transaction(self._outer.engine.losses.agree)
            self._ranks.begin()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._check_turn()),
            optimizer.register_step_post_hook(lambda *_: self._advance()),
        ]
        self._scalers_step: Callable[..., Any] | None = None
        if scaler is not None:
            # It has no hooks.
            self._scalers_step = scaler.step
            scaler.step = self._scaled_step  # type: ignore[method-assign]

    @property
    def step_counter(self) -> int:
        """Steps so far, as all ranks count them."""
        return self._outer.step

    @property
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the global parameters by name, which all ranks have alike; float32 for those of 16 bits."""
        self._outer.land()
        by_name = {p.name: p.like for p in self._model.parameters}
        return {name: as_tensor(x, like=by_name[name]).clone() for name, x in self._outer.values.items()}

    @property
    def logical(self) -> Iterator[int]:
        """The logical ranks that live here, each once: their steps are made in ``of``, and exchanged after the last.

        Each has parameters, buffers, and a state of the optimizer of its own, of which model and optimizer have one at
        a time; ``param_groups`` are those of all.  Ranks that were adopted from a lost process meanwhile come too.

        Raises:
            ValueError: the communicator has no logical ranks.

        Example:
            >>> import torch
            >>> import distopt
            >>> import distopt.torch as dt
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> ranks = distopt.comm.Logical(distopt.comm.LocalCommunicator(), 4)
            >>> windows = dt.local_steps(model, optimizer, every=30, group=ranks)
            >>> for rank in windows.logical:
            ...     with windows.of(rank):
            ...         optimizer.zero_grad()
            ...         model(torch.full((1, 3), float(rank))).sum().backward()
            ...         optimizer.step()
            >>> windows.step_counter
            1
        """
        if self._ranks is None:
            raise not_logical(self.communicator)
        return self._turns(self._ranks)

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Return a context of the passes of a logical rank, and of its ``optimizer.step()``, with its random numbers.

        Args:
            rank: the one that ``logical`` has yielded last.

        Raises:
            ValueError: it is another one.
        """
        if rank != self._turn:
            turn = "a rank that logical yields" if self._turn is None else f"{self._turn}, whose turn it is"
            raise ValueError(f"rank must be {turn}, got {rank!r}")
        with self._outer.engine.losses.turn(rank):
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def join(self) -> None:
        """Take part in the others' exchanges, without steps, until no rank makes any (``LocalSteps.join``)."""
        self._state.check_open()
        with self._model.stream():
            self._outer.join()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is this rank's: counters, global parameters, the outer optimizer, and residuals.

        They are numbers and tensors, for ``torch.save``.  The script saves model and optimizer; each rank has its own.
        """
        self._outer.engine.check_own_rank("state_dict")
        return of_rank(self.communicator, self._state.state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned on this rank; the script loads model and optimizer.

        Args:
            state: the dict.

        Raises:
            ValueError: it is of another rank, or of another number of ranks, or belongs to another model.
        """
        self._outer.engine.check_own_rank("load_state_dict")
        self._state.load(for_rank(self.communicator, state))

    def close(self) -> None:
        """Remove the hooks: the optimizer's steps are this rank's own again."""
        for hook in self._hooks:
            hook.remove()
        if self._scaler is not None and self._scalers_step is not None:
            self._scaler.step, self._scalers_step = self._scalers_step, None  # type: ignore[method-assign]
        self._outer.close()

    # -- details

    def _places(self) -> tuple[Arrays, Arrays]:
        """Return no masters, and the parameters where the model has them now."""
        for p in self._model.parameters:
            p.follow()
        return {}, {p.name: p.data for p in self._model.parameters}

    def _advance(self) -> None:
        self._model.refuse_new()
        self._stepped = True
        if self._ranks:
            self._ranks.step_made()
            return
        with self._model.stream():
            self._outer.advance()

    def _check_turn(self) -> None:
        if self._ranks and (self._stepped or not self._inside):
            raise RuntimeError("a step of the optimizer must be in `with windows.of(rank):`, one of each logical rank")

    def _turns(self, ranks: LocalRanks) -> Iterator[int]:
        try:
            if self._outer.awaited:
                self._outer.let_in()
            for rank in ranks.turns():
                self._turn, self._stepped = rank, False
                yield rank
                if not self._stepped:
                    raise RuntimeError(f"rank {rank} must make a step of the optimizer in `with windows.of({rank}):`")
        finally:
            self._turn = None
        self._outer.advance()

    def _own(self) -> Tree:
        """Return copies of what the logical rank in the model has of its own."""
        return {
            "parameters": {p.name: p.tensor.detach().clone() for p in self._model.parameters},
            "others": [x.copy() for x in self._model.buffer_bytes()],
            "optimizer": [dict(self._optimizer.state.get(p, {})) for p in self._updated()],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def _load(self, own: Tree | None, made: int) -> None:
        """Bring a logical rank into the model."""
        if own is None:
            return
        with torch.no_grad():
            for p in self._model.parameters:
                p.tensor.copy_(own["parameters"][p.name])
        for x, kept in zip(self._model.buffer_bytes(), own["others"], strict=True):
            x[...] = kept
        for updated, state in zip(self._updated(), own["optimizer"], strict=True):
            self._optimizer.state[updated] = state
        if self._scaler is not None:
            self._scaler.load_state_dict(own["scaler"])

    def _updated(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _scaled_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do what ``GradScaler.step`` does; count the step too if that has left it out, as not finite."""
        assert self._scalers_step is not None
        self._check_turn()
        self._stepped = False
        returned = self._scalers_step(optimizer, *args, **kwargs)
        if optimizer is self._optimizer and not self._stepped:
            self._advance()
        return returned


@shows(OuterSteps)
def local_steps(model: Any, optimizer: torch.optim.Optimizer, every: int, **options: Any) -> OuterSteps:
    """Average over ranks how far they have come, after every ``every`` steps of the script's optimizer.  Collective.

    Args:
        model: the model; rank 0's parameters and buffers are sent to all ranks.
        optimizer: of ``torch.optim``.
        every: steps of a window.
        **options: the keyword arguments of ``OuterSteps``.

    Raises:
        TypeError: as ``OuterSteps``.
        ValueError: as ``OuterSteps``.

    Example:
        >>> import torch
        >>> import distopt.torch as dt
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> windows = dt.local_steps(model, optimizer, every=30)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> windows.step_counter
        1
    """
    return OuterSteps(model, optimizer, every=every, **options)
