// SPDX-License-Identifier: GPL-2.0
/*
 * Random calls of the user API of virtio_rgpu, from several processes and threads
 * that die at random moments: rgpu_fuzz CALLS
 *
 * SEED in the environment is where the random numbers start (1). The calls of each
 * thread follow from it, their order between threads does not. RGPU_CHANNEL names a
 * file with the beginning of a channel that the device accepts; without it, channels
 * are for the mock device of tests/src/mock_device.rs.
 *
 * Prints how many calls there were and how many of which kind succeeded. The caller
 * checks that the kernel has not complained and that nothing is pinned afterwards.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/virtio_rgpu.h>

#define PROCESSES	4
#define THREADS		3
#define FILES		4
#define AREAS		8
#define AREA_SIZE	(2UL << 20)
#define TEMPLATE_MAX	65536

/* Bytes of a file that is mapped into areas. */
#define FILE_SIZE	(256UL << 10)

#define CHECK(condition)                                                       \
	do {                                                                   \
		if (!(condition)) {                                            \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__,        \
				#condition, strerror(errno));                  \
			exit(1);                                               \
		}                                                              \
	} while (0)

enum kind {
	OPEN, CREATE, MAP, CONNECT, REGISTER, UNREGISTER, WAIT, KICK, FORK, KINDS
};

static const char * const kind_names[KINDS] = {
	"open", "create", "map", "connect", "register", "unregister", "wait", "kick", "fork",
};

/* Shared by all processes. */
static struct {
	_Atomic int64_t left;
	_Atomic uint64_t calls, faults;
	_Atomic uint64_t good[KINDS];
} *tally;

/* Shared by the threads of a process. */
static _Atomic int files[FILES];
static uint8_t *areas;
static int memfd = -1, readable = -1, resource = -1;

static const char *device = "/dev/rgpu0";
static uint8_t template[TEMPLATE_MAX];
static size_t template_size;
static uint64_t channel_size;

/* Of a thread. */
struct state {
	uint64_t random;
	int fail_nth;
	bool finite;
};

/* SplitMix64. */
static uint64_t next(struct state *state)
{
	uint64_t z = state->random += 0x9e3779b97f4a7c15ULL;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	return z ^ (z >> 31);
}

static bool one_in(struct state *state, unsigned int n)
{
	return next(state) % n == 0;
}

/* A number that a check may have overlooked. */
static uint64_t odd_number(struct state *state)
{
	static const uint64_t odd[] = {
		0, 1, 3, 4, 4095, 4096, 4097, 65536, 1 << 20, 0x7fffffff, 0x80000000, 0xffffffff,
		1ULL << 32, 1ULL << 47, 0x7fffffffffffffff, 1ULL << 63, 0xfffffffffffff000, UINT64_MAX,
	};
	uint64_t r = next(state);

	return r % 3 ? odd[r / 3 % (sizeof(odd) / sizeof(odd[0]))] : r >> (r % 64);
}

/* An address in the areas, often near the end of one. */
static uint8_t *somewhere(struct state *state)
{
	uint64_t r = next(state);

	if (r % 4 == 0)
		return areas + (r >> 8) % AREAS * AREA_SIZE + AREA_SIZE - (r >> 16) % 16;
	return areas + (r >> 8) % (AREAS * AREA_SIZE);
}

/* A pointer that the kernel should not trust. */
static void *bad_pointer(struct state *state)
{
	uint64_t odd = odd_number(state);

	switch (next(state) % 4) {
	case 0:
		/* Not into this program's data. */
		return (void *)(odd < 65536 ? odd : odd | 1ULL << 47);
	case 1:
		return (void *)(0xffff888000000000 + next(state) % (1 << 30));
	default:
		return somewhere(state);
	}
}

/*
 * Makes the call, and counts it and whether it succeeded. Where the kernel can
 * inject faults, one of the call's allocations may fail.
 */
#define TRY(state, kind, call)                                                 \
	({                                                                     \
		bool armed = arm(state);                                       \
		long result = (long)(call);                                    \
									       \
		if (armed)                                                     \
			disarm(state);                                         \
		atomic_fetch_add(&tally->calls, 1);                            \
		if (result != -1)                                              \
			atomic_fetch_add(&tally->good[kind], 1);               \
		result;                                                        \
	})

static bool arm(struct state *state)
{
	char text[16];

	if (state->fail_nth < 0 || !one_in(state, 12))
		return false;
	snprintf(text, sizeof(text), "%u", 1 + (unsigned int)(next(state) % 24));
	return pwrite(state->fail_nth, text, strlen(text), 0) > 0;
}

static void disarm(struct state *state)
{
	char text[16] = {};

	/* 0 is left over if a call failed. Otherwise reading or writing may be what fails. */
	if (pread(state->fail_nth, text, sizeof(text) - 1, 0) > 0 && !strtoul(text, NULL, 0))
		atomic_fetch_add(&tally->faults, 1);
	while (pwrite(state->fail_nth, "0", 1, 0) != 1)
		CHECK(errno == EFAULT || errno == ENOMEM);
}

static int any_file(struct state *state)
{
	return atomic_load(&files[next(state) % FILES]);
}

static void reopen(struct state *state)
{
	int fd = TRY(state, OPEN, open(device, O_RDWR));
	int old;

	if (fd >= 0 && one_in(state, 8)) {
		int copy = dup(fd);

		close(fd);
		fd = copy;
	}
	old = atomic_exchange(&files[next(state) % FILES], fd);
	if (old >= 0)
		close(old);
}

static void create(struct state *state)
{
	struct rgpu_create_channel create = { .size = channel_size };
	int fd = any_file(state);
	uint8_t *channel;

	if (one_in(state, 3))
		create.size = 4096ULL << next(state) % 9;
	if (one_in(state, 4))
		*(one_in(state, 2) ? &create.size : &create.flags) = odd_number(state);
	if (TRY(state, CREATE, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create)))
		return;
	channel = mmap(NULL, create.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (channel == MAP_FAILED)
		return;
	/* Without its beginning the device refuses the channel. */
	if (template_size <= create.size)
		memcpy(channel, template, template_size);
	/* What is in the channel is the device's problem. The mock knows but one language. */
	for (uint64_t i = next(state) % 8; i && template_size > 4 && one_in(state, 4); i--)
		channel[next(state) % create.size] = next(state);
	if (one_in(state, 2))
		munmap(channel, create.size);
}

static void connect_channel(struct state *state)
{
	struct rgpu_connect connect;
	void *arg = one_in(state, 8) ? bad_pointer(state) : &connect;

	TRY(state, CONNECT, ioctl(any_file(state), RGPU_IOC_CONNECT, arg));
}

static void register_memory(struct state *state)
{
	struct rgpu_register_memory reg = {
		.addr = (uintptr_t)somewhere(state),
		.size = next(state) % (one_in(state, 4) ? 2 * AREA_SIZE : 65536),
		.flags = next(state) % 2,
	};

	if (one_in(state, 8))
		*(one_in(state, 2) ? &reg.addr : &reg.size) = odd_number(state);
	if (one_in(state, 8))
		reg.addr = getauxval(AT_SYSINFO_EHDR);
	/* The argument is in memory that others replace meanwhile. */
	if (one_in(state, 8))
		TRY(state, REGISTER, ioctl(any_file(state), RGPU_IOC_REGISTER_MEMORY,
					   somewhere(state)));
	else
		TRY(state, REGISTER, ioctl(any_file(state), RGPU_IOC_REGISTER_MEMORY, &reg));
}

static void unregister_memory(struct state *state)
{
	struct rgpu_unregister_memory unregister = { .region = next(state) % 8 };

	if (one_in(state, 8))
		*(one_in(state, 2) ? &unregister.region : &unregister.reserved) = odd_number(state);
	TRY(state, UNREGISTER, ioctl(any_file(state), RGPU_IOC_UNREGISTER_MEMORY, &unregister));
}

static void wait_for_word(struct state *state)
{
	struct rgpu_wait wait = {
		.offset = 4096 + next(state) % 1024 * 4, .timeout_ns = next(state) >> 44,
	};

	if (one_in(state, 4))
		wait.offset = odd_number(state);
	if (one_in(state, 8))
		wait.expected = next(state);
	/* A thread that is not waited for may sleep until its process dies. */
	if (one_in(state, 4) && !state->finite)
		wait.timeout_ns = odd_number(state);
	TRY(state, WAIT, ioctl(any_file(state), RGPU_IOC_WAIT, &wait));
}

static void kick(struct state *state)
{
	struct pollfd fds[2] = {
		{ .fd = any_file(state), .events = POLLIN },
		{ .fd = any_file(state), .events = next(state) },
	};

	TRY(state, KICK, ioctl(fds[0].fd, RGPU_IOC_KICK));
	poll(fds, 2, next(state) % 2);
}

static void map(struct state *state)
{
	uint64_t size = one_in(state, 4) ? odd_number(state) : channel_size;
	uint64_t offset = one_in(state, 4) ? odd_number(state) & ~4095ULL : 0;
	int prot = one_in(state, 4) ? (int)next(state) % 8 : PROT_READ | PROT_WRITE;
	uint8_t *channel = (uint8_t *)TRY(state, MAP, mmap(NULL, size, prot,
					  one_in(state, 8) ? MAP_PRIVATE : MAP_SHARED,
					  any_file(state), offset));
	uint64_t r = next(state);

	if (channel == MAP_FAILED)
		return;
	switch (r % 6) {
	case 0:
		mprotect(channel, size, r >> 8 & 7);
		break;
	case 1:
		madvise(channel, size, r >> 8 & 31);
		break;
	case 2: {
		void *moved = mremap(channel, size, size + (r >> 8) % 2 * 4096, MREMAP_MAYMOVE);

		if (moved != MAP_FAILED)
			channel = moved;
		break;
	}
	case 3:
		/* In two parts. */
		munmap(channel + size / 2 / 4096 * 4096, size - size / 2 / 4096 * 4096);
		size = size / 2 / 4096 * 4096;
		break;
	}
	munmap(channel, size);
}

/* Puts other memory into an area, whatever uses it at the moment. */
static void replace_area(struct state *state)
{
	uint8_t *at = areas + next(state) % AREAS * AREA_SIZE;
	int prot = one_in(state, 4) ? PROT_READ : PROT_READ | PROT_WRITE;
	int fixed = MAP_FIXED | (one_in(state, 4) ? MAP_POPULATE : 0);
	uint64_t part = (1 + next(state) % (AREA_SIZE / 4096)) * 4096;

	switch (next(state) % 9) {
	case 0:
	case 1:
		mmap(at, part, prot, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
		break;
	case 2:
		mmap(at, part, prot, MAP_SHARED | MAP_ANONYMOUS | fixed, -1, 0);
		break;
	case 3:
		/* Its file may become shorter. */
		mmap(at, FILE_SIZE, prot, MAP_SHARED | fixed, memfd, 0);
		break;
	case 4:
		mmap(at, FILE_SIZE, one_in(state, 2) ? PROT_READ : prot,
		     (one_in(state, 2) ? MAP_SHARED : MAP_PRIVATE) | fixed, readable, 0);
		break;
	case 5:
		if (mmap(at, AREA_SIZE, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | fixed,
			 -1, 0) == MAP_FAILED)
			madvise(at, AREA_SIZE, MADV_HUGEPAGE);
		break;
	case 6:
		mmap(at, part, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		break;
	case 7:
		/* A channel as registered memory of another. */
		mmap(at, channel_size, prot, MAP_SHARED | fixed, any_file(state), 0);
		break;
	case 8:
		/* Not memory: registers of a PCI device. */
		mmap(at, 4096, prot, MAP_SHARED | MAP_FIXED, resource, 0);
		break;
	}
}

static void disturb(struct state *state)
{
	uint8_t *at = (uint8_t *)((uintptr_t)somewhere(state) & ~4095UL);
	uint64_t size = (1 + next(state) % 128) * 4096, r = next(state);
	struct rlimit limit = { .rlim_cur = r >> 44, .rlim_max = RLIM_INFINITY };

	if (at + size > areas + AREAS * AREA_SIZE)
		size = 4096;
	switch (r % 8) {
	case 0:
		madvise(at, size, (r >> 8) % 26);
		break;
	case 1:
		mprotect(at, size, r >> 8 & 3);
		break;
	case 2:
		/* The kernel touches the pages. With bad ones it just fails. */
		pread(readable, at, size, 0);
		break;
	case 3:
		pwrite(memfd, at, size < FILE_SIZE ? size : FILE_SIZE, 0);
		break;
	case 4:
		ftruncate(memfd, one_in(state, 2) ? FILE_SIZE : r % FILE_SIZE);
		break;
	case 5:
		mremap(at, 4096, 4096, MREMAP_MAYMOVE | MREMAP_FIXED,
		       (uint8_t *)((uintptr_t)somewhere(state) & ~4095UL));
		break;
	case 6:
		setrlimit(RLIMIT_MEMLOCK, &limit);
		break;
	case 7:
		ioctl(any_file(state), one_in(state, 2) ? next(state) :
		      _IOC(next(state) % 4, 'G', 0xa0 + next(state) % 8, next(state) % 300),
		      bad_pointer(state));
		atomic_fetch_add(&tally->calls, 1);
		break;
	}
}

static void step(struct state *state);

/* A child has the files, but not the channels. */
static void fork_child(struct state *state)
{
	/* Without a fault: the kernel warns when a new process gets no stack. */
	pid_t pid = fork();

	if (pid == 0) {
		struct state child = { .random = next(state), .fail_nth = -1, .finite = true };

		for (uint64_t i = child.random % 16; i; i--)
			step(&child);
		if (one_in(&child, 2))
			kill(getpid(), SIGKILL);
		_exit(0);
	}
	if (pid < 0)
		return;
	waitpid(pid, NULL, 0);
	atomic_fetch_add(&tally->good[FORK], 1);
}

static void step(struct state *state)
{
	switch (next(state) % 64) {
	case 0 ... 2:
		reopen(state);
		break;
	case 3 ... 10:
		create(state);
		break;
	case 11 ... 16:
		connect_channel(state);
		break;
	case 17 ... 28:
		register_memory(state);
		break;
	case 29 ... 36:
		unregister_memory(state);
		break;
	case 37 ... 41:
		wait_for_word(state);
		break;
	case 42 ... 45:
		kick(state);
		break;
	case 46 ... 49:
		map(state);
		break;
	case 50 ... 56:
		replace_area(state);
		break;
	case 57 ... 62:
		disturb(state);
		break;
	case 63:
		if (one_in(state, 4))
			fork_child(state);
		break;
	}
}

static struct state thread_state(uint64_t random, bool finite)
{
	struct state state = { .random = random, .finite = finite };

	/* Exists if the kernel can inject faults, and belongs to the thread. */
	state.fail_nth = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	return state;
}

static void *run_thread(void *random)
{
	struct state state = thread_state((uintptr_t)random, false);

	for (;;)
		step(&state);
	return NULL;
}

/* Opens a PCI device's registers, which are not memory that could be pinned. */
static int open_resource(void)
{
	glob_t found;
	int fd = -1;

	if (glob("/sys/bus/pci/devices/*/resource[0-9]", 0, NULL, &found))
		return -1;
	for (size_t i = 0; i < found.gl_pathc && fd < 0; i++)
		fd = open(found.gl_pathv[i], O_RDWR | O_CLOEXEC);
	globfree(&found);
	return fd;
}

/* One process: as many calls as its random numbers say, then one of several ends. */
static void run_process(uint64_t random)
{
	struct state state = { .random = random };
	uint64_t life = 1 + next(&state) % 600, end = next(&state) % 4, user = next(&state) % 3;
	char path[64], *idle[] = { "rgpu_fuzz", "inherited", NULL };

	resource = open_resource();
	snprintf(path, sizeof(path), "/tmp/rgpu_fuzz.%d", getpid());
	readable = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(readable >= 0 && ftruncate(readable, FILE_SIZE) == 0);
	close(readable);
	readable = open(path, O_RDONLY | O_CLOEXEC);
	unlink(path);
	memfd = memfd_create("rgpu_fuzz", MFD_CLOEXEC);
	CHECK(memfd >= 0 && readable >= 0 && ftruncate(memfd, FILE_SIZE) == 0);
	/* A third of the processes may do everything, the others are two users. */
	if (user)
		CHECK(setuid(1000 + user) == 0);

	state = thread_state(next(&state), true);
	for (int i = 0; i < FILES; i++) {
		atomic_store(&files[i], -1);
		reopen(&state);
	}
	for (int i = 1; i < THREADS; i++) {
		pthread_t thread;

		CHECK(pthread_create(&thread, NULL, run_thread, (void *)next(&state)) == 0);
	}
	for (; life && atomic_fetch_sub(&tally->left, 1) > 0; life--)
		step(&state);

	/* The other threads are in the middle of something. */
	switch (end) {
	case 0:
		kill(getpid(), SIGKILL);
		break;
	case 1:
		for (int i = 0; i < FILES; i++)
			close(atomic_load(&files[i]));
		break;
	case 2:
		execv("/proc/self/exe", idle);
		break;
	}
	_exit(0);
}

/* What a program can do with files that it has inherited. */
static void inherited(void)
{
	struct rgpu_connect connect;
	struct rgpu_info info;

	for (int fd = 3; fd < 64; fd++) {
		ioctl(fd, RGPU_IOC_GET_INFO, &info);
		ioctl(fd, RGPU_IOC_KICK);
		ioctl(fd, RGPU_IOC_CONNECT, &connect);
		mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	}
}

static void read_template(const char *path)
{
	int fd = open(path, O_RDONLY);
	ssize_t size = read(fd, template, sizeof(template));

	/* The channel's size is in its header. */
	CHECK(fd >= 0 && size >= 32);
	template_size = size;
	memcpy(&channel_size, template + 16, sizeof(channel_size));
	close(fd);
}

int main(int argc, char **argv)
{
	uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 1, processes = 0;
	int running = 0, status;

	if (argc == 2 && !strcmp(argv[1], "inherited")) {
		inherited();
		return 0;
	}
	if (argc != 2) {
		fprintf(stderr, "usage: rgpu_fuzz CALLS\n");
		return 2;
	}
	if (getenv("RGPU_DEVICE"))
		device = getenv("RGPU_DEVICE");
	if (getenv("RGPU_CHANNEL")) {
		read_template(getenv("RGPU_CHANNEL"));
	} else {
		memcpy(template, "MOCK", 4);
		template_size = 4;
		channel_size = 65536;
	}

	tally = mmap(NULL, sizeof(*tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(tally != MAP_FAILED);
	tally->left = strtoull(argv[1], NULL, 0);
	/*
	 * Far below the addresses that the kernel chooses itself: what else the program
	 * maps must not come into a hole between areas, where it would be replaced.
	 */
	areas = mmap((void *)(1UL << 32), AREAS * AREA_SIZE, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	CHECK(areas != MAP_FAILED);

	while (running || atomic_load(&tally->left) > 0) {
		pid_t pid;

		if (running < PROCESSES && atomic_load(&tally->left) > 0) {
			pid = fork();
			CHECK(pid >= 0);
			if (!pid)
				run_process((seed << 32) + processes);
			processes++;
			running++;
			continue;
		}
		pid = wait(&status);
		CHECK(pid > 0);
		if (!WIFEXITED(status) && WTERMSIG(status) != SIGKILL) {
			fprintf(stderr, "a process died of signal %d\n", WTERMSIG(status));
			return 1;
		}
		CHECK(!WIFEXITED(status) || WEXITSTATUS(status) == 0);
		running--;
	}
	printf("calls %llu processes %llu faults %llu", (unsigned long long)tally->calls,
	       (unsigned long long)processes, (unsigned long long)tally->faults);
	for (int kind = 0; kind < KINDS; kind++)
		printf(" %s %llu", kind_names[kind], (unsigned long long)tally->good[kind]);
	printf("\n");
	return 0;
}
