// What the threads of a warp say to each other: shuffles of every kind and width, votes, matches, reductions; with all threads
// and with some of them.
#define PROGRAM "warp_intrinsics"
#include "common.h"
#include <vector>

constexpr int WARPS = 4, RESULTS = 20;

__global__ void ask(const int *in, long long *out) {
    int i = threadIdx.x, lane = i % 32, mine = in[i];
    long long *to = out + i * RESULTS;
    const unsigned all = 0xffffffffu;
    to[0] = __shfl_sync(all, mine, 5);
    to[1] = __shfl_sync(all, mine, lane / 2);
    to[2] = __shfl_sync(all, mine, 3, 8);
    to[3] = __shfl_up_sync(all, mine, 3);
    to[4] = __shfl_up_sync(all, mine, 2, 4);
    to[5] = __shfl_down_sync(all, mine, 7);
    to[6] = __shfl_xor_sync(all, mine, 9);
    to[7] = __shfl_xor_sync(all, (long long)mine << 33, 1);
    to[8] = (long long)(__shfl_down_sync(all, mine * 0.5, 1) * 2);
    to[9] = __ballot_sync(all, mine % 3 == 0);
    to[10] = __any_sync(all, mine > 990) + 2 * __all_sync(all, mine >= 0);
    to[11] = __match_any_sync(all, mine % 4);
    int same = 7;
    to[12] = __match_all_sync(all, mine / 1000, &same);
    to[12] = to[12] * 2 + same;
    to[13] = __popc(__activemask());
    to[14] = to[15] = to[16] = to[17] = -1;
    if (lane % 2) {
        const unsigned odd = 0xaaaaaaaau;
        to[14] = __shfl_sync(odd, mine, 31);
        to[15] = __ballot_sync(odd, mine & 1);
        unsigned sum = mine;
        for (int step = 2; step < 32; step *= 2) sum += __shfl_xor_sync(odd, sum, step);
        to[16] = sum;
    }
    __syncwarp();
    if (lane < 20) to[17] = __shfl_down_sync(0xfffff, mine, 4);
    __syncwarp();
    to[18] = __shfl_sync(all, mine, 35);
    to[19] = __fns(0x0f0f0f0f, 0, lane % 16 + 1);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = WARPS * 32;
    std::vector<int> host(n);
    Random random(options.seed);
    for (int &value : host) value = random.below(1000);
    int *in;
    long long *out;
    std::vector<long long> got(n * RESULTS);
    CHECK(cudaMalloc(&in, n * 4));
    CHECK(cudaMalloc(&out, got.size() * 8));
    CHECK(cudaMemcpy(in, host.data(), n * 4, cudaMemcpyHostToDevice));
    ask<<<1, n>>>(in, out);
    CHECK(cudaMemcpy(got.data(), out, got.size() * 8, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        int lane = i % 32;
        const int *warp = &host[i - lane];
        unsigned thirds = 0, odd = 0, alike = 0, any = 0, sum = 0;
        for (int k = 0; k < 32; k++) {
            thirds |= (unsigned)(warp[k] % 3 == 0) << k;
            any |= warp[k] > 990;
            alike |= (unsigned)(warp[k] % 4 == warp[lane] % 4) << k;
            if (k % 2) odd |= (unsigned)(warp[k] & 1) << k, sum += warp[k];
        }
        int seen = 0, nth = -1;
        for (int bit = 0; bit < 32 && nth < 0; bit++)
            if (0x0f0f0f0fu >> bit & 1 && ++seen == lane % 16 + 1) nth = bit;
        // The upper lanes of the 20 read lanes that are not among those: what they get is not defined.
        bool inside = lane < 16;
        long long want[RESULTS] = {
            warp[5], warp[lane / 2], warp[lane / 8 * 8 + 3], lane >= 3 ? warp[lane - 3] : warp[lane], lane % 4 >= 2 ? warp[lane - 2] : warp[lane],
            lane + 7 < 32 ? warp[lane + 7] : warp[lane], warp[lane ^ 9], (long long)warp[lane ^ 1] << 33, lane < 31 ? warp[lane + 1] : warp[lane],
            thirds, (int)any + 2, alike, 0xffffffffll * 2 + 1, 32, lane % 2 ? warp[31] : -1, lane % 2 ? odd : -1ll, lane % 2 ? sum : -1ll,
            inside ? warp[lane + 4] : lane < 20 ? got[i * RESULTS + 17] : -1, warp[3], (unsigned)nth};
        for (int k = 0; k < RESULTS; k++)
            REQUIRE(got[i * RESULTS + k] == want[k], "thread %d, result %d: %lld instead of %lld", i, k, got[i * RESULTS + k], want[k]);
    }
    return pass("%d results of %d threads", RESULTS, n);
}
