"""The speed of light: how long a step's products would take at the rate measured on this device.

    share = (products + attention) / rate / seconds

Operations are those of models/flops.py, the rate is that of one large matrix product in the run's
dtype, measured at the start. Attention is counted at the same rate, which no attention reaches, and
everything else as if it cost nothing: so 100 % is out of reach, and nothing is hidden. A step that
beats the rate shows that it was measured too low, on a machine that did something else as well: the
rate becomes what that step reached, for it and those after it.
"""

import time

import numpy as np

from surogate.config import Config
from surogate.device import Device
from surogate.kernels.matmul import matmul
from surogate.models.config import ModelConfig
from surogate.models.flops import training_flops

SIDE = {"cuda": 8192, "cpu": 512}
REPEATS = 5


class Light:
    """The measured rate, and the share of it that a step reached."""

    def __init__(self, device: Device, model: ModelConfig, config: Config) -> None:
        self._model, self._config = model, config
        self.rate = product_rate(device)
        self._dtype = device.compute

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
        flops = training_flops(
            self._model,
            tokens=tokens,
            cells=cells,
            lora_rank=self._config.lora_rank if self._config.lora else None,
            recompute=self._config.recompute,
        )
        reached = flops.total / seconds
        self.rate = max(self.rate, reached)
        return 100 * reached / self.rate


def product_rate(device: Device) -> float:
    """FLOP/s of a square product of random numbers: the best of a few, after a first one."""
    side = SIDE[device.kind]
    random = np.random.default_rng(0)
    # Two matrices: of one with itself NumPy computes half the product.
    a, b = (
        device.put(random.standard_normal((side, side), np.float32).astype(device.compute))
        for _ in range(2)
    )
    best = float("inf")
    for _ in range(1 + REPEATS):
        device.synchronize()
        begin = time.perf_counter()
        matmul(a, b, transpose_b=True)
        device.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best
