// SPDX-License-Identifier: GPL-2.0
/*
 * Every allocation and every copy from or to a program that a call of virtio_rgpu
 * makes fails once, on a kernel with fault injection:
 *
 *   rgpu_faults calls			each call of a channel's life
 *   rgpu_faults probe DRIVER DEVICE	binding the driver, by their names in sysfs
 *
 * A call that fails has changed nothing: the same call without a fault succeeds, and
 * so does the rest of the channel's life. Prints how many faults there were.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/virtio_rgpu.h>

#define MAGIC		0x4b434f4dU
#define CHANNEL_SIZE	(3UL << 20)
#define MEMORY_SIZE	(2UL << 20)
#define MOST_FAULTS	1000

#define CHECK(condition)                                                       \
	do {                                                                   \
		if (!(condition)) {                                            \
			fprintf(stderr, "line %d, fault %d: %s (%s)\n",        \
				__LINE__, nth, #condition, strerror(errno));   \
			exit(1);                                               \
		}                                                              \
	} while (0)

/* The kernel's file: the how manieth fault point of this thread from now on fails. */
static int fail_nth;
static int nth;

static void arm(void)
{
	char text[16];

	snprintf(text, sizeof(text), "%d", nth);
	CHECK(pwrite(fail_nth, text, strlen(text), 0) > 0);
}

/* Returns whether the fault has happened. If it has not, reading or writing may be what fails. */
static bool disarm(void)
{
	char text[16] = {};
	bool happened = pread(fail_nth, text, sizeof(text) - 1, 0) > 0 && atoi(text) == 0;

	while (pwrite(fail_nth, "0", 1, 0) != 1)
		CHECK(errno == EFAULT || errno == ENOMEM);
	return happened;
}

/* A channel's life, whose calls share this. */
static struct {
	int fd;
	uint8_t *channel, *memory;
	uint32_t region;
} life;

static int do_open(void)
{
	life.fd = open("/dev/rgpu0", O_RDWR | O_CLOEXEC);
	return life.fd;
}

static int do_create(void)
{
	struct rgpu_create_channel create = { .size = CHANNEL_SIZE };

	return ioctl(life.fd, RGPU_IOC_CREATE_CHANNEL, &create);
}

static int do_map(void)
{
	life.channel = mmap(NULL, CHANNEL_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, life.fd, 0);
	if (life.channel == MAP_FAILED)
		return -1;
	*(uint32_t *)life.channel = MAGIC;
	return 0;
}

static int do_connect(void)
{
	struct rgpu_connect connect;

	/* After EFAULT the session may exist: only its number could not be copied out. */
	if (ioctl(life.fd, RGPU_IOC_CONNECT, &connect))
		return errno == EISCONN ? 0 : -1;
	CHECK(connect.status == RGPU_STATUS_OK);
	return 0;
}

static int do_register(void)
{
	struct rgpu_register_memory reg = { .addr = (uintptr_t)life.memory, .size = MEMORY_SIZE };
	int ret = ioctl(life.fd, RGPU_IOC_REGISTER_MEMORY, &reg);

	life.region = reg.region;
	return ret;
}

static int do_wait(void)
{
	struct rgpu_wait wait = { .offset = CHANNEL_SIZE - 4, .expected = 1 };

	return ioctl(life.fd, RGPU_IOC_WAIT, &wait);
}

static int do_kick(void)
{
	return ioctl(life.fd, RGPU_IOC_KICK);
}

static int do_unregister(void)
{
	struct rgpu_unregister_memory unregister = { .region = life.region };

	return ioctl(life.fd, RGPU_IOC_UNREGISTER_MEMORY, &unregister);
}

static int do_close(void)
{
	munmap(life.channel, CHANNEL_SIZE);
	return close(life.fd);
}

static const struct {
	const char *name;
	int (*call)(void);
} calls[] = {
	{ "open", do_open },
	{ "create", do_create },
	{ "map", do_map },
	{ "connect", do_connect },
	{ "register", do_register },
	{ "wait", do_wait },
	{ "kick", do_kick },
	{ "unregister", do_unregister },
	{ "close", do_close },
};

#define CALLS	(sizeof(calls) / sizeof(calls[0]))

/* Returns whether the call @faulty reached its fault number @nth. */
static bool live(unsigned int faulty)
{
	bool happened = false;

	life.memory = mmap(NULL, MEMORY_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(life.memory != MAP_FAILED);
	for (unsigned int i = 0; i < CALLS; i++) {
		int ret;

		if (i != faulty) {
			CHECK(calls[i].call() == 0 || i == 0);
			CHECK(life.fd >= 0);
			continue;
		}
		arm();
		ret = calls[i].call();
		happened = disarm();
		/* Some allocations are attempts, after which a smaller one follows. */
		if (ret < 0 && happened && i + 1 < CALLS)
			CHECK(calls[i].call() >= 0);
		else
			CHECK(ret >= 0);
	}
	munmap(life.memory, MEMORY_SIZE);
	return happened;
}

static void fail_calls(void)
{
	for (unsigned int i = 0; i < CALLS; i++) {
		for (nth = 1; live(i); nth++)
			CHECK(nth < MOST_FAULTS);
		printf("%s %d ", calls[i].name, nth - 1);
	}
	printf("\n");
}

static int bind_driver(const char *driver, const char *file, const char *device, bool faulty)
{
	char path[256];
	int fd, ret;

	snprintf(path, sizeof(path), "/sys/bus/virtio/drivers/%s/%s", driver, file);
	fd = open(path, O_WRONLY);
	CHECK(fd >= 0);
	if (faulty)
		arm();
	ret = write(fd, device, strlen(device));
	if (faulty && !disarm())
		ret = -2;
	close(fd);
	return ret;
}

/* A device that could not be bound can be bound when there is memory again. */
static void fail_probe(const char *driver, const char *device)
{
	int failed = 0, ret = 0;

	for (nth = 1; ret != -2; nth++) {
		CHECK(nth < MOST_FAULTS);
		CHECK(bind_driver(driver, "unbind", device, false) > 0);
		ret = bind_driver(driver, "bind", device, true);
		if (ret == -1) {
			failed++;
			CHECK(bind_driver(driver, "bind", device, false) > 0);
		}
	}
	CHECK(access("/dev/rgpu0", F_OK) == 0);
	printf("probe %d of %d failed\n", failed, nth - 2);
}

int main(int argc, char **argv)
{
	fail_nth = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	CHECK(fail_nth >= 0);
	if (argc == 2 && !strcmp(argv[1], "calls")) {
		fail_calls();
		return 0;
	}
	if (argc == 4 && !strcmp(argv[1], "probe")) {
		fail_probe(argv[2], argv[3]);
		return 0;
	}
	fprintf(stderr, "usage: rgpu_faults calls | probe DRIVER DEVICE\n");
	return 2;
}
