// Every question of NVML about one device that takes plain numbers: each is answered with one of NVML's own statuses, and writes no more than its structure has.
// The rest of NVML is called too: events, pairs of devices, processes, names of devices.
#define PROGRAM "nvml_questions"
#include "common.h"

#include <dlfcn.h>
#include <unistd.h>

typedef int Return;  // nvmlReturn_t
enum { Success = 0, InvalidArgument = 2, NotSupported = 3, NoPermission = 4, NotFound = 6, InsufficientSize = 7, Timeout = 10, FunctionNotFound = 13, OldVersion = 25 };
typedef uintptr_t Word;

enum Shape { Block, Words, Text, List, Struct };
struct Question {
    const char *name;
    Shape shape;
    int numbers;       // that the function takes after the device
    unsigned size;     // of the block, the structure or an element in bytes, or how many words
    unsigned version;  // of the structure
};

static const Question questions[] = {
    {"nvmlDeviceGetName", Text, 0, 0, 0},
    {"nvmlDeviceGetUUID", Text, 0, 0, 0},
    {"nvmlDeviceGetSerial", Text, 0, 0, 0},
    {"nvmlDeviceGetBoardPartNumber", Text, 0, 0, 0},
    {"nvmlDeviceGetVbiosVersion", Text, 0, 0, 0},
    {"nvmlDeviceGetInforomImageVersion", Text, 0, 0, 0},
    {"nvmlDeviceGetInforomVersion", Text, 1, 0, 0},
    {"nvmlDeviceGetGspFirmwareVersion", Block, 0, 64, 0},
    {"nvmlDeviceGetPciInfo_v3", Block, 0, 68, 0},
    {"nvmlDeviceGetPciInfoExt", Struct, 0, 64, 1},
    {"nvmlDeviceGetMemoryInfo", Block, 0, 24, 0},
    {"nvmlDeviceGetMemoryInfo_v2", Struct, 0, 40, 2},
    {"nvmlDeviceGetBAR1MemoryInfo", Block, 0, 24, 0},
    {"nvmlDeviceGetBrand", Block, 0, 4, 0},
    {"nvmlDeviceGetArchitecture", Block, 0, 4, 0},
    {"nvmlDeviceGetCudaComputeCapability", Words, 0, 2, 0},
    {"nvmlDeviceGetMinorNumber", Block, 0, 4, 0},
    {"nvmlDeviceGetBoardId", Block, 0, 4, 0},
    {"nvmlDeviceGetMultiGpuBoard", Block, 0, 4, 0},
    {"nvmlDeviceGetModuleId", Block, 0, 4, 0},
    {"nvmlDeviceGetBusType", Block, 0, 4, 0},
    {"nvmlDeviceGetIrqNum", Block, 0, 4, 0},
    {"nvmlDeviceGetNumGpuCores", Block, 0, 4, 0},
    {"nvmlDeviceGetMemoryBusWidth", Block, 0, 4, 0},
    {"nvmlDeviceGetPowerSource", Block, 0, 4, 0},
    {"nvmlDeviceGetAttributes_v2", Block, 0, 40, 0},
    {"nvmlDeviceGetInforomConfigurationChecksum", Block, 0, 4, 0},
    {"nvmlDeviceGetDisplayMode", Block, 0, 4, 0},
    {"nvmlDeviceGetDisplayActive", Block, 0, 4, 0},
    {"nvmlDeviceGetPersistenceMode", Block, 0, 4, 0},
    {"nvmlDeviceGetComputeMode", Block, 0, 4, 0},
    {"nvmlDeviceGetEccMode", Words, 0, 2, 0},
    {"nvmlDeviceGetDefaultEccMode", Block, 0, 4, 0},
    {"nvmlDeviceGetMigMode", Words, 0, 2, 0},
    {"nvmlDeviceGetMaxMigDeviceCount", Block, 0, 4, 0},
    {"nvmlDeviceGetGpuOperationMode", Words, 0, 2, 0},
    {"nvmlDeviceGetVirtualizationMode", Block, 0, 4, 0},
    {"nvmlDeviceGetAddressingMode", Struct, 0, 8, 1},
    {"nvmlDeviceGetGspFirmwareMode", Words, 0, 2, 0},
    {"nvmlDeviceGetAPIRestriction", Block, 1, 4, 0},
    {"nvmlDeviceGetAccountingMode", Block, 0, 4, 0},
    {"nvmlDeviceGetAccountingBufferSize", Block, 0, 4, 0},
    {"nvmlDeviceGetConfComputeProtectedMemoryUsage", Block, 0, 24, 0},
    {"nvmlDeviceGetGpuUptime_v1", Block, 0, 4, 0},
    {"nvmlDeviceGetUtilizationRates", Block, 0, 8, 0},
    {"nvmlDeviceGetEncoderUtilization", Words, 0, 2, 0},
    {"nvmlDeviceGetDecoderUtilization", Words, 0, 2, 0},
    {"nvmlDeviceGetJpgUtilization", Words, 0, 2, 0},
    {"nvmlDeviceGetOfaUtilization", Words, 0, 2, 0},
    {"nvmlDeviceGetTemperature", Block, 1, 4, 0},
    {"nvmlDeviceGetTemperatureV", Struct, 0, 12, 1},
    {"nvmlDeviceGetTemperatureThreshold", Block, 1, 4, 0},
    {"nvmlDeviceGetMarginTemperature", Struct, 0, 8, 1},
    {"nvmlDeviceGetPowerUsage", Block, 0, 4, 0},
    {"nvmlDeviceGetPowerManagementMode", Block, 0, 4, 0},
    {"nvmlDeviceGetPowerManagementLimit", Block, 0, 4, 0},
    {"nvmlDeviceGetPowerManagementLimitConstraints", Words, 0, 2, 0},
    {"nvmlDeviceGetPowerManagementDefaultLimit", Block, 0, 4, 0},
    {"nvmlDeviceGetEnforcedPowerLimit", Block, 0, 4, 0},
    {"nvmlDeviceGetTotalEnergyConsumption", Block, 0, 8, 0},
    {"nvmlDeviceGetPerformanceState", Block, 0, 4, 0},
    {"nvmlDeviceGetPowerState", Block, 0, 4, 0},
    {"nvmlDeviceGetCurrentClocksThrottleReasons", Block, 0, 8, 0},
    {"nvmlDeviceGetCurrentClocksEventReasons", Block, 0, 8, 0},
    {"nvmlDeviceGetSupportedClocksThrottleReasons", Block, 0, 8, 0},
    {"nvmlDeviceGetSupportedClocksEventReasons", Block, 0, 8, 0},
    {"nvmlDeviceGetClockInfo", Block, 1, 4, 0},
    {"nvmlDeviceGetMaxClockInfo", Block, 1, 4, 0},
    {"nvmlDeviceGetApplicationsClock", Block, 1, 4, 0},
    {"nvmlDeviceGetDefaultApplicationsClock", Block, 1, 4, 0},
    {"nvmlDeviceGetClock", Block, 2, 4, 0},
    {"nvmlDeviceGetMaxCustomerBoostClock", Block, 1, 4, 0},
    {"nvmlDeviceGetAutoBoostedClocksEnabled", Words, 0, 2, 0},
    {"nvmlDeviceGetAdaptiveClockInfoStatus", Block, 0, 4, 0},
    {"nvmlDeviceGetViolationStatus", Block, 1, 16, 0},
    {"nvmlDeviceGetSupportedMemoryClocks", List, 0, 4, 0},
    {"nvmlDeviceGetSupportedGraphicsClocks", List, 1, 4, 0},
    {"nvmlDeviceGetDynamicPstatesInfo", Block, 0, 132, 0},
    {"nvmlDeviceGetFanSpeed", Block, 0, 4, 0},
    {"nvmlDeviceGetFanSpeed_v2", Block, 1, 4, 0},
    {"nvmlDeviceGetNumFans", Block, 0, 4, 0},
    {"nvmlDeviceGetTargetFanSpeed", Block, 1, 4, 0},
    {"nvmlDeviceGetMinMaxFanSpeed", Words, 0, 2, 0},
    {"nvmlDeviceGetFanSpeedRPM", Struct, 0, 12, 1},
    {"nvmlDeviceGetMaxPcieLinkGeneration", Block, 0, 4, 0},
    {"nvmlDeviceGetGpuMaxPcieLinkGeneration", Block, 0, 4, 0},
    {"nvmlDeviceGetMaxPcieLinkWidth", Block, 0, 4, 0},
    {"nvmlDeviceGetCurrPcieLinkGeneration", Block, 0, 4, 0},
    {"nvmlDeviceGetCurrPcieLinkWidth", Block, 0, 4, 0},
    {"nvmlDeviceGetPcieThroughput", Block, 1, 4, 0},
    {"nvmlDeviceGetPcieReplayCounter", Block, 0, 4, 0},
    {"nvmlDeviceGetPcieLinkMaxSpeed", Block, 0, 4, 0},
    {"nvmlDeviceGetPcieSpeed", Block, 0, 4, 0},
    {"nvmlDeviceValidateInforom", Words, 0, 0, 0},
    {"nvmlDeviceGetTotalEccErrors", Block, 2, 8, 0},
    {"nvmlDeviceGetDetailedEccErrors", Block, 2, 32, 0},
    {"nvmlDeviceGetMemoryErrorCounter", Block, 3, 8, 0},
    {"nvmlDeviceGetRetiredPages", List, 1, 8, 0},
    {"nvmlDeviceGetRetiredPagesPendingStatus", Block, 0, 4, 0},
    {"nvmlDeviceGetRemappedRows", Words, 0, 4, 0},
    {"nvmlDeviceGetRemappedRows_v2", Block, 0, 24, 0},
    {"nvmlDeviceGetRowRemapperHistogram", Block, 0, 20, 0},
    {"nvmlDeviceGetUnrepairableMemoryFlag_v1", Block, 0, 4, 0},
    {"nvmlDeviceGetSramEccErrorStatus", Struct, 0, 104, 1},
    {"nvmlDeviceGetRepairStatus", Struct, 0, 12, 1},
    {"nvmlDeviceGetNvLinkState", Block, 1, 4, 0},
    {"nvmlDeviceGetNvLinkVersion", Block, 1, 4, 0},
    {"nvmlDeviceGetNvLinkCapability", Block, 2, 4, 0},
    {"nvmlDeviceGetNvLinkRemotePciInfo_v2", Block, 1, 68, 0},
    {"nvmlDeviceGetNvLinkErrorCounter", Block, 2, 8, 0},
    {"nvmlDeviceGetNvLinkRemoteDeviceType", Block, 1, 4, 0},
    {"nvmlDeviceGetEncoderCapacity", Block, 1, 4, 0},
    {"nvmlDeviceGetEncoderStats", Words, 0, 3, 0},
    {"nvmlDeviceGetFBCStats", Block, 0, 12, 0},
    {"nvmlDeviceGetC2cModeInfoV", Block, 0, 4, 0},
    {"nvmlDeviceGetCapabilities", Struct, 0, 8, 1},
    {"nvmlDeviceGetPlatformInfo", Struct, 0, 44, 1},
    {"nvmlDeviceGetPlatformInfo", Struct, 0, 44, 2},
    {"nvmlDeviceGetPdi", Struct, 0, 16, 1},
    {"nvmlDeviceGetPerformanceModes", Struct, 0, 2052, 1},
    {"nvmlDeviceGetCurrentClockFreqs", Struct, 0, 2052, 1},
    {"nvmlDeviceGetPciInfo", Block, 0, 32, 0},
    {"nvmlDeviceGetPciInfo_v2", Block, 0, 36, 0},
    {"nvmlDeviceGetNvLinkRemotePciInfo", Block, 1, 36, 0},
};

static void *library;

// Numbers and addresses are passed alike.
static Return call(const char *name, Word a = 0, Word b = 0, Word c = 0, Word d = 0, Word e = 0, Word f = 0) {
    void *found = dlsym(library, name);
    if (!found) return FunctionNotFound;
    return ((Return(*)(Word, Word, Word, Word, Word, Word))found)(a, b, c, d, e, f);
}

static Word at(void *pointer) { return (Word)pointer; }

static const unsigned char Untouched = 0xa5;
static unsigned char room[4][8192];

// The bytes of an answer that were written, at most.
static unsigned written(const unsigned char *bytes) {
    unsigned last = sizeof room[0];
    while (last && bytes[last - 1] == Untouched) last--;
    return last;
}

static Return ask(const Question &question, Word device) {
    memset(room, Untouched, sizeof room);
    Word words[6] = {device};
    int next = 1 + question.numbers;
    unsigned count = 64, most = question.size;
    switch (question.shape) {
        case Struct:
            memset(room[0], 0, question.size);
            *(unsigned *)room[0] = question.size | question.version << 24;
            words[next] = at(room[0]);
            break;
        case Block: words[next] = at(room[0]); break;
        case Words:
            for (unsigned i = 0; i < question.size; i++) words[next++] = at(room[i]);
            most = 4;
            break;
        case Text:
            words[next++] = at(room[0]);
            words[next] = most = 96;
            break;
        case List:
            words[next++] = at(&count);
            words[next] = at(room[0]);
            most = 64 * question.size;
            break;
    }
    Return status = call(question.name, words[0], words[1], words[2], words[3], words[4], words[5]);
    for (int i = 0; i < 4; i++)
        REQUIRE(written(room[i]) <= most, "%s wrote %u bytes of %u", question.name, written(room[i]), most);
    switch (status) {
        case Success:
        case InvalidArgument:
        case NotSupported:
        case NoPermission:
        case NotFound:
        case OldVersion:
        // Drivers have more of them each year.
        case FunctionNotFound: return status;
        case InsufficientSize: REQUIRE(question.shape == List, "%s: too little room", question.name); return status;
        default: fail("%s answers %d", question.name, status); return status;
    }
}

#define NVML(...)                                                                                                        \
    do {                                                                                                                 \
        Return status_ = call(__VA_ARGS__);                                                                              \
        if (status_ != Success) fail("%s: %d", #__VA_ARGS__, status_);                                                   \
    } while (0)

// Succeeds, or says that there is no such thing.
#define MAY(...)                                                                                                         \
    do {                                                                                                                 \
        Return status_ = call(__VA_ARGS__);                                                                              \
        if (status_ != Success && status_ != NotSupported && status_ != NotFound && status_ != NoPermission)             \
            fail("%s: %d", #__VA_ARGS__, status_);                                                                       \
    } while (0)

int main(int argc, char **argv) {
    parse_options(argc, argv);
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library, "%s", dlerror());
    NVML("nvmlInit");
    NVML("nvmlInit");
    NVML("nvmlInitWithFlags", 0);
    char text[256];
    unsigned count = 0, number = 0;
    int cuda = 0;
    MAY("nvmlSystemGetDriverVersion", at(text), sizeof text);
    MAY("nvmlSystemGetNVMLVersion", at(text), sizeof text);
    NVML("nvmlSystemGetCudaDriverVersion", at(&cuda));
    NVML("nvmlSystemGetProcessName", getpid(), at(text), sizeof text);
    REQUIRE(strstr(text, PROGRAM), "this process is \"%s\"", text);
    NVML("nvmlDeviceGetCount", at(&count));
    REQUIRE(count > 0, "no device");
    MAY("nvmlGetExcludedDeviceCount", at(&number));

    Word device = 0, same = 0;
    NVML("nvmlDeviceGetHandleByIndex", 0, at(&device));
    unsigned char pci[68];
    NVML("nvmlDeviceGetPciInfo_v3", device, at(pci));
    NVML("nvmlDeviceGetHandleByPciBusId", at(pci), at(&same));  // the short form of the address comes first
    REQUIRE(same == device, "the PCI address leads to another device");
    struct {
        unsigned version, kind;
        char text[44];
    } uuid = {sizeof uuid | 1 << 24, 1, {}};
    NVML("nvmlDeviceGetUUID", device, at(uuid.text), sizeof uuid.text);
    NVML("nvmlDeviceGetHandleByUUIDV", at(&uuid), at(&same));
    REQUIRE(same == device, "the UUID leads to another device");
    if (call("nvmlDeviceGetSerial", device, at(text), 96) == Success) {
        NVML("nvmlDeviceGetHandleBySerial", at(text), at(&same));
        REQUIRE(same == device, "the serial number leads to another device");
    } else {
        Return status = call("nvmlDeviceGetHandleBySerial", at((void *)"0123456789"), at(&same));
        REQUIRE(status == NotFound, "a serial number that no device has: %d", status);
    }
    MAY("nvmlDeviceIsMigDeviceHandle", device, at(&number));
    MAY("nvmlDeviceOnSameBoard", device, device, at(&number));
    for (unsigned other = 0; other < count; other++) {
        Word second = 0;
        NVML("nvmlDeviceGetHandleByIndex_v2", other, at(&second));
        MAY("nvmlDeviceGetTopologyCommonAncestor", device, second, at(&number));
            Return status = call("nvmlDeviceGetP2PStatus", device, second, 0, at(&number));
        REQUIRE(status == Success || status == NotSupported || status == InvalidArgument, "devices 0 and %u: %d", other, status);
    }

    const char *(*text_of)(Return) = (const char *(*)(Return))dlsym(library, "nvmlErrorString");
    REQUIRE(text_of && !strcmp(text_of(Success), "Success"), "the text of no error");

    unsigned asked = 0;
    for (const Question &question : questions) {
        Return first = ask(question, device), again = ask(question, device);
        REQUIRE(first == again, "%s answers %d, then %d", question.name, first, again);
        asked++;
    }
    unsigned char field[40] = {82};  // NVML_FI_DEV_ECC_CURRENT… of a device that may have none: the status is the field's own
    MAY("nvmlDeviceGetFieldValues", device, 1, at(field));

    for (const char *kind : {"Compute", "Graphics", "MPSCompute"})
        for (const char *version : {"", "_v2", "_v3"}) {
            char name[80];
            snprintf(name, sizeof name, "nvmlDeviceGet%sRunningProcesses%s", kind, version);
            static unsigned char processes[16384];
            count = 64;
            MAY(name, device, at(&count), at(processes));
        }
    count = 0;
    Return status = call("nvmlDeviceGetProcessUtilization", device, 0, at(&count), 0);
    REQUIRE(status == Success || status == NotFound || status == NotSupported || status == InsufficientSize,
            "processes' part of the device: %d", status);
    unsigned char fabric[64] = {};
    call("nvmlDeviceGetGpuFabricInfo", device, at(fabric));
    *(unsigned *)fabric = 36 | 2 << 24;
    call("nvmlDeviceGetGpuFabricInfoV", device, at(fabric));

    Word set = 0;
    unsigned long long types = 0;
    NVML("nvmlEventSetCreate", at(&set));
    MAY("nvmlDeviceGetSupportedEventTypes", device, at(&types));
    MAY("nvmlDeviceRegisterEvents", device, types, set);
    unsigned char event[64];
    for (const char *wait : {"nvmlEventSetWait", "nvmlEventSetWait_v2"}) {
        status = call(wait, set, at(event), 1);
        REQUIRE(status == Timeout, "%s: %d, and nothing has happened", wait, status);
    }
    NVML("nvmlEventSetFree", set);
    for (int i = 0; i < 3; i++) NVML("nvmlShutdown");
    return pass("%u questions", asked);
}
