// Code of kernels beyond straight lines: pointers to functions in memory, virtual functions, recursion, lambdas, switches, and
// what the compiler makes of them with and without optimization (this file is built both ways).
#ifndef PROGRAM
#define PROGRAM "device_functions"
#endif
#include "common.h"

typedef int (*Operation)(int, int);
__device__ int add(int a, int b) { return a + b; }
__device__ int subtract(int a, int b) { return a - b; }
__device__ int multiply(int a, int b) { return a * b; }
__device__ Operation operations[3] = {add, subtract, multiply};
__device__ Operation chosen = multiply;

struct Shape {
    __device__ virtual int area(int) const = 0;
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    __device__ int area(int side) const override { return side * side; }
};
struct Frame : Square {
    int border;
    __device__ explicit Frame(int border) : border(border) {}
    __device__ int area(int side) const override { return Square::area(side) - Square::area(side - 2 * border); }
};

__device__ int ackermann(int m, int n) { return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1)); }

__device__ int by_case(int i) {
    switch (i % 13) {
        case 0: return 5;
        case 1: return i * 3;
        case 2: return -i;
        case 3: return i << 4;
        case 4: return i ^ 0x55;
        case 5: return 1000 - i;
        case 7: return i / 3;
        case 8: return i % 7;
        case 12: return 77;
        default: return -1;
    }
}

template <class F> __device__ int twice(F f, int value) { return f(f(value)); }

__global__ void work(int *out, Operation given) {
    int i = threadIdx.x, *to = out + i * 8;
    to[0] = operations[i % 3](i, 7);
    to[1] = chosen(i, i) + (given ? given(1, 2) : 0);
    Square square;
    Frame frame(1 + i % 4);
    const Shape *shape = i % 2 ? (const Shape *)&square : &frame;
    to[2] = shape->area(20 + i);
    to[3] = ackermann(1 + i % 2, i % 5);
    to[4] = by_case(i);
    to[5] = twice([=](int value) { return value * 3 + i; }, 2);
    // A loop with a way out of the middle, another for each thread.
    int n = 0, value = i + 1;
    while (true) {
        if (value == 1) break;
        value = value % 2 ? value * 3 + 1 : value / 2;
        if (++n > 60) goto out;
    }
out:
    to[6] = n;
    to[7] = i < 64 ? (i & 1 ? i * 2 : i * 3) : (i & 2 ? i - 1 : i + 1);
}

__global__ void address_of(Operation *to) { *to = subtract; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 128;
    int *out, got[n][8];
    Operation *place, given;
    CHECK(cudaMalloc(&out, sizeof got));
    CHECK(cudaMalloc(&place, sizeof given));
    address_of<<<1, 1>>>(place);
    CHECK(cudaMemcpy(&given, place, sizeof given, cudaMemcpyDeviceToHost));
    REQUIRE(given != nullptr, "a function's address is NULL");
    work<<<1, n>>>(out, given);
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        int m = 1 + i % 2, k = i % 5, border = 1 + i % 4, side = 20 + i;
        int cases[] = {5, i * 3, -i, i << 4, i ^ 0x55, 1000 - i, -1, i / 3, i % 7, -1, -1, -1, 77};
        int steps = 0;
        for (int value = i + 1; value != 1;) {
            value = value % 2 ? value * 3 + 1 : value / 2;
            if (++steps > 60) break;
        }
        int want[8] = {i % 3 == 0 ? i + 7 : i % 3 == 1 ? i - 7 : i * 7,
                       i * i - 1,
                       i % 2 ? side * side : side * side - (side - 2 * border) * (side - 2 * border),
                       m == 1 ? k + 2 : 2 * k + 3,
                       cases[i % 13],
                       (2 * 3 + i) * 3 + i,
                       steps,
                       i < 64 ? (i & 1 ? i * 2 : i * 3) : (i & 2 ? i - 1 : i + 1)};
        for (int c = 0; c < 8; c++) REQUIRE(got[i][c] == want[c], "thread %d, result %d: %d instead of %d", i, c, got[i][c], want[c]);
    }
    return pass("%d threads, 8 results each", n);
}
