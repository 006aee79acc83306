// Block-scaled NVFP4 product on CUTLASS 4: d = alpha * a b^T + beta * c for packed E2M1 a (rows, inner) and
// b (columns, inner), E4M3 scales per 16 in 128x4 tiles, bf16 c and d, row-major. alpha is read from device memory.
// nvcc compiles this file for one of sm_100a, sm_103a, sm_120a, sm_121a (kernels/cutlass.py); NVRTC does not.
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace {

using namespace cute;

#if SUROGATE_ARCH >= 120
using Arch = cutlass::arch::Sm120;  // warp-level instructions: one multiprocessor a tile
using Tile = Shape<_128, _128, _128>;
#else
using Arch = cutlass::arch::Sm100;  // sums in tensor memory
using Tile = Shape<_128, _128, _256>;
#endif
using Cluster = Shape<_1, _1, _1>;
using Class = cutlass::arch::OpClassBlockScaledTensorOp;
using Fp4 = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using Bf16 = cutlass::bfloat16_t;
using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
constexpr int ALIGN_FP4 = 32, ALIGN_BF16 = 8;  // elements of 16 bytes

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, Class, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, Bf16, Rows,
    ALIGN_BF16, Bf16, Rows, ALIGN_BF16, cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, Class, Fp4, Rows, ALIGN_FP4, Fp4, Columns, ALIGN_FP4, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, void>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using ScaleLayout = typename Mainloop::Sm1xxBlkScaledConfig;

typename Gemm::Arguments arguments(void* d, const void* a, const void* b, const void* a_scales,
                                   const void* b_scales, const float* alpha, const void* c, int rows, int columns,
                                   int inner) {
    using Element = typename Fp4::DataType;
    using Scale = typename Fp4::ScaleFactorType;
    auto shape = make_shape(rows, columns, inner, 1);
    auto stride_a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {rows, inner, 1});
    auto stride_b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {columns, inner, 1});
    auto stride_c = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {rows, columns, 1});
    auto stride_d = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {rows, columns, 1});
    typename Gemm::Arguments out{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {rows, columns, inner, 1},
        {static_cast<const Element*>(a), stride_a, static_cast<const Element*>(b), stride_b,
         static_cast<const Scale*>(a_scales), ScaleLayout::tile_atom_to_shape_SFA(shape),
         static_cast<const Scale*>(b_scales), ScaleLayout::tile_atom_to_shape_SFB(shape)},
        {{1.0f, c == nullptr ? 0.0f : 1.0f}, static_cast<const Bf16*>(c), stride_c, static_cast<Bf16*>(d), stride_d}};
    out.epilogue.thread.alpha_ptr = alpha;
    return out;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of scratch memory that nvfp4_product needs for these sizes.
EXPORT size_t nvfp4_product_workspace(int rows, int columns, int inner) {
    return Gemm::get_workspace_size(
        arguments(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, rows, columns, inner));
}

// Launches on the stream. c may be null, or d itself. Returns 0, or a cutlass::Status.
EXPORT int nvfp4_product(void* d, const void* a, const void* b, const void* a_scales, const void* b_scales,
                         const float* alpha, const void* c, int rows, int columns, int inner, void* workspace,
                         cudaStream_t stream) {
    auto args = arguments(d, a, b, a_scales, b_scales, alpha, c, rows, columns, inner);
    Gemm gemm;
    cutlass::Status status = gemm.can_implement(args);
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, workspace, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return static_cast<int>(status);
}

EXPORT const char* nvfp4_product_error(int status) {
    return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}
