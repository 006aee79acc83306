"""surogate info: what a run would use here."""

import json
from pathlib import Path

from surogate.device import choose_device
from surogate.light import product_rate


def info_command() -> None:
    """Prints device, versions, caches and the measured rate."""
    from surogate.kernels.nvrtc import cache_directory
    from surogate.train import stream_of, versions

    device = choose_device("auto")
    print(f"device     {device.fact()}, computes in {device.compute}")
    if device.kind == "cuda":
        from surogate.kernels.nvrtc import architecture

        runtime = device.library.cuda.runtime
        free, total = runtime.memGetInfo()
        print(f"memory     {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        print(f"target     sm_{architecture()}, driver {runtime.driverGetVersion()}")
    with stream_of(device):
        print(f"products   {product_rate(device) / 1e12:.2f} TFLOP/s, measured now")
    print(f"cache      {cache_directory()}")
    for line in kept_choices(cache_directory() / "choice"):
        print(line)
    for name, version in versions().items():
        print(f"{name:10s} {version}")


def kept_choices(folder: Path) -> list[str]:
    """A line for each choice between implementations that was measured and kept."""
    lines = []
    for path in sorted(folder.rglob("*.json")):
        kept = json.loads(path.read_text())
        times = ", ".join(f"{name} {us:.0f} us" for name, us in kept["microseconds"].items())
        lines.append(f"{kept['topic']:10s} {kept['choice']} for {kept['key']}: {times}")
    return lines
