// SPDX-License-Identifier: GPL-2.0
/*
 * Tests the user API of virtio_rgpu against the mock device of
 * tests/src/mock_device.rs: rgpu_selftest TEST [ARGUMENT]
 *
 * Prints "ok" and exits with 0 if the test passes. Otherwise prints what failed.
 */
#include "rgpu_selftest.h"

const char *device = "/dev/rgpu0";

int open_device(void)
{
	int fd = open(device, O_RDWR | O_CLOEXEC);

	if (fd < 0)
		FAIL("open %s", device);
	return fd;
}

struct channel *create(int fd, uint64_t size)
{
	struct rgpu_create_channel create = { .size = size };
	struct channel *channel;

	CHECK(ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create) == 0);
	channel = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(channel != MAP_FAILED);
	channel->magic = MAGIC;
	return channel;
}

struct channel *connect_channel(int fd, uint64_t size)
{
	struct channel *channel = create(fd, size);
	struct rgpu_connect connect;

	memset(&connect, 0xff, sizeof(connect));
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	if (connect.status)
		FAIL("connect: status %u, %s", connect.status, connect.reason);
	CHECK(connect.reason[0] == 0);
	return channel;
}

int wait_word(int fd, uint64_t offset, uint32_t expected, int64_t timeout_ns)
{
	struct rgpu_wait wait = {
		.offset = offset, .expected = expected, .timeout_ns = timeout_ns,
	};

	return ioctl(fd, RGPU_IOC_WAIT, &wait);
}

void submit(int fd, struct channel *channel, const struct command *command)
{
	channel->command = *command;
	atomic_fetch_add(&channel->submitted, 1);
	CHECK(ioctl(fd, RGPU_IOC_KICK) == 0);
}

void complete(int fd, struct channel *channel)
{
	uint32_t completed, submitted = atomic_load(&channel->submitted);

	while ((completed = atomic_load(&channel->completed)) != submitted) {
		if (wait_word(fd, COMPLETED, completed, 60000000000LL) && errno != EINTR)
			FAIL("wait for command %u", submitted);
	}
}

uint64_t command(int fd, struct channel *channel, struct command command)
{
	submit(fd, channel, &command);
	complete(fd, channel);
	if (channel->command.error)
		FAIL("op %u: error %u", command.op, channel->command.error);
	return channel->command.result;
}

int register_memory(int fd, const void *addr, uint64_t size, uint32_t flags, uint32_t *region)
{
	struct rgpu_register_memory reg = {
		.addr = (uintptr_t)addr, .size = size, .flags = flags, .region = 0xabcd,
	};
	int ret = ioctl(fd, RGPU_IOC_REGISTER_MEMORY, &reg);

	if (region)
		*region = reg.region;
	return ret;
}

int unregister_memory(int fd, uint32_t region)
{
	struct rgpu_unregister_memory unregister = { .region = region };

	return ioctl(fd, RGPU_IOC_UNREGISTER_MEMORY, &unregister);
}

uint8_t pattern(uint64_t seed, uint64_t index)
{
	return ((seed + index) * 0x9e3779b97f4a7c15ULL) >> 56;
}

void fill(uint8_t *p, uint64_t len, uint64_t seed)
{
	for (uint64_t i = 0; i < len; i++)
		p[i] = pattern(seed, i);
}

void check_pattern(const uint8_t *p, uint64_t len, uint64_t seed)
{
	for (uint64_t i = 0; i < len; i++)
		if (p[i] != pattern(seed, i))
			FAIL("byte %llu of %llu is %02x, not %02x", (unsigned long long)i,
			     (unsigned long long)len, p[i], pattern(seed, i));
}

uint64_t hash(const uint8_t *p, uint64_t len)
{
	uint64_t hash = 0xcbf29ce484222325ULL;

	for (uint64_t i = 0; i < len; i++)
		hash = (hash ^ p[i]) * 0x100000001b3ULL;
	return hash;
}

void sleep_ms(int ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000L };

	while (nanosleep(&time, &time) && errno == EINTR)
		;
}

long long milliseconds(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000LL + time.tv_nsec / 1000000;
}

void say_ready(void)
{
	printf("ready\n");
	fflush(stdout);
}

static const struct test *find(const char *name)
{
	const struct test *tables[] = { api_tests, process_tests, fuse_tests };

	for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
		for (const struct test *test = tables[i]; test->name; test++)
			if (!strcmp(name, test->name))
				return test;
	return NULL;
}

int main(int argc, char **argv)
{
	const struct test *test = argc < 2 ? NULL : find(argv[1]);

	if (!test) {
		fprintf(stderr, "usage: rgpu_selftest TEST [ARGUMENT]\n");
		return 2;
	}
	if (getenv("RGPU_DEVICE"))
		device = getenv("RGPU_DEVICE");
	if (test->run)
		test->run();
	else
		test->run_with(argc > 2 ? strtoull(argv[2], NULL, 0) : 1);
	printf("ok\n");
	return 0;
}
