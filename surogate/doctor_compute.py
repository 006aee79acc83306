"""What surogate doctor computes: a product, attention and three updates, against the host's.

Each is a check of doctor.py: it returns what it found or raises a UserError that says what to do.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from surogate.config import Config
from surogate.device import COMPUTE, Device, choose_device
from surogate.errors import UserError
from surogate.kernels.attention import attention_fwd
from surogate.kernels.batch import batch_of, docs_from_lengths
from surogate.kernels.matmul import matmul
from surogate.kernels.nvrtc import cache_directory
from surogate.light import product_rate
from surogate.models.config import from_hf
from surogate.models.init import init_model
from surogate.setup import Sources, putter
from surogate.train import train_step

VOCAB = 512  # of the small model


def product(device: Device) -> str:
    """A matrix product: right, and how fast.

    Rounding alone gives an error below eps |y| + terms 2^-24 sum |a b|, eps of the dtype.
    """
    rows, terms, columns = 256, 1024, 512
    random = np.random.default_rng(1)
    a, b = (
        random.standard_normal((side, terms), np.float32).astype(device.compute)
        for side in (rows, columns)
    )
    got = _host(matmul(device.put(a), device.put(b), transpose_b=True)).astype(np.float64)
    a, b = a.astype(np.float64), b.astype(np.float64)
    epsilon = 2.0**-8 if device.compute == COMPUTE["cuda"] else 2.0**-24
    allowed = epsilon * np.abs(a @ b.T) + terms * 2.0**-24 * (np.abs(a) @ np.abs(b.T))
    wrong = int((~(np.abs(got - a @ b.T) <= allowed)).sum())
    if wrong:
        raise UserError(
            f"{wrong} of {got.size} elements of a product are wrong: the hardware is faulty or "
            "overclocked: do not train on it; test the memory, and a GPU with `dcgmi diag -r 3`"
        )
    return f"{product_rate(device) / 1e12:.2f} TFLOP/s in {device.compute}, and right"


def attention(device: Device) -> str:
    """Attention over two documents against the host's, and which code was the fastest."""
    tokens, heads, kv_heads, head_dim = 512, 16, 8, 128
    random = np.random.default_rng(2)
    q, k, v = (
        random.standard_normal((tokens, count, head_dim), np.float32).astype(device.compute)
        for count in (heads, kv_heads, kv_heads)
    )
    common: dict[str, Any] = {"scale": head_dim**-0.5}
    docs = docs_from_lengths([200, tokens - 200])
    want, _ = attention_fwd(*(x.astype(np.float32) for x in (q, k, v)), docs=docs, **common)
    got, _ = attention_fwd(*map(device.put, (q, k, v)), docs=device.put(docs), **common)
    error = float(np.abs(_host(got).astype(np.float32) - want).max() / np.abs(want).max())
    if not error < 0.02:
        raise UserError(
            f"attention is off by {error:.1%}: remove {cache_directory()} and try again; if it "
            "stays, report it with the line of the card"
        )
    if device.kind == "cpu":
        return "NumPy, over documents"
    attention_fwd(*map(device.put, (q, k, v)), docs=device.put(docs), rows=1, **common)
    return f"right over documents; the fastest for whole rows: {_kept(f'({tokens}, {heads}, ')}"


def _kept(start: str) -> str:
    """What was chosen last for attention whose key starts so."""
    files = (cache_directory() / "choice" / "attention_forward").rglob("*.json")
    newest = sorted(files, key=lambda file: file.stat().st_mtime)
    kept = [json.loads(file.read_text()) for file in newest]
    chosen = [row["choice"] for row in kept if row["key"].startswith(start)]
    return chosen[-1] if chosen else "mma, the only one that can"


def step(device: Device) -> str:
    """Three updates of a small model: the loss begins near ln(vocab), falls, and is the host's."""
    host = _losses(choose_device("cpu"), 1)
    begin = time.perf_counter()
    losses = _losses(device, 3)
    seconds = time.perf_counter() - begin
    shown = ", ".join(f"{loss:.3f}" for loss in losses)
    expected = math.log(VOCAB)
    if not all(map(math.isfinite, losses)) or abs(losses[0] - expected) > 0.1 * expected:
        raise UserError(
            f"the losses of three updates are {shown}, not from {expected:.2f} down: report it "
            "with the lines above"
        )
    if not losses[0] > losses[1] > losses[2] or abs(losses[0] - host[0]) > 0.02 * expected:
        raise UserError(
            f"the losses of three updates are {shown}, the first on the CPU {host[0]:.3f}, and "
            "should fall and agree: report it with the lines above"
        )
    return f"losses {shown} in {seconds:.1f} s with the making of the step"


def _losses(device: Device, updates: int) -> list[float]:

    model = from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
            **{"vocab_size": VOCAB, "max_position_embeddings": 128, "rope_theta": 1e4},
            **{"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True},
            **{"initializer_range": 0.02, "eos_token_id": 0, "torch_dtype": "bfloat16"},
        }
    )
    config = Config(
        model="doctor", sequence_len=128, lora=False, learning_rate=2e-3, recompute="block"
    )
    weights = init_model(model, 0, device.compute, put=putter(device))
    made = train_step(config, device, Sources(Path(), model, weights, None, None))
    tokens = np.random.default_rng(3).integers(0, VOCAB, 256).astype(np.int32)
    batch = batch_of(tokens, [128, 128])
    losses = []
    for _ in range(updates):
        made.micro(batch)
        losses.append(made.update(config.learning_rate).result().loss)
    return losses


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


CHECKS = {"product": product, "attention": attention, "step": step}
