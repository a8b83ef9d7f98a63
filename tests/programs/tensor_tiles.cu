// Copies of tiles by tensor maps, both ways: one to five dimensions, steps, places over every edge, swizzled shared memory, and
// reductions. A tile must begin at a multiple of 16 bytes of its row (NVIDIA's GPUs refuse the instruction otherwise), and no store
// before the tensor; stores write the 16 bytes whole in which a row ends.
#define PROGRAM "tensor_tiles"
#include "common.h"
#include <cstdint>
#include <cstring>
#include <cuda.h>
#include <vector>

struct Place {
    int at[5];
};

#if __CUDA_ARCH__ >= 900
#define LIST1 "{%2}"
#define LIST2 "{%2, %3}"
#define LIST3 "{%2, %3, %4}"
#define LIST4 "{%2, %3, %4, %5}"
#define LIST5 "{%2, %3, %4, %5, %6}"
#define LOAD(N)                                                                                                                              \
    asm volatile("cp.async.bulk.tensor." #N "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, " LIST##N "], [%7];" ::"r"(to), \
                 "l"(&map), "r"(p.at[0]), "r"(p.at[1]), "r"(p.at[2]), "r"(p.at[3]), "r"(p.at[4]), "r"(bar)                                   \
                 : "memory")
#endif

// Dynamic shared memory from the next multiple of what the widest swizzle repeats after.
constexpr unsigned REPEAT = 1024;
__device__ uint8_t *aligned() {
    extern __shared__ uint8_t dynamic[];
    return dynamic + (REPEAT - (unsigned)__cvta_generic_to_shared(dynamic) % REPEAT) % REPEAT;
}

template <int N> __global__ void load(const __grid_constant__ CUtensorMap map, Place p, uint8_t *out, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    uint8_t *tile = aligned();
    __shared__ alignas(8) unsigned long long barrier;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes));
        if (N == 1) LOAD(1);
        if (N == 2) LOAD(2);
        if (N == 3) LOAD(3);
        if (N == 4) LOAD(4);
        if (N == 5) LOAD(5);
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar)
                     : "memory");
    for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = tile[i];
#endif
}

enum Way { STORE, ADD, MIN, XOR };

__global__ void store(const __grid_constant__ CUtensorMap map, Place p, const uint8_t *in, unsigned bytes, Way way) {
#if __CUDA_ARCH__ >= 900
    uint8_t *tile = aligned();
    unsigned from = (unsigned)__cvta_generic_to_shared(tile);
    for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = in[i];
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    if (threadIdx.x == 0) {
#define TO2 ".2d.global.shared::cta"
#define AT2 ".bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(p.at[0]), "r"(p.at[1]), "r"(from) : "memory"
        if (way == STORE) asm volatile("cp.async.bulk.tensor" TO2 AT2);
        if (way == ADD) asm volatile("cp.reduce.async.bulk.tensor" TO2 ".add" AT2);
        if (way == MIN) asm volatile("cp.reduce.async.bulk.tensor" TO2 ".min" AT2);
        if (way == XOR) asm volatile("cp.reduce.async.bulk.tensor" TO2 ".xor" AT2);
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
#endif
}

struct Tensor {
    CUtensorMapDataType type;
    int width, rank;
    cuuint64_t sizes[5], strides[5]; // strides in bytes, that of the first dimension included
    cuuint32_t box[5], steps[5];
    CUtensorMapSwizzle swizzle;

    unsigned count(int d) const { return d == 0 ? box[0] : (box[d] + steps[d] - 1) / steps[d]; }
    unsigned bytes() const {
        unsigned n = width;
        for (int d = 0; d < rank; d++) n *= count(d);
        return n;
    }
    size_t total() const { return strides[rank - 1] * sizes[rank - 1]; }
    CUtensorMap map(void *address) const {
        CUtensorMap map;
        CUresult result = cuTensorMapEncodeTiled(&map, type, rank, address, sizes, strides + 1, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        REQUIRE(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: %d", (int)result);
        return map;
    }
    // Where the `n`th byte of a tile is in shared memory.
    unsigned place(unsigned n) const {
        unsigned chunk = n >> 4, turn = n >> 7 & 7;
        if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) chunk ^= turn;
        if (swizzle == CU_TENSOR_MAP_SWIZZLE_64B) chunk ^= turn & 3;
        if (swizzle == CU_TENSOR_MAP_SWIZZLE_32B) chunk ^= turn & 1;
        return chunk << 4 | (n & 15);
    }
    // Calls f(byte of the tile, byte of the tensor or -1 outside) for every element of a load, or of a store.
    template <class F> void each(const Place &p, bool stored, F f) const {
        const long last = stored ? (long(sizes[0]) * width + 15) / 16 * 16 / width : long(sizes[0]);
        for (unsigned n = 0; n < bytes() / width; n++) {
            unsigned rest = n;
            long at = 0;
            bool inside = true;
            for (int d = 0; d < rank; d++) {
                long x = p.at[d] + long(rest % count(d)) * (d == 0 ? 1 : steps[d]);
                rest /= count(d);
                inside &= x >= 0 && x < (d == 0 ? last : (long)sizes[d]);
                at += x * strides[d];
            }
            f(n * width, inside ? at : -1);
        }
    }
};

static Tensor tensor(CUtensorMapDataType type, int width, std::vector<unsigned> sizes, std::vector<unsigned> box, std::vector<unsigned> steps = {},
                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
    Tensor t = {type, width, (int)sizes.size(), {}, {}, {}, {}, swizzle};
    cuuint64_t stride = width;
    for (int d = 0; d < t.rank; d++) {
        t.sizes[d] = sizes[d];
        t.box[d] = box[d];
        t.steps[d] = steps.empty() ? 1 : steps[d];
        t.strides[d] = stride;
        stride = (stride * sizes[d] + 15) / 16 * 16;
    }
    return t;
}

static void loads(const char *name, const Tensor &t, std::vector<Place> places) {
    std::vector<uint8_t> in(t.total()), got(t.bytes());
    for (size_t i = 0; i < in.size(); i++) in[i] = uint8_t(i * 37 + i / 251);
    uint8_t *from, *out;
    CHECK(cudaMalloc(&from, in.size()));
    CHECK(cudaMalloc(&out, got.size()));
    CHECK(cudaMemcpy(from, in.data(), in.size(), cudaMemcpyDefault));
    CUtensorMap map = t.map(from);
    unsigned sum = 0;
    for (const Place &p : places) {
        unsigned n = t.bytes();
        if (t.rank == 1) load<1><<<1, 64, n + REPEAT>>>(map, p, out, n);
        if (t.rank == 2) load<2><<<1, 64, n + REPEAT>>>(map, p, out, n);
        if (t.rank == 3) load<3><<<1, 64, n + REPEAT>>>(map, p, out, n);
        if (t.rank == 4) load<4><<<1, 64, n + REPEAT>>>(map, p, out, n);
        if (t.rank == 5) load<5><<<1, 64, n + REPEAT>>>(map, p, out, n);
        LAUNCHED();
        CHECK(cudaMemcpy(got.data(), out, n, cudaMemcpyDefault));
        for (uint8_t byte : got) sum = sum * 31 + byte;
        t.each(p, false, [&](unsigned n, long at) {
            for (int b = 0; b < t.width; b++) {
                uint8_t is = got[t.place(n + b)];
                uint8_t want = at < 0 ? 0 : in[at + b];
                REQUIRE(is == want, "%s at %d,%d: byte %u is %d instead of %d", name, p.at[0], p.at[1], n + b, is, want);
            }
        });
    }
    printf("%s: %zu tiles of %u bytes, %08x\n", name, places.size(), t.bytes(), sum);
    CHECK(cudaFree(from));
    CHECK(cudaFree(out));
}

template <class T> static void stores(const char *name, const Tensor &t, std::vector<Place> places, Way way) {
    std::vector<T> tile(t.bytes() / t.width), want(t.total() / t.width), got(want.size());
    for (size_t i = 0; i < want.size(); i++) want[i] = T(i % 201) - T(100);
    for (size_t i = 0; i < tile.size(); i++) tile[i] = T(i * 7 % 150) - T(70);
    T *to, *in;
    CHECK(cudaMalloc(&to, t.total()));
    CHECK(cudaMalloc(&in, t.bytes()));
    CHECK(cudaMemcpy(to, want.data(), t.total(), cudaMemcpyDefault));
    CHECK(cudaMemcpy(in, tile.data(), t.bytes(), cudaMemcpyDefault));
    CUtensorMap map = t.map(to);
    for (const Place &p : places) {
        store<<<1, 64, t.bytes() + REPEAT>>>(map, p, (uint8_t *)in, t.bytes(), way);
        LAUNCHED();
        t.each(p, true, [&](unsigned n, long at) {
            if (at < 0) return;
            T value = tile[t.place(n) / t.width], &old = want[at / t.width];
            if (way == STORE) old = value;
            if (way == ADD) old = old + value;
            if (way == MIN) old = value < old ? value : old;
            if (way == XOR) old = T((long)old ^ (long)value);
        });
    }
    CHECK(cudaMemcpy(got.data(), to, t.total(), cudaMemcpyDefault));
    for (size_t i = 0; i < want.size(); i++) REQUIRE(got[i] == want[i], "%s: element %zu is %g instead of %g", name, i, (double)got[i], (double)want[i]);
    printf("%s: %zu tiles of %u bytes\n", name, places.size(), t.bytes());
    CHECK(cudaFree(to));
    CHECK(cudaFree(in));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const auto U8 = CU_TENSOR_MAP_DATA_TYPE_UINT8, U16 = CU_TENSOR_MAP_DATA_TYPE_UINT16, F32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    loads("bytes", tensor(U8, 1, {100}, {64}), {{{0}}, {{-16}}, {{80}}, {{208}}});
    loads("a matrix", tensor(F32, 4, {50, 20}, {16, 8}), {{{0, 0}}, {{40, 15}}, {{-4, -2}}, {{48, 19}}, {{60, 3}}});
    loads("doubles", tensor(CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, {10, 9}, {6, 4}), {{{2, 2}}, {{8, 7}}});
    loads("three dimensions in steps", tensor(U16, 2, {24, 10, 7}, {8, 6, 5}, {1, 2, 3}), {{{0, 0, 0}}, {{8, 3, 1}}, {{16, 8, 4}}, {{-8, -1, -1}}});
    loads("four dimensions", tensor(F32, 4, {8, 5, 4, 3}, {4, 3, 2, 2}), {{{0, 0, 0, 0}}, {{4, 3, 3, 2}}, {{4, -1, 1, -1}}});
    loads("five dimensions", tensor(CU_TENSOR_MAP_DATA_TYPE_INT32, 4, {8, 5, 4, 3, 3}, {4, 2, 2, 2, 2}), {{{0, 0, 0, 0, 0}}, {{4, 4, 3, 2, 2}}, {{-4, 1, -1, 1, -1}}});
    loads("swizzled by 128", tensor(F32, 4, {64, 40}, {32, 16}, {}, CU_TENSOR_MAP_SWIZZLE_128B), {{{0, 0}}, {{36, 30}}});
    loads("swizzled by 64", tensor(F32, 4, {64, 40}, {16, 32}, {}, CU_TENSOR_MAP_SWIZZLE_64B), {{{0, 0}}, {{52, 30}}});
    loads("swizzled by 32", tensor(U16, 2, {64, 40}, {16, 40}, {}, CU_TENSOR_MAP_SWIZZLE_32B), {{{0, 0}}, {{56, 3}}});
    stores<float>("stored", tensor(F32, 4, {50, 20}, {16, 8}), {{{0, 0}}, {{40, 15}}, {{60, 3}}, {{4, 19}}}, STORE);
    stores<float>("stored swizzled", tensor(F32, 4, {64, 20}, {32, 8}, {}, CU_TENSOR_MAP_SWIZZLE_128B), {{{0, 0}}, {{40, 15}}}, STORE);
    stores<float>("added", tensor(F32, 4, {50, 20}, {16, 8}), {{{0, 0}}, {{8, 4}}, {{40, 15}}}, ADD);
    stores<int>("the least", tensor(CU_TENSOR_MAP_DATA_TYPE_INT32, 4, {49, 20}, {16, 8}), {{{0, 0}}, {{8, 4}}, {{36, 15}}}, MIN);
    stores<unsigned>("exclusive or", tensor(CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, {51, 20}, {16, 8}), {{{0, 0}}, {{8, 4}}, {{40, 13}}}, XOR);
    return pass("tiles of one to five dimensions");
}
