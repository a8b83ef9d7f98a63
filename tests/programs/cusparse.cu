// cuSPARSE from the toolkit: a sparse matrix times a vector and times a matrix, from compressed rows, by the generic interface.
#define PROGRAM "cusparse"
#include "toolkit.h"
#include <cmath>
#include <vector>

typedef struct Handle_ *Handle;
typedef struct Matrix_ *Matrix;

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Toolkit sparse("libcusparse.so");
    Handle handle;
    ANSWERS(sparse.function<int (*)(Handle *)>("cusparseCreate")(&handle));
    const int rows = 500, columns = 300, width = 4, INDEX = 2 /* 32 bits */, DOUBLE = 1 /* CUDA_R_64F */;
    Random random(options.seed);
    std::vector<int> starts(rows + 1), places;
    std::vector<double> values, x(columns * width), y(rows * width), want(rows * width);
    for (int i = 0; i < rows; i++) {
        for (int j = random.below(20); j < columns; j += 1 + random.below(40)) {
            places.push_back(j);
            values.push_back((double)random.below(9) - 4);
        }
        starts[i + 1] = (int)places.size();
    }
    for (double &value : x) value = (double)random.below(9) - 4;
    for (int k = 0; k < width; k++)
        for (int i = 0; i < rows; i++)
            for (int at = starts[i]; at < starts[i + 1]; at++) want[k * rows + i] += values[at] * x[k * columns + places[at]];
    int *ds, *dp;
    double *dv, *dx, *dy;
    long long count = (long long)values.size();
    CHECK(cudaMalloc(&ds, starts.size() * 4));
    CHECK(cudaMalloc(&dp, count * 4));
    CHECK(cudaMalloc(&dv, count * 8));
    CHECK(cudaMalloc(&dx, x.size() * 8));
    CHECK(cudaMalloc(&dy, y.size() * 8));
    CHECK(cudaMemcpy(ds, starts.data(), starts.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dp, places.data(), count * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dv, values.data(), count * 8, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dx, x.data(), x.size() * 8, cudaMemcpyHostToDevice));
    Matrix a, vector_x, vector_y, dense_x, dense_y;
    ANSWERS(sparse.function<int (*)(Matrix *, long long, long long, long long, void *, void *, void *, int, int, int, int)>("cusparseCreateCsr")(
        &a, rows, columns, count, ds, dp, dv, INDEX, INDEX, 0, DOUBLE));
    auto dense_vector = sparse.function<int (*)(Matrix *, long long, void *, int)>("cusparseCreateDnVec");
    auto dense_matrix = sparse.function<int (*)(Matrix *, long long, long long, long long, void *, int, int)>("cusparseCreateDnMat");
    ANSWERS(dense_vector(&vector_x, columns, dx, DOUBLE));
    ANSWERS(dense_vector(&vector_y, rows, dy, DOUBLE));
    ANSWERS(dense_matrix(&dense_x, columns, width, columns, dx, DOUBLE, 1));
    ANSWERS(dense_matrix(&dense_y, rows, width, rows, dy, DOUBLE, 1));
    double one = 1, zero = 0;
    size_t size = 0;
    void *buffer;
    ANSWERS(sparse.function<int (*)(Handle, int, const void *, Matrix, Matrix, const void *, Matrix, int, int, size_t *)>("cusparseSpMV_bufferSize")(
        handle, 0, &one, a, vector_x, &zero, vector_y, DOUBLE, 0, &size));
    CHECK(cudaMalloc(&buffer, size + 16));
    auto product = sparse.function<int (*)(Handle, int, const void *, Matrix, Matrix, const void *, Matrix, int, int, void *)>("cusparseSpMV");
    in_fresh_thread([&] { ANSWERS(product(handle, 0, &one, a, vector_x, &zero, vector_y, DOUBLE, 0, buffer)); });
    CHECK(cudaMemcpy(y.data(), dy, rows * 8, cudaMemcpyDeviceToHost));
    for (int i = 0; i < rows; i++) REQUIRE(y[i] == want[i], "row %d of the vector is %f, not %f", i, y[i], want[i]);
    CHECK(cudaFree(buffer));
    ANSWERS(sparse.function<int (*)(Handle, int, int, const void *, Matrix, Matrix, const void *, Matrix, int, int, size_t *)>("cusparseSpMM_bufferSize")(
        handle, 0, 0, &one, a, dense_x, &zero, dense_y, DOUBLE, 0, &size));
    CHECK(cudaMalloc(&buffer, size + 16));
    ANSWERS(sparse.function<int (*)(Handle, int, int, const void *, Matrix, Matrix, const void *, Matrix, int, int, void *)>("cusparseSpMM")(
        handle, 0, 0, &one, a, dense_x, &zero, dense_y, DOUBLE, 0, buffer));
    CHECK(cudaMemcpy(y.data(), dy, y.size() * 8, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < y.size(); i++) REQUIRE(y[i] == want[i], "element %zu of the matrix is %f, not %f", i, y[i], want[i]);
    ANSWERS(sparse.function<int (*)(Handle)>("cusparseDestroy")(handle));
    return pass("%d by %d, a vector and a matrix", rows, columns);
}
