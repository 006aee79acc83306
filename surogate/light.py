"""The speed of light: how long a step's products would take at the rate measured on this device.

    share = (products + attention) / rate / seconds

Operations are those of models/flops.py, the rate is that of one large matrix product in the run's
dtype (in codes under the fp8 recipe, on a card that multiplies them), measured at the start.
Attention is counted at the same rate, which no attention reaches, and
everything else as if it cost nothing: so 100 % is out of reach, and nothing is hidden. A step that
beats the rate shows that it was measured too low, on a machine that did something else as well: the
rate becomes what that step reached, for it and those after it.
"""

import time
from collections.abc import Callable

import numpy as np

from surogate.config import Config
from surogate.device import Device
from surogate.kernels.fp8 import E4M3, Fp8State, fp8_cast
from surogate.kernels.fp8_matmul import emulated as fp8_emulated
from surogate.kernels.fp8_matmul import fp8_matmul
from surogate.kernels.matmul import matmul
from surogate.models.config import ModelConfig
from surogate.models.flops import training_flops
from surogate.models.recipe import device_of

SIDE = {"cuda": 8192, "cpu": 512}
REPEATS = 5


class Light:
    """The measured rate, and the share of it that a step reached."""

    def __init__(self, device: Device, model: ModelConfig, config: Config) -> None:
        self._model, self._config = model, config
        fp8 = config.recipe == "fp8_hybrid" and not fp8_emulated(device_of(device.library))
        self.rate = fp8_rate(device) if fp8 else product_rate(device)
        self._dtype = "float8_e4m3" if fp8 else str(device.compute)

    def fact(self) -> str:
        """A line for the start of a run."""
        side = (
            f"{self.rate / 1e12:.1f} TFLOP/s"
            if self.rate >= 1e12
            else f"{self.rate / 1e9:.0f} GFLOP/s"
        )
        return f"speed of light: {side} in {self._dtype} products, measured now"

    def share(self, *, tokens: int, cells: int, seconds: float) -> float:
        """Percentage of the speed of light of a step over ``tokens`` with ``cells`` attended
        keys. Raises ``rate`` to what the step reached.
        """
        recompute = self._config.recompute
        assert recompute != "auto", "plan.settled decides it"
        flops = training_flops(
            self._model,
            tokens=tokens,
            cells=cells,
            lora_rank=self._config.lora_rank if self._config.lora else None,
            recompute=recompute,
        )
        reached = flops.total / seconds
        self.rate = max(self.rate, reached)
        return 100 * reached / self.rate


def product_rate(device: Device) -> float:
    """FLOP/s of a square product of random numbers in the dtype that the device computes in."""
    side = SIDE[device.kind]
    random = np.random.default_rng(0)
    # Two matrices: of one with itself NumPy computes half the product.
    a, b = (
        device.put(random.standard_normal((side, side), np.float32).astype(device.compute))
        for _ in range(2)
    )
    return _rate(device, lambda: matmul(a, b, transpose_b=True))


def fp8_rate(device: Device) -> float:
    """The same in codes of E4M3, on a card that multiplies them."""
    side, library = SIDE[device.kind], device.library
    limits = np.full(2, E4M3.largest, np.float32)
    state = Fp8State(limits, length=1, algorithm="max", scaling="tensor", library=library)
    draw = library.random.default_rng(0).standard_normal
    a, b = (
        fp8_cast(draw((side, side), np.float32).astype(device.compute), state.slot(i, E4M3))
        for i in range(2)
    )
    return _rate(device, lambda: fp8_matmul(a, b, fast=True))


def _rate(device: Device, product: Callable[[], object]) -> float:
    """The best of a few, after a first one."""
    best = float("inf")
    for _ in range(1 + REPEATS):
        device.synchronize()
        begin = time.perf_counter()
        product()
        device.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * SIDE[device.kind] ** 3 / best
