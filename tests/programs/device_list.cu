// What nvidia-smi would say, from the runtime API alone: versions, and each device's name, memory, capability, UUID
// and PCI address; the properties must agree with the attributes.
#define PROGRAM "device_list"
#include "common.h"

static std::string uuid_text(const cudaUUID_t &uuid) {
    std::string text = "GPU-";
    for (int i = 0; i < 16; i++) {
        char two[3];
        snprintf(two, sizeof two, "%02x", (unsigned char)uuid.bytes[i]);
        if (i == 4 || i == 6 || i == 8 || i == 10) text += "-";
        text += two;
    }
    return text;
}

static int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int driver = 0, runtime = 0, count = 0;
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count > 0, "there is no device");
    REQUIRE(driver >= runtime, "the driver's version %d is below the runtime's %d", driver, runtime);
    printf("CUDA driver %d.%d, runtime %d.%d, %d device(s)\n", driver / 1000, driver % 1000 / 10, runtime / 1000,
           runtime % 1000 / 10, count);

    for (int device = 0; device < count; device++) {
        cudaDeviceProp properties;
        CHECK(cudaGetDeviceProperties(&properties, device));
        CHECK(cudaSetDevice(device));
        int current = -1;
        CHECK(cudaGetDevice(&current));
        REQUIRE(current == device, "the current device is %d, not %d", current, device);
        size_t free_bytes = 0, total_bytes = 0;
        CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
        char bus[32];
        CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
        int again = -1;
        CHECK(cudaDeviceGetByPCIBusId(&again, bus));
        REQUIRE(again == device, "device %d's address %s belongs to device %d", device, bus, again);

        printf("  %d: %s, capability %d.%d, %d multiprocessors\n", device, properties.name, properties.major,
               properties.minor, properties.multiProcessorCount);
        printf("     memory %zu MiB in all, %zu MiB free\n", total_bytes >> 20, free_bytes >> 20);
        printf("     %s, PCI %s\n", uuid_text(properties.uuid).c_str(), bus);

        REQUIRE(properties.name[0] != 0, "device %d has no name", device);
        REQUIRE(properties.totalGlobalMem > 0 && total_bytes <= properties.totalGlobalMem, "device %d has %zu bytes by its properties, %zu by cudaMemGetInfo",
                device, properties.totalGlobalMem, total_bytes);
        REQUIRE(free_bytes <= total_bytes, "device %d has more free memory than memory", device);
        struct {
            const char *name;
            cudaDeviceAttr attribute;
            int value;
        } const agree[] = {
            {"major", cudaDevAttrComputeCapabilityMajor, properties.major},
            {"minor", cudaDevAttrComputeCapabilityMinor, properties.minor},
            {"multiProcessorCount", cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
            {"maxThreadsPerBlock", cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
            {"maxThreadsDim[0]", cudaDevAttrMaxBlockDimX, properties.maxThreadsDim[0]},
            {"maxThreadsDim[1]", cudaDevAttrMaxBlockDimY, properties.maxThreadsDim[1]},
            {"maxThreadsDim[2]", cudaDevAttrMaxBlockDimZ, properties.maxThreadsDim[2]},
            {"maxGridSize[0]", cudaDevAttrMaxGridDimX, properties.maxGridSize[0]},
            {"maxGridSize[1]", cudaDevAttrMaxGridDimY, properties.maxGridSize[1]},
            {"maxGridSize[2]", cudaDevAttrMaxGridDimZ, properties.maxGridSize[2]},
            {"sharedMemPerBlock", cudaDevAttrMaxSharedMemoryPerBlock, (int)properties.sharedMemPerBlock},
            {"regsPerBlock", cudaDevAttrMaxRegistersPerBlock, properties.regsPerBlock},
            {"warpSize", cudaDevAttrWarpSize, properties.warpSize},
            {"pciBusID", cudaDevAttrPciBusId, properties.pciBusID},
            {"pciDeviceID", cudaDevAttrPciDeviceId, properties.pciDeviceID},
            {"unifiedAddressing", cudaDevAttrUnifiedAddressing, properties.unifiedAddressing},
            {"l2CacheSize", cudaDevAttrL2CacheSize, properties.l2CacheSize},
            {"maxThreadsPerMultiProcessor", cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
        };
        for (auto &pair : agree) {
            int value = attribute(pair.attribute, device);
            REQUIRE(value == pair.value, "device %d: %s is %d by its properties, %d by its attribute", device, pair.name,
                    pair.value, value);
        }
        REQUIRE(properties.warpSize == 32, "a warp of %d", properties.warpSize);
        REQUIRE(properties.maxThreadsPerBlock >= 1024 && properties.sharedMemPerBlock >= 48 * 1024,
                "device %d is smaller than any that CUDA 13 supports", device);
    }
    return pass("%d device(s)", count);
}
