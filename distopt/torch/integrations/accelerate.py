"""distopt in a loop of accelerate."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distopt.compress import Compressor
from distopt.engine.spec import shows
from distopt.torch.exchange import GradientExchange
from distopt.torch.integrations import FOLDER, exchange_of

if TYPE_CHECKING:
    from accelerate import Accelerator


@shows(GradientExchange)
def compress(
    accelerator: "Accelerator", model: torch.nn.Module, compressor: Compressor | None = None, **options: Any
) -> GradientExchange:
    """Exchange the gradients of a model that ``accelerator.prepare`` has returned as distopt does.  Collective.

    ``accelerator.save_state`` and ``load_state`` have residuals and counters too, in a folder ``distopt`` of theirs: a
    run that is resumed goes on with the same bits on as many ranks, and with the same sum of residuals on others.

    Args:
        accelerator: the ``Accelerator``; its ``GradScaler``, if it has one, is that of the exchange.
        model: what ``prepare`` has returned.
        compressor: what is sent; None for all of it.
        **options: the keyword arguments of ``GradientExchange``: optimizer, group, exchange, break_even, threshold,
            overlap.

    Raises:
        TypeError: as ``distopt.torch.compress``.
        ValueError: accelerate has not prepared the model for several ranks, and there are several; or as
            ``GradientExchange``.

    Example:
        Skipped where examples run as tests: it needs accelerate.

        >>> import torch
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> from distopt.compress import ErrorFeedback, Int8
        >>> from distopt.torch.integrations.accelerate import compress
        >>> accelerator, model = Accelerator(), torch.nn.Linear(3, 2)  # doctest: +SKIP
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        >>> sync = compress(accelerator, model, ErrorFeedback(Int8()), optimizer=optimizer)  # doctest: +SKIP
    """
    sync = exchange_of(model, compressor, {"scaler": accelerator.scaler} | options)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: sync.save(Path(folder, FOLDER)))
    accelerator.register_load_state_pre_hook(lambda models, folder: sync.load(Path(folder, FOLDER)))
    return sync
