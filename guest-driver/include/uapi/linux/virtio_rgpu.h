/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * User API of virtio_rgpu: /dev/rgpu0, /dev/rgpu1, ...
 *
 * An open file has at most one channel: memory that a program shares with the
 * rgpu device. A program creates it (RGPU_IOC_CREATE_CHANNEL), maps it (mmap),
 * writes the channel header to it, and connects it to the device
 * (RGPU_IOC_CONNECT). Program and device then communicate through the memory.
 * RGPU_IOC_KICK wakes the device, and RGPU_IOC_WAIT sleeps until the device
 * wakes the program.
 *
 * A channel belongs to the process that created it. It is destroyed when the
 * file is closed for the last time or when that process exits, whichever comes
 * first. A forked child that uses the file gets EPERM; it must open the device
 * itself.
 *
 * An ioctl that needs a reply from the device fails with ETIMEDOUT after 30 s
 * without one. The request continues, and memory stays pinned until the reply.
 * Every ioctl fails with ENODEV once the device is gone, and with EINVAL if a
 * flag or reserved field that must be 0 is not.
 */
#ifndef _UAPI_LINUX_VIRTIO_RGPU_H
#define _UAPI_LINUX_VIRTIO_RGPU_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The version of this header, in &struct rgpu_info.abi_version. */
#define RGPU_ABI_VERSION		1

/* &struct rgpu_connect.status: the device's reply. */
#define RGPU_STATUS_OK			0
#define RGPU_STATUS_INVALID		1
#define RGPU_STATUS_NO_RESOURCES	2
#define RGPU_STATUS_NO_SERVER		3
#define RGPU_STATUS_VERSION		4
#define RGPU_STATUS_DENIED		5
#define RGPU_STATUS_UNSUPPORTED		6

/* &struct rgpu_register_memory.flags: the device only reads. */
#define RGPU_REGISTER_READ_ONLY		(1U << 0)

/**
 * struct rgpu_info - limits of the device (RGPU_IOC_GET_INFO)
 * @abi_version: version of this header that the driver implements
 * @device_version: version of the device specification
 * @max_channels: maximum number of concurrent channels of all processes
 * @flags: 0
 * @max_channel_size: maximum size of a channel in bytes
 * @max_registered: maximum registered bytes per channel; 0 if the device has no
 *	limit
 * @reserved: 0
 */
struct rgpu_info {
	__u32 abi_version;
	__u32 device_version;
	__u32 max_channels;
	__u32 flags;
	__u64 max_channel_size;
	__u64 max_registered;
	__u64 reserved[4];
};

/**
 * struct rgpu_create_channel - allocate memory (RGPU_IOC_CREATE_CHANNEL)
 * @size: size in bytes, a multiple of the page size
 * @flags: 0
 *
 * Allocates zeroed pages, which must be mapped as a whole: mmap(NULL, size,
 * PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0). The device does not know them yet.
 *
 * Errors: EINVAL (0, or not a multiple of the page size), EFBIG (more than
 * @max_channel_size of &struct rgpu_info), EEXIST (the file has a channel),
 * ENOMEM, EDQUOT (the user's limit, module parameter user_memory_mib), E2BIG
 * (memory is too fragmented to describe to the device), EINTR.
 */
struct rgpu_create_channel {
	__u64 size;
	__u64 flags;
};

/**
 * struct rgpu_connect - the device's reply (RGPU_IOC_CONNECT)
 * @status: RGPU_STATUS_OK or the reason for the refusal
 * @channel: the channel's id, for logs; valid if @status is OK
 * @reason: message in UTF-8, NUL-terminated; empty if @status is OK
 *
 * The program must have written the channel header. The call returns 0 if there
 * is a reply, even a refusal. The driver itself replies NO_RESOURCES if all
 * channels of the device are in use, or as many by this user as one may have
 * (module parameter user_channels). The call may take seconds; only a fatal
 * signal interrupts it. It may be repeated after a reply other than OK.
 *
 * Errors: ENXIO (no channel was created), EISCONN, EALREADY (another thread is
 * connecting), EIO (malformed reply from the device), ENOMEM.
 */
struct rgpu_connect {
	__u32 status;
	__u32 channel;
	__u8 reason[256];
};

/**
 * struct rgpu_wait - sleep until the device changes a word (RGPU_IOC_WAIT)
 * @offset: offset of a 32-bit word in the channel in bytes, a multiple of 4
 * @expected: sleep while the word has this value
 * @flags: 0
 * @timeout_ns: maximum time to sleep in nanoseconds; negative for no limit
 *
 * Returns 0 if the word has another value, or after a wake-up from the device
 * since the call began; the caller then checks again. Clears the POLLIN
 * condition that poll() reports.
 *
 * Errors: ENXIO (no channel was created), ENOTCONN, EINVAL (@offset), ETIMEDOUT,
 * EINTR.
 */
struct rgpu_wait {
	__u64 offset;
	__u32 expected;
	__u32 flags;
	__s64 timeout_ns;
};

/**
 * struct rgpu_register_memory - pin memory and let the device use it
 *	(RGPU_IOC_REGISTER_MEMORY)
 * @addr: address of the first byte; any alignment
 * @size: size in bytes; not 0
 * @flags: RGPU_REGISTER_READ_ONLY or 0
 * @region: out: the region's number, which commands in the channel use
 *
 * The pages stay pinned until RGPU_IOC_UNREGISTER_MEMORY or the end of the
 * channel. They count against RLIMIT_MEMLOCK, unless the process has
 * CAP_IPC_LOCK.
 *
 * Errors: ENXIO, ENOTCONN, EINVAL, EFAULT (no such memory, or not writable and
 * not registered read-only), ENOMEM (RLIMIT_MEMLOCK, or no memory), EDQUOT (the
 * user's limit, module parameter user_memory_mib), E2BIG (more
 * extents than the device accepts), ENOSPC (@max_registered of &struct
 * rgpu_info, or a limit of the server), EINTR (fatal signal), and the device's
 * other refusals: EINVAL, EHOSTUNREACH (NO_SERVER), EPROTO (VERSION), EACCES
 * (DENIED), EOPNOTSUPP (UNSUPPORTED), EIO (anything else).
 */
struct rgpu_register_memory {
	__u64 addr;
	__u64 size;
	__u32 flags;
	__u32 region;
};

/**
 * struct rgpu_unregister_memory - unpin memory (RGPU_IOC_UNREGISTER_MEMORY)
 * @region: number from RGPU_IOC_REGISTER_MEMORY
 * @reserved: 0
 *
 * Returns when neither the device nor a server can access the memory any more.
 *
 * Errors: ENXIO, ENOTCONN, ENOENT (no such region), EBUSY (another thread is
 * registering or unregistering it); the device's refusals as for registering, in
 * which case the region stays registered.
 */
struct rgpu_unregister_memory {
	__u32 region;
	__u32 reserved;
};

#define RGPU_IOC_GET_INFO		_IOR('G', 0xA0, struct rgpu_info)
#define RGPU_IOC_CREATE_CHANNEL		_IOW('G', 0xA1, struct rgpu_create_channel)
#define RGPU_IOC_CONNECT		_IOR('G', 0xA2, struct rgpu_connect)
#define RGPU_IOC_KICK			_IO('G', 0xA3)
#define RGPU_IOC_WAIT			_IOW('G', 0xA4, struct rgpu_wait)
#define RGPU_IOC_REGISTER_MEMORY	_IOWR('G', 0xA5, struct rgpu_register_memory)
#define RGPU_IOC_UNREGISTER_MEMORY	_IOW('G', 0xA6, struct rgpu_unregister_memory)

#endif /* _UAPI_LINUX_VIRTIO_RGPU_H */
