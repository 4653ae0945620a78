"""The commands of ``distopt`` that measure, predict and compare: one file per command."""
