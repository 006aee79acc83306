"""Optimizers, schedules and clipping. Import as ``surogate.optim``."""

if __name__ != "surogate.optim":
    raise ImportError("this folder is the package surogate.optim: import it by that name")
