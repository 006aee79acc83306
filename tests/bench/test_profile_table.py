"""Durations of a profiler by kind of kernel."""

import pytest

from bench.profile_table import by_kernel, by_kind, durations, kind_of
from surogate.errors import UserError
from surogate.kernels.nvrtc import all_sources

KINDS = {
    "adamw": "optimizer",
    "attention_bwd": "attention",
    "attention_cudnn": "attention",
    "attention_fwd": "attention",
    "attention_hopper_bwd": "attention",
    "attention_hopper_fwd": "attention",
    "cross_entropy": "loss",
    "grad_norm": "optimizer",
    "linear": "products",
    "qk_norm_rope": "rotary",
    "rmsnorm": "norms",
    "rope": "rotary",
    "swiglu": "activation",
}
LIBRARIES = {
    "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT": "products",
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob": "attention",
    "cupy_fill": "other",
}


@pytest.mark.parametrize("stem", KINDS)
def test_our_kernels_have_the_kind_of_their_op(stem):
    kernels = all_sources()[stem].instances
    assert {kind_of(kernel) for kernel in kernels} == {KINDS[stem]}


@pytest.mark.parametrize("name", LIBRARIES)
def test_kernels_of_libraries(name):
    assert kind_of(name) == LIBRARIES[name]


def written(tmp_path, rows):
    """A file as ncu writes it, with the lines that it prints before."""
    path = tmp_path / "step.csv"
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    path.write_text("\n".join(["==PROF== Connected to process 1", header, *rows, ""]))
    return path


ROWS = [
    '"0","void rmsnorm_fwd<__nv_bfloat16, 4>(T1 *, int)","gpu__time_duration.sum","ns","4,000"',
    '"1","nvjet_hsh_256x128(Params)","gpu__time_duration.sum","us","10"',
    '"2","nvjet_hsh_256x128(Params)","gpu__time_duration.sum","usecond","20"',
    '"3","nvjet_tst_64x8(Params)","gpu__time_duration.sum","ms","0.006"',
    '"3","nvjet_tst_64x8(Params)","dram__bytes.sum","byte","1"',
]


def test_durations_are_summed_by_kind_and_by_kernel(tmp_path):
    times = durations(written(tmp_path, ROWS))
    assert times["rmsnorm_fwd<__nv_bfloat16, 4>"] == [4.0]
    assert [(g.name, g.us, g.count) for g in by_kind(times)] == [
        ("products", 36.0, 3),
        ("norms", 4.0, 1),
    ]
    assert [g.share for g in by_kind(times)] == [0.9, 0.1]
    assert [(g.name, g.count) for g in by_kernel(times)] == [
        ("nvjet_hsh_256x128", 2),
        ("nvjet_tst_64x8", 1),
        ("rmsnorm_fwd<__nv_bfloat16, 4>", 1),
    ]


def test_a_file_without_durations_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"step\.csv: holds no gpu__time_duration\.sum"):
        durations(written(tmp_path, ROWS[-1:]))
