"""Where the numbers of a training go while it runs: files, TensorBoard, Weights & Biases, or what a user writes.

A callback is anything that can be called with a step and the numbers of that step, by name; an ``Experiment`` is one
too.  All ranks have the same sums, so one rank writes::

    callbacks = [CsvFile("run.csv"), TensorBoard(SummaryWriter())] if world.rank == 0 else []
    ...
    for callback in callbacks:
        callback(step, {"loss": loss, "accuracy": accuracy})
"""

from distopt.monitor.callback import Callback
from distopt.monitor.csv_file import CsvFile
from distopt.monitor.json_lines import JsonLines
from distopt.monitor.services import TensorBoard, WeightsAndBiases

__all__ = ["Callback", "CsvFile", "JsonLines", "TensorBoard", "WeightsAndBiases"]
