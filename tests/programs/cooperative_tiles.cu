// Cooperative groups inside a block: tiles of each size, their shuffles and votes, reductions and scans, coalesced and
// labelled groups.
#define PROGRAM "cooperative_tiles"
#include "common.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;
constexpr int THREADS = 128, RESULTS = 12;

template <int SIZE> __global__ void tiles(const int *in, int *out) {
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<SIZE>(block);
    int mine = in[block.thread_rank()], *to = out + block.thread_rank() * RESULTS;
    to[0] = tile.thread_rank() + 100 * tile.size() + 10000 * tile.meta_group_rank();
    to[1] = cg::reduce(tile, mine, cg::plus<int>());
    to[2] = cg::reduce(tile, mine, cg::less<int>());
    to[3] = cg::inclusive_scan(tile, mine);
    to[4] = cg::exclusive_scan(tile, mine, cg::plus<int>());
    to[5] = tile.shfl_xor(mine, SIZE / 2);
    to[6] = tile.shfl_down(mine, 1);
    to[7] = (int)tile.ballot(mine & 1);
    to[8] = tile.any(mine % 7 == 0) * 2 + tile.all(mine % 7 != 0);
    // Those of the tile that came here.
    to[9] = to[10] = 0;
    if (mine % 3 == 0) {
        cg::coalesced_group active = cg::coalesced_threads();
        to[9] = cg::reduce(active, 1, cg::plus<int>()) - (int)active.size() + 1;
        auto labelled = cg::labeled_partition(active, mine % 2);
        to[10] = labelled.size() > 0 && cg::reduce(labelled, mine % 2, cg::greater<int>()) == mine % 2;
    }
    to[11] = cg::reduce(tile, (unsigned)mine, cg::bit_xor<unsigned>());
    block.sync();
}

template <int SIZE> static void run(const int *host, const int *in, int *out) {
    static int got[THREADS][RESULTS];
    CHECK(cudaMemset(out, 0, sizeof got));
    tiles<SIZE><<<1, THREADS>>>(in, out);
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < THREADS; i++) {
        int rank = i % SIZE, first = i - rank;
        int sum = 0, least = host[first], before = 0, any = 0;
        unsigned vote = 0, bits = 0;
        for (int k = 0; k < SIZE; k++) {
            int value = host[first + k];
            if (k < rank) before += value;
            sum += value;
            least = value < least ? value : least;
            vote |= (unsigned)(value & 1) << k;
            any |= value % 7 == 0;
            bits ^= (unsigned)value;
        }
        int down = rank + 1 < SIZE ? host[i + 1] : host[i];
        int want[RESULTS] = {rank + 100 * SIZE + 10000 * (i / SIZE), sum, least, before + host[i], before, host[first + (rank ^ (SIZE / 2))], down, (int)vote,
                             any * 2 + !any, host[i] % 3 == 0, host[i] % 3 == 0, (int)bits};
        for (int k = 0; k < RESULTS; k++) REQUIRE(got[i][k] == want[k], "tiles of %d, thread %d, result %d: %d instead of %d", SIZE, i, k, got[i][k], want[k]);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int host[THREADS], *in, *out;
    Random random(options.seed);
    for (int &value : host) value = random.below(1000);
    CHECK(cudaMalloc(&in, sizeof host));
    CHECK(cudaMalloc(&out, sizeof(int) * THREADS * RESULTS));
    CHECK(cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice));
    run<2>(host, in, out);
    run<4>(host, in, out);
    run<8>(host, in, out);
    run<16>(host, in, out);
    run<32>(host, in, out);
    return pass("tiles of 2 to 32, %d results each", RESULTS);
}
