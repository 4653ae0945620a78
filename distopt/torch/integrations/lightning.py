"""distopt in the ``Trainer`` of Lightning."""

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer

from distopt.compress import Compressor
from distopt.engine.spec import shows
from distopt.torch.exchange import GradientExchange
from distopt.torch.integrations import exchange_of


class LightningCallback(Callback):  # type: ignore[misc]  # of a package that need not be there
    """Callback with which a ``Trainer(strategy="ddp")`` exchanges gradients as distopt does.

    Its state, with the residuals of all ranks, is part of the trainer's checkpoints: ``fit(ckpt_path=...)`` goes on
    with the same bits on as many ranks, and with the same sum of residuals on others.

    Args:
        compressor: what is sent; None for all of it.
        **options: the keyword arguments of ``GradientExchange``: group, exchange, break_even, threshold, overlap.

    Attributes:
        sync: the ``GradientExchange``, from the begin of training on.

    A script gives it to its trainer::

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[LightningCallback(ErrorFeedback(Int8()))])
    """

    sync: GradientExchange | None = None

    @shows(GradientExchange)
    def __init__(self, compressor: Compressor | None = None, **options: Any):
        self._compressor, self._options = compressor, options
        # of a checkpoint, until there is an exchange
        self._loaded: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the gradients of what the strategy has prepared.  Collective."""
        if self.sync:
            # of an earlier `fit`, whose residuals wait still
            self._loaded = self._loaded or self.sync.state_dict()
            self.sync.close()
        optimizers = trainer.optimizers
        scripts = {
            "optimizer": optimizers[0] if len(optimizers) == 1 else None,
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
        }
        self.sync = exchange_of(trainer.strategy.model, self._compressor, scripts | self._options)
        if self._loaded:
            self.sync.load_state_dict(self._loaded)
            self._loaded = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, which rank 0 writes.  Collective."""
        return self.sync.gathered_state_dict() if self.sync else self._loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of all ranks for the begin of training."""
        self._loaded = state_dict
