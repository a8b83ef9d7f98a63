// NVML beside CUDA in one program: libnvidia-ml.so.1 is opened as pynvml and nvml-wrapper open it, and what it says of a
// device is what CUDA says of it. What a device does not have (a fan, on most servers) must be "not supported", and what it
// has must be a possible number. What programs ask when they start, versions and clocks, every device has.
#define PROGRAM "nvml"
#include "common.h"

#include <dlfcn.h>

typedef int Return;  // nvmlReturn_t
typedef struct Opaque *Device;
enum { Success = 0, Uninitialized = 1, InvalidArgument = 2, NotSupported = 3, NotFound = 6, InsufficientSize = 7 };

struct Memory {
    unsigned long long total, free, used;
};
struct MemoryV2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct Utilization {
    unsigned gpu, memory;
};
struct Pci {
    char short_id[16];
    unsigned domain, bus, device, ids, subsystem;
    char id[32];
};

static void *library;
static const char *(*error_string)(Return);

template <typename... Arguments>
static Return call(const char *name, Arguments... arguments) {
    void *found = dlsym(library, name);
    REQUIRE(found, "libnvidia-ml.so.1 has no %s", name);
    return ((Return(*)(Arguments...))found)(arguments...);
}

#define NVML(...)                                                                                                        \
    do {                                                                                                                 \
        Return status_ = call(__VA_ARGS__);                                                                              \
        if (status_ != Success) fail("%s: %s (%d)", #__VA_ARGS__, error_string(status_), status_);                       \
    } while (0)

#define ANSWERS(expected, ...)                                                                                           \
    do {                                                                                                                 \
        Return status_ = call(__VA_ARGS__);                                                                              \
        if (status_ != expected) fail("%s: expected %d, got %d", #__VA_ARGS__, (int)expected, status_);                  \
    } while (0)

// A reading that a device may lack; -1 where it does.
static long reading(const char *name, Device device, long most) {
    unsigned value = 0;
    Return status = call(name, device, &value);
    if (status == NotSupported) return -1;
    REQUIRE(status == Success, "%s: %s (%d)", name, error_string(status), status);
    REQUIRE(value <= (unsigned long)most, "%s: %u is beyond %ld", name, value, most);
    return value;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library, "%s", dlerror());
    error_string = (const char *(*)(Return))dlsym(library, "nvmlErrorString");
    REQUIRE(error_string, "libnvidia-ml.so.1 has no nvmlErrorString");
    REQUIRE(!strcmp(error_string(Success), "Success") && !strcmp(error_string(NotSupported), "Not Supported"),
            "nvmlErrorString: \"%s\", \"%s\"", error_string(Success), error_string(NotSupported));

    unsigned count = 0;
    ANSWERS(Uninitialized, "nvmlDeviceGetCount_v2", &count);
    NVML("nvmlInit_v2");
    NVML("nvmlInit_v2");
    NVML("nvmlShutdown");  // of two
    NVML("nvmlDeviceGetCount_v2", &count);
    int cuda_count = 0, cuda_version = 0, nvml_cuda_version = 0;
    CHECK(cudaGetDeviceCount(&cuda_count));
    unsigned units = 7;  // enclosures of S-class systems
    NVML("nvmlUnitGetCount", &units);
    REQUIRE(units == 0, "%u units", units);
    REQUIRE((int)count >= cuda_count, "NVML knows %u devices, CUDA %d", count, cuda_count);
    // In a container both have the same, in the same order.
    bool contained = options.word == "container";
    REQUIRE(!contained || (int)count == cuda_count, "in a container NVML knows %u devices, CUDA %d", count, cuda_count);
    CHECK(cudaDriverGetVersion(&cuda_version));
    NVML("nvmlSystemGetCudaDriverVersion_v2", &nvml_cuda_version);
    REQUIRE(nvml_cuda_version >= cuda_version, "CUDA %d, to NVML %d", cuda_version, nvml_cuda_version);

    char driver[80], version[80];
    NVML("nvmlSystemGetDriverVersion", driver, 80u);
    NVML("nvmlSystemGetNVMLVersion", version, 80u);
    REQUIRE(atof(driver) >= 500 && strstr(version, "."), "driver %s, NVML %s", driver, version);

    Device device = nullptr;
    ANSWERS(InvalidArgument, "nvmlDeviceGetHandleByIndex_v2", count, &device);
    ANSWERS(InvalidArgument, "nvmlDeviceGetHandleByIndex_v2", 0u, (Device *)nullptr);
    ANSWERS(NotFound, "nvmlDeviceGetHandleByUUID", "GPU-00000000-0000-0000-0000-000000000000", &device);

    std::string names;
    for (int ordinal = 0; ordinal < cuda_count; ordinal++) {
        cudaDeviceProp properties;
        CHECK(cudaGetDeviceProperties(&properties, ordinal));
        char bus_id[32];
        CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, ordinal));
        NVML("nvmlDeviceGetHandleByPciBusId_v2", (const char *)bus_id, &device);

        char name[96], uuid[96], small[4];
        NVML("nvmlDeviceGetName", device, name, 96u);
        REQUIRE(!strcmp(name, properties.name), "the name \"%s\", to CUDA \"%s\"", name, properties.name);
        ANSWERS(InsufficientSize, "nvmlDeviceGetName", device, small, 4u);
        NVML("nvmlDeviceGetUUID", device, uuid, 96u);
        char expected[64];
        int length = snprintf(expected, sizeof expected, "GPU-");
        for (int i = 0; i < 16; i++) {
            const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
            length += snprintf(expected + length, sizeof expected - length, "%s%02x", dash,
                               (unsigned char)properties.uuid.bytes[i]);
        }
        REQUIRE(!strcmp(uuid, expected), "the UUID %s, to CUDA %s", uuid, expected);
        Device same = nullptr;
        NVML("nvmlDeviceGetHandleByUUID", (const char *)uuid, &same);
        REQUIRE(same == device, "the UUID leads to another device");
        unsigned index = ~0u;
        NVML("nvmlDeviceGetIndex", device, &index);
        REQUIRE(index < count, "index %u of %u", index, count);
        REQUIRE(!contained || (int)index == ordinal, "in a container CUDA's device %d is NVML's %u", ordinal, index);

        int major = 0, minor = 0;
        NVML("nvmlDeviceGetCudaComputeCapability", device, &major, &minor);
        REQUIRE(major == properties.major && minor == properties.minor, "compute capability %d.%d", major, minor);
        Pci pci;
        NVML("nvmlDeviceGetPciInfo_v3", device, &pci);
        REQUIRE((int)pci.bus == properties.pciBusID && (int)pci.device == properties.pciDeviceID, "at %s", pci.id);

        Memory memory;
        NVML("nvmlDeviceGetMemoryInfo", device, &memory);
        REQUIRE(memory.total >= properties.totalGlobalMem && memory.free <= memory.total && memory.used <= memory.total,
                "%llu bytes, %llu free, %llu used", memory.total, memory.free, memory.used);
        MemoryV2 again = {};
        ANSWERS(13, "nvmlDeviceGetMemoryInfo_v2", device, &again);
        again.version = sizeof again | 2 << 24;
        NVML("nvmlDeviceGetMemoryInfo_v2", device, &again);
        REQUIRE(again.total == memory.total, "%llu bytes in version 2, %llu in version 1", again.total, memory.total);

        for (unsigned clock = 0; clock < 4; clock++) {  // graphics, SM, memory, video
            unsigned now = 0, most = 0;
            NVML("nvmlDeviceGetClockInfo", device, clock, &now);
            NVML("nvmlDeviceGetMaxClockInfo", device, clock, &most);
            REQUIRE(now > 0 && now <= most, "clock %u: %u MHz of %u", clock, now, most);
        }
        unsigned bits = 0;
        NVML("nvmlDeviceGetMemoryBusWidth", device, &bits);
        REQUIRE((int)bits == properties.memoryBusWidth, "a bus of %u bits, to CUDA of %d", bits, properties.memoryBusWidth);

        Utilization utilization = {};
        Return status = call("nvmlDeviceGetUtilizationRates", device, &utilization);
        REQUIRE(status == NotSupported || (status == Success && utilization.gpu <= 100 && utilization.memory <= 100),
                "utilization %u %%: %s", utilization.gpu, error_string(status));
        unsigned celsius = 0;
        status = call("nvmlDeviceGetTemperature", device, 0u, &celsius);
        REQUIRE(status == NotSupported || (status == Success && celsius < 150), "%u °C: %s", celsius, error_string(status));
        reading("nvmlDeviceGetPowerUsage", device, 5000000);
        reading("nvmlDeviceGetFanSpeed", device, 100);
        reading("nvmlDeviceGetPerformanceState", device, 32);
        unsigned processes = 0;
        status = call("nvmlDeviceGetComputeRunningProcesses_v3", device, &processes, (void *)nullptr);
        REQUIRE(status == Success || status == InsufficientSize, "processes: %s", error_string(status));
        names += std::string(ordinal ? ", " : "") + name;
    }
    NVML("nvmlShutdown");
    ANSWERS(Uninitialized, "nvmlDeviceGetCount_v2", &count);
    ANSWERS(Uninitialized, "nvmlShutdown");
    return pass("%d device(s): %s", cuda_count, names.c_str());
}
