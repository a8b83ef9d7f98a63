/* SPDX-License-Identifier: GPL-2.0 */
/*
 * rgpu_selftest: what its files share.
 *
 *   rgpu_selftest.c		the program, and what the tests are made of
 *   rgpu_selftest_api.c	what each call does and refuses
 *   rgpu_selftest_processes.c	limits of users, and processes and devices that go
 *   rgpu_selftest_fuse.c	a user who keeps locks of the kernel
 */
#ifndef _RGPU_SELFTEST_H
#define _RGPU_SELFTEST_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/virtio_rgpu.h>

/* The mock device's channel; see mod layout in mock_device.rs. */
#define MAGIC		0x4b434f4dU
#define CHANNEL		0xffffffffU
#define COMPLETED	128

enum {
	OP_HASH = 1,
	OP_FILL = 2,
	OP_NOP = 3,
	OP_BARE_WAKE = 4,
	OP_NEXT_ANSWER = 5,
	OP_DOORBELLS = 6,
	OP_STRANGE_EVENTS = 7,
};

struct command {
	uint32_t op, region;
	uint64_t offset, len, seed, result;
	uint32_t error, delay_ms;
};

struct channel {
	uint32_t magic, answer, answer_delay;
	char pad0[64 - 12];
	_Atomic uint32_t submitted;
	char pad1[64 - 4];
	_Atomic uint32_t completed;
	char pad2[64 - 4];
	struct command command;
};

#define FAIL(...)                                                              \
	do {                                                                   \
		fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                \
		fprintf(stderr, __VA_ARGS__);                                  \
		fprintf(stderr, " (%s)\n", strerror(errno));                   \
		exit(1);                                                       \
	} while (0)

#define CHECK(condition)                                                       \
	do {                                                                   \
		if (!(condition))                                              \
			FAIL("%s", #condition);                                \
	} while (0)

/* The call fails with this errno. */
#define FAILS(error, call)                                                     \
	do {                                                                   \
		errno = 0;                                                     \
		if ((call) != -1 || errno != (error))                          \
			FAIL("%s: not %s but", #call, strerror(error));        \
	} while (0)

/* What a thread that waits for something is given. */
struct waiter {
	pthread_t thread;
	int fd;
	struct channel *channel;
};

/* One of them has a test; the argument is a number. */
struct test {
	const char *name;
	void (*run)(void);
	void (*run_with)(uint64_t argument);
};

/* Each ends with a test without a name. */
extern const struct test api_tests[], process_tests[], fuse_tests[];

/* The device's file. */
extern const char *device;

int open_device(void);
struct channel *create(int fd, uint64_t size);
struct channel *connect_channel(int fd, uint64_t size);
int wait_word(int fd, uint64_t offset, uint32_t expected, int64_t timeout_ns);
void submit(int fd, struct channel *channel, const struct command *command);
void complete(int fd, struct channel *channel);
uint64_t command(int fd, struct channel *channel, struct command command);
int register_memory(int fd, const void *addr, uint64_t size, uint32_t flags, uint32_t *region);
int unregister_memory(int fd, uint32_t region);
uint8_t pattern(uint64_t seed, uint64_t index);
void fill(uint8_t *p, uint64_t len, uint64_t seed);
void check_pattern(const uint8_t *p, uint64_t len, uint64_t seed);
uint64_t hash(const uint8_t *p, uint64_t len);
void sleep_ms(int ms);
long long milliseconds(void);
void say_ready(void);

#endif /* _RGPU_SELFTEST_H */
