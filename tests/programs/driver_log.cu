// The driver's log: what is refused is in it, and the program's callbacks get it.
#define PROGRAM "driver_log"
#include "common.h"
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#define GIVES(expected, call)                                                                          \
    do {                                                                                               \
        CUresult result_ = (call);                                                                     \
        if (result_ != expected) fail("%s: expected %d, got %d", #call, (int)expected, (int)result_);  \
    } while (0)

#if CUDA_VERSION >= 12090

// What the messages of this test contain. There may be others: on a busy machine, the link may be interrupted for a moment.
static const char *REFUSED = "cuCoredumpGetAttribute";

typedef std::vector<std::string> Lines;

struct Told {
    Lines lines;
    CUlogsCallbackHandle handle = nullptr;
    Told *leaves_with = nullptr;  // unregisters itself and this one
};

static void CUDA_CB note(void *data, CUlogLevel level, char *message, size_t length) {
    Told &told = *(Told *)data;
    REQUIRE(level == CU_LOG_LEVEL_ERROR || level == CU_LOG_LEVEL_WARNING, "level %d", (int)level);
    REQUIRE(strlen(message) == length, "a message of %zu bytes, said to have %zu", strlen(message), length);
    if (!strstr(message, REFUSED)) return;
    told.lines.push_back(message);
    if (!told.leaves_with) return;
    GIVES(CUDA_SUCCESS, cuLogsUnregisterCallback(told.handle));
    GIVES(CUDA_SUCCESS, cuLogsUnregisterCallback(told.leaves_with->handle));
}

// The messages of this test in a log.
static Lines of_test(const std::string &log) {
    std::stringstream text(log);
    Lines lines;
    for (std::string line; std::getline(text, line);)
        if (line.find(REFUSED) != std::string::npos) lines.push_back(line);
    return lines;
}

// Something that rgpu does not support.
static void be_refused() {
    CUcoredumpSettings setting = CU_COREDUMP_LIGHTWEIGHT;
    bool value = false;
    size_t size = sizeof value;
    GIVES(CUDA_ERROR_NOT_SUPPORTED, cuCoredumpGetAttribute(setting, &value, &size));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUlogIterator iterator = 0, start = 0;
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsCurrent(nullptr, 0));
    GIVES(CUDA_SUCCESS, cuLogsCurrent(&iterator, 1));  // nobody looks at flags
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsUnregisterCallback(nullptr));
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsRegisterCallback(nullptr, nullptr, nullptr));
    Told first, second, third;
    for (Told *told : {&first, &second, &third}) GIVES(CUDA_SUCCESS, cuLogsRegisterCallback(note, told, &told->handle));
    GIVES(CUDA_SUCCESS, cuInit(0));
    char text[25600];
    size_t size = sizeof text;
    GIVES(CUDA_SUCCESS, cuLogsDumpToMemory(&iterator, text, &size, 0));
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!driver || !dlsym(driver, "rgpu_libcuda")) {
        // What NVIDIA's driver says is its own affair.
        for (Told *told : {&first, &second, &third}) GIVES(CUDA_SUCCESS, cuLogsUnregisterCallback(told->handle));
        return pass("of NVIDIA's driver");
    }
    REQUIRE(of_test(text).empty(), "\"%s\" is said without a reason", text);
    start = iterator;
    second.leaves_with = &third;
    be_refused();
    be_refused();
    be_refused();
    REQUIRE(first.lines.size() == 3, "%zu messages about three refusals", first.lines.size());
    for (const std::string &line : first.lines)
        REQUIRE(line[0] == '[' && line.find('\n') == std::string::npos, "a message is \"%s\"", line.c_str());
    std::string thread = "][" + std::to_string(getpid()) + "][rgpu][";
    REQUIRE(first.lines[0].find(thread) != std::string::npos, "the thread %d is not in \"%s\"", (int)getpid(), first.lines[0].c_str());
    REQUIRE(second.lines == Lines{first.lines[0]}, "%zu messages for a callback that wanted one", second.lines.size());
    REQUIRE(third.lines.empty(), "a message for a callback that was unregistered");
    for (Told *told : {&second, &third}) GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsUnregisterCallback(told->handle));
    GIVES(CUDA_SUCCESS, cuLogsUnregisterCallback(first.handle));
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsUnregisterCallback(first.handle));

    size = sizeof text;
    GIVES(CUDA_SUCCESS, cuLogsDumpToMemory(&iterator, text, &size, 0));
    REQUIRE(size == strlen(text) && of_test(text) == first.lines, "the log is \"%s\"", text);
    size = sizeof text;
    GIVES(CUDA_SUCCESS, cuLogsDumpToMemory(&iterator, text, &size, 0));
    REQUIRE(size == strlen(text) && of_test(text).empty(), "messages come again: \"%s\"", text);
    be_refused();
    REQUIRE(first.lines.size() == 3, "a message after the callback was unregistered");
    // With room for all but one byte, the last ones come, behind a line that says so.
    iterator = start;
    size = sizeof text;
    GIVES(CUDA_SUCCESS, cuLogsDumpToMemory(&iterator, text, &size, 0));
    Lines four = of_test(text);
    REQUIRE(four.size() == 4 && Lines(four.begin(), four.end() - 1) == first.lines, "the log is \"%s\"", text);
    iterator = start;
    size_t room = size;
    GIVES(CUDA_SUCCESS, cuLogsDumpToMemory(&iterator, text, &size, 0));
    REQUIRE(size == strlen(text) && size < room && text[size - 1] == '\n' && !strncmp(text, "[rgpu] ", 7) && of_test(text).size() < 4,
            "with less room the log is \"%s\"", text);
    iterator = start;
    size = 10;
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToMemory(&iterator, text, &size, 0));
    REQUIRE(size == 0 && iterator == start, "%zu bytes where none have room", size);
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToMemory(&iterator, nullptr, &size, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToMemory(&iterator, text, nullptr, 0));

    char path[] = "/tmp/driver_log_XXXXXX";
    int file = mkstemp(path);
    REQUIRE(file >= 0, "no file");
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToFile(&iterator, nullptr, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToFile(&iterator, "/nowhere/log", 0));
    GIVES(CUDA_SUCCESS, cuLogsDumpToFile(&iterator, path, 0));
    GIVES(CUDA_SUCCESS, cuLogsDumpToFile(&iterator, path, 0));
    std::ifstream in(path);
    std::stringstream written;
    written << in.rdbuf();
    remove(path);
    std::string got = written.str();
    REQUIRE(of_test(got) == four, "the file has \"%s\"", got.c_str());
    return pass("%zu bytes", got.size());
}

#else

int main() { return pass("not in this version of CUDA"); }

#endif
