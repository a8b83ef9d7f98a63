// SPDX-License-Identifier: GPL-2.0
/*
 * What each call does and refuses, and that program and device see the same bytes.
 */
#include "rgpu_selftest.h"

/* Both sides access a region of any alignment without touching its surroundings. */
static void check_region(int fd, struct channel *channel, uint8_t *base, uint64_t before,
			 uint64_t len, uint64_t after, uint64_t seed)
{
	uint32_t region;

	fill(base, before + len + after, seed);
	CHECK(register_memory(fd, base + before, len, 0, &region) == 0);
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region, .len = len }) ==
	      hash(base + before, len));
	if (len > 10)
		CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region,
							     .offset = 3, .len = len - 5 }) ==
		      hash(base + before + 3, len - 5));
	/* The device sees the program's writes after registering. */
	base[before + len / 2] ^= 0x5a;
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region, .len = len }) ==
	      hash(base + before, len));
	command(fd, channel,
		(struct command){ .op = OP_FILL, .region = region, .len = len, .seed = ~seed });
	check_pattern(base + before, len, ~seed);
	check_pattern(base, before, seed);
	for (uint64_t i = before + len; i < before + len + after; i++)
		CHECK(base[i] == pattern(seed, i));
	CHECK(unregister_memory(fd, region) == 0);
	FAILS(ENOENT, unregister_memory(fd, region));
}

static void test_info(void)
{
	struct rgpu_info info;
	int fd = open_device();

	memset(&info, 0xff, sizeof(info));
	CHECK(ioctl(fd, RGPU_IOC_GET_INFO, &info) == 0);
	CHECK(info.abi_version == RGPU_ABI_VERSION);
	CHECK(info.flags == 0);
	for (int i = 0; i < 4; i++)
		CHECK(info.reserved[i] == 0);
	printf("version %u channels %u size %llu registered %llu\n", info.device_version,
	       info.max_channels, (unsigned long long)info.max_channel_size,
	       (unsigned long long)info.max_registered);
}

/* Program and device see the same bytes everywhere in a channel of N KiB. */
static void test_channel(uint64_t kib)
{
	uint64_t size = kib << 10, begin = 4096 < size ? 4096 : 1024;
	int fd = open_device();
	struct channel *channel = create(fd, size);
	uint8_t *bytes = (uint8_t *)channel;
	struct rgpu_connect connect;

	for (uint64_t i = sizeof(*channel); i < size; i++)
		CHECK(bytes[i] == 0);
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == 0);
	fill(bytes + begin, size - begin, kib);
	CHECK(command(fd, channel,
		      (struct command){ .op = OP_HASH, .region = CHANNEL, .offset = begin,
					.len = size - begin }) == hash(bytes + begin, size - begin));
	command(fd, channel,
		(struct command){ .op = OP_FILL, .region = CHANNEL, .offset = begin,
				  .len = size - begin, .seed = kib + 7 });
	check_pattern(bytes + begin, size - begin, kib + 7);

	/* The mapping outlives the file descriptor, and the channel outlives both. */
	close(fd);
	check_pattern(bytes + begin, size - begin, kib + 7);
	munmap(channel, size);
}

static void test_register(void)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	uint8_t *memory = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *shared = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint8_t *huge;

	CHECK(memory != MAP_FAILED && shared != MAP_FAILED);
	check_region(fd, channel, memory, 0, 4096, 0, 1);
	check_region(fd, channel, memory, 0, 1 << 20, 0, 2);
	check_region(fd, channel, memory, 100, 1, 100, 3);
	check_region(fd, channel, memory, 4095, 2, 4095, 4);
	check_region(fd, channel, memory, 1234, 3 << 20, 99, 5);
	check_region(fd, channel, memory, 4096, 8191, 1, 6);
	check_region(fd, channel, shared, 77, 500000, 77, 7);
	huge = aligned_alloc(2 << 20, 4 << 20);
	CHECK(huge);
	madvise(huge, 4 << 20, MADV_HUGEPAGE);
	check_region(fd, channel, huge, 5, (4 << 20) - 10, 5, 8);
	/* Memory of the channel itself, and memory on the stack. */
	check_region(fd, channel, (uint8_t *)channel + 8192, 10, 20000, 10, 9);
	uint8_t stack[20000];
	check_region(fd, channel, stack, 17, 19000, 17, 10);
}

/* A forked child writes to shared pages first; the parent's region must keep its pages. */
static void test_register_then_fork(void)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	uint64_t len = 1 << 20;
	uint8_t *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t region;
	pid_t child;

	fill(memory, len, 1);
	CHECK(register_memory(fd, memory, len, 0, &region) == 0);
	child = fork();
	if (!child) {
		sleep_ms(100);
		_exit(0);
	}
	fill(memory, len, 2);
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region, .len = len }) ==
	      hash(memory, len));
	command(fd, channel,
		(struct command){ .op = OP_FILL, .region = region, .len = len, .seed = 3 });
	check_pattern(memory, len, 3);
	CHECK(waitpid(child, NULL, 0) == child);
}

static const char read_only[10000] = "a constant in .rodata";

static void test_register_read_only(void)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	uint8_t *fresh = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t region;

	FAILS(EFAULT, register_memory(fd, read_only, sizeof(read_only), 0, NULL));
	CHECK(register_memory(fd, read_only, sizeof(read_only), RGPU_REGISTER_READ_ONLY, &region) == 0);
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region,
						     .len = sizeof(read_only) }) ==
	      hash((const uint8_t *)read_only, sizeof(read_only)));
	CHECK(unregister_memory(fd, region) == 0);

	/* The device must see later writes to pages that were never touched. */
	CHECK(register_memory(fd, fresh, 1 << 20, RGPU_REGISTER_READ_ONLY, &region) == 0);
	fill(fresh, 1 << 20, 42);
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region, .len = 1 << 20 }) ==
	      hash(fresh, 1 << 20));
}

/* Alternating first writes to two mappings scatter the pages of both. */
static void test_register_scattered(uint64_t mib)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	uint64_t len = mib << 20;
	uint8_t *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *other = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t region;

	CHECK(memory != MAP_FAILED && other != MAP_FAILED);
	madvise(memory, len, MADV_NOHUGEPAGE);
	madvise(other, len, MADV_NOHUGEPAGE);
	for (uint64_t i = 0; i < len; i += 4096) {
		memory[i] = i >> 12;
		other[i] = 1;
	}
	CHECK(register_memory(fd, memory + 5, len - 5, 0, &region) == 0);
	CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region, .len = len - 5 }) ==
	      hash(memory + 5, len - 5));
	CHECK(unregister_memory(fd, region) == 0);
}

/* Runs as an unprivileged user with RLIMIT_MEMLOCK at 1 MiB. */
static void test_memlock(void)
{
	struct rlimit limit = { 1 << 20, 1 << 20 };
	uint32_t region, second;
	uint8_t *memory;
	int fd;

	CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
	CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	fd = open_device();
	connect_channel(fd, 65536);
	memory = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	FAILS(ENOMEM, register_memory(fd, memory, 2 << 20, 0, NULL));
	CHECK(register_memory(fd, memory, 1 << 20, 0, &region) == 0);
	FAILS(ENOMEM, register_memory(fd, memory + (2 << 20), 1, 0, NULL));
	CHECK(unregister_memory(fd, region) == 0);
	CHECK(register_memory(fd, memory, 512 << 10, 0, &region) == 0);
	CHECK(register_memory(fd, memory + (1 << 20), 512 << 10, 0, &second) == 0);
	CHECK(region != second);
	/* A failure midway leaves nothing charged. */
	CHECK(unregister_memory(fd, second) == 0);
	CHECK(munmap(memory + (3 << 20), 4096) == 0);
	FAILS(EFAULT, register_memory(fd, memory + (3 << 20) - 8192, 16384, 0, NULL));
	CHECK(register_memory(fd, memory + (1 << 20), 512 << 10, 0, &second) == 0);
}

/* close() uncharges memory before it returns. */
static void test_memlock_after_close(void)
{
	struct rlimit limit = { 1 << 20, 1 << 20 };
	uint8_t *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
	CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	for (int i = 0; i < 5; i++) {
		int fd = open_device();
		struct channel *channel = connect_channel(fd, 65536);

		CHECK(register_memory(fd, memory, 1 << 20, 0, NULL) == 0);
		munmap(channel, 65536);
		close(fd);
	}
}

/* What was pinned for a region whose registration took too long is let go with the late answer. */
static void test_late_registration(void)
{
	struct rlimit limit = { 1 << 20, 1 << 20 };
	uint8_t *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct channel *channel;
	int fd;

	CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
	CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	fd = open_device();
	channel = connect_channel(fd, 65536);
	command(fd, channel, (struct command){ .op = OP_NEXT_ANSWER, .seed = RGPU_STATUS_OK, .delay_ms = 33000 });
	FAILS(ETIMEDOUT, register_memory(fd, memory, 1 << 20, 0, NULL));
	for (int tries = 0; register_memory(fd, memory, 1 << 20, 0, NULL); tries++) {
		CHECK(errno == ENOMEM && tries < 600);
		usleep(100000);
	}
}

static void test_arguments(void)
{
	struct rgpu_info info;
	struct rgpu_connect connect;
	struct rgpu_create_channel create_args = { .size = 65536 };
	struct rgpu_wait wait = { .offset = 0 };
	struct rgpu_register_memory reg = { .size = 4096 };
	struct rgpu_unregister_memory unregister = { .region = 0 };
	static uint8_t memory[65536];
	struct channel *channel;
	void *map;
	int fd = open_device();

	/* Without a channel, only the limits can be queried. */
	CHECK(ioctl(fd, RGPU_IOC_GET_INFO, &info) == 0);
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_GET_INFO, NULL));
	FAILS(ENOTTY, ioctl(fd, _IO('G', 0xA7)));
	FAILS(ENOTTY, ioctl(fd, _IOR('G', 0xA0, int), &info));
	FAILS(ENXIO, ioctl(fd, RGPU_IOC_CONNECT, &connect));
	FAILS(ENXIO, ioctl(fd, RGPU_IOC_KICK));
	FAILS(ENXIO, ioctl(fd, RGPU_IOC_WAIT, &wait));
	FAILS(ENXIO, ioctl(fd, RGPU_IOC_REGISTER_MEMORY, &reg));
	FAILS(ENXIO, ioctl(fd, RGPU_IOC_UNREGISTER_MEMORY, &unregister));
	map = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(map == MAP_FAILED && errno == ENXIO);

	FAILS(EFAULT, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, (void *)8));
	create_args.size = 0;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));
	create_args.size = 4097;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));
	create_args.size = info.max_channel_size + 4096;
	FAILS(EFBIG, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));
	create_args.size = 0ULL - 4096;
	FAILS(EFBIG, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));
	create_args.size = 65536;
	create_args.flags = 1;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));
	create_args.flags = 0;
	CHECK(ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args) == 0);
	FAILS(EEXIST, ioctl(fd, RGPU_IOC_CREATE_CHANNEL, &create_args));

	map = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(map == MAP_FAILED && errno == EINVAL);
	map = mmap(NULL, 61440, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(map == MAP_FAILED && errno == EINVAL);
	map = mmap(NULL, 69632, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(map == MAP_FAILED && errno == EINVAL);
	map = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4096);
	CHECK(map == MAP_FAILED && errno == EINVAL);
	map = mmap(NULL, 65536, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
	CHECK(map == MAP_FAILED && errno == EINVAL);
	channel = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(channel != MAP_FAILED);
	FAILS(EACCES, mprotect(channel, 65536, PROT_READ | PROT_EXEC));
	map = mremap(channel, 65536, 131072, MREMAP_MAYMOVE);
	CHECK(map == MAP_FAILED && errno == EFAULT);

	/* A channel that is not connected. */
	FAILS(ENOTCONN, ioctl(fd, RGPU_IOC_KICK));
	FAILS(ENOTCONN, ioctl(fd, RGPU_IOC_WAIT, &wait));
	FAILS(ENOTCONN, register_memory(fd, memory, 4096, 0, NULL));
	FAILS(ENOTCONN, unregister_memory(fd, 0));
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_CONNECT, read_only));

	/* The device refuses a bad header; the program can fix it and try again. */
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_INVALID && connect.reason[0]);
	channel->magic = MAGIC;
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_OK);
	FAILS(EISCONN, ioctl(fd, RGPU_IOC_CONNECT, &connect));

	wait.offset = 65536;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_WAIT, &wait));
	wait.offset = 65534;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_WAIT, &wait));
	wait.offset = ~3ULL;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_WAIT, &wait));
	wait.offset = 65532;
	wait.flags = 1;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_WAIT, &wait));
	wait.flags = 0;
	FAILS(ETIMEDOUT, ioctl(fd, RGPU_IOC_WAIT, &wait));
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_WAIT, (void *)1));

	FAILS(EINVAL, register_memory(fd, memory, 0, 0, NULL));
	FAILS(EINVAL, register_memory(fd, memory, 4096, 2, NULL));
	FAILS(EINVAL, register_memory(fd, memory, ~0ULL, 0, NULL));
	FAILS(EINVAL, register_memory(fd, (void *)~0xfffULL, 8192, 0, NULL));
	FAILS(EFAULT, register_memory(fd, (void *)0xffff888000000000ULL, 4096, 0, NULL));
	FAILS(EFAULT, register_memory(fd, NULL, 4096, 0, NULL));
	FAILS(EFAULT, register_memory(fd, memory, 1ULL << 46, 0, NULL));
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_REGISTER_MEMORY, NULL));
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_UNREGISTER_MEMORY, NULL));
	FAILS(ENOENT, unregister_memory(fd, 12345));
	FAILS(ENOENT, unregister_memory(fd, ~0U));
	unregister.reserved = 1;
	FAILS(EINVAL, ioctl(fd, RGPU_IOC_UNREGISTER_MEMORY, &unregister));

	/* If the result cannot be written, the region must not stay registered. */
	struct rgpu_register_memory *ro = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ro->addr = (uintptr_t)memory;
	ro->size = 4096;
	CHECK(mprotect(ro, 4096, PROT_READ) == 0);
	FAILS(EFAULT, ioctl(fd, RGPU_IOC_REGISTER_MEMORY, ro));

	/* It still works after all this. */
	CHECK(register_memory(fd, memory, 65536, 0, NULL) == 0);
	command(fd, channel, (struct command){ .op = OP_NOP });
}

static void nothing(int signal)
{
	(void)signal;
}

static void test_wait(void)
{
	struct sigaction action = { .sa_handler = nothing, .sa_flags = SA_RESTART };
	struct itimerspec soon = { .it_value.tv_nsec = 50000000 };
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	long long begin;
	timer_t timer;

	/* A different value, and a timeout. */
	CHECK(wait_word(fd, 0, MAGIC + 1, -1) == 0);
	begin = milliseconds();
	FAILS(ETIMEDOUT, wait_word(fd, 0, MAGIC, 100000000));
	CHECK(milliseconds() - begin >= 100);
	FAILS(ETIMEDOUT, wait_word(fd, 0, MAGIC, 0));

	/* A signal, even with SA_RESTART. */
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
	CHECK(timer_settime(timer, 0, &soon, NULL) == 0);
	FAILS(EINTR, wait_word(fd, 0, MAGIC, -1));

	/* A change during the sleep, with and without a timeout. */
	for (int i = 0; i < 2; i++) {
		submit(fd, channel, &(struct command){ .op = OP_NOP, .delay_ms = 100 });
		CHECK(wait_word(fd, COMPLETED, i, i ? -1 : 30000000000LL) == 0);
		complete(fd, channel);
	}

	/* A WAKE without a change, then the change. */
	submit(fd, channel, &(struct command){ .op = OP_BARE_WAKE, .delay_ms = 200 });
	complete(fd, channel);

	/* Events for other channels do not wake it. */
	command(fd, channel, (struct command){ .op = OP_STRANGE_EVENTS });
	while (wait_word(fd, 0, MAGIC, 50000000) == 0)
		;
	CHECK(errno == ETIMEDOUT);

	/* poll() reports a WAKE that no WAIT has consumed. */
	CHECK(poll(&poll_fd, 1, 0) == 0);
	submit(fd, channel, &(struct command){ .op = OP_NOP, .delay_ms = 100 });
	CHECK(poll(&poll_fd, 1, 30000) == 1 && poll_fd.revents == POLLIN);
	CHECK(poll(&poll_fd, 1, 0) == 1);
	CHECK(atomic_load(&channel->completed) == atomic_load(&channel->submitted));
	FAILS(ETIMEDOUT, wait_word(fd, 0, MAGIC, 0));
	CHECK(poll(&poll_fd, 1, 0) == 0);
}

static void *wait_completed(void *arg)
{
	struct waiter *waiter = arg;

	while (!atomic_load(&waiter->channel->completed))
		CHECK(wait_word(waiter->fd, COMPLETED, 0, -1) == 0);
	return NULL;
}

/* One WAKE wakes all waiting threads. */
static void test_waiters(void)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	struct waiter waiters[16];

	for (int i = 0; i < 16; i++) {
		waiters[i] = (struct waiter){ .fd = fd, .channel = channel };
		CHECK(pthread_create(&waiters[i].thread, NULL, wait_completed, &waiters[i]) == 0);
	}
	sleep_ms(200);
	submit(fd, channel, &(struct command){ .op = OP_NOP });
	for (int i = 0; i < 16; i++)
		CHECK(pthread_join(waiters[i].thread, NULL) == 0);
}

/* The program gets every status with its reason, and can try again. */
static void test_refused(void)
{
	static const int errnos[] = { 0, EINVAL, ENOSPC, EHOSTUNREACH, EPROTO, EACCES, EOPNOTSUPP, EIO };
	static uint8_t memory[65536];
	int fd = open_device();
	struct channel *channel = create(fd, 65536);
	struct rgpu_connect connect;
	uint32_t region;

	for (uint32_t status = 1; status <= 7; status++) {
		channel->answer = status;
		CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
		CHECK(connect.status == status);
		CHECK(strstr((char *)connect.reason, "the test wants"));
	}
	channel->answer = 0;
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_OK);

	for (uint32_t status = 1; status <= 7; status++) {
		command(fd, channel, (struct command){ .op = OP_NEXT_ANSWER, .seed = status });
		FAILS(errnos[status], register_memory(fd, memory, 65536, 0, NULL));
	}
	CHECK(register_memory(fd, memory, 65536, 0, &region) == 0);
	command(fd, channel, (struct command){ .op = OP_NEXT_ANSWER, .seed = RGPU_STATUS_INVALID });
	FAILS(EINVAL, unregister_memory(fd, region));
	/* The device refused, so the region stays registered. */
	CHECK(unregister_memory(fd, region) == 0);
}

static void test_doorbells(uint64_t count)
{
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	uint64_t before = command(fd, channel, (struct command){ .op = OP_DOORBELLS });
	uint64_t after;

	for (uint64_t i = 0; i < count; i++) {
		CHECK(ioctl(fd, RGPU_IOC_KICK) == 0);
		sleep_ms(10);
	}
	after = command(fd, channel, (struct command){ .op = OP_DOORBELLS });
	printf("%llu doorbells\n", (unsigned long long)(after - before));
}

/* The kernel can access the memory, as for a core dump or gdb. */
static void test_kernel_access(void)
{
	int fd = open_device(), mem = open("/proc/self/mem", O_RDONLY);
	struct channel *channel = connect_channel(fd, 65536);
	uint8_t bytes[64];

	fill((uint8_t *)channel + 8192, 64, 5);
	CHECK(pread(mem, bytes, 64, (uintptr_t)channel + 8192) == 64);
	check_pattern(bytes, 64, 5);
}

const struct test api_tests[] = {
	{ "info", test_info, NULL },
	{ "channel", NULL, test_channel },
	{ "register", test_register, NULL },
	{ "register-then-fork", test_register_then_fork, NULL },
	{ "register-read-only", test_register_read_only, NULL },
	{ "register-scattered", NULL, test_register_scattered },
	{ "memlock", test_memlock, NULL },
	{ "memlock-after-close", test_memlock_after_close, NULL },
	{ "late-registration", test_late_registration, NULL },
	{ "arguments", test_arguments, NULL },
	{ "wait", test_wait, NULL },
	{ "waiters", test_waiters, NULL },
	{ "refused", test_refused, NULL },
	{ "doorbells", NULL, test_doorbells },
	{ "kernel-access", test_kernel_access, NULL },
	{}
};
