// cuSOLVER from the toolkit: a system by LU, a Cholesky factor, eigenvalues; each result put back into its equation.
#define PROGRAM "cusolver"
#include "toolkit.h"
#include <cmath>
#include <vector>

typedef struct Handle_ *Handle;

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Toolkit solver("libcusolver.so");
    Handle handle;
    ANSWERS(solver.function<int (*)(Handle *)>("cusolverDnCreate")(&handle));
    const int n = 60;
    Random random(options.seed);
    std::vector<double> a(n * n), b(n), x(n), work_matrix(n * n);
    for (int j = 0; j < n; j++) {
        for (int i = 0; i <= j; i++) a[j * n + i] = a[i * n + j] = random.unit() - 0.5;
        a[j * n + j] += n;
        b[j] = random.unit();
    }
    double *da, *db, *work;
    int *pivots, *info, size = 0, told = -1;
    CHECK(cudaMalloc(&da, n * n * 8));
    CHECK(cudaMalloc(&db, n * 8));
    CHECK(cudaMalloc(&pivots, n * 4));
    CHECK(cudaMalloc(&info, 4));
    auto matrix = [&] { CHECK(cudaMemcpy(da, a.data(), n * n * 8, cudaMemcpyHostToDevice)); };
    auto finished = [&](const char *what) {
        CHECK(cudaMemcpy(&told, info, 4, cudaMemcpyDeviceToHost));
        REQUIRE(told == 0, "%s tells %d", what, told);
    };

    matrix();
    CHECK(cudaMemcpy(db, b.data(), n * 8, cudaMemcpyHostToDevice));
    ANSWERS(solver.function<int (*)(Handle, int, int, double *, int, int *)>("cusolverDnDgetrf_bufferSize")(handle, n, n, da, n, &size));
    CHECK(cudaMalloc(&work, size * 8 + 8));
    auto factorize = solver.function<int (*)(Handle, int, int, double *, int, double *, int *, int *)>("cusolverDnDgetrf");
    in_fresh_thread([&] { ANSWERS(factorize(handle, n, n, da, n, work, pivots, info)); });
    finished("LU");
    ANSWERS(solver.function<int (*)(Handle, int, int, int, const double *, int, const int *, double *, int, int *)>("cusolverDnDgetrs")(handle, 0, n, 1, da, n, pivots, db, n, info));
    finished("the solution");
    CHECK(cudaMemcpy(x.data(), db, n * 8, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++) sum += a[j * n + i] * x[j];
        REQUIRE(std::fabs(sum - b[i]) < 1e-10, "row %d of the system is off by %g", i, sum - b[i]);
    }
    CHECK(cudaFree(work));

    matrix();
    ANSWERS(solver.function<int (*)(Handle, int, int, double *, int, int *)>("cusolverDnDpotrf_bufferSize")(handle, 0, n, da, n, &size));
    CHECK(cudaMalloc(&work, size * 8 + 8));
    ANSWERS(solver.function<int (*)(Handle, int, int, double *, int, double *, int, int *)>("cusolverDnDpotrf")(handle, 0, n, da, n, work, size, info));
    finished("Cholesky");
    CHECK(cudaMemcpy(work_matrix.data(), da, n * n * 8, cudaMemcpyDeviceToHost));
    for (int j = 0; j < n; j++)
        for (int i = j; i < n; i++) {
            double sum = 0;
            for (int k = 0; k <= j; k++) sum += work_matrix[k * n + i] * work_matrix[k * n + j];
            REQUIRE(std::fabs(sum - a[j * n + i]) < 1e-10, "L·Lᵀ is off at %d,%d", i, j);
        }
    CHECK(cudaFree(work));

    matrix();
    double *values;
    std::vector<double> w(n), v(n * n);
    CHECK(cudaMalloc(&values, n * 8));
    ANSWERS(solver.function<int (*)(Handle, int, int, int, const double *, int, const double *, int *)>("cusolverDnDsyevd_bufferSize")(handle, 1, 0, n, da, n, values, &size));
    CHECK(cudaMalloc(&work, size * 8 + 8));
    ANSWERS(solver.function<int (*)(Handle, int, int, int, double *, int, double *, double *, int, int *)>("cusolverDnDsyevd")(handle, 1, 0, n, da, n, values, work, size, info));
    finished("the eigenvalues");
    CHECK(cudaMemcpy(w.data(), values, n * 8, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(v.data(), da, n * n * 8, cudaMemcpyDeviceToHost));
    for (int k = 0; k < n; k++)
        for (int i = 0; i < n; i++) {
            double sum = 0;
            for (int j = 0; j < n; j++) sum += a[j * n + i] * v[k * n + j];
            REQUIRE(std::fabs(sum - w[k] * v[k * n + i]) < 1e-9, "eigenvector %d is off at %d", k, i);
        }
    ANSWERS(solver.function<int (*)(Handle)>("cusolverDnDestroy")(handle));
    return pass("LU, Cholesky, eigenvalues");
}
