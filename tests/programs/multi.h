// What multi_a.cu and multi_b.cu share.
#pragma once

// Adds file-local values of multi_b.cu to n integers on the device.
void run_b(int *device, int n);
// The file-local counter of multi_b.cu.
int counter_of_b();

#ifdef RELOCATABLE
// Defined in multi_b.cu and linked on the device (-rdc=true).
extern __device__ int shared_table[8];
__device__ int function_of_b(int x);
#endif
