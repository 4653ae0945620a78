"""distopt in the ``Trainer`` of transformers."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distopt.compress import Compressor
from distopt.engine.spec import shows
from distopt.torch.exchange import GradientExchange
from distopt.torch.integrations import FOLDER, exchange_of


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # of a package that need not be there
    """Callback with which a ``Trainer`` exchanges gradients as distopt does.

    Each ``checkpoint-N`` that the trainer writes has residuals and counters too, in a folder ``distopt`` of its own:
    ``trainer.train(resume_from_checkpoint=True)`` goes on with the same bits on as many ranks, and with the same sum of
    residuals on others.  A checkpoint must be resumed from the ``output_dir`` where it was written.

    Args:
        trainer: the trainer, to which the callback is added.
        compressor: what is sent; None for all of it.
        **options: the keyword arguments of ``GradientExchange``: group, exchange, break_even, threshold, overlap.

    Attributes:
        sync: the ``GradientExchange``, from the begin of ``trainer.train()`` on.

    A script adds it before it trains::

        trainer.add_callback(TransformersCallback(trainer, ErrorFeedback(Int8())))
    """

    sync: GradientExchange

    @shows(GradientExchange)
    def __init__(self, trainer: Trainer, compressor: Compressor | None = None, **options: Any):
        self._trainer, self._compressor, self._options = trainer, compressor, options
        # what the trainer trains with, to which the exchange belongs
        self._model: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Exchange the gradients of what the trainer has prepared.  Collective."""
        trainer = self._trainer
        if self._model is not trainer.model_wrapped:
            scripts = {"optimizer": trainer.optimizer, "scaler": trainer.accelerator.scaler}
            self.sync = exchange_of(trainer.model_wrapped, self._compressor, scripts | self._options)
            self._model = trainer.model_wrapped
        if state.global_step:
            self.sync.load(self._folder(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save what belongs to the exchange in the checkpoint that was just written.  Collective."""
        if not args.save_only_model:
            self.sync.save(self._folder(args, state))

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
