"""CUDA ops. Import as ``surogate.kernels``."""

if __name__ != "surogate.kernels":
    raise ImportError("this folder is the package surogate.kernels: import it by that name")
