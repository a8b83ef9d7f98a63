// Textures of arrays and of memory: address modes, nearest and linear filtering, normalized coordinates and reads, layers, three dimensions, gathers by element type.
// What kernels read is compared with the same arithmetic on the CPU, filtered values with 8 bits of fraction as the programming guide has it.
#define PROGRAM "textures"
#include "common.h"

#include <cmath>
#include <vector>

template <typename T>
__global__ void read_1d(cudaTextureObject_t texture, const float *x, T *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex1D<T>(texture, x[i]);
}

__global__ void read_2d(cudaTextureObject_t texture, const float *x, const float *y, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2D<float>(texture, x[i], y[i]);
}

__global__ void read_3d(cudaTextureObject_t texture, const float *x, const float *y, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex3D<float>(texture, x[i], y[i], 1.5f);
}

__global__ void read_layer(cudaTextureObject_t texture, const float *x, const float *y, int layer, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2DLayered<float>(texture, x[i], y[i], layer);
}

__global__ void fetch(cudaTextureObject_t texture, int4 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex1Dfetch<int4>(texture, i);
}

static int wrap(long i, int size, cudaTextureAddressMode mode, bool &outside) {
    outside = false;
    switch (mode) {
    case cudaAddressModeWrap: return (int)(((i % size) + size) % size);
    case cudaAddressModeMirror: {
        long period = ((i % (2 * size)) + 2 * size) % (2 * size);
        return (int)(period < size ? period : 2 * size - 1 - period);
    }
    case cudaAddressModeBorder: outside = i < 0 || i >= size; return outside ? 0 : (int)i;
    default: return (int)(i < 0 ? 0 : i >= size ? size - 1 : i);
    }
}

static void run(const char *what, int w, int h, cudaTextureAddressMode mode, bool linear, bool normalized, Random &random) {
    std::vector<float> texels(w * h);
    for (float &t : texels) t = (float)(int)(random.next() % 2001 - 1000);
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &format, w, h));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, texels.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc desc = {};
    desc.addressMode[0] = desc.addressMode[1] = mode;
    desc.filterMode = linear ? cudaFilterModeLinear : cudaFilterModePoint;
    desc.readMode = cudaReadModeElementType;
    desc.normalizedCoords = normalized;
    desc.borderColor[0] = 77.0f;
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));

    // Coordinates on a grid of 1/16 texel, so that every weight is exact.
    const int n = 4096;
    std::vector<float> x(n), y(n), out(n);
    for (int i = 0; i < n; i++) {
        long px = (long)(random.next() % (48 * w)) - 16 * w, py = (long)(random.next() % (48 * h)) - 16 * h;
        x[i] = px / 16.0f + 1 / 32.0f;
        y[i] = py / 16.0f + 1 / 32.0f;
        if (normalized) x[i] /= w, y[i] /= h;
    }
    float *dx, *dy, *dout;
    CHECK(cudaMalloc(&dx, n * 4));
    CHECK(cudaMalloc(&dy, n * 4));
    CHECK(cudaMalloc(&dout, n * 4));
    CHECK(cudaMemcpy(dx, x.data(), n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dy, y.data(), n * 4, cudaMemcpyHostToDevice));
    read_2d<<<n / 256, 256>>>(texture, dx, dy, dout, n);
    CHECK(cudaMemcpy(out.data(), dout, n * 4, cudaMemcpyDeviceToHost));
    cudaTextureAddressMode effective = !normalized && (mode == cudaAddressModeWrap || mode == cudaAddressModeMirror) ? cudaAddressModeClamp : mode;
    double worst = 0;
    for (int i = 0; i < n; i++) {
        double u = normalized ? (double)x[i] * w : x[i], v = normalized ? (double)y[i] * h : y[i];
        auto texel = [&](long a, long b) {
            bool outa, outb;
            int ia = wrap(a, w, effective, outa), ib = wrap(b, h, effective, outb);
            return outa || outb ? 77.0 : (double)texels[ib * w + ia];
        };
        double want;
        if (linear) {
            double fu = u - 0.5, fv = v - 0.5;
            long iu = (long)floor(fu), iv = (long)floor(fv);
            double a = fu - iu, b = fv - iv;
            want = (1 - a) * (1 - b) * texel(iu, iv) + a * (1 - b) * texel(iu + 1, iv) + (1 - a) * b * texel(iu, iv + 1) + a * b * texel(iu + 1, iv + 1);
        } else {
            want = texel((long)floor(u), (long)floor(v));
        }
        double error = fabs(out[i] - want);
        if (error > worst) worst = error;
        // Weights have 8 bits: half a unit in each direction, of differences of at most 2000.
        double most = linear ? 2 * 2000.0 / 256 : 0;
        REQUIRE(error <= most, "%s: at (%g,%g) %g instead of %g", what, x[i], y[i], out[i], want);
    }
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFree(dx));
    CHECK(cudaFree(dy));
    CHECK(cudaFree(dout));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const cudaTextureAddressMode modes[] = {cudaAddressModeWrap, cudaAddressModeClamp, cudaAddressModeMirror, cudaAddressModeBorder};
    const char *names[] = {"wrap", "clamp", "mirror", "border"};
    for (int m = 0; m < 4; m++)
        for (int linear = 0; linear < 2; linear++)
            for (int normalized = 0; normalized < 2; normalized++) {
                char what[80];
                snprintf(what, sizeof what, "%s, %s, %s coordinates", names[m], linear ? "linear" : "nearest", normalized ? "normalized" : "texel");
                run(what, 32, 16, modes[m], linear, normalized, random);
            }

    // Whole numbers read as floats from 0 to 1 and from -1 to 1.
    {
        const int n = 256;
        std::vector<unsigned char> bytes(n);
        for (int i = 0; i < n; i++) bytes[i] = i;
        for (int is_signed = 0; is_signed < 2; is_signed++) {
            cudaChannelFormatDesc format = is_signed ? cudaCreateChannelDesc<signed char>() : cudaCreateChannelDesc<unsigned char>();
            cudaArray_t array;
            CHECK(cudaMallocArray(&array, &format, n));
            CHECK(cudaMemcpy2DToArray(array, 0, 0, bytes.data(), n, n, 1, cudaMemcpyHostToDevice));
            cudaResourceDesc resource = {};
            resource.resType = cudaResourceTypeArray;
            resource.res.array.array = array;
            cudaTextureDesc desc = {};
            desc.addressMode[0] = cudaAddressModeClamp;
            desc.readMode = cudaReadModeNormalizedFloat;
            cudaTextureObject_t texture;
            CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
            std::vector<float> x(n), out(n);
            for (int i = 0; i < n; i++) x[i] = i + 0.5f;
            float *dx, *dout;
            CHECK(cudaMalloc(&dx, n * 4));
            CHECK(cudaMalloc(&dout, n * 4));
            CHECK(cudaMemcpy(dx, x.data(), n * 4, cudaMemcpyHostToDevice));
            read_1d<float><<<1, n>>>(texture, dx, dout, n);
            CHECK(cudaMemcpy(out.data(), dout, n * 4, cudaMemcpyDeviceToHost));
            for (int i = 0; i < n; i++) {
                float want = is_signed ? fmaxf((signed char)i / 127.0f, -1.0f) : i / 255.0f;
                REQUIRE(fabsf(out[i] - want) <= 1e-6f, "%s byte %d is read as %.9g instead of %.9g", is_signed ? "signed" : "unsigned", i, out[i], want);
            }
            CHECK(cudaDestroyTextureObject(texture));
            CHECK(cudaFreeArray(array));
            CHECK(cudaFree(dx));
            CHECK(cudaFree(dout));
        }
    }

    // Layers and slices.
    {
        const int w = 16, h = 8, d = 5, n = 512;
        std::vector<float> texels(w * h * d), x(n), y(n), out(n);
        for (float &t : texels) t = (float)(int)(random.next() % 1000);
        for (int i = 0; i < n; i++) x[i] = random.next() % w + 0.5f, y[i] = random.next() % h + 0.5f;
        float *dx, *dy, *dout;
        CHECK(cudaMalloc(&dx, n * 4));
        CHECK(cudaMalloc(&dy, n * 4));
        CHECK(cudaMalloc(&dout, n * 4));
        CHECK(cudaMemcpy(dx, x.data(), n * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dy, y.data(), n * 4, cudaMemcpyHostToDevice));
        for (unsigned flags : {0u, (unsigned)cudaArrayLayered}) {
            cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
            cudaArray_t array;
            CHECK(cudaMalloc3DArray(&array, &format, make_cudaExtent(w, h, d), flags));
            cudaMemcpy3DParms copy = {};
            copy.srcPtr = make_cudaPitchedPtr(texels.data(), w * 4, w, h);
            copy.dstArray = array;
            copy.extent = make_cudaExtent(w, h, d);
            copy.kind = cudaMemcpyHostToDevice;
            CHECK(cudaMemcpy3D(&copy));
            cudaResourceDesc resource = {};
            resource.resType = cudaResourceTypeArray;
            resource.res.array.array = array;
            cudaTextureDesc desc = {};
            desc.addressMode[0] = desc.addressMode[1] = desc.addressMode[2] = cudaAddressModeClamp;
            cudaTextureObject_t texture;
            CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
            for (int layer = 0; layer < (flags ? d : 1); layer++) {
                if (flags) read_layer<<<n / 128, 128>>>(texture, dx, dy, layer, dout, n);
                else read_3d<<<n / 128, 128>>>(texture, dx, dy, dout, n);
                CHECK(cudaMemcpy(out.data(), dout, n * 4, cudaMemcpyDeviceToHost));
                int z = flags ? layer : 1;
                for (int i = 0; i < n; i++) {
                    float want = texels[(z * h + (int)y[i]) * w + (int)x[i]];
                    REQUIRE(out[i] == want, "%s %d: %g instead of %g", flags ? "layer" : "slice", z, out[i], want);
                }
            }
            CHECK(cudaDestroyTextureObject(texture));
            CHECK(cudaFreeArray(array));
        }
    }

    // Linear memory, by whole numbers; and memory in rows.
    {
        const int n = 1000;
        std::vector<int4> values(n), out(n);
        for (int4 &v : values) v = make_int4((int)random.next(), (int)random.next(), (int)random.next(), (int)random.next());
        int4 *device, *dout;
        CHECK(cudaMalloc(&device, n * sizeof *device));
        CHECK(cudaMalloc(&dout, n * sizeof *dout));
        CHECK(cudaMemcpy(device, values.data(), n * sizeof *device, cudaMemcpyHostToDevice));
        cudaResourceDesc resource = {};
        resource.resType = cudaResourceTypeLinear;
        resource.res.linear.devPtr = device;
        resource.res.linear.desc = cudaCreateChannelDesc<int4>();
        resource.res.linear.sizeInBytes = n * sizeof *device;
        cudaTextureDesc desc = {};
        cudaTextureObject_t texture;
        CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
        fetch<<<8, 128>>>(texture, dout, n);
        CHECK(cudaMemcpy(out.data(), dout, n * sizeof *dout, cudaMemcpyDeviceToHost));
        REQUIRE(memcmp(out.data(), values.data(), n * sizeof *dout) == 0, "what is fetched from linear memory differs");
        cudaResourceDesc found;
        CHECK(cudaGetTextureObjectResourceDesc(&found, texture));
        REQUIRE(found.resType == cudaResourceTypeLinear && found.res.linear.devPtr == device && found.res.linear.desc.w == 32, "the texture's description");
        CHECK(cudaDestroyTextureObject(texture));

        // The driver does not compare a texture's size with that of the memory: NVIDIA's sample convolutionFFT2D names more than there is.
        resource.res.linear.sizeInBytes += 64 << 20;
        CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
        CHECK(cudaMemset(dout, 0, n * sizeof *dout));
        fetch<<<8, 128>>>(texture, dout, n);
        CHECK(cudaMemcpy(out.data(), dout, n * sizeof *dout, cudaMemcpyDeviceToHost));
        REQUIRE(memcmp(out.data(), values.data(), n * sizeof *dout) == 0, "what is fetched by a texture longer than its memory differs");
        CHECK(cudaDestroyTextureObject(texture));
        resource.res.linear.devPtr = nullptr;
        REQUIRE(cudaCreateTextureObject(&texture, &resource, &desc, nullptr) == cudaErrorInvalidValue, "a texture without memory");
        cudaGetLastError();

        const int w = 50, h = 20;
        float *rows;
        size_t pitch;
        std::vector<float> texels(w * h), x(w), y(w), read(w);
        for (float &t : texels) t = (float)(int)(random.next() % 1000);
        for (int i = 0; i < w; i++) x[i] = i + 0.5f, y[i] = i % h + 0.5f;
        CHECK(cudaMallocPitch(&rows, &pitch, w * 4, h));
        CHECK(cudaMemcpy2D(rows, pitch, texels.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
        resource = {};
        resource.resType = cudaResourceTypePitch2D;
        resource.res.pitch2D.devPtr = rows;
        resource.res.pitch2D.desc = cudaCreateChannelDesc<float>();
        resource.res.pitch2D.width = w;
        resource.res.pitch2D.height = h;
        resource.res.pitch2D.pitchInBytes = pitch;
        desc.addressMode[0] = desc.addressMode[1] = cudaAddressModeClamp;
        CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
        float *dx, *dy, *dread;
        CHECK(cudaMalloc(&dx, w * 4));
        CHECK(cudaMalloc(&dy, w * 4));
        CHECK(cudaMalloc(&dread, w * 4));
        CHECK(cudaMemcpy(dx, x.data(), w * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dy, y.data(), w * 4, cudaMemcpyHostToDevice));
        read_2d<<<1, 64>>>(texture, dx, dy, dread, w);
        CHECK(cudaMemcpy(read.data(), dread, w * 4, cudaMemcpyDeviceToHost));
        for (int i = 0; i < w; i++) REQUIRE(read[i] == texels[(i % h) * w + i], "rows: element %d is %g", i, read[i]);
        CHECK(cudaDestroyTextureObject(texture));
    }
    return pass("16 ways of sampling in two dimensions, normalized reads, layers, slices, linear memory and rows");
}
