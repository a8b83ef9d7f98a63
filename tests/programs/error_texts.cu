// The name and the text of every error code, of the runtime and of the driver, printed to be compared.
#define PROGRAM "error_texts"
#include "cases.h"
#include <cuda.h>

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int known = 0, of_driver = 0;
    for (int code = -1; code <= 1100; code++) {
        const char *name = cudaGetErrorName((cudaError_t)code), *text = cudaGetErrorString((cudaError_t)code);
        TRUE_THAT(name && text);
        if (strcmp(name, "unrecognized error code") != 0) {
            printf("%d %s: %s\n", code, name, text);
            known++;
        }
        const char *driver_name = (const char *)1, *driver_text = (const char *)1;
        CUresult named = cuGetErrorName((CUresult)code, &driver_name), told = cuGetErrorString((CUresult)code, &driver_text);
        TRUE_THAT(named == told);
        if (named == CUDA_SUCCESS) {
            printf("%d %s: %s\n", code, driver_name, driver_text);
            of_driver++;
        } else {
            IS(CUDA_ERROR_INVALID_VALUE, named);
            TRUE_THAT(driver_name == nullptr && driver_text == nullptr);
        }
    }
    TRUE_THAT(known > 100 && of_driver > 80);
    return verdict();
}
