// SPDX-License-Identifier: Apache-2.0
/*
 * The first process of a test machine: mounts, loads modules, and then does what
 * it is told over a virtio-serial port named "rgpu.agent". In a machine with a
 * disk it starts the disk's own first process instead, and that starts the agent
 * once more, as a service.
 *
 * Each side begins by sending MAGIC, and skips everything up to the other's: so
 * bytes of an earlier boot cannot be mistaken for frames. Then frames go both
 * ways, each a header of three little-endian words (payload length, kind, id) and
 * a payload. agent.rs is the other side.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAGIC "\x7frgpu-agent-1\n\n\n"
#define MAGIC_LEN 16
#define MAX_PAYLOAD (1u << 20)
#define MAX_CHILDREN 256

enum { RUN = 1, KILL = 2, PUT = 3, REBOOT = 4, POWEROFF = 5 };
enum { STDOUT = 1, STDERR = 2, EXIT = 3 };

struct header {
	uint32_t len, kind, id;
};

struct child {
	pid_t pid;
	uint32_t id;
	int fd[2]; /* stdout, stderr; -1: closed */
};

static struct child children[MAX_CHILDREN];
static int child_count;
static int port = -1;
static int greeted;
static int absent; /* milliseconds since the port's other end was last seen */
static char payload[MAX_PAYLOAD];

static _Noreturn void die(const char *what)
{
	fprintf(stderr, "agent: %s: %s\n", what, strerror(errno));
	sync();
	reboot(RB_POWER_OFF);
	_exit(1);
}

static void write_all(const void *data, size_t len)
{
	const char *p = data;

	while (len) {
		ssize_t n = write(port, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die("write to the port");
		p += n;
		len -= n;
	}
}

/*
 * Called while the port's other end is not there: before the host connects, for a moment
 * after a suspend, until the device has told the driver that the host is still there, and
 * for good when the test's process has ended.
 */
static void wait_for_host(void)
{
	if (greeted && ++absent == 60000)
		die("the host is gone");
	usleep(1000);
}

static void read_all(void *data, size_t len)
{
	char *p = data;

	while (len) {
		ssize_t n = read(port, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die("read from the port");
		if (n == 0)
			wait_for_host();
		else
			absent = 0;
		p += n;
		len -= n;
	}
}

static void send_frame(uint32_t kind, uint32_t id, const void *data, uint32_t len)
{
	struct header header = { len, kind, id };

	write_all(&header, sizeof(header));
	write_all(data, len);
}

static void send_exit(uint32_t id, int32_t status)
{
	send_frame(EXIT, id, &status, sizeof(status));
}

/* Passes on what there is; returns 0 once the pipe is closed. */
static int forward(struct child *child, int which)
{
	static char data[65536];
	ssize_t n = read(child->fd[which], data, sizeof(data));

	if (n > 0) {
		send_frame(which ? STDERR : STDOUT, child->id, data, n);
		return 1;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return -1;
	close(child->fd[which]);
	child->fd[which] = -1;
	return 0;
}

static void run(uint32_t id, const char *command)
{
	struct child *child = &children[child_count];
	int out[2], err[2];

	if (child_count == MAX_CHILDREN || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) {
		send_exit(id, -1);
		return;
	}
	child->pid = fork();
	if (child->pid < 0)
		die("fork");
	if (!child->pid) {
		sigset_t none;

		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		setsid();
		dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
		dup2(out[1], 1);
		dup2(err[1], 2);
		chdir("/root");
		execl("/bin/sh", "sh", "-c", command, (char *)NULL);
		_exit(127);
	}
	close(out[1]);
	close(err[1]);
	fcntl(out[0], F_SETFL, O_NONBLOCK);
	fcntl(err[0], F_SETFL, O_NONBLOCK);
	child->id = id;
	child->fd[0] = out[0];
	child->fd[1] = err[0];
	child_count++;
}

static void reap(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		for (int i = 0; i < child_count; i++) {
			if (children[i].pid != pid)
				continue;
			for (int which = 0; which < 2; which++) {
				while (children[i].fd[which] >= 0 &&
				       forward(&children[i], which) > 0)
					;
				if (children[i].fd[which] >= 0)
					close(children[i].fd[which]);
			}
			send_exit(children[i].id, WIFEXITED(status) ? WEXITSTATUS(status) :
								      128 + WTERMSIG(status));
			children[i] = children[--child_count];
			break;
		}
	}
}

/* Payload: flags (bit 0: append), mode, path with its NUL, data. */
static void put(uint32_t id, uint32_t len)
{
	uint32_t flags, mode;
	size_t path_len = strnlen(payload + 8, len - 8) + 1;
	const char *path = payload + 8, *data = path + path_len;
	size_t left = len - 8 - path_len;
	int fd;

	memcpy(&flags, payload, 4);
	memcpy(&mode, payload + 4, 4);
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | (flags & 1 ? O_APPEND : O_TRUNC), mode);
	while (fd >= 0 && left) {
		ssize_t n = write(fd, data, left);

		if (n < 0)
			break;
		data += n;
		left -= n;
	}
	if (fd < 0 || left || fchmod(fd, mode) || close(fd))
		send_exit(id, errno ? errno : EIO);
	else
		send_exit(id, 0);
}

static void request(void)
{
	struct header header;

	read_all(&header, sizeof(header));
	if (header.len >= MAX_PAYLOAD)
		die("a frame is too long");
	read_all(payload, header.len);
	payload[header.len] = 0;

	switch (header.kind) {
	case RUN:
		run(header.id, payload);
		break;
	case KILL:
		for (int i = 0; i < child_count; i++)
			if (children[i].id == header.id)
				kill(-children[i].pid, SIGKILL);
		break;
	case PUT:
		put(header.id, header.len);
		break;
	case REBOOT:
	case POWEROFF:
		sync();
		reboot(header.kind == REBOOT ? RB_AUTOBOOT : RB_POWER_OFF);
		die("reboot");
	default:
		die("a frame of unknown kind");
	}
}

static void load_modules(void)
{
	char line[256];
	FILE *list = fopen("/etc/modules", "re");

	if (!list)
		die("/etc/modules");
	while (fgets(line, sizeof(line), list)) {
		int fd;

		line[strcspn(line, "\n")] = 0;
		fd = open(line, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
			die(line);
		close(fd);
	}
	fclose(list);
}

static int open_port(void)
{
	for (int tries = 0; tries < 3000; tries++) {
		DIR *dir = opendir("/sys/class/virtio-ports");
		struct dirent *entry;

		while (dir && (entry = readdir(dir))) {
			char path[512], name[64] = "";
			FILE *file;

			snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", entry->d_name);
			file = fopen(path, "re");
			if (!file)
				continue;
			if (!fgets(name, sizeof(name), file))
				name[0] = 0;
			fclose(file);
			if (strcmp(name, "rgpu.agent\n"))
				continue;
			snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
			closedir(dir);
			return open(path, O_RDWR | O_CLOEXEC);
		}
		if (dir)
			closedir(dir);
		usleep(10000);
	}
	errno = ENODEV;
	return -1;
}

static void mount_all(void)
{
	mkdir("/proc", 0755);
	mkdir("/sys", 0755);
	mkdir("/dev", 0755);
	mkdir("/tmp", 01777);
	mkdir("/run", 0755);
	mkdir("/root", 0700);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sysfs", "/sys", "sysfs", 0, NULL);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	mkdir("/dev/pts", 0755);
	mkdir("/dev/shm", 01777);
	mount("devpts", "/dev/pts", "devpts", 0, NULL);
	mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777");
	mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777");
	mount("tmpfs", "/run", "tmpfs", 0, NULL);
	mount("debugfs", "/sys/kernel/debug", "debugfs", 0, NULL);
}

/*
 * Makes the disk the root and starts what is its first process. The initramfs's
 * /host is /mnt there.
 */
static _Noreturn void start_disk(void)
{
	static const char *const moved[] = { "/dev", "/proc", "/sys", "/run" };
	int tries = 0;

	mkdir("/disk", 0755);
	while (mount("/dev/vda", "/disk", "ext4", 0, NULL)) {
		if (++tries == 3000)
			die("mount the disk");
		usleep(10000);
	}
	if (mount("/host", "/disk/mnt", NULL, MS_BIND, NULL))
		die("mount /mnt");
	for (unsigned int i = 0; i < sizeof(moved) / sizeof(moved[0]); i++) {
		char place[64];

		snprintf(place, sizeof(place), "/disk%s", moved[i]);
		if (mount(moved[i], place, NULL, MS_MOVE, NULL))
			die(moved[i]);
	}
	if (chdir("/disk") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot("."))
		die("enter the disk");
	execl("/sbin/init", "init", (char *)NULL);
	die("start the disk's first process");
}

int main(void)
{
	char seen[MAGIC_LEN] = "";
	sigset_t set;
	int signals;

	setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
	setenv("HOME", "/root", 1);
	if (getpid() == 1) {
		mount_all();
		load_modules();
		if (!access("/host/agent", F_OK))
			start_disk();
	}

	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	port = open_port();
	if (port < 0)
		die("the agent's port");

	write_all(MAGIC, MAGIC_LEN);
	while (memcmp(seen, MAGIC, MAGIC_LEN)) {
		memmove(seen, seen + 1, MAGIC_LEN - 1);
		read_all(seen + MAGIC_LEN - 1, 1);
	}
	greeted = 1;
	for (;;) {
		struct pollfd fds[2 + 2 * MAX_CHILDREN];
		struct { int child, which; } of[2 + 2 * MAX_CHILDREN];
		int count = 2;

		fds[0] = (struct pollfd){ .fd = port, .events = POLLIN };
		fds[1] = (struct pollfd){ .fd = signals, .events = POLLIN };
		for (int i = 0; i < child_count; i++) {
			for (int which = 0; which < 2; which++) {
				if (children[i].fd[which] < 0)
					continue;
				of[count].child = i;
				of[count].which = which;
				fds[count++] = (struct pollfd){ .fd = children[i].fd[which],
								.events = POLLIN };
			}
		}
		if (poll(fds, count, -1) < 0 && errno != EINTR)
			die("poll");
		for (int i = 2; i < count; i++)
			if (fds[i].revents)
				forward(&children[of[i].child], of[i].which);
		if (fds[1].revents & POLLIN) {
			struct signalfd_siginfo info;

			while (read(signals, &info, sizeof(info)) > 0)
				;
			reap();
		}
		if (fds[0].revents & POLLHUP) {
			wait_for_host();
			continue;
		}
		absent = 0;
		if (fds[0].revents & POLLIN)
			request();
	}
}
