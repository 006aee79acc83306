"""Number formats, and weights stored in them. Import as ``surogate.kernels.quant``."""

if __name__ != "surogate.kernels.quant":
    raise ImportError("this folder is the package surogate.kernels.quant: import it by that name")
