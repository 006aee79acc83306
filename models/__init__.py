"""Model architectures as pure functions. Import as ``surogate.models``."""

if __name__ != "surogate.models":
    raise ImportError("this folder is the package surogate.models: import it by that name")
