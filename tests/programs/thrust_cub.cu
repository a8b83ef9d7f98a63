// Thrust and CUB as they come with the compiler: sorts, reductions, scans, selections, histograms, with their temporary memory and
// on a stream.
#define PROGRAM "thrust_cub"
#include "common.h"
#include <algorithm>
#include <cub/device/device_histogram.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_select.cuh>
#include <numeric>
#include <thrust/device_vector.h>
#include <thrust/scan.h>
#include <thrust/sort.h>
#include <thrust/transform_reduce.h>
#include <thrust/unique.h>
#include <vector>

struct Even {
    __host__ __device__ bool operator()(int value) const { return value % 2 == 0; }
};
struct Square {
    __host__ __device__ long long operator()(int value) const { return (long long)value * value; }
};

// Calls twice, as CUB wants it: for the size of its memory, and to work.
template <class Work> static void cub_call(cudaStream_t stream, Work work) {
    size_t bytes = 0;
    void *room = nullptr;
    CHECK(work((void *)nullptr, bytes));
    CHECK(cudaMallocAsync(&room, bytes, stream));
    CHECK(work(room, bytes));
    CHECK(cudaFreeAsync(room, stream));
    CHECK(cudaStreamSynchronize(stream));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? 1 << 22 : 5000;
    Random random(options.seed);
    std::vector<int> host(n);
    for (int &value : host) value = (int)random.below(2000) - 1000;
    std::vector<int> sorted = host;
    std::sort(sorted.begin(), sorted.end());

    thrust::device_vector<int> values(host.begin(), host.end()), sums(n);
    thrust::inclusive_scan(values.begin(), values.end(), sums.begin());
    std::vector<int> want(n), got(n);
    std::partial_sum(host.begin(), host.end(), want.begin());
    thrust::copy(sums.begin(), sums.end(), got.begin());
    REQUIRE(got == want, "the scan is wrong");
    long long squares = thrust::transform_reduce(values.begin(), values.end(), Square(), 0ll, thrust::plus<long long>()), wanted = 0;
    for (int value : host) wanted += (long long)value * value;
    REQUIRE(squares == wanted, "the squares come to %lld, not %lld", squares, wanted);
    thrust::sort(values.begin(), values.end());
    thrust::copy(values.begin(), values.end(), got.begin());
    REQUIRE(got == sorted, "the sort is wrong");
    int different = (int)(thrust::unique(values.begin(), values.end()) - values.begin());
    std::vector<int> unique = sorted;
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    REQUIRE(different == (int)unique.size(), "%d different values, not %zu", different, unique.size());

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int *in, *out, *places, *places_out, *count;
    for (int **p : {&in, &out, &places, &places_out}) CHECK(cudaMalloc(p, n * 4));
    CHECK(cudaMalloc(&count, 4));
    CHECK(cudaMemcpy(in, host.data(), n * 4, cudaMemcpyHostToDevice));
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    CHECK(cudaMemcpy(places, order.data(), n * 4, cudaMemcpyHostToDevice));
    cub_call(stream, [&](void *room, size_t &bytes) { return cub::DeviceRadixSort::SortPairs(room, bytes, in, out, places, places_out, n, 0, 32, stream); });
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return host[a] < host[b]; });
    CHECK(cudaMemcpy(got.data(), places_out, n * 4, cudaMemcpyDeviceToHost));
    REQUIRE(got == order, "the places of the sorted are wrong");
    cub_call(stream, [&](void *room, size_t &bytes) { return cub::DeviceReduce::Max(room, bytes, in, count, n, stream); });
    int single = 0;
    CHECK(cudaMemcpy(&single, count, 4, cudaMemcpyDeviceToHost));
    REQUIRE(single == sorted.back(), "the greatest is %d", single);
    cub_call(stream, [&](void *room, size_t &bytes) { return cub::DeviceSelect::If(room, bytes, in, out, count, n, Even(), stream); });
    CHECK(cudaMemcpy(&single, count, 4, cudaMemcpyDeviceToHost));
    want.clear();
    std::copy_if(host.begin(), host.end(), std::back_inserter(want), Even());
    REQUIRE(single == (int)want.size(), "%d are even, not %zu", single, want.size());
    got.resize(want.size());
    CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    REQUIRE(got == want, "the even ones are wrong");
    const int levels = 11;
    cub_call(stream, [&](void *room, size_t &bytes) { return cub::DeviceHistogram::HistogramEven(room, bytes, in, out, levels, -1000, 1000, n, stream); });
    std::vector<int> bins(levels - 1), counted(levels - 1);
    for (int value : host) counted[(value + 1000) / 200]++;
    CHECK(cudaMemcpy(bins.data(), out, bins.size() * 4, cudaMemcpyDeviceToHost));
    REQUIRE(bins == counted, "the histogram is wrong");
    return pass("%d values: sorts, scans, reductions, selections, a histogram", n);
}
