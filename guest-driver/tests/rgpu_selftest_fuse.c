// SPDX-License-Identifier: GPL-2.0
/*
 * A user can have a file system of their own (FUSE), and with it keep locks of the
 * kernel that belong to their memory: here until /tmp/go-on exists. That must be no
 * matter to anybody else.
 */
#include "rgpu_selftest.h"

#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define FILE_SIZE	(16 * 4096)

/* What the file system answers, behind the header. */
union answer {
	struct fuse_init_out init;
	struct fuse_attr_out attr;
	struct fuse_open_out open;
	struct fuse_write_out write;
	uint8_t bytes[FILE_SIZE];
};

static void answer(int fuse, uint64_t unique, int error, const void *bytes, size_t len)
{
	static char message[sizeof(struct fuse_out_header) + FILE_SIZE];
	struct fuse_out_header header = {
		.len = sizeof(header) + len, .error = error, .unique = unique,
	};

	memcpy(message, &header, sizeof(header));
	memcpy(message + sizeof(header), bytes, len);
	write(fuse, message, sizeof(header) + len);
}

/*
 * The file system, which consists of a file. Who opens it for the second time
 * bypasses the page cache, which the kernel therefore writes back when that one maps
 * the file; this takes until /tmp/go-on exists. Says on @writes when it begins.
 */
static void serve(int fuse, int writes)
{
	static char request[FILE_SIZE + 4096];
	const struct fuse_in_header *in = (void *)request;
	int opened = 0;

	while (read(fuse, request, sizeof(request)) > 0) {
		const struct fuse_init_in *init = (void *)(in + 1);
		const struct fuse_read_in *range = (void *)(in + 1);
		union answer out = {};
		size_t len = 0;
		int error = 0;

		switch (in->opcode) {
		case FUSE_INIT:
			out.init = (struct fuse_init_out){
				.major = FUSE_KERNEL_VERSION, .minor = init->minor,
				.max_readahead = init->max_readahead, .max_write = FILE_SIZE,
			};
			len = sizeof(out.init);
			break;
		case FUSE_GETATTR:
			out.attr = (struct fuse_attr_out){
				.attr_valid = 1000,
				.attr = { .ino = 1, .size = FILE_SIZE, .mode = S_IFREG | 0666, .nlink = 1 },
			};
			len = sizeof(out.attr);
			break;
		case FUSE_OPEN:
			out.open.open_flags = opened++ ? FOPEN_DIRECT_IO : 0;
			len = sizeof(out.open);
			break;
		case FUSE_READ:
			len = range->size;
			break;
		case FUSE_WRITE:
			out.write.size = range->size;
			len = sizeof(out.write);
			write(writes, "", 1);
			while (access("/tmp/go-on", F_OK))
				sleep_ms(10);
			break;
		case FUSE_FLUSH:
		case FUSE_RELEASE:
			break;
		default:
			error = -ENOSYS;
		}
		answer(fuse, in->unique, error, &out, len);
	}
	_exit(0);
}

/* What this process has of the file, and what keeps its mmap_lock. */
struct held {
	char path[32];
	uint8_t *mapped;
	int direct;
	int writes;
	pthread_t thread;
	pthread_barrier_t begin;
};

static void *map_directly(void *arg)
{
	struct held *held = arg;

	pthread_barrier_wait(&held->begin);
	/* Is refused in the end if the pages are in use. */
	mmap(NULL, FILE_SIZE, PROT_READ, MAP_PRIVATE, held->direct, 0);
	return NULL;
}

/* Mounts the file system, goes on as this user, and maps the file. */
static void mount_file(struct held *held, uid_t uid)
{
	struct rlimit unlimited = { RLIM_INFINITY, RLIM_INFINITY };
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC), file, pipes[2];
	struct stat stat;
	char options[100];

	CHECK(fuse >= 0 && pipe(pipes) == 0);
	snprintf(held->path, sizeof(held->path), "/tmp/fuse-%u", uid);
	file = open(held->path, O_CREAT | O_RDWR, 0666);
	CHECK(file >= 0);
	close(file);
	snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=%u,group_id=%u", fuse,
		 uid, uid);
	CHECK(mount("fuse", held->path, "fuse", 0, options) == 0);
	CHECK(setrlimit(RLIMIT_MEMLOCK, &unlimited) == 0);
	CHECK(setgid(uid) == 0 && setuid(uid) == 0);
	if (!fork()) {
		close(0);
		close(1);
		close(2);
		serve(fuse, pipes[1]);
	}
	close(fuse);
	held->writes = pipes[0];
	file = open(held->path, O_RDWR);
	held->direct = open(held->path, O_RDWR);
	CHECK(file >= 0 && held->direct >= 0);
	/* The kernel asks for the size now. */
	CHECK(fstat(file, &stat) == 0 && stat.st_size == FILE_SIZE);
	held->mapped = mmap(NULL, FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	CHECK(held->mapped != MAP_FAILED);
	memset(held->mapped, 1, FILE_SIZE);
}

/*
 * A thread keeps the process's mmap_lock, and the locks of the file's pages, one
 * after the other. All that the other threads need must be in memory.
 */
static void hold_locks(struct held *held)
{
	char byte;

	CHECK(pthread_barrier_init(&held->begin, NULL, 2) == 0);
	CHECK(pthread_create(&held->thread, NULL, map_directly, held) == 0);
	CHECK(mlockall(MCL_CURRENT) == 0);
	pthread_barrier_wait(&held->begin);
	CHECK(read(held->writes, &byte, 1) == 1);
}

/* Memory is let go without the process's mmap_lock. */
static void test_unregister_while_mmap_waits(void)
{
	static uint8_t memory[65536];
	int fd = open_device();
	int unregistered, joined;
	struct held held;
	uint32_t region;

	mount_file(&held, 0);
	connect_channel(fd, 65536);
	CHECK(register_memory(fd, memory, sizeof(memory), 0, &region) == 0);
	hold_locks(&held);
	unregistered = unregister_memory(fd, region);
	joined = pthread_tryjoin_np(held.thread, NULL);
	CHECK(close(open("/tmp/go-on", O_CREAT | O_WRONLY, 0666)) == 0);
	CHECK(unregistered == 0 && joined == EBUSY);
	CHECK(pthread_join(held.thread, NULL) == 0);
}

struct unregisters {
	int fd;
	uint32_t region;
	pthread_barrier_t *begin;
};

static void *unregister(void *arg)
{
	const struct unregisters *what = arg;

	pthread_barrier_wait(what->begin);
	unregister_memory(what->fd, what->region);
	return NULL;
}

/*
 * A user has 64 regions of a page whose lock is kept, and lets go of all at a time.
 * Writes to /tmp/ready-UID when everything is registered, and keeps the locks once
 * there is /tmp/keep: the first writes to one such file system may wait for the
 * pages of another.
 */
static void test_unregister_locked_pages(uint64_t uid)
{
	struct unregisters what[64];
	pthread_barrier_t begin;
	pthread_attr_t small;
	pthread_t threads[64];
	int fd, ready;
	struct held held;
	char path[32];

	snprintf(path, sizeof(path), "/tmp/ready-%u", (uid_t)uid);
	ready = open(path, O_CREAT | O_WRONLY, 0666);
	mount_file(&held, uid);
	fd = open_device();
	connect_channel(fd, 65536);
	CHECK(pthread_barrier_init(&begin, NULL, 64 + 1) == 0);
	CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 65536) == 0);
	for (int i = 0; i < 64; i++) {
		what[i] = (struct unregisters){ .fd = fd, .begin = &begin };
		CHECK(register_memory(fd, held.mapped, 1, 0, &what[i].region) == 0);
		CHECK(pthread_create(&threads[i], &small, unregister, &what[i]) == 0);
	}
	CHECK(write(ready, "1", 1) == 1);
	while (access("/tmp/keep", F_OK) != 0)
		usleep(1000);
	hold_locks(&held);
	pthread_barrier_wait(&begin);
	for (int i = 0; i < 64; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(pthread_join(held.thread, NULL) == 0);
}

const struct test fuse_tests[] = {
	{ "unregister-while-mmap-waits", test_unregister_while_mmap_waits, NULL },
	{ "unregister-locked-pages", NULL, test_unregister_locked_pages },
	{}
};
