// cuBLAS from the toolkit: products of matrices in several types, triangular solves, batches; in a stream, with scalars on the
// device, with its workspace, and captured into a graph.
#define PROGRAM "cublas"
#include "toolkit.h"
#include <cmath>
#include <vector>

typedef struct Handle_ *Handle;

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Toolkit blas("libcublas.so");
    Handle handle;
    ANSWERS(blas.function<int (*)(Handle *)>("cublasCreate_v2")(&handle));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ANSWERS(blas.function<int (*)(Handle, cudaStream_t)>("cublasSetStream_v2")(handle, stream));
    auto sgemm = blas.function<int (*)(Handle, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int)>("cublasSgemm_v2");
    auto dgemm = blas.function<int (*)(Handle, int, int, int, int, int, const double *, const double *, int, const double *, int, const double *, double *, int)>("cublasDgemm_v2");
    auto ddot = blas.function<int (*)(Handle, int, const double *, int, const double *, int, double *)>("cublasDdot_v2");
    auto dtrsm = blas.function<int (*)(Handle, int, int, int, int, int, int, const double *, const double *, int, double *, int)>("cublasDtrsm_v2");
    auto pointer_mode = blas.function<int (*)(Handle, int)>("cublasSetPointerMode_v2");

    const int m = 70, n = 45, k = 33;
    Random random(options.seed);
    std::vector<double> a(m * k), b(k * n), c(m * n), want(m * n);
    for (double &v : a) v = random.below(17) - 8.0;
    for (double &v : b) v = random.below(17) - 8.0;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++)
            for (int l = 0; l < k; l++) want[j * m + i] += a[l * m + i] * b[j * k + l];
    double *da, *db, *dc;
    float *fa, *fb, *fc;
    CHECK(cudaMalloc(&da, a.size() * 8));
    CHECK(cudaMalloc(&db, b.size() * 8));
    CHECK(cudaMalloc(&dc, c.size() * 8));
    CHECK(cudaMalloc(&fa, a.size() * 4));
    CHECK(cudaMalloc(&fb, b.size() * 4));
    CHECK(cudaMalloc(&fc, c.size() * 4));
    std::vector<float> sa(a.begin(), a.end()), sb(b.begin(), b.end()), sc(c.size());
    CHECK(cudaMemcpyAsync(da, a.data(), a.size() * 8, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyAsync(db, b.data(), b.size() * 8, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyAsync(fa, sa.data(), a.size() * 4, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyAsync(fb, sb.data(), b.size() * 4, cudaMemcpyHostToDevice, stream));
    double one = 1, zero = 0, two = 2;
    float fone = 1, fzero = 0;
    // Small whole numbers: exact in every type.
    ANSWERS(dgemm(handle, 0, 0, m, n, k, &one, da, m, db, k, &zero, dc, m));
    CHECK(cudaMemcpyAsync(c.data(), dc, c.size() * 8, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(c == want, "the product in double is wrong");
    ANSWERS(sgemm(handle, 0, 0, m, n, k, &fone, fa, m, fb, k, &fzero, fc, m));
    CHECK(cudaMemcpyAsync(sc.data(), fc, c.size() * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < c.size(); i++) REQUIRE(sc[i] == (float)want[i], "the product in float has %f for %f", sc[i], want[i]);

    // A result on the host, and one on the device.
    double dot = 0, wanted = 0, *on_device;
    for (int i = 0; i < m * k; i++) wanted += a[i] * a[i];
    ANSWERS(ddot(handle, m * k, da, 1, da, 1, &dot));
    REQUIRE(dot == wanted, "the dot product is %f, not %f", dot, wanted);
    CHECK(cudaMalloc(&on_device, 8));
    ANSWERS(pointer_mode(handle, 1));
    ANSWERS(ddot(handle, m * k, da, 1, da, 1, on_device));
    dot = 0;
    CHECK(cudaMemcpyAsync(&dot, on_device, 8, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(dot == wanted, "the dot product on the device is %f", dot);
    ANSWERS(pointer_mode(handle, 0));

    // L x = b with a unit triangle.
    std::vector<double> l(k * k), x(k * n);
    for (int j = 0; j < k; j++)
        for (int i = j + 1; i < k; i++) l[j * k + i] = (int)random.below(3) - 1;
    double *dl;
    CHECK(cudaMalloc(&dl, l.size() * 8));
    CHECK(cudaMemcpyAsync(dl, l.data(), l.size() * 8, cudaMemcpyHostToDevice, stream));
    ANSWERS(dtrsm(handle, 0, 0, 0, 1, k, n, &two, dl, k, db, k));
    CHECK(cudaMemcpyAsync(x.data(), db, x.size() * 8, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int j = 0; j < n; j++)
        for (int i = 0; i < k; i++) {
            double sum = x[j * k + i];
            for (int p = 0; p < i; p++) sum += l[p * k + i] * x[j * k + p];
            REQUIRE(std::fabs(sum - 2 * b[j * k + i]) < 1e-6 * (1 + std::fabs(sum)), "the solution is off: %f for %f", sum, 2 * b[j * k + i]);
        }

    // Captured, and run three times: c = a · b + c.
    CHECK(cudaMemcpyAsync(db, b.data(), b.size() * 8, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemsetAsync(dc, 0, c.size() * 8, stream));
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    ANSWERS(dgemm(handle, 0, 0, m, n, k, &one, da, m, db, k, &one, dc, m));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaMemcpyAsync(c.data(), dc, c.size() * 8, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < c.size(); i++) REQUIRE(c[i] == 3 * want[i], "three products in a graph: %f for %f", c[i], 3 * want[i]);
    // The handle in threads that have no context yet: cuBLAS asks the driver for the context's number before it has one.
    auto dgemv = blas.function<int (*)(Handle, int, int, int, const double *, const double *, int, const double *, int, const double *, double *, int)>("cublasDgemv_v2");
    for (int j = 0; j < 2; j++) {
        CHECK(cudaMemset(dc, 0xff, c.size() * 8));
        in_fresh_thread([&] {
            if (j)
                ANSWERS(dgemm(handle, 0, 0, m, n, k, &one, da, m, db, k, &zero, dc, m));
            else
                ANSWERS(dgemv(handle, 0, m, k, &one, da, m, db, 1, &zero, dc, 1));
        });
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaMemcpy(c.data(), dc, c.size() * 8, cudaMemcpyDeviceToHost));
        for (int i = 0; i < (j ? m * n : m); i++) REQUIRE(c[i] == want[i], "a product %d in a thread of its own has %f for %f", j, c[i], want[i]);
    }
    ANSWERS(blas.function<int (*)(Handle)>("cublasDestroy_v2")(handle));
    return pass("products, dot products, a solve, a graph, threads");
}
