"""The numbers of a training by step: kept in a record, or passed on to files and services while it runs."""

from distopt.volume.experiment.callbacks import Callback, CsvFile, JsonLines, TensorBoard, WeightsAndBiases
from distopt.volume.experiment.record import read
from distopt.volume.experiment.run import Experiment

__all__ = ["Callback", "CsvFile", "Experiment", "JsonLines", "TensorBoard", "WeightsAndBiases", "read"]
