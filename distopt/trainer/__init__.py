"""Gluon's Trainer on distopt's training step."""

from distopt.trainer.trainer import Trainer

__all__ = ["Trainer"]
