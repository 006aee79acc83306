"""Hopper's instructions: the emulator and a card must give what NumPy gives, and mistakes show."""

from collections.abc import Iterator

import numpy as np
import pytest

from surogate.kernels.attention_hopper import tensor_map
from tests.emulator.launch import emulated
from tests.emulator.sample import Sample
from tests.kernels.test_attention_hopper import is_hopper
from tests.oracle import close, normal, to_device

FORMS = [  # a in registers; the tile of a holds its columns; the tile of b holds its rows
    (False, False, False),
    (False, False, True),
    (False, True, False),
    (False, True, True),
    (True, False, False),
    (True, False, True),
]
HOPPER = Sample(
    "hopper",
    {
        "product": [tuple(str(flag).lower() for flag in form) for form in FORMS],
        "wrong": [(str(n),) for n in range(4)],
    },
)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "emulated":
        with emulated():
            yield "emulated"
    elif is_hopper():
        yield "cuda"
    else:
        pytest.skip("needs a Hopper card")


def one_head(x: np.ndarray, device: str) -> np.ndarray:
    return to_device(np.ascontiguousarray(x)[:, None], device)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products(form, device):
    _, a_columns, b_rows = form
    a, b = normal("bfloat16", (64, 64), (64, 128))
    left = one_head(a.T if a_columns else a, device)
    right = one_head(b if b_rows else b.T, device)
    d = to_device(np.zeros((64, 128), np.float32), device)
    maps = [tensor_map("a", left, 64), tensor_map("b", right, 64 if b_rows else 128)]
    types = tuple(str(flag).lower() for flag in form)
    HOPPER.launch("product", types, 1, 128, [d, *maps], shared=64 * 1024)
    close(d, a.astype(np.float64) @ b.astype(np.float64), "float32", terms=64)


@pytest.mark.parametrize(
    "mistake,message",
    [
        (0, "no wgmma_fence"),
        (2, r"deadlock: among others, this warp waits for ever \(hopper.cu"),
        (3, "tma_load: not aligned to 1024 bytes"),
    ],
)
def test_mistakes_end_the_launch(mistake, message):
    d, a = np.zeros(128, np.float32), normal("bfloat16", (64, 1, 64))
    with emulated(), pytest.raises(RuntimeError, match=message):
        HOPPER.launch(
            "wrong", (str(mistake),), 1, 128, [d, tensor_map("a", a, 64)], shared=64 * 1024
        )


def test_a_product_read_too_early_is_nan():
    d, a = np.zeros(128, np.float32), normal("bfloat16", (64, 1, 64))
    with emulated():
        HOPPER.launch("wrong", ("1",), 1, 128, [d, tensor_map("a", a, 64)], shared=64 * 1024)
    assert np.isnan(d).all()
