// Variables by their symbols: copies at once and in a stream, from and to the device, at offsets, past the end; and in graphs. Parts of a module without symbols.
#define PROGRAM "symbol_copies"
#include "cases.h"

__constant__ int coefficients[64];
__device__ int table[1024];
__device__ struct {
    char tag;
    double value;
} pair = {'a', 1.5};

__global__ void apply(int *to) { to[threadIdx.x] = coefficients[threadIdx.x % 64] * table[threadIdx.x]; }

struct Told {
    const char *text;
    int *kept;
};

// Addresses that have no symbol: of a text, and of a variable of a kernel.
__global__ void tell(Told *to, int value) {
    static int kept;
    kept = value;
    to->text = "a text of the device";
    to->kept = &kept;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int host[1024], got[1024], *device;
    for (int i = 0; i < 1024; i++) host[i] = i * 3 - 500;
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaMalloc(&device, sizeof host));
    RETURNS(cudaSuccess, cudaMemcpyToSymbolAsync(coefficients, host, sizeof coefficients, 0, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaMemcpyToSymbolAsync(table, device, sizeof host, 0, cudaMemcpyDeviceToDevice, stream));
    apply<<<1, 512, 0, stream>>>(device);
    RETURNS(cudaSuccess, cudaMemcpyFromSymbolAsync(got, table, 512 * 4, 512 * 4, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    TRUE_THAT(memcmp(got, host + 512, 512 * 4) == 0);
    RETURNS(cudaSuccess, cudaMemcpy(got, device, 512 * 4, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < 512; i++) wrong += got[i] != host[i % 64] * host[i];
    IS(0, wrong);

    // A part, in the middle and at no round place; a member of a structure.
    char bytes[5] = {1, 2, 3, 4, 5};
    RETURNS(cudaSuccess, cudaMemcpyToSymbol(table, bytes, 5, 41));
    RETURNS(cudaSuccess, cudaMemcpyFromSymbol(got, table, 64));
    TRUE_THAT(memcmp((char *)got + 41, bytes, 5) == 0 && memcmp(got, host, 40) == 0);
    double value = 0, other = 7.25;
    RETURNS(cudaSuccess, cudaMemcpyFromSymbol(&value, pair, 8, 8));
    TRUE_THAT(value == 1.5);
    RETURNS(cudaSuccess, cudaMemcpyToSymbol(pair, &other, 8, 8));
    char whole[16];
    RETURNS(cudaSuccess, cudaMemcpyFromSymbol(whole, pair, 16));
    TRUE_THAT(whole[0] == 'a' && memcmp(whole + 8, &other, 8) == 0);

    // Symbol and address are the same memory.
    int *address;
    size_t size = 0;
    RETURNS(cudaSuccess, cudaGetSymbolAddress((void **)&address, table));
    RETURNS(cudaSuccess, cudaGetSymbolSize(&size, table));
    IS(sizeof table, size);
    RETURNS(cudaSuccess, cudaMemset(address + 1000, 0xff, 4));
    RETURNS(cudaSuccess, cudaMemcpyFromSymbol(got, table, 4, 4000));
    IS(-1, got[0]);
    RETURNS(cudaSuccess, cudaGetSymbolSize(&size, pair));
    IS(16, size);

    // What only a kernel knows the address of: read, written, copied on the device and filled.
    Told told, *room;
    char text[sizeof "a text of the device"] = "";
    int kept = 0, seven = 7;
    RETURNS(cudaSuccess, cudaMalloc(&room, sizeof told));
    tell<<<1, 1, 0, stream>>>(room, 77);
    RETURNS(cudaSuccess, cudaMemcpyAsync(&told, room, sizeof told, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(text, told.text, sizeof text, cudaMemcpyDeviceToHost));
    TRUE_THAT(strcmp(text, "a text of the device") == 0);
    RETURNS(cudaSuccess, cudaMemcpyAsync(&kept, told.kept, 4, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    IS(77, kept);
    RETURNS(cudaSuccess, cudaMemcpy(told.kept, &seven, 4, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemcpy(device, told.kept, 4, cudaMemcpyDeviceToDevice));
    RETURNS(cudaSuccess, cudaMemcpy(&kept, device, 4, cudaMemcpyDeviceToHost));
    IS(7, kept);
    RETURNS(cudaSuccess, cudaMemset(told.kept, 0xff, 4));
    RETURNS(cudaSuccess, cudaMemcpy(&kept, told.kept, 4, cudaMemcpyDeviceToHost));
    IS(-1, kept);
    RETURNS(cudaSuccess, cudaFree(room));

    // In a graph, added and captured.
    cudaGraph_t graph;
    cudaGraphNode_t to, from;
    cudaGraphExec_t exec;
    int five = 5, back = 0;
    RETURNS(cudaSuccess, cudaGraphCreate(&graph, 0));
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNodeToSymbol(&to, graph, nullptr, 0, table, &five, 4, 8, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNodeFromSymbol(&from, graph, &to, 1, &back, table, 4, 8, cudaMemcpyDeviceToHost));
    RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    IS(5, back);
    five = 6;
    RETURNS(cudaSuccess, cudaGraphExecMemcpyNodeSetParamsFromSymbol(exec, from, &back, table, 4, 8, cudaMemcpyDeviceToHost));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    IS(6, back);
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    RETURNS(cudaSuccess, cudaMemcpyToSymbolAsync(coefficients, host + 9, 4, 4, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaMemcpyFromSymbolAsync(&back, coefficients, 4, 4, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamEndCapture(stream, &graph));
    RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    IS(host[9], back);
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));

    // Past the end, and the wrong way.
    RETURNS(cudaErrorInvalidValue, cudaMemcpyFromSymbolAsync(got, table, 4096, 4, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaErrorInvalidMemcpyDirection, cudaMemcpyToSymbolAsync(table, host, 4, 0, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaErrorInvalidMemcpyDirection, cudaMemcpyFromSymbolAsync(got, table, 4, 0, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    return verdict();
}
