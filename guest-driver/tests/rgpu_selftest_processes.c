// SPDX-License-Identifier: GPL-2.0
/*
 * Limits of users, and processes and devices that go.
 */
#include "rgpu_selftest.h"

/* Connects @max channels, as many as are allowed. */
static void fill_up(struct channel **channels, int *fds, uint64_t max)
{
	for (uint64_t i = 0; i < max; i++) {
		fds[i] = open_device();
		channels[i] = connect_channel(fds[i], 4096);
	}
}

/* Closing one of them makes room immediately. */
static void makes_room(struct channel **channels, int *fds, uint64_t max)
{
	for (int i = 0; i < 20; i++) {
		munmap(channels[i % max], 4096);
		close(fds[i % max]);
		fds[i % max] = open_device();
		channels[i % max] = connect_channel(fds[i % max], 4096);
	}
}

/* The device accepts its maximum number of channels and not one more. */
static void test_max_channels(uint64_t max)
{
	struct channel *channels[512];
	struct rgpu_connect connect;
	int fds[512], fd;

	fill_up(channels, fds, max);
	fd = open_device();
	create(fd, 4096);
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_NO_RESOURCES);
	CHECK(strstr((char *)connect.reason, "in use"));
	makes_room(channels, fds, max);
}

/* Runs a test of a limit in a child, as another user; returns once it has passed. */
static void as_user(uid_t uid, void (*run)(uint64_t), uint64_t argument)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		CHECK(setgid(uid) == 0 && setuid(uid) == 0);
		run(argument);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(status == 0);
}

static void connects(uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		connect_channel(open_device(), 4096);
}

/* Has as many channels as one user may have, which keeps no other user out. */
static void user_at_its_limit(uint64_t max)
{
	struct channel *channels[512];
	struct rgpu_connect connect;
	int fds[512], fd;

	fill_up(channels, fds, max);
	fd = open_device();
	create(fd, 4096);
	for (int i = 0; i < 3; i++) {
		CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
		CHECK(connect.status == RGPU_STATUS_NO_RESOURCES);
		CHECK(strstr((char *)connect.reason, "user_channels"));
	}
	printf("full\n");
	fflush(stdout);
	while (access("/tmp/go-on", F_OK))
		sleep_ms(10);
	makes_room(channels, fds, max);
	munmap(channels[0], 4096);
	close(fds[0]);
	CHECK(ioctl(fd, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_OK);
}

static void test_user_channels(uint64_t max)
{
	as_user(1000, user_at_its_limit, max);
}

static void test_connects_as(uint64_t uid)
{
	as_user(uid, connects, 2);
}

static void *register_page(void *arg)
{
	const struct waiter *waiter = arg;

	register_memory(waiter->fd, (uint8_t *)waiter->channel, 4096, 0, NULL);
	return NULL;
}

/* A user has @count requests at the same time, which the device does not answer. */
static void test_registers_at_once(uint64_t count)
{
	uint8_t *memory = mmap(NULL, count * 4096, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct waiter *waiters = calloc(count, sizeof(*waiters));
	int fd;

	CHECK(memory != MAP_FAILED && waiters);
	CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	fd = open_device();
	connect_channel(fd, 65536);
	for (uint64_t i = 0; i < count; i++) {
		waiters[i] = (struct waiter){ .fd = fd, .channel = (void *)(memory + i * 4096) };
		CHECK(pthread_create(&waiters[i].thread, NULL, register_page, &waiters[i]) == 0);
	}
	say_ready();
	for (uint64_t i = 0; i < count; i++)
		CHECK(pthread_join(waiters[i].thread, NULL) == 0);
}

/* Runs as an unprivileged user who may have @mib MiB of channels and memory. */
static void test_user_memory(uint64_t mib)
{
	const uint64_t unit = 1 << 20;
	struct rgpu_create_channel large = { .size = mib * unit };
	uint8_t *memory = mmap(NULL, mib * unit, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct channel *channel;
	uint32_t region;
	int fd, other;

	CHECK(memory != MAP_FAILED);
	CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	fd = open_device();
	channel = connect_channel(fd, unit);
	/* The channel counts, and several processes and files are one user. */
	FAILS(EDQUOT, register_memory(fd, memory, mib * unit, 0, NULL));
	CHECK(register_memory(fd, memory, (mib - 1) * unit, 0, &region) == 0);
	FAILS(EDQUOT, register_memory(fd, memory, 1, 0, NULL));
	other = open_device();
	FAILS(EDQUOT, ioctl(other, RGPU_IOC_CREATE_CHANNEL, &large));
	CHECK(unregister_memory(fd, region) == 0);
	FAILS(EDQUOT, ioctl(other, RGPU_IOC_CREATE_CHANNEL, &large));
	/* A failure midway leaves nothing charged. */
	CHECK(munmap(memory + (mib - 2) * unit, 4096) == 0);
	FAILS(EFAULT, register_memory(fd, memory, (mib - 1) * unit, 0, NULL));
	CHECK(munmap(channel, unit) == 0);
	close(fd);
	/* On a busy machine the device may not have let go of it when close() stops waiting. */
	for (int i = 0; ioctl(other, RGPU_IOC_CREATE_CHANNEL, &large); i++) {
		CHECK(errno == EDQUOT && i < 600);
		sleep_ms(100);
	}
}

static void one_of_many(unsigned int seed)
{
	uint64_t len = 40000 + seed * 1000;
	uint8_t *memory = malloc(len);
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 1 << 20);

	for (int i = 0; i < 5; i++) {
		uint32_t region;

		fill(memory, len, seed + i);
		CHECK(register_memory(fd, memory, len, 0, &region) == 0);
		CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = region,
							     .len = len }) == hash(memory, len));
		command(fd, channel, (struct command){ .op = OP_FILL, .region = region, .len = len,
						       .seed = seed * 100 });
		check_pattern(memory, len, seed * 100);
		fill((uint8_t *)channel + 4096, 20000, seed);
		CHECK(command(fd, channel, (struct command){ .op = OP_HASH, .region = CHANNEL,
							     .offset = 4096, .len = 20000 }) ==
		      hash((uint8_t *)channel + 4096, 20000));
		if (i % 2)
			CHECK(unregister_memory(fd, region) == 0);
	}
}

static void test_many(uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (!pid) {
			one_of_many(i);
			_exit(0);
		}
	}
	for (uint64_t i = 0; i < count; i++) {
		int status;

		CHECK(wait(&status) > 0);
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
}

/* A forked child has neither its parent's channel nor the memory. */
static void test_fork(void)
{
	struct rgpu_wait wait_args = { .timeout_ns = 0 };
	struct rgpu_connect connect;
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 65536);
	int status;
	pid_t pid;

	pid = fork();
	if (!pid) {
		void *map;

		FAILS(EPERM, ioctl(fd, RGPU_IOC_KICK));
		FAILS(EPERM, ioctl(fd, RGPU_IOC_WAIT, &wait_args));
		FAILS(EPERM, ioctl(fd, RGPU_IOC_CONNECT, &connect));
		FAILS(EPERM, register_memory(fd, &status, 4, 0, NULL));
		FAILS(EPERM, unregister_memory(fd, 0));
		map = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(map == MAP_FAILED && errno == EPERM);
		channel->magic = 0;
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	/* A child can have a channel of its own. */
	pid = fork();
	if (!pid) {
		one_of_many(1);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	command(fd, channel, (struct command){ .op = OP_NOP });
}

/* Exits and leaves a child that inherited the file. */
static void test_orphan(void)
{
	int fd = open_device();

	connect_channel(fd, 65536);
	if (!fork()) {
		close(0);
		close(1);
		close(2);
		sleep_ms(60000);
		_exit(0);
	}
}

#define DROPPED 30

/* Sends files to a pair of sockets that nobody can receive from, because it is sent, too. */
static void send_for_ever(const int *fds)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE((DROPPED + 2) * sizeof(int))];
	} control = {};
	struct iovec text = { .iov_base = "x", .iov_len = 1 };
	struct msghdr message = { .msg_iov = &text, .msg_iovlen = 1,
				  .msg_control = &control, .msg_controllen = sizeof(control) };
	int sockets[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
	control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN((DROPPED + 2) * sizeof(int)),
					   .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(&control.header), fds, DROPPED * sizeof(int));
	memcpy(CMSG_DATA(&control.header) + DROPPED * sizeof(int), sockets, sizeof(sockets));
	CHECK(sendmsg(sockets[0], &message, 0) == 1);
	close(sockets[0]);
	close(sockets[1]);
}

/*
 * Leaves channels to another process, which has their files or, with @sent, only closes a socket: then
 * the kernel looks for files that nobody can receive.
 */
static void test_dropped(uint64_t sent)
{
	int fds[DROPPED], tell[2], status;
	void *maps[DROPPED];
	pid_t pid;
	char byte;

	CHECK(pipe(tell) == 0);
	for (int i = 0; i < DROPPED; i++) {
		fds[i] = open_device();
		maps[i] = connect_channel(fds[i], 4096);
	}
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		int other = socket(AF_UNIX, SOCK_STREAM, 0);

		for (int i = 0; sent && i < DROPPED; i++)
			close(fds[i]);
		CHECK(other >= 0 && read(tell[0], &byte, 1) == 1);
		for (int i = 0; !sent && i < DROPPED; i++)
			close(fds[i]);
		close(other);
		_exit(0);
	}
	if (sent)
		send_for_ever(fds);
	for (int i = 0; i < DROPPED; i++) {
		CHECK(munmap(maps[i], 4096) == 0);
		close(fds[i]);
	}
	CHECK(write(tell[1], "x", 1) == 1);
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Connects, registers memory, prints "ready", and waits to be killed. */
static void test_hold(void)
{
	uint64_t len = 4 << 20;
	uint8_t *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = open_device();
	struct channel *channel = connect_channel(fd, 1 << 20);

	CHECK(register_memory(fd, memory, len, 0, NULL) == 0);
	command(fd, channel, (struct command){ .op = OP_NOP });
	say_ready();
	for (;;)
		wait_word(fd, COMPLETED, atomic_load(&channel->completed), -1);
}

/* Prints "ready" and connects, to be killed before the device replies. */
static void test_connect_slowly(void)
{
	struct rgpu_connect connect;
	int fd = open_device();

	create(fd, 1 << 20);
	say_ready();
	ioctl(fd, RGPU_IOC_CONNECT, &connect);
	FAIL("connect returned");
}

static void test_register_slowly(void)
{
	static uint8_t memory[1 << 20];
	int fd = open_device();

	connect_channel(fd, 1 << 20);
	say_ready();
	register_memory(fd, memory, sizeof(memory), 0, NULL);
	FAIL("register returned");
}

static void *wait_gone(void *arg)
{
	struct waiter *waiter = arg;

	/* Suspending the machine interrupts the call like a signal. */
	while (wait_word(waiter->fd, 0, MAGIC, -1) == -1 && errno == EINTR)
		;
	CHECK(errno == ENODEV);
	return NULL;
}

static void *poll_gone(void *arg)
{
	struct waiter *waiter = arg;
	struct pollfd poll_fd = { .fd = waiter->fd, .events = POLLIN };

	CHECK(poll(&poll_fd, 1, -1) == 1);
	CHECK(poll_fd.revents & POLLHUP);
	return NULL;
}

static void *connect_gone(void *arg)
{
	struct waiter *waiter = arg;
	struct rgpu_connect connect;

	FAILS(ENODEV, ioctl(waiter->fd, RGPU_IOC_CONNECT, &connect));
	return NULL;
}

/* Prints "ready"; then the device is removed while files are open and in use. */
static void test_gone(void)
{
	static uint8_t memory[1 << 20];
	int fd = open_device(), second = open_device(), third = open_device();
	struct channel *channel = connect_channel(fd, 1 << 20);
	struct waiter waiter = { .fd = fd }, unused = { .fd = second }, slow = { .fd = third };
	pthread_t threads[4];
	struct rgpu_connect connect;
	struct rgpu_info info;

	CHECK(register_memory(fd, memory, sizeof(memory), 0, NULL) == 0);
	create(second, 65536);
	create(third, 65536)->answer_delay = 60000;
	CHECK(pthread_create(&threads[0], NULL, wait_gone, &waiter) == 0);
	CHECK(pthread_create(&threads[1], NULL, poll_gone, &waiter) == 0);
	CHECK(pthread_create(&threads[2], NULL, poll_gone, &unused) == 0);
	CHECK(pthread_create(&threads[3], NULL, connect_gone, &slow) == 0);
	sleep_ms(200);
	say_ready();
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);

	FAILS(ENODEV, ioctl(fd, RGPU_IOC_KICK));
	FAILS(ENODEV, ioctl(fd, RGPU_IOC_GET_INFO, &info));
	FAILS(ENODEV, register_memory(fd, memory, 4096, 0, NULL));
	FAILS(ENODEV, unregister_memory(fd, 0));
	FAILS(ENODEV, ioctl(second, RGPU_IOC_CONNECT, &connect));
	/* The memory stays accessible after the device is gone. */
	CHECK(channel->magic == MAGIC);
	memset((uint8_t *)channel + 4096, 1, (1 << 20) - 4096);
	memset(memory, 1, sizeof(memory));
}

static void *unregister_gone(void *arg)
{
	struct waiter *waiter = arg;

	/* The first region. */
	FAILS(ENODEV, unregister_memory(waiter->fd, 0));
	return NULL;
}

/* Prints "ready"; then the machine suspends, which ends channels but not the device. */
static void test_suspend(void)
{
	static uint8_t memory[1 << 20];
	int fd = open_device(), second = open_device();
	struct channel *channel = connect_channel(fd, 1 << 20);
	struct waiter waiter = { .fd = fd };
	struct rgpu_connect connect;
	pthread_t threads[2];

	CHECK(register_memory(fd, memory, sizeof(memory), 0, NULL) == 0);
	create(second, 65536);
	CHECK(pthread_create(&threads[0], NULL, wait_gone, &waiter) == 0);
	/* The device does not answer this. */
	CHECK(pthread_create(&threads[1], NULL, unregister_gone, &waiter) == 0);
	say_ready();
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	FAILS(ENODEV, ioctl(fd, RGPU_IOC_KICK));
	FAILS(ENODEV, register_memory(fd, memory, 4096, 0, NULL));
	CHECK(channel->magic == MAGIC);
	/* A channel that was not connected can still be used. */
	CHECK(ioctl(second, RGPU_IOC_CONNECT, &connect) == 0);
	CHECK(connect.status == RGPU_STATUS_OK);
}

const struct test process_tests[] = {
	{ "max-channels", NULL, test_max_channels },
	{ "user-channels", NULL, test_user_channels },
	{ "connects-as", NULL, test_connects_as },
	{ "registers-at-once", NULL, test_registers_at_once },
	{ "user-memory", NULL, test_user_memory },
	{ "many", NULL, test_many },
	{ "fork", test_fork, NULL },
	{ "orphan", test_orphan, NULL },
	{ "dropped", NULL, test_dropped },
	{ "hold", test_hold, NULL },
	{ "connect-slowly", test_connect_slowly, NULL },
	{ "register-slowly", test_register_slowly, NULL },
	{ "gone", test_gone, NULL },
	{ "suspend", test_suspend, NULL },
	{}
};
