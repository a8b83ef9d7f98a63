// NVML lists the processes that use a device, each with the memory that it uses, and says which processors and memory are near it.
#define PROGRAM "nvml_processes"
#include "other_process.h"

#include <dlfcn.h>
#include <sched.h>

#include <map>
#include <vector>

typedef int Return;  // nvmlReturn_t
typedef struct Opaque *Device;
enum { Success = 0, InvalidArgument = 2, NotSupported = 3, InsufficientSize = 7 };
typedef unsigned long long Long;
typedef std::map<unsigned, Long> Processes;  // bytes by process ID

struct InfoV1 {
    unsigned pid;
    Long memory;
};
struct Info {
    unsigned pid;
    Long memory;
    unsigned instances[2];
};
struct Detail {
    unsigned pid;
    Long memory;
    unsigned instances[2];
    Long protected_memory;
};
struct Details {
    unsigned version, mode, count;
    Detail *list;
};

constexpr size_t MIB = 1 << 20;

static void *library;

template <typename... Arguments>
static Return call(const char *name, Arguments... arguments) {
    void *found = dlsym(library, name);
    REQUIRE(found, "libnvidia-ml.so.1 has no %s", name);
    return ((Return(*)(Arguments...))found)(arguments...);
}

#define ANSWERS(expected, ...)                                                                                           \
    do {                                                                                                                 \
        Return status_ = call(__VA_ARGS__);                                                                              \
        if (status_ != expected) fail("%s: expected %d, got %d", #__VA_ARGS__, (int)expected, status_);                  \
    } while (0)

template <typename Entry>
static Processes listed(const char *name, Device device) {
    std::vector<Entry> entries(1024);
    unsigned count = entries.size();
    ANSWERS(Success, name, device, &count, entries.data());
    Processes all;
    for (unsigned i = 0; i < count; i++) all[entries[i].pid] = entries[i].memory;
    REQUIRE(all.size() == count, "%s lists a process twice", name);
    return all;
}

static Processes compute(Device device) { return listed<Info>("nvmlDeviceGetComputeRunningProcesses_v3", device); }

// What the parent waits for may take a while on a busy machine.
template <typename Condition>
static void eventually(const char *what, Condition condition) {
    for (int i = 0; i < 6000; i++) {
        if (condition()) return;
        usleep(10000);
    }
    fail("not within a minute: %s", what);
}

static bool holds(const Processes &all, unsigned process, Long least) {
    auto found = all.find(process);
    return found != all.end() && found->second >= least;
}

static void check_processes(Device device, char **argv) {
    const unsigned pid = getpid();
    unsigned count = 0;
    if (!dlsym(library, "rgpu_libnvml")) {
        // In a container, NVIDIA's library knows no processes.
        Return status = call("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, (Info *)nullptr);
        REQUIRE(status == Success || status == InsufficientSize, "processes: %d", status);
        return;
    }
    char *memory = nullptr;
    CHECK(cudaMalloc(&memory, 32 * MIB));
    eventually("this process is listed", [&] { return holds(compute(device), pid, 32 * MIB); });

    OtherProcess other = start_other(argv);
    char byte = 0;
    REQUIRE(read(other.socket, &byte, 1) == 1, "the other process has failed");
    const unsigned other_pid = other.pid;
    eventually("the other process is listed, too", [&] { return holds(compute(device), other_pid, 16 * MIB); });
    // Programs that run beside this one are in the lists as well. A process may have more memory than its program uses, and get more at any time.
    auto of_test = [&](const Processes &all) {
        Processes two;
        for (auto [process, bytes] : all)
            if (process == pid || process == other_pid) two[process] = bytes;
        return two;
    };
    Processes both = of_test(compute(device));
    REQUIRE(both.size() == 2 && both[pid] >= 32 * MIB && both[other_pid] >= 16 * MIB,
            "%zu processes, this one with %llu bytes, the other with %llu", both.size(), both[pid], both[other_pid]);
    auto are_listed = [&](const Processes &all) { return holds(all, pid, 32 * MIB) && holds(all, other_pid, 16 * MIB); };
    REQUIRE(are_listed(listed<InfoV1>("nvmlDeviceGetComputeRunningProcesses", device)), "the first version lists others");
    REQUIRE(are_listed(listed<Info>("nvmlDeviceGetComputeRunningProcesses_v2", device)), "the second version lists others");
    REQUIRE(listed<Info>("nvmlDeviceGetGraphicsRunningProcesses_v3", device).empty(), "there are processes that draw");

    // With too little room, only the number is written.
    Info one = {7, 7, {7, 7}};
    ANSWERS(InsufficientSize, "nvmlDeviceGetComputeRunningProcesses_v3", device, &count, (Info *)nullptr);
    REQUIRE(count >= 2, "room for %u processes is needed", count);
    count = 1;
    ANSWERS(InsufficientSize, "nvmlDeviceGetComputeRunningProcesses_v3", device, &count, &one);
    REQUIRE(count >= 2 && one.pid == 7 && one.memory == 7, "room for %u processes is needed", count);
    ANSWERS(InvalidArgument, "nvmlDeviceGetComputeRunningProcesses_v3", device, &count, (Info *)nullptr);
    ANSWERS(InvalidArgument, "nvmlDeviceGetComputeRunningProcesses_v3", device, (unsigned *)nullptr, &one);

    std::vector<Detail> details(1024);
    Details list = {sizeof list | 1 << 24, 0, (unsigned)details.size(), details.data()};
    ANSWERS(Success, "nvmlDeviceGetRunningProcessDetailList", device, &list);
    Processes in_detail;
    for (unsigned i = 0; i < list.count; i++) {
        REQUIRE(details[i].instances[0] == ~0u && details[i].instances[1] == ~0u && details[i].protected_memory == 0,
                "process %u in detail", details[i].pid);
        in_detail[details[i].pid] = details[i].memory;
    }
    REQUIRE(are_listed(in_detail), "%u processes in detail, which are others", list.count);
    list.count = details.size();
    list.mode = 1;
    ANSWERS(Success, "nvmlDeviceGetRunningProcessDetailList", device, &list);
    REQUIRE(list.count == 0, "%u processes that draw", list.count);

    REQUIRE(write(other.socket, &byte, 1) == 1, "the other process is gone");
    int status = -1;
    REQUIRE(waitpid(other.pid, &status, 0) == other.pid && status == 0, "the other process ended with %x", status);
    eventually("the other process is no longer listed", [&] { return compute(device).count(other_pid) == 0; });
    CHECK(cudaFree(memory));
}

static void check_affinity(Device device) {
    unsigned long cpus[16] = {}, nodes[16] = {};
    ANSWERS(InvalidArgument, "nvmlDeviceGetCpuAffinity", device, 0u, cpus);
    ANSWERS(InvalidArgument, "nvmlDeviceGetCpuAffinity", device, 16u, (unsigned long *)nullptr);
    Return status = call("nvmlDeviceGetCpuAffinity", device, 16u, cpus);
    if (status == NotSupported) return;
    REQUIRE(status == Success, "processors: %d", status);
    if (!dlsym(library, "rgpu_libnvml")) return;
    // The GPU is far from all of them alike.
    cpu_set_t before, narrow, after;
    REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0, "this thread's processors");
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        REQUIRE(!CPU_ISSET(cpu, &before) || (cpus[cpu / 64] >> (cpu % 64) & 1), "processor %d is far", cpu);
    unsigned long socket[16] = {};
    ANSWERS(Success, "nvmlDeviceGetCpuAffinityWithinScope", device, 16u, socket, 1u);
    REQUIRE(!memcmp(cpus, socket, sizeof cpus), "a socket has other processors");
    ANSWERS(InvalidArgument, "nvmlDeviceGetCpuAffinityWithinScope", device, 16u, socket, 2u);
    ANSWERS(Success, "nvmlDeviceGetMemoryAffinity", device, 16u, nodes, 0u);
    unsigned long any = 0;
    for (unsigned long word : nodes) any |= word;
    REQUIRE(any, "no NUMA node");
    int first = 0;
    while (!CPU_ISSET(first, &before)) first++;
    CPU_ZERO(&narrow);
    CPU_SET(first, &narrow);
    REQUIRE(sched_setaffinity(0, sizeof narrow, &narrow) == 0, "one processor");
    // As all are near, a thread stays where it is bound.
    ANSWERS(Success, "nvmlDeviceSetCpuAffinity", device);
    REQUIRE(sched_getaffinity(0, sizeof after, &after) == 0, "this thread's processors");
    REQUIRE(CPU_EQUAL(&narrow, &after), "the thread is no longer bound to processor %d", first);
    ANSWERS(Success, "nvmlDeviceClearCpuAffinity", device);
    REQUIRE(sched_getaffinity(0, sizeof after, &after) == 0, "this thread's processors");
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) REQUIRE(!CPU_ISSET(cpu, &before) || CPU_ISSET(cpu, &after), "not on processor %d", cpu);
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "other")) {
        int socket = atoi(argv[2]);
        char *memory = nullptr, byte = 0;
        CHECK(cudaMalloc(&memory, 16 * MIB));
        REQUIRE(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1, "the first process is gone");
        return pass("the other process");
    }
    parse_options(argc, argv);
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library, "%s", dlerror());
    ANSWERS(Success, "nvmlInit_v2");
    char bus_id[32];
    CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, 0));
    Device device = nullptr;
    ANSWERS(Success, "nvmlDeviceGetHandleByPciBusId_v2", (const char *)bus_id, &device);
    check_processes(device, argv);
    check_affinity(device);
    ANSWERS(Success, "nvmlShutdown");
    return pass("processes and processors");
}
