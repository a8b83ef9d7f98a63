/* The work of kernels.cu in plain C, on one core; prints the CPU time of each in seconds. Compiled with cc -O2. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void matrix_mul(float *c, const float *a, const float *b, int n)
{
    for (int bi = 0; bi < n; bi += 32)
        for (int bj = 0; bj < n; bj += 32) {
            float sums[32][32] = {{0}};
            for (int t = 0; t < n; t += 32)
                for (int y = 0; y < 32; y++)
                    for (int x = 0; x < 32; x++) {
                        float sum = sums[y][x];
                        for (int k = 0; k < 32; k++)
                            sum += a[(bi + y) * n + t + k] * b[(t + k) * n + bj + x];
                        sums[y][x] = sum;
                    }
            for (int y = 0; y < 32; y++)
                for (int x = 0; x < 32; x++)
                    c[(bi + y) * n + bj + x] = sums[y][x];
        }
}

static float reduce(const float *in, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += in[i];
    return sum;
}

static void nbody(float (*out)[4], float (*in)[4], int n)
{
    for (int i = 0; i < n; i++) {
        float ax = 0, ay = 0, az = 0;
        for (int j = 0; j < n; j++) {
            float dx = in[j][0] - in[i][0], dy = in[j][1] - in[i][1], dz = in[j][2] - in[i][2];
            float inverse = 1.0f / sqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
            float s = in[j][3] * inverse * inverse * inverse;
            ax += dx * s;
            ay += dy * s;
            az += dz * s;
        }
        out[i][0] = ax, out[i][1] = ay, out[i][2] = az, out[i][3] = 0;
    }
}

static float normal(float d)
{
    float k = 1.0f / (1.0f + 0.2316419f * fabsf(d));
    float c = 0.39894228040143267793994605993438f * expf(-0.5f * d * d) *
              (k * (0.31938153f + k * (-0.356563782f + k * (1.781477937f + k * (-1.821255978f + k * 1.330274429f)))));
    return d > 0 ? 1.0f - c : c;
}

static void black_scholes(float *call, float *put, const float *price, const float *strike, const float *years, int n)
{
    for (int i = 0; i < n; i++) {
        float s = price[i], x = strike[i], t = years[i], r = 0.02f, v = 0.30f;
        float root = sqrtf(t);
        float d1 = (logf(s / x) + (r + 0.5f * v * v) * t) / (v * root), d2 = d1 - v * root;
        float n1 = normal(d1), n2 = normal(d2), discount = expf(-r * t);
        call[i] = s * n1 - x * discount * n2;
        put[i] = x * discount * (1.0f - n2) - s * (1.0f - n1);
    }
}

static float *numbers(size_t n)
{
    float *p = malloc(n * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[i] = (float)(i % 1000) * 0.001f + 0.5f;
    return p;
}

int main(void)
{
    double start;
    float keep = 0;
    {
        int n = 1024;
        float *a = numbers(n * n), *b = numbers(n * n), *c = numbers(n * n);
        start = now();
        matrix_mul(c, a, b, n);
        printf("%.6f\n", now() - start);
        keep += c[12345];
    }
    {
        float *a = numbers(64 << 20);
        start = now();
        keep += reduce(a, 64 << 20);
        printf("%.6f\n", now() - start);
        free(a);
    }
    {
        int n = 16384;
        float *a = numbers(n * 4), *b = numbers(n * 4);
        start = now();
        nbody((float(*)[4])b, (float(*)[4])a, n);
        printf("%.6f\n", now() - start);
        keep += b[123];
    }
    {
        int n = 4 << 20;
        float *p = numbers(n), *x = numbers(n), *t = numbers(n), *c = numbers(n), *q = numbers(n);
        start = now();
        black_scholes(c, q, p, x, t, n);
        printf("%.6f\n", now() - start);
        keep += c[123] + q[123];
    }
    return keep == 1.5f;
}
