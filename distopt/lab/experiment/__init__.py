"""The numbers of a training by step: kept in a record, or passed on to files and services while it runs."""

from distopt.lab.experiment.callbacks import Callback, CsvFile, JsonLines, TensorBoard, WeightsAndBiases
from distopt.lab.experiment.record import read
from distopt.lab.experiment.run import Experiment

__all__ = ["Callback", "CsvFile", "Experiment", "JsonLines", "TensorBoard", "WeightsAndBiases", "read"]
