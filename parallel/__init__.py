"""Where weights live and how ranks talk. Import as ``surogate.parallel``."""

if __name__ != "surogate.parallel":
    raise ImportError("this folder is the package surogate.parallel: import it by that name")
