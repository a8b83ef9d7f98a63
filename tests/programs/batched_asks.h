// A variable and a kernel of a module of their own, which is loaded when one of them is first used.
#pragma once
#include <cuda_runtime.h>

cudaError_t write_symbol(const int *numbers);
cudaError_t launch_other(int *data, int count);
