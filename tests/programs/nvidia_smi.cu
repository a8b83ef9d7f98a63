// What nvidia-smi 580 asks NVML, in its order and with its arguments, as it was traced on an H200: `nvidia-smi`, `-L`, `dmon`,
// `pmon`, `-q` and `--query-gpu`. Every call must succeed where nvidia-smi needs it, or say "not supported" where nvidia-smi shows
// N/A. The functions of its private table are called only in rgpu's library: another driver's table may be another.
#define PROGRAM "nvidia_smi"
#include "common.h"

#include <dlfcn.h>
#include <vector>

typedef int Return;  // nvmlReturn_t
typedef uintptr_t Word;
enum { Success = 0, InvalidArgument = 2, NotSupported = 3, NotFound = 6, InsufficientSize = 7, NotReady = 27 };

static void *library;
static Word device;
static unsigned calls;
static unsigned char room[8192];

static Return ask(const char *name, Word a = 0, Word b = 0, Word c = 0, Word d = 0, Word e = 0) {
    void *found = dlsym(library, name);
    REQUIRE(found, "libnvidia-ml.so.1 has no %s", name);
    calls++;
    return ((Return(*)(Word, Word, Word, Word, Word))found)(a, b, c, d, e);
}

static Word at(void *pointer) { return (Word)pointer; }

// Succeeds.
#define NEEDS(...)                                                                   \
    do {                                                                             \
        Return status_ = ask(__VA_ARGS__);                                           \
        if (status_ != Success) fail("line %d: %s: %d", __LINE__, #__VA_ARGS__, status_); \
    } while (0)

// Succeeds, or the device has no such thing.
#define MAY(...)                                                                     \
    do {                                                                             \
        Return status_ = ask(__VA_ARGS__);                                           \
        if (status_ != Success && status_ != NotSupported && status_ != NotReady)    \
            fail("line %d: %s: %d", __LINE__, #__VA_ARGS__, status_);                \
    } while (0)

static unsigned number(const char *name, unsigned argument = ~0u) {
    unsigned value = ~0u;
    if (argument == ~0u)
        NEEDS(name, device, at(&value));
    else
        NEEDS(name, device, argument, at(&value));
    return value;
}

// A function that writes two words.
static void two(const char *name) {
    unsigned first = ~0u, second = ~0u;
    NEEDS(name, device, at(&first), at(&second));
    REQUIRE(first != ~0u && second != ~0u, "%s wrote %u and %u", name, first, second);
}

// A structure that begins with its version.
static void versioned(const char *name, unsigned size, unsigned version, bool needed = true) {
    memset(room, 0, sizeof room);
    *(unsigned *)room = size | version << 24;
    if (needed)
        NEEDS(name, device, at(room));
    else
        MAY(name, device, at(room));
}

struct Field {
    unsigned id, scope;
    long long time, latency;
    unsigned type, status;
    unsigned long long value;
};

static void fields(std::initializer_list<Field> asked) {
    std::vector<Field> list = asked;
    NEEDS("nvmlDeviceGetFieldValues", device, list.size(), at(list.data()));
    for (const Field &field : list)
        REQUIRE(field.status == Success || field.status == NotSupported || field.status == InvalidArgument,
                "field %u: %u", field.id, field.status);
}

typedef Return (*Slot)(Word, Word, Word, Word, Word);

// A function of nvidia-smi's table; NULL if the library is not rgpu's.
static Slot slot(unsigned place) {
    static const unsigned char id[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
    if (!dlsym(library, "rgpu_libnvml")) return nullptr;
    Word *table = nullptr;
    NEEDS("nvmlInternalGetExportTable", at(&table), (Word)id);
    REQUIRE(table[0] / sizeof(Word) > place, "the table has %zu bytes", (size_t)table[0]);
    calls++;
    return (Slot)table[place];
}

// Begins as every command does: finds the device by its index.
static void begin() {
    NEEDS("nvmlInitWithFlags", 0);
    unsigned count = 0;
    NEEDS("nvmlDeviceGetCount_v2", at(&count));
    REQUIRE(count > 0, "no device");
    NEEDS("nvmlDeviceGetHandleByIndex_v2", 0, at(&device));
    unsigned char pci[68];
    NEEDS("nvmlDeviceGetPciInfo_v3", device, at(pci));
    if (Slot address = slot(81)) {
        char text[32];
        memset(text, '#', sizeof text);
        Return status = address(0, at(text), 0, 0, 0);
        REQUIRE(status == Success && !strcmp(text, (char *)pci), "the address of device 0 is \"%.32s\", status %d", text, status);
        REQUIRE(text[strlen(text) + 1] == '#', "something is written behind the address");
        status = address(count, at(text), 0, 0, 0);
        REQUIRE(status == InvalidArgument, "the address of a device that is not there: %d", status);
    }
    unsigned index = ~0u;
    NEEDS("nvmlDeviceGetIndex", device, at(&index));
    REQUIRE(index == 0, "device 0 has the index %u", index);
}

static void list() {  // nvidia-smi -L
    begin();
    char text[96];
    NEEDS("nvmlDeviceGetName", device, at(text), 64);
    NEEDS("nvmlDeviceGetUUID", device, at(text), 96);
    two("nvmlDeviceGetMigMode");
    number("nvmlDeviceGetMaxMigDeviceCount");
    NEEDS("nvmlShutdown");
}

// The part of dmon and pmon before their tables.
static void watch() {
    begin();
    if (Slot can_be_watched = slot(72)) {
        unsigned supported = 0;
        Return status = can_be_watched(device, at(&supported), 0, 0, 0);
        REQUIRE(status == Success && supported == 1, "the device cannot be watched: status %d, %u", status, supported);
    }
    number("nvmlDeviceGetVirtualizationMode");
    two("nvmlDeviceGetMigMode");
}

static void dmon() {  // nvidia-smi dmon -s pucvmet
    watch();
    REQUIRE(number("nvmlDeviceGetPowerUsage") < 5000000, "the power");
    REQUIRE(number("nvmlDeviceGetTemperature", 0) < 150, "the temperature");
    fields({{82, 43, 0, 0, 0, 0, 0}});
    unsigned utilization[2] = {~0u, ~0u};
    NEEDS("nvmlDeviceGetUtilizationRates", device, at(utilization));
    REQUIRE(utilization[0] <= 100 && utilization[1] <= 100, "utilization %u %%, %u %%", utilization[0], utilization[1]);
    for (const char *part : {"Encoder", "Decoder", "Jpg", "Ofa"}) two((std::string("nvmlDeviceGet") + part + "Utilization").c_str());
    REQUIRE(number("nvmlDeviceGetClockInfo", 2) > 0 && number("nvmlDeviceGetClockInfo", 1) > 0, "a clock that stands still");
    unsigned long long violation[2] = {~0ull, ~0ull};
    NEEDS("nvmlDeviceGetViolationStatus", device, 0, at(violation));
    if (Slot thermal = slot(138)) {
        unsigned long long time[3] = {~0ull, ~0ull, ~0ull};
        Return status = thermal(device, at(time), 0, 0, 0);
        REQUIRE(status == NotSupported || (status == Success && time[0] != ~0ull && time[2] == ~0ull), "violation by heat: %d", status);
    }
    versioned("nvmlDeviceGetMemoryInfo_v2", 40, 2);
    NEEDS("nvmlDeviceGetBAR1MemoryInfo", device, at(room));
    MAY("nvmlDeviceGetConfComputeProtectedMemoryUsage", device, at(room));
    two("nvmlDeviceGetEccMode");
    for (unsigned kind : {0, 1}) MAY("nvmlDeviceGetTotalEccErrors", device, kind, 0, at(room));
    number("nvmlDeviceGetPcieReplayCounter");
    for (unsigned direction : {0, 1}) number("nvmlDeviceGetPcieThroughput", direction);
    NEEDS("nvmlShutdown");
}

static void pmon() {  // nvidia-smi pmon -c 1
    watch();
    if (Slot samples = slot(145)) {
        unsigned processes = 7, count = 100;
        static unsigned char list[48800];
        Return status = samples(device, 0, at(&processes), at(&count), at(list));
        REQUIRE(status == Success && processes == 0 && count == 0, "samples: status %d, %u processes, %u samples", status, processes, count);
        for (unsigned kind : {213, 214, 215}) {
            static unsigned char entries[4128 * 4];
            count = 4;
            status = slot(kind)(device, at(&count), at(entries), 0, 0);
            REQUIRE(status == Success && count == 0, "processes by slot %u: status %d, %u", kind, status, count);
        }
    }
    NEEDS("nvmlShutdown");
}

static void report() {  // nvidia-smi and nvidia-smi -q
    begin();
    char text[96];
    int cuda = 0;
    NEEDS("nvmlSystemGetDriverVersion", at(text), 80);
    REQUIRE(atof(text) > 0, "the driver's version is \"%s\"", text);
    NEEDS("nvmlSystemGetCudaDriverVersion_v2", at(&cuda));
    NEEDS("nvmlDeviceGetName", device, at(text), 64);
    number("nvmlDeviceGetBrand");
    number("nvmlDeviceGetArchitecture");
    number("nvmlDeviceGetDisplayMode");
    number("nvmlDeviceGetDisplayActive");
    number("nvmlDeviceGetPersistenceMode");
    versioned("nvmlDeviceGetAddressingMode", 8, 1);
    two("nvmlDeviceGetMigMode");
    number("nvmlDeviceGetMaxMigDeviceCount");
    number("nvmlDeviceGetAccountingMode");
    unsigned count = 0;
    NEEDS("nvmlDeviceGetAccountingPids", device, at(&count), at(room));
    unsigned pending = 0, current = 0;
    MAY("nvmlDeviceGetDriverModel_v2", device, at(&current), at(&pending));
    NEEDS("nvmlDeviceGetSerial", device, at(text), 30);
    NEEDS("nvmlDeviceGetUUID", device, at(text), 80);
    versioned("nvmlDeviceGetPdi", 16, 1);
    number("nvmlDeviceGetMinorNumber");
    NEEDS("nvmlDeviceGetVbiosVersion", device, at(text), 32);
    number("nvmlDeviceGetMultiGpuBoard");
    number("nvmlDeviceGetBoardId");
    NEEDS("nvmlDeviceGetBoardPartNumber", device, at(text), 80);
    number("nvmlDeviceGetModuleId");
    MAY("nvmlDeviceGetInforomImageVersion", device, at(text), 16);
    for (unsigned object : {0, 1, 2}) MAY("nvmlDeviceGetInforomVersion", device, object, at(text), 16);
    MAY("nvmlDeviceGetLastBBXFlushTime", device, at(room), at(room + 64));
    MAY("nvmlDeviceGetGpuOperationMode", device, at(&current), at(&pending));
    MAY("nvmlDeviceGetC2cModeInfoV", device, at(room));
    number("nvmlDeviceGetVirtualizationMode");
    MAY("nvmlDeviceGetHostVgpuMode", device, at(&current));
    MAY("nvmlDeviceGetGspFirmwareVersion", device, at(room));
    versioned("nvmlDeviceGetPciInfoExt", 64, 1);
    for (const char *name : {"nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetGpuMaxPcieLinkGeneration",
                             "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkWidth"})
        REQUIRE(number(name) <= 32, "%s: %u", name, number(name));
    MAY("nvmlDeviceGetBridgeChipInfo", device, at(room));
    fields({{95, 0, 0, 0, 0, 0, 0}});
    fields({{228, 0, 0, 0, 0, 0, 0}, {229, 0, 0, 0, 0, 0, 0}});
    MAY("nvmlDeviceGetFanSpeed", device, at(&current));
    number("nvmlDeviceGetPerformanceState");
    NEEDS("nvmlDeviceGetSupportedClocksThrottleReasons", device, at(room));
    NEEDS("nvmlDeviceGetCurrentClocksThrottleReasons", device, at(room));
    fields({{74, 0, 0, 0, 0, 0, 0}, {76, 0, 0, 0, 0, 0, 0}, {269, 0, 0, 0, 0, 0, 0}, {270, 0, 0, 0, 0, 0, 0}, {271, 0, 0, 0, 0, 0, 0}});
    versioned("nvmlDeviceGetMemoryInfo_v2", 40, 2);
    number("nvmlDeviceGetComputeMode");
    unsigned three[3];
    NEEDS("nvmlDeviceGetEncoderStats", device, at(three), at(three + 1), at(three + 2));
    NEEDS("nvmlDeviceGetFBCStats", device, at(three));
    MAY("nvmlDeviceGetDramEncryptionMode", device, at(room), at(room + 64));
    for (unsigned kind : {0, 1})
        for (unsigned counter : {0, 1}) MAY("nvmlDeviceGetMemoryErrorCounter", device, kind, counter, 0, at(room));
    versioned("nvmlDeviceGetSramEccErrorStatus", 104, 1, false);
    for (unsigned cause : {0, 1}) {
        count = 0;
        Return status = ask("nvmlDeviceGetRetiredPages", device, cause, at(&count), 0);
        REQUIRE(status == Success || status == NotSupported || status == InsufficientSize, "retired pages: %d", status);
    }
    MAY("nvmlDeviceGetRemappedRows_v2", device, at(room));
    MAY("nvmlDeviceGetRowRemapperHistogram", device, at(room));
    versioned("nvmlDeviceGetTemperatureV", 12, 1);
    versioned("nvmlDeviceGetMarginTemperature", 8, 1);
    fields({{193, 0, 0, 0, 0, 0, 0}, {194, 0, 0, 0, 0, 0, 0}, {195, 0, 0, 0, 0, 0, 0}, {196, 0, 0, 0, 0, 0, 0}});
    for (unsigned scope : {0, 1})
        fields({{185, scope, 0, 0, 0, 0, 0}, {186, scope, 0, 0, 0, 0, 0}, {187, scope, 0, 0, 0, 0, 0}, {188, scope, 0, 0, 0, 0, 0},
                {189, scope, 0, 0, 0, 0, 0}, {190, scope, 0, 0, 0, 0, 0}, {192, scope, 0, 0, 0, 0, 0}});
    for (unsigned clock : {0, 1, 2, 3}) number("nvmlDeviceGetClockInfo", clock), number("nvmlDeviceGetMaxClockInfo", clock);
    for (unsigned clock : {0, 2}) number("nvmlDeviceGetApplicationsClock", clock), number("nvmlDeviceGetDefaultApplicationsClock", clock);
    NEEDS("nvmlDeviceGetClock", device, 0, 3, at(&current));
    MAY("nvmlDeviceGetAutoBoostedClocksEnabled", device, at(&current), at(&pending));
    versioned("nvmlDeviceGetCapabilities", 8, 1);
    NEEDS("nvmlShutdown");
}

static void supported_clocks() {  // nvidia-smi --query-supported-clocks=mem,gr
    begin();
    unsigned memory[64], graphics[512], count = 0;
    Return status = ask("nvmlDeviceGetSupportedMemoryClocks", device, at(&count), 0);
    REQUIRE(status == InsufficientSize && count > 0 && count <= 64, "the memory's clocks: %d, %u of them", status, count);
    NEEDS("nvmlDeviceGetSupportedMemoryClocks", device, at(&count), at(memory));
    for (unsigned i = 0; i < count; i++) {
        unsigned most = 512;
        NEEDS("nvmlDeviceGetSupportedGraphicsClocks", device, memory[i], at(&most), at(graphics));
        REQUIRE(most > 0 && graphics[0] > 0, "no clock with the memory at %u MHz", memory[i]);
    }
    NEEDS("nvmlShutdown");
}

static void query_gpu() {  // nvidia-smi --query-gpu=… with everything that the report does not show
    begin();
    int major = 0, minor = 0;
    NEEDS("nvmlDeviceGetCudaComputeCapability", device, at(&major), at(&minor));
    number("nvmlDeviceGetPowerManagementMode");
    unsigned limit = number("nvmlDeviceGetPowerManagementLimit");
    two("nvmlDeviceGetPowerManagementLimitConstraints");
    unsigned enforced = number("nvmlDeviceGetEnforcedPowerLimit");
    if (Slot same = slot(108)) {
        unsigned value = 0;
        Return status = same(device, at(&value), 0, 0, 0);
        REQUIRE(status == Success && value == enforced, "the enforced limit of the table: %d, %u mW of %u", status, value, enforced);
    }
    REQUIRE(limit >= enforced, "a limit of %u mW, of which %u are enforced", limit, enforced);
    number("nvmlDeviceGetPowerState");
    NEEDS("nvmlShutdown");
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library, "%s", dlerror());
    list();
    report();
    dmon();
    pmon();
    query_gpu();
    supported_clocks();
    return pass("%u calls", calls);
}
